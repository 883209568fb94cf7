/* The conversation as a live region. `props.value` is {items: [...], busy, empty}; an item is
   {id, cls, head, text, foot, note}. `head`, `foot` and `note` are HTML made (and escaped) by the server;
   `text` is set as text, so whatever a person or a model wrote stays literal. Only what changed is touched:
   selection, focus and scroll position survive streaming. Sends the event 'act' {act, index, text}. */
const log = element.querySelector('.kv-log');
const more = element.querySelector('.kv-jump');
let pinned = true;

const put = (node, html) => {
  if (node.dataset.html !== html) { node.innerHTML = html; node.dataset.html = html; }
};

// A growing answer only gets what is new: replacing a long text at every token would be quadratic, and drop a selection.
const write = (node, words) => {
  const old = node.firstChild;
  if (old && node.childNodes.length === 1 && words.length >= old.length && words.startsWith(old.data)) {
    if (words.length > old.length) old.appendData(words.slice(old.length));
  } else if (node.textContent !== words) node.textContent = words;
};

const build = (item) => {
  const node = document.createElement(item.note ? 'div' : 'article');
  node.dataset.id = item.id;
  if (item.note) { node.className = 'kv-divider'; return node; }
  node.innerHTML = '<header></header><div class="kv-text" dir="auto"></div><footer></footer>';
  return node;
};

const draw = () => {
  const value = props.value || {};
  const items = value.items || [];
  log.setAttribute('aria-busy', value.busy ? 'true' : 'false');
  let empty = log.querySelector('.kv-empty');
  if (!items.length && value.empty) {
    if (!empty) { log.textContent = ''; empty = document.createElement('div'); empty.className = 'kv-empty'; log.append(empty); }
    put(empty, value.empty);
    return;
  }
  if (empty) empty.remove();
  while (log.children.length > items.length) log.lastElementChild.remove();
  items.forEach((item, i) => {
    let node = log.children[i];
    if (!node || node.dataset.id !== item.id) {
      const made = build(item);
      if (node) node.replaceWith(made); else log.append(made);
      node = made;
    }
    if (item.note) { put(node, item.note); return; }
    const cls = 'kv-msg ' + (item.cls || '');
    if (node.className !== cls) node.className = cls;
    const [head, text, foot] = node.children;
    put(head, item.head || '');
    put(foot, item.foot || '');
    write(text, item.text || '');
  });
  if (pinned) log.scrollTop = log.scrollHeight;
};

log.addEventListener('scroll', () => {
  pinned = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  more.hidden = pinned;
});
more.addEventListener('click', () => { pinned = true; log.scrollTop = log.scrollHeight; more.hidden = true; });

element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-act]');
  if (!button) return;
  const act = button.dataset.act;
  if (act === 'copy') {
    const text = button.closest('.kv-msg').querySelector('.kv-text').textContent;
    const told = (word) => { button.textContent = word; setTimeout(() => { button.textContent = 'Copy'; }, 1500); };
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => told('Copied'), () => told('Not allowed'));
    else told('Not allowed');
    return;
  }
  trigger('act', { act: act, index: Number(button.dataset.index || -1), text: button.dataset.text || '' });
});

watch('value', draw);
draw();
