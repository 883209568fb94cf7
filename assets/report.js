/* Draws the figures of a report. For paper they get a size that fits, and short tables are unfolded. */
const figures = [...document.querySelectorAll('.figure')];
for (const node of figures) {
  const drawing = JSON.parse(document.getElementById(node.dataset.of).textContent);
  Plotly.newPlot(node, drawing.data, Object.assign({}, drawing.layout, {autosize: true}), {responsive: true, displaylogo: false});
}
const folded = () => document.querySelectorAll('details:not([open]):not([data-long])');
let unfolded = [], screen = new Map();
addEventListener('beforeprint', () => {
  unfolded = [...folded()];
  for (const details of unfolded) details.open = true;
  for (const node of figures) {
    const {width, height, autosize} = node.layout;
    screen.set(node, {width, height, autosize});
    const row = node.closest('.beside');
    const [wide, high] = !row ? [680, 410] : row.matches('.wide') ? [680, 285] : [330, 330]; // A4 within its margins
    Plotly.relayout(node, {autosize: false, width: wide, height: Math.min(height || 450, high)});
  }
});
addEventListener('afterprint', () => {
  for (const details of unfolded) details.open = false;
  for (const [node, size] of screen) Plotly.relayout(node, {...size, width: null, autosize: true});
});
