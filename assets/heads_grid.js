/* Layers x heads as a grid of buttons: colour and number say the same. `props.value` is
   {layers, heads, values: [layer][head], low, high, label, head_word, pick, reverse, diverging, marked: [[layer, KV head]],
   group: query heads a KV head}. Layers run along the long side of the screen. Arrow keys, Home and End move; Enter or Space opens a head. Sends 'cell' {layer, head}. */
const grid = element.querySelector('.kv-grid');
const STOPS = [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]]; // viridis
const DIVERGING = [[84, 39, 136], [178, 171, 210], [247, 247, 247], [253, 184, 99], [179, 88, 6]]; // PuOr

const colour = (share, stops) => {
  const t = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const i = Math.min(Math.floor(t), stops.length - 2);
  const c = stops[i].map((a, k) => Math.round(a + (stops[i + 1][k] - a) * (t - i)));
  const linear = c.map((x) => (x <= 10 ? x / 3295 : ((x / 255 + 0.055) / 1.055) ** 2.4));
  const light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return [`rgb(${c.join(',')})`, light > 0.179 ? '#000000' : '#ffffff']; // whichever has more contrast
};

const short = (x) => {
  if (x === null || !Number.isFinite(x)) return '–';
  const a = Math.abs(x);
  if (a >= 100) return x.toFixed(0);
  if (a >= 9.95) return x.toFixed(0);
  if (a >= 1.995) return x.toFixed(1);
  if (a > 0 && a < 0.01) return x.toExponential(0);
  const text = x.toFixed(2);
  return a < 1 ? text.replace('0.', '.') : text;
};

let wide = true;
let focus = [0, 0];

const draw = () => {
  const v = props.value;
  grid.textContent = '';
  if (!v || !v.values) return;
  wide = element.clientWidth === 0 || element.clientWidth > 700;
  const cols = wide ? v.layers : v.heads;
  const rows = wide ? v.heads : v.layers;
  grid.style.setProperty('--cols', cols);
  grid.setAttribute('aria-label', v.label);
  grid.setAttribute('aria-rowcount', rows + 1);
  grid.setAttribute('aria-colcount', cols + 1);
  const line = () => { const d = document.createElement('div'); d.setAttribute('role', 'row'); d.className = 'kv-grid-row'; grid.append(d); return d; };
  const name = (parent, text, role) => {
    const d = document.createElement('span'); d.setAttribute('role', role); d.className = 'kv-grid-name'; d.textContent = text; parent.append(d);
  };
  const top = line();
  name(top, wide ? `${v.head_word} \\ layer` : `layer \\ ${v.head_word}`, 'columnheader');
  for (let c = 0; c < cols; c++) name(top, c, 'columnheader');
  focus = v.pick || [0, 0];
  for (let r = 0; r < rows; r++) {
    const row = line();
    name(row, r, 'rowheader');
    for (let c = 0; c < cols; c++) {
      const layer = wide ? c : r, head = wide ? r : c;
      const x = (v.values[layer] || [])[head];
      const holder = document.createElement('span');
      holder.setAttribute('role', 'gridcell');
      const b = document.createElement('button');
      b.type = 'button';
      b.dataset.layer = layer; b.dataset.head = head;
      b.textContent = short(x);
      const has = x !== null && Number.isFinite(x);
      if (has) {
        let share = v.log ? Math.log(Math.max(x, 1e-9) / v.low) / Math.log(v.high / v.low) : (x - v.low) / (v.high - v.low);
        if (v.reverse) share = 1 - share;
        const [back, fore] = colour(share, v.diverging ? DIVERGING : STOPS);
        b.style.background = back; b.style.color = fore;
      } else b.classList.add('kv-dead');
      const marked = (v.marked || []).some(([l, h]) => l === layer && h === Math.floor(head / (v.group || 1)));
      if (marked) b.classList.add('kv-marked');
      const where = `layer ${layer}, ${v.head_word} ${head}`;
      const end = marked ? ', marked' : '';
      b.setAttribute('aria-label', `${where}: ${has ? b.textContent : 'no value'}${end}`);
      b.title = `${where}: ${has ? x.toPrecision(3) : 'no value, the head does not vary'}${end}`;
      const here = layer === focus[0] && head === focus[1];
      b.tabIndex = here ? 0 : -1;
      if (v.pick && here) { b.classList.add('kv-picked'); b.setAttribute('aria-pressed', 'true'); }
      holder.append(b); row.append(holder);
    }
  }
};

const at = (layer, head) => grid.querySelector(`button[data-layer="${layer}"][data-head="${head}"]`);

const open = (button, keep) => {
  grid.querySelectorAll('.kv-picked').forEach((b) => { b.classList.remove('kv-picked'); b.removeAttribute('aria-pressed'); });
  grid.querySelectorAll('button[tabindex="0"]').forEach((b) => { b.tabIndex = -1; });
  button.classList.add('kv-picked'); button.setAttribute('aria-pressed', 'true'); button.tabIndex = 0;
  trigger('cell', { layer: Number(button.dataset.layer), head: Number(button.dataset.head) });
};

grid.addEventListener('click', (event) => { const b = event.target.closest('button'); if (b) open(b); });

grid.addEventListener('keydown', (event) => {
  const b = event.target.closest('button');
  if (!b) return;
  let layer = Number(b.dataset.layer), head = Number(b.dataset.head);
  const v = props.value;
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (step) {
    layer += wide ? step[1] : step[0];
    head += wide ? step[0] : step[1];
  } else if (event.key === 'Home') { if (wide) layer = 0; else head = 0; }
  else if (event.key === 'End') { if (wide) layer = v.layers - 1; else head = v.heads - 1; }
  else return;
  event.preventDefault();
  const next = at(layer, head);
  if (!next) return;
  b.tabIndex = -1; next.tabIndex = 0; next.focus();
});

let last = 0;
new ResizeObserver(() => {
  const now = element.clientWidth;
  if (now && ((now > 700) !== (last > 700) || !last)) { last = now; draw(); }
}).observe(element);

watch('value', draw);
draw();
