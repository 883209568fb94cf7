/* Buttons that save what is on the screen. A click sends 'take' {format}; the answer arrives as `props.value`:
   {say} tells the visitor something; {name, mime, text} is a file; with `plotly` true the drawing library is put in
   place of its marker; {name, format, figure} is a drawing that is turned into a picture here, in a frame of its own,
   so that the page's own drawing library stays as it is. Files are made in the browser: the server keeps none. */
const said = element.querySelector('.kv-export-said');
const root = (window.gradio_config && window.gradio_config.root) || location.origin;
const LIBRARY = root.replace(/\/$/, '') + '/kv/plotly.min.js';
let done = 0;

const tell = (text) => { said.textContent = text; };

const save = (blob, name) => {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  tell('Saved ' + name);
};

const library = async () => {
  const answer = await fetch(LIBRARY);
  if (!answer.ok) throw new Error('the drawing library could not be read');
  return answer.text();
};

const frame = () => new Promise((resolve, reject) => {
  const made = document.createElement('iframe');
  made.title = 'drawing'; made.setAttribute('aria-hidden', 'true'); made.tabIndex = -1;
  made.style.cssText = 'position:fixed;left:-3000px;top:0;width:1600px;height:1200px;border:0;visibility:hidden';
  document.body.append(made);
  const script = made.contentDocument.createElement('script');
  script.src = LIBRARY;
  script.onload = () => resolve(made);
  script.onerror = () => { made.remove(); reject(new Error('the drawing library could not be read')); };
  made.contentDocument.head.append(script);
});

const picture = async (v) => {
  const holder = await frame();
  try {
    const drawing = JSON.parse(v.figure);
    const url = await holder.contentWindow.Plotly.toImage(
      { data: drawing.data, layout: drawing.layout },
      { format: v.format, width: v.width, height: v.height, scale: v.format === 'png' ? 3 : 1 });
    return await (await fetch(url)).blob();
  } finally { holder.remove(); }
};

const act = async () => {
  const v = props.value;
  if (!v || !v.at || v.at === done) return;
  done = v.at;
  try {
    if (v.say) tell(v.say);
    else if (v.figure) { tell('Drawing …'); save(await picture(v), v.name); }
    else {
      let text = v.text;
      if (v.plotly) { const code = await library(); text = text.replace('/*plotly.js*/', () => code); }
      save(new Blob([text], { type: v.mime + ';charset=utf-8' }), v.name);
    }
  } catch (error) { tell('This could not be saved: ' + error.message + '.'); }
};

element.addEventListener('click', (event) => {
  const button = event.target.closest('[data-format]');
  if (!button) return;
  tell('Preparing …');
  trigger('take', { format: button.dataset.format });
});

watch('value', act);
