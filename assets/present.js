/* The presentation. Opens for `?view=present` and for every button with `data-present`; asks the server for the slides
   ('open'), shows them one at a time, and runs the live step ('live'). Arrow keys, Page Up/Down, Home and End move;
   Escape closes; D changes light and dark; F full screen; L switches live; R plays the recording. */
const stage = element.querySelector('.kv-stage');
const holder = stage.querySelector('.kv-stage-slides');
const counter = stage.querySelector('.kv-stage-step');
let step = 1, waiting = false, player = null;

const all = () => [...holder.querySelectorAll('.kv-slide')];
const part = (name) => holder.querySelector('.kv-live-' + name);

const address = (open) => {
  const url = new URL(location.href);
  if (open) { url.searchParams.set('view', 'present'); url.searchParams.set('step', step); }
  else { url.searchParams.delete('view'); url.searchParams.delete('step'); }
  history.replaceState(null, '', url);
};

const show = (wanted) => {
  const list = all();
  if (!list.length) return;
  step = Math.min(Math.max(wanted, 1), list.length);
  list.forEach((slide, i) => { slide.hidden = i !== step - 1; });
  counter.textContent = `${step} of ${list.length}`;
  address(true);
};

const say = (text) => { const label = part('label'); if (label) label.innerHTML = text; };

const recorded = (why) => {
  const value = props.value;
  if (!value || !value.replay) { say((why || '') + ' There is no recording for this pair.'); return; }
  say((why ? why + ' Shown instead: ' : '') + value.replay.label);
  player = makePlayer(holder.querySelector('.kv-slide .kv-log'), (state) => {
    if ('account' in state) part('account').innerHTML = state.account;
  });
  player.load(value.replay.turns);
  player.play();
};

const draw = (items) => {
  const log = holder.querySelector('.kv-slide .kv-log');
  items.forEach((item, i) => {
    let node = log.children[i];
    if (!node || node.dataset.id !== item.id) {
      const made = document.createElement(item.note ? 'div' : 'article');
      made.dataset.id = item.id;
      if (!item.note) made.innerHTML = '<header></header><div class="kv-text" dir="auto"></div>';
      if (node) node.replaceWith(made); else log.append(made);
      node = made;
    }
    if (item.note) { node.className = 'kv-divider'; node.innerHTML = item.note; return; }
    node.className = 'kv-msg ' + (item.cls || '');
    node.children[0].innerHTML = item.head || '';
    node.children[1].textContent = item.text || '';
  });
  while (log.children.length > items.length) log.lastElementChild.remove();
  log.scrollTop = log.scrollHeight;
};

const live = () => {
  if (waiting) return;
  if (player) { player.pause(); player = null; }
  holder.querySelector('.kv-slide .kv-log').textContent = '';
  part('account').innerHTML = '';
  waiting = true;
  say('Live: waiting for the models');
  trigger('live', {});
};

document.addEventListener('kv-live', (event) => {
  const v = event.detail;
  if (!v || !waiting) return;
  if (v.failed) { waiting = false; recorded(v.failed); return; }
  if (v.items) draw(v.items);
  if (v.account !== undefined && v.account !== part('account').innerHTML) part('account').innerHTML = v.account;
  if (v.done) { waiting = false; say('<b>Live</b>: computed just now, on this machine.'); }
  else if (v.items) say('<b>Live</b>');
  else if (v.status) say(v.status);
});

const open = () => {
  if (!stage.open) stage.showModal();
  stage.focus(); // not the first button: the arrow keys are for the slides
  document.documentElement.style.overflow = 'hidden';
  if (!all().length) counter.textContent = 'Collecting the results …';
  trigger('open', {});
};

const close = () => {
  if (player) player.pause();
  if (waiting) { waiting = false; trigger('halt', {}); }
  document.documentElement.style.overflow = '';
  if (document.fullscreenElement) document.exitFullscreen();
  address(false);
};

const fill = () => {
  if (!props.value || !props.value.slides) return;
  holder.innerHTML = props.value.slides.join('');
  show(step);
};

const does = {
  on: () => show(step + 1), back: () => show(step - 1), close: () => stage.close(),
  look: () => document.body.classList.toggle('dark'),
  full: () => (document.fullscreenElement ? document.exitFullscreen() : stage.requestFullscreen().catch(() => {})),
};

stage.addEventListener('close', close);
stage.addEventListener('click', (event) => {
  const { go, live: how } = event.target.dataset;
  if (go) does[go]();
  if (how === 'live') live();
  if (how === 'recorded') { waiting = false; if (player) player.pause(); recorded(''); }
});
stage.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, select, textarea')) return;
  const keys = { ArrowRight: () => does.on(), PageDown: () => does.on(), ArrowLeft: () => does.back(), PageUp: () => does.back(),
    Home: () => show(1), End: () => show(all().length), d: does.look, f: does.full };
  if (part('label') && step === 3) { keys.l = live; keys.r = () => { waiting = false; if (player) player.pause(); recorded(''); }; }
  const act = keys[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});
document.addEventListener('click', (event) => { if (event.target.closest('[data-present]')) { step = 1; open(); } });

watch('value', fill);
const asked = new URLSearchParams(location.search);
if (asked.get('view') === 'present') {
  step = Math.max(1, parseInt(asked.get('step'), 10) || 1);
  // The page has to be wired before it can ask the server.
  setTimeout(open, 300);
}
