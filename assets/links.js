/* A head that is opened stands in the address, so that a link opens it again. */
document.addEventListener('click', (event) => {
  const button = event.target.closest('.kv-grid button[data-layer]');
  if (!button) return;
  const url = new URL(location.href);
  url.searchParams.set('layer', button.dataset.layer);
  url.searchParams.set('head', button.dataset.head);
  history.replaceState(null, '', url);
});
