// The page's player: a websocket, a small buffer, a canvas. Everything from the server is set as text, never as HTML.
(() => {
  "use strict";

  const $ = (name) => document.getElementById("bc-" + name);
  const put = (name, text) => { const e = $(name); if (e && e.textContent !== text) e.textContent = text; };

  // ------------------------------------------------------------------------------------------- frames at their pace
  // Frames come a chunk at a time. They are shown at the video's own rate; when none is left the picture waits for
  // the next, and none is ever skipped.
  class Player {
    constructor(onShow) { this.onShow = onShow; this.reset(12); requestAnimationFrame((now) => this.tick(now)); }

    reset(fps) {
      (this.queue || []).forEach((frame) => frame.bitmap && frame.bitmap.close());
      this.queue = []; this.interval = 1000 / fps; this.ahead = Math.ceil(fps / 4);
      this.waiting = true; this.paused = false; this.ended = this.shown = false; this.due = 0;
    }

    push(index, bytes) {
      const frame = { index, bitmap: null };
      this.queue.push(frame);
      createImageBitmap(new Blob([bytes])).then((bitmap) => { frame.bitmap = bitmap; });
    }

    tick(now) {
      requestAnimationFrame((later) => this.tick(later));
      $("screen") && $("screen").classList.toggle("bc-waits", this.waiting && this.shown && !this.paused && !this.ended);
      if (this.paused || (!this.waiting && now < this.due - 4)) return;
      const frame = this.queue[0];
      if (!frame || !frame.bitmap || (this.waiting && !this.ended && this.queue.length < this.ahead)) {
        this.waiting = this.waiting || !frame;
        return;
      }
      this.queue.shift();
      const late = this.waiting || now - this.due > this.interval;
      this.due = (late ? now : this.due) + this.interval;
      this.waiting = false; this.shown = true;
      const canvas = $("canvas");
      if (canvas.width !== frame.bitmap.width || canvas.height !== frame.bitmap.height) {
        canvas.width = frame.bitmap.width; canvas.height = frame.bitmap.height;
        canvas.style.aspectRatio = canvas.width + " / " + canvas.height;
      }
      canvas.classList.toggle("bc-small", canvas.height <= 128);
      canvas.getContext("2d").drawImage(frame.bitmap, 0, 0);
      frame.bitmap.close();
      this.onShow(frame.index, now);
    }
  }

  // ------------------------------------------------------------------------------------------------- the cache strip
  const COLORS = ["var(--bc-fixed)", "var(--bc-window)", "var(--bc-staged)"], FREE = "var(--bc-free)";

  function paint(runs, from, to) { // the background of the slots [from, to) of one page
    const stops = [], length = to - from;
    const stop = (color, a, b) => stops.push(`${color} ${(100 * (a - from)) / length}% ${(100 * (b - from)) / length}%`);
    let at = from;
    for (const [role, a, b] of [...runs].sort((x, y) => x[1] - y[1])) {
      const first = Math.max(a, from), last = Math.min(b, to);
      if (first >= last) continue;
      if (first > at) stop(FREE, at, first);
      stop(COLORS[role], first, last);
      at = last;
    }
    if (at < to) stop(FREE, at, to);
    return `linear-gradient(to right, ${stops.join(", ")})`;
  }

  function showCache(cache) {
    const box = $("cells");
    if (cache.closed) {
      box.querySelectorAll("i").forEach((cell) => { cell.dataset.paint = cell.style.background = FREE; });
      box.dataset.state = "free";
      box.setAttribute("aria-label", "The cache has been given back");
      return put("cache-text", "given back");
    }
    const parts = Math.min(8, Math.max(1, 2 ** Math.floor(Math.log2(64 / cache.cells.length)))); // of a page
    if (box.children.length !== cache.cells.length || box.dataset.parts !== String(parts)) {
      box.replaceChildren(...cache.cells.map(() => {
        const page = document.createElement("span");
        for (let i = 0; i < parts; i++) page.append(document.createElement("i"));
        return page;
      }));
      box.dataset.parts = parts;
      box.classList.toggle("bc-many", cache.cells.length > 64);
    }
    cache.cells.forEach((runs, page) => {
      for (let i = 0; i < parts; i++) {
        const size = cache.page_size / parts, background = paint(runs, i * size, (i + 1) * size);
        const cell = box.children[page].children[i];
        if (cell.dataset.paint !== background) { cell.dataset.paint = cell.style.background = background; }
      }
    });
    box.dataset.state = "open"; box.dataset.committed = cache.committed;
    const pinned = cache.fixed ? `${cache.fixed} fixed · ` : "";
    const text = `${pinned}${cache.window} of ${cache.window_tokens} window tokens · ${cache.staged} staged · ` +
      `${cache.free} of ${cache.pages} pages free`;
    put("cache-text", text);
    box.setAttribute("aria-label", `The cache: ${text}`);
  }

  // ---------------------------------------------------------------------------------------------------- the session
  const page = {
    socket: null, hello: null, job: null, phase: "idle", paused: false, asked: 0, first: null, made: 0, shown: 0,
    length: null, chunks: [], prompts: [], told: 0, log: [],
  };
  const player = new Player(onShow);

  function connect() {
    if (page.socket && page.socket.readyState <= WebSocket.OPEN) return page.opened;
    const address = new URL("bc/stream", document.baseURI);
    address.protocol = address.protocol.replace("http", "ws");
    const socket = page.socket = new WebSocket(address);
    socket.binaryType = "arraybuffer";
    socket.onmessage = ({ data }) => (typeof data === "string" ? onMessage(JSON.parse(data)) : onPicture(data));
    socket.onclose = () => {
      if (["asked", "waiting", "running"].includes(page.phase)) {
        setPhase("ended");
        say("The connection to the server was lost. Start begins a new video.");
      }
    };
    page.opened = new Promise((resolve, reject) => { socket.onopen = resolve; socket.onerror = reject; });
    page.opened.catch(() => say("The server does not answer."));
    return page.opened;
  }

  const send = (message) => page.socket && page.socket.readyState === WebSocket.OPEN &&
    page.socket.send(JSON.stringify(message));
  const steer = (type, more) => send({ type, job: page.job, ...more });

  function say(text) { const e = $("message"); e.hidden = !text; put("message", text || ""); }
  function overlay(text) { const e = $("overlay"); e.hidden = !text; put("overlay", text || ""); }

  function setPhase(phase) {
    page.phase = phase;
    const busy = ["asked", "waiting", "running"].includes(phase), going = phase === "running" || phase === "playing";
    put("start", busy ? "Restart" : "Start");
    for (const [name, on] of [["change", busy], ["pause", going], ["stop", busy || phase === "playing"]]) {
      $(name).disabled = !on;
    }
    $("screen").dataset.phase = phase;
  }

  function setPaused(paused) { page.paused = player.paused = paused; put("pause", paused ? "Resume" : "Pause"); }

  const HANDLERS = {
    hello(m) {
      page.hello = m;
      if ($("file").files.length) upload();
    },
    accepted(m) { page.job = m.job; },
    waiting(m) {
      setPhase("waiting");
      overlay(m.place === 1 ? "You are next in line" : `You are number ${m.place} in line of ${m.of}`);
    },
    started(m) {
      if (page.phase === "waiting") page.asked = performance.now();
      page.length = m.frames;
      setPhase("running");
      overlay(page.paused ? "Paused" : "Making the first frames …");
    },
    cache: showCache,
    chunk(m) {
      page.made = m.first + m.count;
      page.chunks.push(m);
      const recent = page.chunks.slice(-5), sum = (key) => recent.reduce((all, c) => all + c[key], 0);
      page.rate = sum("count") / sum("seconds");
      put("latency", m.seconds < 1 ? `${Math.round(m.seconds * 1000)} ms` : `${m.seconds.toFixed(2)} s`);
      figures();
    },
    prompt(m) {
      page.prompts.push(m);
      $("canvas").dataset.changeAt = m.chunk;
      caption();
    },
    end(m) {
      player.ended = true;
      setPhase(player.queue.length && m.reason !== "stopped" ? "playing" : "ended");
      if (m.message) say(m.message);
      overlay(page.shown || player.queue.length ? "" : m.reason === "stopped" ? "Stopped" : "No video");
      if (m.video) {
        const link = $("download");
        link.href = m.video; link.removeAttribute("aria-disabled");
        link.textContent = `Download mp4 (${m.frames} frames)`;
      }
    },
    error(m) { say(m.message); if (page.phase === "asked") { setPhase("idle"); overlay("Press Start"); } },
  };

  function onMessage(message) {
    if (message.job !== undefined && message.type !== "accepted" && message.job !== page.job) return;
    if (HANDLERS[message.type]) HANDLERS[message.type](message);
  }

  function onPicture(data) {
    const head = new DataView(data);
    if (head.getUint32(0, true) === page.job && !["ended", "idle"].includes(page.phase)) {
      player.push(head.getUint32(4, true), new Uint8Array(data, 8));
    }
  }

  function onShow(index, now) {
    page.shown = index + 1;
    if (page.first === null) {
      page.first = (performance.now() - page.asked) / 1000;
      put("first", `${page.first.toFixed(2)} s`);
      overlay("");
    }
    while (page.chunks.length > 1 && page.chunks[0].first + page.chunks[0].count <= index - 100) page.chunks.shift();
    const chunk = page.chunks.find((c) => index >= c.first && index < c.first + c.count);
    page.log.push({ job: page.job, frame: index, chunk: chunk && chunk.chunk, at: now });
    if (page.log.length > 4000) page.log.splice(0, 1000);
    Object.assign($("canvas").dataset, { job: page.job, frame: index, chunk: chunk ? chunk.chunk : "" });
    if (chunk && (page.at !== chunk.chunk)) { page.at = chunk.chunk; caption(); }
    if (now - page.told > 200 || !player.queue.length) { page.told = now; steer("shown", { frames: page.shown }); }
    if (player.ended && !player.queue.length) setPhase("ended");
    figures();
  }

  function figures() {
    const recent = page.log.slice(-25).filter((shown) => shown.job === page.job);
    put("rate", page.rate ? page.rate.toFixed(1) : "–");
    const seconds = recent.length > 5 ? (recent[recent.length - 1].at - recent[0].at) / 1000 : 0;
    put("rate-note", seconds ? `made, ${((recent.length - 1) / seconds).toFixed(1)} shown` : "");
    put("frames", page.made ? String(page.shown) : "–");
    put("frames-note", page.made ? `shown, ${page.made} made` + (page.length ? ` of ${page.length}` : "") : "");
  }

  function caption() {
    const at = page.at || 0;
    while (page.prompts.length > 1 && page.prompts[1].chunk <= at) page.prompts.shift();
    const [now, ...next] = page.prompts;
    const to = next.length ? next[next.length - 1] : null;
    put("caption", now ? `Chunk ${at}: ${now.prompt}` : "");
    put("change-note", to ? `From chunk ${to.chunk} on: ${to.prompt}` :
      now && now.chunk > 0 ? `This prompt took effect at chunk ${now.chunk}` : "");
  }

  // ---------------------------------------------------------------------------------------------------- the controls
  async function upload() {
    const file = $("file").files[0], note = (text, bad) => { put("file-note", text); $("picture").classList.toggle("bc-bad", !!bad); };
    $("thumb").hidden = $("forget").hidden = true;
    page.picture = false;
    if (!file) { send({ type: "forget picture" }); return note("PNG, JPEG or WebP"); }
    try {
      await connect();
      const most = page.hello ? page.hello.picture_bytes : Infinity;
      if (file.size > most) {
        return note(`The picture has ${(file.size / 2 ** 20).toFixed(1)} MB; this server takes ${most / 2 ** 20} MB.`, true);
      }
      note("Uploading …");
      const answer = await fetch(new URL("bc/picture/" + page.hello.session, document.baseURI), { method: "POST", body: file });
      const told = await answer.json();
      if (!answer.ok) return note(told.error, true);
      page.picture = true;
      $("thumb").src = URL.createObjectURL(file);
      $("thumb").hidden = $("forget").hidden = false;
      note(`${told.width} × ${told.height}, cut to the video's shape`);
    } catch (error) {
      note("The picture could not be sent.", true);
    }
  }

  window.bcDemo = {
    page, player,
    async start(prompt, seconds, endless, seed, width, height) {
      say(""); overlay("Asking the server …");
      try { await connect(); } catch (error) { return overlay("No server"); }
      Object.assign(page, { job: null, asked: performance.now(), first: null, made: 0, shown: 0, length: null, rate: 0,
        chunks: [], at: 0, told: 0, prompts: [{ chunk: 0, prompt: (prompt || "").trim() }] });
      player.reset(page.hello ? page.hello.fps : 12);
      setPaused(false); setPhase("asked"); caption();
      delete $("canvas").dataset.frame; delete $("canvas").dataset.changeAt;
      for (const name of ["first", "latency"]) put(name, "–");
      const link = $("download");
      link.removeAttribute("href"); link.setAttribute("aria-disabled", "true"); put("download", "Download mp4");
      figures();
      showCache({ closed: true });
      put("cache-text", "");
      $("canvas").getContext("2d").clearRect(0, 0, $("canvas").width, $("canvas").height);
      send({ type: "start", prompt, seed, width, height, seconds: endless ? null : seconds, picture: page.picture });
    },
    change(prompt) { say(""); steer("prompt", { prompt }); },
    pause() {
      setPaused(!page.paused);
      steer(page.paused ? "pause" : "resume");
      overlay(page.paused ? "Paused" : "");
    },
    stop() {
      steer("stop");
      player.reset(page.hello ? page.hello.fps : 12);
      setPaused(false);
      if (page.phase === "playing") { setPhase("ended"); }
    },
  };

  function ready() {
    if (!$("canvas") || !$("start") || !$("file")) return setTimeout(ready, 50);
    setPhase("idle");
    $("file").addEventListener("change", upload);
    $("forget").addEventListener("click", () => { $("file").value = ""; upload(); $("file").focus(); });
    $("prompt").querySelector("textarea").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      event.stopPropagation();
      (page.phase === "running" ? $("change") : $("start")).click();
    }, true);
    document.body.dataset.demo = "ready";
    connect().catch(() => {});
  }
  ready();
})();
