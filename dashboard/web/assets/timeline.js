/* The timeline: ranks and lanes on a canvas, drawn from windows that the server computes.
   An element #timeline-view with data-run requests them; one without reads #timeline-data. */
(function () {
  "use strict";

  const { GUTTER, AXIS, BAND, LANE, GAP, LEAST_NS, WAIT_MS, clamp, time, timeRange, methods } = window.stepsplitPainting;
  const NO_ROWS = { rows: [], names: [], from: 0, to: 0, ranks: [], open: [] };

  const node = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  class Timeline {
    constructor(root) {
      this.root = root;
      this.run = root.dataset.run;
      this.data = NO_ROWS;
      this.open = new Set();
      this.focus = 0;
      this.chosen = null;
      this.build();
      this.load();
    }

    build() {
      const bar = node("div", "tl-bar");
      this.button(bar, "−", "zoom out", () => this.zoom(2));
      this.button(bar, "+", "zoom in", () => this.zoom(0.5));
      this.button(bar, "◀", "earlier", () => this.pan(-0.5));
      this.button(bar, "▶", "later", () => this.pan(0.5));
      this.button(bar, "whole run", "show the whole run", () => this.whole());
      this.steps = node("select", "tl-steps");
      this.steps.setAttribute("aria-label", "step");
      this.steps.addEventListener("change", () => this.toStep(this.steps.value));
      bar.append(this.steps);
      this.lanesButton = this.button(bar, "all lanes", "open or close every rank", () => this.toggleAll());
      if (this.run) this.button(bar, "open in Perfetto", "open the run at ui.perfetto.dev", () => this.perfetto());
      this.where = node("span", "tl-where");
      bar.append(this.where);
      this.body = node("div", "tl-body");
      this.canvas = node("canvas");
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "application");
      this.canvas.setAttribute("aria-label",
        "Timeline. Arrow left and right move, plus and minus zoom, arrow up and down choose a rank, " +
        "Enter opens its lanes, full stop and comma choose the next and previous slice, 0 shows the whole run.");
      this.space = node("div", "tl-space");
      this.body.append(this.canvas, this.space);
      this.tip = node("div", "tl-tip");
      this.tip.hidden = true;
      this.status = node("div", "tl-status");
      this.status.setAttribute("role", "status");
      this.status.textContent = "Drag to pan, Ctrl + wheel to zoom, double-click to zoom in; click a rank to show its lanes.";
      this.root.append(bar, this.body, this.status, this.tip);
      this.listen();
    }

    button(parent, text, label, act) {
      const element = node("button", "", text);
      element.type = "button";
      element.title = label;
      element.setAttribute("aria-label", label);
      element.addEventListener("click", act);
      parent.append(element);
      return element;
    }

    async load() {
      try {
        this.index = await this.read("");
      } catch (error) {
        this.status.textContent = "Cannot load the timeline: " + error.message;
        return;
      }
      this.looks();
      for (const one of this.index.steps) {
        const text = "step " + one.step + (one.kind === "full" ? "" : " (" + one.kind + ")");
        const option = node("option", "", text);
        option.value = one.step;
        this.steps.append(option);
      }
      const first = Math.min(...this.index.steps.map((one) => one.from));
      const last = Math.max(...this.index.steps.map((one) => one.to));
      this.extent = [first, last];
      this.start();
    }

    /* The initial window: from the URL, else the middle full step. */
    start() {
      const asked = new URLSearchParams(this.run ? location.search : "");
      const number = (name) => (/^-?\d{1,18}$/.test(asked.get(name) || "") ? Number(asked.get(name)) : null);
      (asked.get("open") || "").split(",").filter((one) => /^\d{1,8}$/.test(one)).forEach((one) => this.open.add(Number(one)));
      if (!asked.has("open") && this.index.ranks.length <= 4) this.index.ranks.forEach((one) => this.open.add(one.rank));
      const [from, to] = [number("from"), number("to")];
      const rank = number("rank");
      if (rank !== null) {
        this.open.add(rank);
        this.focus = Math.max(0, this.index.ranks.findIndex((one) => one.rank === rank));
      }
      if (from !== null && to !== null && to > from) this.show(from, to);
      else this.toStep(asked.get("step") || this.middle());
      if (rank !== null) setTimeout(() => this.reveal(rank), 300);
    }

    middle() {
      const full = this.index.steps.filter((one) => one.kind === "full");
      const steps = full.length ? full : this.index.steps;
      return String(steps.length ? steps[Math.floor(steps.length / 2)].step : "");
    }

    toStep(number) {
      const step = this.index.steps.find((one) => String(one.step) === String(number));
      if (!step) return this.whole();
      const edge = 0.01 * (step.to - step.from);
      this.show(step.from - edge, step.to + edge);
    }

    whole() { this.show(...this.extent); }

    show(from, to) {
      const [first, last] = this.extent;
      const most = 1.1 * (last - first) || 1;
      const span = clamp(to - from, LEAST_NS, most);
      const middle = clamp((from + to) / 2, first, last);
      this.from = middle - span / 2;
      this.to = middle + span / 2;
      this.draw();
      this.ask();
    }

    zoom(times, at) {
      const share = at === undefined ? 0.5 : at;
      const pivot = this.from + share * (this.to - this.from);
      this.show(pivot - (pivot - this.from) * times, pivot + (this.to - pivot) * times);
    }

    pan(share) {
      const by = share * (this.to - this.from);
      this.show(this.from + by, this.to + by);
    }

    ranksInSight() {
      const top = this.body.scrollTop, bottom = top + this.body.clientHeight;
      return this.places().filter((one) => one.y + one.height > top - 200 && one.y < bottom + 200).map((one) => one.rank);
    }

    enough() {
      const had = this.data, span = this.to - this.from;
      const covers = had.from <= Math.max(this.from, this.extent[0] - span) && had.to >= Math.min(this.to, this.extent[1] + span);
      const close = had.to - had.from <= 4.2 * span || had.exact;
      const same = this.ranksInSight().every((rank) => had.ranks.includes(rank)) &&
        [...this.open].every((rank) => had.open.includes(rank) || !this.ranksInSight().includes(rank));
      return covers && close && same;
    }

    ask() {
      this.remember();
      clearTimeout(this.later);
      if (!this.enough()) this.later = setTimeout(() => this.fetchWindow(), WAIT_MS);
    }

    async fetchWindow() {
      const span = this.to - this.from, number = (this.asked = (this.asked || 0) + 1);
      const from = Math.floor(this.from - span / 2), to = Math.ceil(this.to + span / 2);
      const ranks = this.ranksInSight(), open = ranks.filter((rank) => this.open.has(rank));
      const query = new URLSearchParams({ from, to, slots: Math.round(this.width() * 1.2), ranks: ranks.join(","), open: open.join(",") });
      try {
        const got = await this.read("/window?" + query);
        if (number !== this.asked) return;
        const exact = got.rows.every((row) => row.name.every((name) => name >= 0));
        this.data = { ...got, from, to, ranks, open, exact };
      } catch (error) {
        this.status.textContent = "Cannot load the timeline: " + error.message;
        return;
      }
      this.byRank = new Map();
      for (const row of this.data.rows) {
        if (!this.byRank.has(row.rank)) this.byRank.set(row.rank, []);
        this.byRank.get(row.rank).push(row);
      }
      this.draw();
    }

    async read(path) {
      if (!this.run) {
        const data = JSON.parse(document.getElementById("timeline-data").textContent);
        return path ? data.window : data.index;
      }
      const answer = await fetch("/api/v1/runs/" + this.run + "/timeline" + path);
      const body = await answer.json().catch(() => ({}));
      if (!answer.ok) throw new Error(body.error || "the server answered " + answer.status);
      return body;
    }

    remember() {
      const step = this.shownStep(), first = this.index.steps[0];
      const origin = step ? "step " + step.step : first ? "from step " + first.step : "time";
      this.where.textContent = origin + ": " + timeRange(this.from - this.zero(), this.to - this.zero());
      if (step) this.steps.value = step.step;
      if (!this.run) return;
      clearTimeout(this.noting);
      this.noting = setTimeout(() => {
        const query = new URLSearchParams({ from: Math.round(this.from), to: Math.round(this.to) });
        if (this.open.size) query.set("open", [...this.open].sort((a, b) => a - b).join(","));
        history.replaceState(history.state, "", location.pathname + "?" + query);
      }, 250);
    }

    /* Layout: one band per rank, and its lanes if it is open. */
    places() {
      let y = AXIS;
      return this.index.ranks.map((one) => {
        const lanes = this.open.has(one.rank) ? this.lanesOf(one.rank) : [];
        const place = { ...one, y, lanes, height: BAND + lanes.length * LANE + GAP };
        y += place.height;
        return place;
      });
    }

    lanesOf(rank) { return ((this.byRank && this.byRank.get(rank)) || []).slice(1); }
    width() { return Math.max(200, this.body.clientWidth - GUTTER - 8); }
    x(ns) { return GUTTER + ((ns - this.from) / (this.to - this.from)) * this.width(); }
    ns(x) { return this.from + ((x - GUTTER) / this.width()) * (this.to - this.from); }

    draw() {
      if (!this.extent) return;
      cancelAnimationFrame(this.frame);
      this.frame = requestAnimationFrame(() => this.paint());
    }

    hit(x, y) {
      const found = (this.hits || []).find((one) => y >= one.y && y < one.y + one.height && (x < GUTTER) === Boolean(one.gutter));
      if (!found || found.gutter) return found || null;
      const at = this.ns(x), row = found.row, near = (2 * (this.to - this.from)) / this.width();
      let best = -1, off = near;
      /* Shapes drawn last are on top. */
      for (let i = row.start.length - 1; i >= 0; i--) {
        const away = Math.max(row.start[i] - at, at - row.start[i] - row.dur[i], 0);
        if (away < off || (away === 0 && best < 0)) { best = i; off = away; }
        if (away === 0) break;
      }
      return best < 0 ? null : this.slice(row, best);
    }

    slice(row, i) {
      const exact = row.name[i] >= 0;
      return {
        rank: row.rank, lane: row.lane, depth: row.depth, start: row.start[i], dur: row.dur[i], at: i,
        bucket: this.index.buckets[row.bucket[i]].name, exact,
        name: exact ? this.data.names[row.name[i]] : "", owner: exact ? row.owner[i] : -1,
      };
    }

    words(one) {
      if (!one.exact) return [one.bucket, "mostly, for " + time(one.dur) + "; zoom in for details"];
      const waits = one.owner >= 0 ? "waits for rank " + one.owner : "";
      const step = this.index.steps.find((each) => each.from <= one.start && one.start < each.to);
      const when = step ? time(one.start - step.from) + " into step " + step.step : "at " + time(one.start);
      return [one.name || one.bucket, [one.bucket, waits, time(one.dur), when, "rank " + one.rank + (one.lane === "buckets" ? "" : ", " + one.lane)].filter(Boolean).join("  ·  ")];
    }

    choose(one) {
      this.chosen = one;
      this.status.replaceChildren();
      if (one) {
        const [head, rest] = this.words(one);
        this.status.append(node("b", "", head), node("span", "", "  " + rest + "  "));
        if (one.exact) this.button(this.status, "zoom to it", "zoom to this slice", () => this.show(one.start - one.dur * 0.3, one.start + one.dur * 1.3));
        if (one.owner >= 0) this.button(this.status, "go to rank " + one.owner, "show rank " + one.owner + " at that time", () => this.follow(one));
      }
      this.draw();
    }

    follow(one) {
      this.open.add(one.owner);
      this.focus = this.index.ranks.findIndex((each) => each.rank === one.owner);
      const span = this.to - this.from, end = one.start + one.dur;
      if (end < this.from || end > this.to) this.show(end - span / 2, end + span / 2);
      this.ask();
      this.draw();
      this.reveal(one.owner);
    }

    reveal(rank) {
      const place = this.places().find((one) => one.rank === rank);
      if (place) this.body.scrollTop = Math.max(0, place.y - this.body.clientHeight / 3);
      this.ask();
    }

    toggle(rank) {
      this.open.has(rank) ? this.open.delete(rank) : this.open.add(rank);
      this.ask();
      this.draw();
    }

    toggleAll() {
      const every = this.index.ranks.map((one) => one.rank);
      this.open = new Set(this.open.size === every.length ? [] : every);
      this.ask();
      this.draw();
    }

    neighbor(by) {
      const rank = this.index.ranks[this.focus].rank;
      const rows = (this.byRank && this.byRank.get(rank)) || [];
      const had = this.chosen && this.chosen.rank === rank ? this.chosen : null;
      const row = rows.find((one) => had && one.lane === had.lane && one.depth === had.depth) || rows[0];
      if (!row || !row.start.length) return;
      const order = row.start.map((start, i) => i).sort((a, b) => row.start[a] - row.start[b]);
      const place = had ? order.findIndex((i) => row.start[i] === had.start) + by : order.findIndex((i) => row.start[i] > this.from);
      this.choose(this.slice(row, order[clamp(place, 0, order.length - 1)]));
      const mid = this.chosen.start + this.chosen.dur / 2;
      if (mid < this.from || mid > this.to) this.show(mid - (this.to - this.from) / 2, mid + (this.to - this.from) / 2);
    }

    key(event) {
      const acts = {
        ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), a: () => this.pan(-0.2), d: () => this.pan(0.2),
        "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), w: () => this.zoom(0.5), "-": () => this.zoom(2), s: () => this.zoom(2),
        0: () => this.whole(), ".": () => this.neighbor(1), ",": () => this.neighbor(-1),
        ArrowDown: () => this.move(1), ArrowUp: () => this.move(-1), Enter: () => this.toggle(this.index.ranks[this.focus].rank),
        Escape: () => this.choose(null),
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
      event.preventDefault();
      acts[event.key]();
    }

    move(by) {
      this.focus = clamp(this.focus + by, 0, this.index.ranks.length - 1);
      const one = this.index.ranks[this.focus];
      this.status.textContent = "rank " + one.rank + (this.open.has(one.rank) ? ", open" : "") + ": Enter shows its lanes, full stop its first slice";
      this.reveal(one.rank);
      this.draw();
    }

    listen() {
      const place = (event) => {
        const box = this.canvas.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
      };
      let drag = null, moved = false;
      this.canvas.addEventListener("pointerdown", (event) => {
        if (!this.extent) return;
        drag = { at: place(event), from: this.from, to: this.to, zoom: place(event)[1] < AXIS };
        moved = false;
        this.canvas.setPointerCapture(event.pointerId);
      });
      this.canvas.addEventListener("pointermove", (event) => {
        if (!this.extent) return;
        const [x, y] = place(event);
        if (!drag) return this.point(x, y, event);
        if (Math.abs(x - drag.at[0]) > 3) moved = true;
        if (!moved) return;
        this.tip.hidden = true;
        const by = ((x - drag.at[0]) / this.width()) * (drag.to - drag.from);
        this.show(drag.from - by, drag.to - by);
      });
      this.canvas.addEventListener("pointerup", (event) => {
        if (!drag) return;
        drag = null;
        if (moved) return;
        const found = this.hit(...place(event));
        if (found && found.gutter) {
          this.focus = this.index.ranks.findIndex((one) => one.rank === found.rank);
          this.toggle(found.rank);
        } else this.choose(found);
      });
      this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
      this.canvas.addEventListener("dblclick", (event) => this.zoom(0.25, (place(event)[0] - GUTTER) / this.width()));
      this.canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
        event.preventDefault();
        if (event.shiftKey) return this.pan((event.deltaY || event.deltaX) / this.width());
        this.zoom(Math.pow(1.0016, event.deltaY), clamp((place(event)[0] - GUTTER) / this.width(), 0, 1));
      }, { passive: false });
      this.canvas.addEventListener("keydown", (event) => this.extent && this.key(event));
      this.body.addEventListener("scroll", () => { if (this.extent) { this.draw(); this.ask(); } });
      new ResizeObserver(() => { if (this.extent && this.body.clientWidth !== this.had) { this.had = this.body.clientWidth; this.draw(); this.ask(); } }).observe(this.body);
      document.addEventListener("stepsplit:theme", () => { if (this.index) { this.looks(); this.draw(); } });
    }

    point(x, y, event) {
      const found = y < AXIS ? null : this.hit(x, y);
      this.canvas.style.cursor = found ? "pointer" : "grab";
      this.tip.hidden = !found || found.gutter;
      if (this.tip.hidden) return;
      const [head, rest] = this.words(found);
      this.tip.replaceChildren(node("b", "", head), node("div", "", rest));
      const box = this.root.getBoundingClientRect();
      this.tip.style.left = clamp(event.clientX - box.left + 14, 0, box.width - 340) + "px";
      this.tip.style.top = event.clientY - box.top + 16 + "px";
    }

    /* Perfetto's page accepts a trace by postMessage after answering a PING. The window must be
       opened in the click handler; the data stays in this browser. */
    perfetto() {
      const site = this.root.dataset.perfetto, page = window.open(site);
      if (!page) return (this.status.textContent = "The browser blocked the new window.");
      this.status.textContent = "Reading the trace for Perfetto ...";
      const trace = fetch("/api/v1/runs/" + this.run + "/perfetto").then((answer) => answer.arrayBuffer());
      const asking = setInterval(() => page.postMessage("PING", site), 100);
      const answer = async (event) => {
        if (event.origin !== new URL(site).origin || event.data !== "PONG") return;
        clearInterval(asking);
        window.removeEventListener("message", answer);
        page.postMessage({ perfetto: { buffer: await trace, title: document.title } }, site);
        this.status.textContent = "The trace was sent to Perfetto.";
      };
      window.addEventListener("message", answer);
      setTimeout(() => clearInterval(asking), 60000);
    }
  }

  Object.assign(Timeline.prototype, methods);

  /* Dash recreates pages: wait for the element each time. */
  const begin = () => {
    const root = document.getElementById("timeline-view");
    if (root && !root.dataset.ready) {
      root.dataset.ready = "1";
      root.timeline = new Timeline(root);
    }
  };
  new MutationObserver(begin).observe(document.documentElement, { childList: true, subtree: true });
  begin();
})();
