/* The replay panel: opens for every button with `data-replay`, plays `props.value` {turns, label}. */
const panel = element.querySelector('.kv-replay');
const toggle = panel.querySelector('[data-play=toggle]');
const status = panel.querySelector('[role=status]');
const account = panel.querySelector('.kv-replay-account');

const player = makePlayer(panel.querySelector('.kv-log'), (state) => {
  if ('account' in state) account.innerHTML = state.account;
  if ('playing' in state) toggle.textContent = state.playing ? 'Pause' : 'Play';
  if (state.done) { toggle.textContent = 'Play again'; status.textContent = 'The recording has ended.'; }
});

const fill = () => {
  const value = props.value;
  const there = Boolean(value && value.turns);
  document.querySelectorAll('[data-replay]').forEach((b) => { b.hidden = !there; });
  if (!there) { panel.hidden = true; return; }
  panel.querySelector('.kv-replay-label').innerHTML = value.label;
  player.load(value.turns);
};

document.addEventListener('click', (event) => {
  const button = event.target.closest('[data-replay]');
  if (!button || !props.value) return;
  panel.hidden = false;
  player.restart();
  player.play();
  panel.scrollIntoView({ block: 'nearest' });
  toggle.focus();
});

panel.addEventListener('click', (event) => {
  const what = event.target.dataset.play;
  if (what === 'toggle') player.toggle();
  if (what === 'restart') { player.restart(); player.play(); }
  if (what === 'close') {
    player.pause(); panel.hidden = true;
    const opener = document.querySelector('[data-replay]');
    if (opener) opener.focus();
  }
});
panel.querySelector('select').addEventListener('change', (event) => player.setSpeed(Number(event.target.value)));

watch('value', fill);
fill();
