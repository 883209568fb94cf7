() => {
  // A tab in the address: /?tab=heads opens that tab, and choosing a tab is kept in the address.
  const names = ['chat', 'side', 'heads', 'latency', 'quality', 'fit'];
  const tabs = () => [...document.querySelectorAll('.kv-tabs > .tab-wrapper button[role=tab], .kv-tabs button[role=tab]')];
  const wanted = new URLSearchParams(location.search).get('tab');
  const open = (tries) => {
    const found = tabs();
    const at = names.indexOf(wanted);
    if (at > 0 && found[at]) found[at].click();
    else if (at > 0 && tries) setTimeout(() => open(tries - 1), 100);
  };
  open(30);
  document.addEventListener('click', (event) => {
    const button = event.target.closest('button[role=tab]');
    if (!button) return;
    const at = tabs().indexOf(button);
    if (at < 0) return;
    const url = new URL(location.href);
    if (at === 0) url.searchParams.delete('tab'); else url.searchParams.set('tab', names[at]);
    history.replaceState(null, '', url);
  });
}
