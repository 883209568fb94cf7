/* Plays a recorded conversation into a log. `turns` is a list of {say, cls, head, foot, pieces: [[ms, text], …], ms,
   switch: {ms, note, account} | null}. `head`, `foot`, `note` and `account` are HTML made by the server; what was said is
   set as text. The whole state is a function of the clock, so pausing, speed and skipping are the same thing. */
const makePlayer = (log, change) => {
  const PAUSE = 1100; // between turns, where the person was thinking
  let events = [], next = 0, clock = 0, speed = 1, playing = false, last = 0, end = 0;

  const put = (tag, cls, make) => {
    const node = document.createElement(tag);
    node.className = cls;
    make(node);
    log.append(node);
    return node;
  };

  const message = (cls, head, text, foot) => put('article', 'kv-msg ' + cls, (node) => {
    node.innerHTML = '<header></header><div class="kv-text" dir="auto"></div><footer></footer>';
    node.children[0].innerHTML = head;
    node.children[1].textContent = text;
    node.children[2].innerHTML = foot;
  });

  const load = (turns) => {
    events = []; let t = 0;
    for (const turn of turns) {
      if (turn.switch) {
        const line = {};
        events.push([t, () => {
          line.node = put('div', 'kv-divider', (n) => { n.innerHTML = '<span>switching …</span>'; });
          change({ switching: true });
        }]);
        t += turn.switch.ms;
        events.push([t, () => { line.node.innerHTML = turn.switch.note; change({ account: turn.switch.account }); }]);
        t += 500;
      }
      if (turn.say) {
        const answer = {};
        events.push([t, () => {
          message('kv-user', '<span class="kv-who">Person</span>', turn.say, '');
          answer.node = message(turn.cls + ' kv-live', turn.head, '', '');
        }]);
        for (const [ms, text] of turn.pieces) {
          events.push([t + ms, () => { answer.node.children[1].append(text); }]);
        }
        t += turn.ms;
        events.push([t, () => { answer.node.classList.remove('kv-live'); answer.node.children[2].innerHTML = turn.foot; }]);
      }
      t += PAUSE;
    }
    end = t;
    restart();
  };

  const apply = () => {
    const pinned = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    let moved = false;
    while (next < events.length && events[next][0] <= clock) { events[next][1](); next += 1; moved = true; }
    if (moved && pinned) log.scrollTop = log.scrollHeight;
    if (next >= events.length && playing) { playing = false; change({ playing, done: true }); }
  };

  const frame = (now) => {
    if (!playing || !log.isConnected) return;
    clock += (now - last) * speed;
    last = now;
    apply();
    if (playing) requestAnimationFrame(frame);
  };

  const play = () => {
    if (playing) return;
    if (next >= events.length) restart();
    playing = true; last = performance.now();
    change({ playing });
    requestAnimationFrame(frame);
  };
  const pause = () => { playing = false; change({ playing }); };
  const restart = () => { playing = false; clock = 0; next = 0; log.textContent = ''; change({ account: '' }); };
  const skip = () => { clock = end; apply(); };

  return { load, play, pause, restart, skip, toggle: () => (playing ? pause() : play()), setSpeed: (x) => { speed = x; },
    get playing() { return playing; }, get done() { return next >= events.length; } };
};
