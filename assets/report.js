/* Draws the figures of a report; opens what is folded before it is printed. */
for (const node of document.querySelectorAll('.figure')) {
  const drawing = JSON.parse(document.getElementById(node.dataset.of).textContent);
  Plotly.newPlot(node, drawing.data, Object.assign({}, drawing.layout, {autosize: true}), {responsive: true, displaylogo: false});
}
addEventListener('beforeprint', () => { for (const d of document.querySelectorAll('details')) d.open = true; });
