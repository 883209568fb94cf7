/* On a narrow screen picture and gallery are folded away, so that the chat is at hand; "More" unfolds them. */
document.addEventListener('click', (event) => {
  const button = event.target.closest('.kv-more-button');
  if (button) button.setAttribute('aria-expanded', String(button.getAttribute('aria-expanded') !== 'true'));
});
