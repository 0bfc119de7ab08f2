/* The timeline: ranks and lanes on a canvas, drawn from windows that the server computes.
   An element #timeline-view with data-run requests them; one without reads #timeline-data. */
(function () {
  "use strict";

  const { WIDE_GUTTER, NARROW_GUTTER, NARROW_PX, AXIS, LEAST_NS, WAIT_MS, clamp, time, timeRange } = window.stepsplitPainting;
  const { unpackWindow } = window.stepsplitRows;
  const NO_ROWS = { rows: [], names: [], from: 0, to: 0, ranks: new Set(), open: new Set(), query: "", compact: false };
  const FILTER_HINT = "numbers (12), ranges (0-7), stages (stage 2), groups (tp group 1) or a part of a host's name, separated by commas";

  const node = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  class Timeline {
    constructor(root, main = null, asked = null) {
      this.root = root;
      this.main = main;
      this.askedSecond = asked;
      this.second = null;
      this.shift = 0;
      this.notes = [];
      this.pins = [];
      this.stats = false;
      this.run = root.dataset.run;
      this.data = NO_ROWS;
      this.open = new Set();
      this.folded = new Set();
      this.names = new Map();
      this.focus = this.by = this.query = this.filter = "";
      this.chosen = this.shown = this.compactChoice = this.found = this.current = this.hovered = null;
      this.range = this.splits = null;
      this.edges = [null, null];
      this.build();
      this.load();
    }

    build() {
      this.body = node("div", "tl-body");
      this.canvas = node("canvas");
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "application");
      this.canvas.setAttribute("aria-label",
        "Timeline. Arrow left and right move, plus and minus zoom, arrow up and down choose a rank or group, " +
        "Enter opens its lanes or folds it, full stop and comma choose the next and previous slice, " +
        "0 shows the whole run, slash searches a name, n and p choose the next and previous match, " +
        "left and right square bracket set the begin and end of a measured range, k pins a rank above the others, Escape clears slice and range.");
      this.space = node("div", "tl-space");
      this.body.append(this.canvas, this.space);
      this.tip = node("div", "tl-tip");
      this.tip.hidden = true;
      this.rangeLine = node("div", "tl-range");
      this.rangeLine.setAttribute("aria-live", "polite");
      this.rangeLine.hidden = true;
      this.status = node("div", "tl-status");
      this.status.setAttribute("role", "status");
      this.status.textContent = "Drag to pan, Shift + drag to measure, Ctrl + wheel to zoom, double-click to zoom in; click a rank to show its lanes.";
      if (this.main) this.status.textContent = "";
      const bars = [this.buildMoves(), this.buildChoices()];
      this.noteList = node("div", "tl-notes");
      this.noteList.hidden = true;
      if (!this.main) this.table = node("div", "tl-tables");
      this.root.append(...(this.main ? [this.buildSecondHead()] : bars), this.body, this.rangeLine, this.noteList, this.status, this.tip);
      if (this.table) this.root.append(this.table);
      this.listen();
    }

    buildMoves() {
      const bar = node("div", "tl-bar");
      this.button(bar, "−", "zoom out", () => this.zoom(2));
      this.button(bar, "+", "zoom in", () => this.zoom(0.5));
      this.button(bar, "◀", "earlier", () => this.pan(-0.5));
      this.button(bar, "▶", "later", () => this.pan(0.5));
      this.button(bar, "whole run", "show the whole run", () => this.whole());
      this.steps = this.menu(bar, "step", (value) => this.toStep(value));
      this.steps.className = "tl-steps";
      this.lanesButton = this.button(bar, "all lanes", "open or close every rank", () => this.toggleAll());
      if (this.run) {
        this.button(bar, "open in Perfetto", "open the run at ui.perfetto.dev", () => this.perfetto());
        const link = node("a", "button", "download trace");
        link.href = "/api/v1/runs/" + this.run + "/perfetto";
        link.download = "";
        link.title = "all ranks in one file for Perfetto, here or offline";
        link.setAttribute("aria-label", "download trace, " + link.title);
        bar.append(link);
      }
      this.where = node("span", "tl-where");
      bar.append(this.where);
      return bar;
    }

    buildChoices() {
      const bar = node("div", "tl-bar");
      const find = node("span", "tl-search");
      this.searchField = this.field(find, "search a kernel or op", "search a kernel or op", "a name or a part of it, in any case; / comes here, Enter goes to the next match", 200);
      this.searchField.addEventListener("input", () => this.typeQuery(this.searchField.value));
      this.searchField.addEventListener("keydown", (event) => this.searchKey(event));
      this.previousButton = this.button(find, "‹", "previous match", () => this.stepMatch(-1));
      this.nextButton = this.button(find, "›", "next match", () => this.stepMatch(1));
      this.previousButton.disabled = this.nextButton.disabled = true;
      this.counter = node("span", "tl-count");
      this.counter.setAttribute("role", "status");
      find.append(this.counter);
      bar.append(find);
      this.groupMenu = this.menu(bar, "group ranks by", (value) => this.setGrouping(value));
      this.filterField = this.field(bar, "ranks: 0-7, stage 2", "show only some ranks", "ranks to show: " + FILTER_HINT, 400);
      this.filterField.addEventListener("change", () => this.setFilter(this.filterField.value));
      this.compactButton = this.button(bar, "compact rows", "draw closed ranks with few pixels", () => this.setCompact(!this.isCompact()));
      this.compactButton.setAttribute("aria-pressed", "false");
      this.pinButton = this.button(bar, "pin rank", "keep the chosen rank above the others", () => this.togglePin());
      if (this.run) this.buildSecondMenu(bar);
      return bar;
    }

    field(parent, placeholder, label, hint, most) {
      const element = node("input", "tl-field");
      element.type = "search";
      element.maxLength = most;
      element.spellcheck = false;
      element.placeholder = placeholder;
      element.title = hint;
      element.setAttribute("aria-label", label);
      parent.append(element);
      return element;
    }

    menu(parent, label, act) {
      const element = node("select");
      element.setAttribute("aria-label", label);
      element.title = label;
      element.addEventListener("change", () => act(element.value));
      parent.append(element);
      return element;
    }

    option(menu, value, text) {
      const element = node("option", "", text);
      element.value = value;
      menu.append(element);
    }

    say(text) { this.status.textContent = text; }

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
        this.say("Cannot load the timeline: " + error.message);
        return;
      }
      this.viewWidth = this.body.clientWidth;
      this.looks();
      for (const one of this.index.steps) this.option(this.steps, one.step, "step " + one.step + (one.kind === "full" ? "" : " (" + one.kind + ")"));
      this.option(this.groupMenu, "", "no groups");
      for (const one of this.index.groupings) this.option(this.groupMenu, one.by, "by " + one.by);
      this.groupMenu.hidden = !this.index.groupings.length;
      const first = Math.min(...this.index.steps.map((one) => one.from));
      const last = Math.max(...this.index.steps.map((one) => one.to));
      this.extent = [first, last];
      this.everyRank = new Set(this.index.ranks.map((one) => one.rank));
      this.start();
    }

    /* The initial window: from the URL, else the middle full step. */
    start() {
      const asked = this.main ? this.secondChoices() : new URLSearchParams(this.run ? location.search : "");
      const number = (name) => (/^-?\d{1,18}$/.test(asked.get(name) || "") ? Number(asked.get(name)) : null);
      (asked.get("open") || "").split(",").filter((one) => /^\d{1,8}$/.test(one)).forEach((one) => this.open.add(Number(one)));
      if (!asked.has("open") && this.index.ranks.length <= 4) this.index.ranks.forEach((one) => this.open.add(one.rank));
      const [from, to, rank] = [number("from"), number("to"), number("rank")];
      if (rank !== null) this.open.add(rank);
      this.focus = "rank " + (rank !== null ? rank : this.index.ranks[0].rank);
      this.starting = true;
      this.restoreChoices(asked);
      if (this.main) this.pairFirst(this.askedSecond);
      else if (from !== null && to !== null && to > from) this.show(from, to);
      else this.toStep(asked.get("step") || this.middle());
      this.restoreAnswers(asked);
      this.starting = false;
      this.ask();
      if (this.main) this.align();
      else this.restoreSecond(asked);
      if (rank !== null) setTimeout(() => this.reveal(rank), 300);
    }

    middle() {
      const full = this.index.steps.filter((one) => one.kind === "full");
      const steps = full.length ? full : this.index.steps;
      return String(steps.length ? steps[Math.floor(steps.length / 2)].step : "");
    }

    toStep(number) {
      if (this.main) return this.pairStep(number);
      const step = this.index.steps.find((one) => String(one.step) === String(number));
      if (!step) return this.whole();
      const edge = 0.01 * (step.to - step.from);
      this.show(step.from - edge, step.to + edge);
    }

    whole() { this.show(...this.extent); }

    show(from, to) {
      if (this.main) {
        const offset = this.secondOffset();
        return this.main.show(from - offset, to - offset);
      }
      const [first, last] = this.extent;
      const most = 1.1 * (last - first) || 1;
      const span = clamp(to - from, LEAST_NS, most);
      const middle = clamp((from + to) / 2, first, last);
      this.from = middle - span / 2;
      this.to = middle + span / 2;
      this.draw();
      this.ask();
      if (this.second) this.second.align();
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

    ranksInSight(beyond = 0) {
      const top = this.body.scrollTop, bottom = top + this.mostHeight();
      return this.places().filter((one) => one.rank !== undefined && (one.pinned || (one.y + one.height > top - beyond && one.y < bottom + beyond))).map((one) => one.rank);
    }

    enough() {
      const had = this.data, span = this.to - this.from;
      const covers = had.from <= Math.max(this.from, this.extent[0] - span) && had.to >= Math.min(this.to, this.extent[1] + span);
      const close = had.to - had.from <= (had.margin ? 4.2 : 2.2) * span || had.exact;
      const same = this.ranksInSight().every((rank) => had.ranks.has(rank) && (had.open.has(rank) || !this.open.has(rank)));
      return covers && close && same && (!this.run || (had.query === this.query && (had.compact || !this.isCompact()) && (!had.compact || this.isCompact())));
    }

    ask() {
      if (!this.extent || this.starting) return;
      this.remember();
      clearTimeout(this.later);
      if (!this.enough()) this.later = setTimeout(() => this.fetchWindow(), WAIT_MS);
    }

    /* The first window comes without a margin, so that it is drawn soon. */
    windowQuery() {
      const first = this.data === NO_ROWS, span = this.to - this.from, margin = first ? 0 : span / 2;
      const from = Math.floor(this.from - margin), to = Math.ceil(this.to + margin);
      const ranks = this.ranksInSight(first ? 0 : 200), open = ranks.filter((rank) => this.open.has(rank));
      const query = new URLSearchParams({ from, to, slots: Math.round(this.width() * (first ? 1 : 1.4)), ranks: ranks.join(","), open: open.join(",") });
      if (this.isCompact()) query.set("compact", Math.round(this.width() * (first ? 0.5 : 0.8)));
      if (this.query) query.set("q", this.query);
      return [query, { from, to, ranks: new Set(ranks), open: new Set(open), margin, query: this.query, compact: this.isCompact() }];
    }

    async fetchWindow() {
      const number = (this.asked = (this.asked || 0) + 1), [query, asked] = this.windowQuery();
      try {
        const got = unpackWindow(await this.read("/window?" + query));
        if (number !== this.asked) return;
        const exact = got.rows.every((row) => row.name.every((name) => name >= 0));
        this.data = this.run
          ? { ...got, ...asked, exact }
          : { ...got, ...asked, from: -Infinity, to: Infinity, exact: true, ranks: this.everyRank, open: this.everyRank };
      } catch (error) {
        this.say("Cannot load the timeline: " + error.message);
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
      if (this.main) return this.starting ? undefined : this.main.remember();
      if (!this.run || this.starting) return;
      clearTimeout(this.noting);
      this.noting = setTimeout(() => {
        if (this.root.isConnected) history.replaceState(history.state, "", location.pathname + "?" + this.addressQuery());
      }, 250);
    }

    get gutter() { return this.viewWidth < NARROW_PX ? NARROW_GUTTER : WIDE_GUTTER; }
    lanesOf(rank) { return ((this.byRank && this.byRank.get(rank)) || []).slice(1); }
    width() { return Math.max(200, this.viewWidth - this.gutter - 8); }
    x(ns) { return this.gutter + ((ns - this.from) / (this.to - this.from)) * this.width(); }
    ns(x) { return this.from + ((x - this.gutter) / this.width()) * (this.to - this.from); }

    draw() {
      if (!this.extent) return;
      cancelAnimationFrame(this.frame);
      this.frame = requestAnimationFrame(() => this.paint());
    }

    hit(x, y) {
      const found = (this.hits || []).find((one) => y >= one.y && y < one.y + one.height && (one.group || (x < this.gutter) === Boolean(one.gutter)));
      if (!found || found.gutter || found.group) return found || null;
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
      const known = one.name || this.nameOf(one);
      if (!one.exact) return [known || one.bucket, (known ? one.bucket + "  ·  " : "") + "mostly, for " + time(one.dur) + "  ·  " + this.rankWords(one.rank) + "; zoom in for details"];
      const waits = one.owner >= 0 ? "waits for rank " + one.owner : "";
      const step = this.index.steps.find((each) => each.from <= one.start && one.start < each.to);
      const when = step ? time(one.start - step.from) + " into step " + step.step : "at " + time(one.start);
      const mostly = known && !one.name ? "mostly " + known : known;
      return [mostly || one.bucket, [one.bucket, waits, time(one.dur), when, this.rankWords(one.rank) + (one.lane === "buckets" ? "" : ", " + one.lane)].filter(Boolean).join("  ·  ")];
    }

    choose(one) {
      this.chosen = one;
      this.showChosen();
      if (one) this.findName(one, () => { if (this.chosen === one) this.showChosen(); }, 0);
      this.remember();
      this.draw();
    }

    showChosen() {
      const one = this.chosen;
      this.status.replaceChildren();
      if (!one) return;
      const [head, rest] = this.words(one);
      this.status.append(node("b", "", head), node("span", "", "  " + rest + "  "));
      if (one.exact) this.button(this.status, "zoom to it", "zoom to this slice", () => this.show(one.start - one.dur * 0.3, one.start + one.dur * 1.3));
      if (one.owner >= 0) this.button(this.status, "go to rank " + one.owner, "show rank " + one.owner + " at that time", () => this.follow(one));
    }

    follow(one) {
      if (!this.makeVisible(one.owner)) return this.say("The filter hides rank " + one.owner + ".");
      this.open.add(one.owner);
      this.focus = "rank " + one.owner;
      const span = this.to - this.from, end = one.start + one.dur;
      if (end < this.from || end > this.to) this.show(end - span / 2, end + span / 2);
      this.ask();
      this.draw();
      this.reveal(one.owner);
    }

    reveal(rank) { this.scrollTo(this.places().find((one) => one.rank === rank)); }

    scrollTo(place) {
      if (place) this.body.scrollTop = Math.max(0, place.y - this.body.clientHeight / 3);
      this.ask();
    }

    toggle(rank) {
      this.open.has(rank) ? this.open.delete(rank) : this.open.add(rank);
      this.ask();
      this.draw();
    }

    toggleAll() {
      const every = this.shownRanks();
      this.open = new Set(every.every((rank) => this.open.has(rank)) ? [] : every);
      this.ask();
      this.draw();
    }

    neighbor(by) {
      const rank = this.focusedRank();
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
        ArrowDown: () => this.move(1), ArrowUp: () => this.move(-1), Enter: () => this.toggleFocused(),
        n: () => this.stepMatch(1), p: () => this.stepMatch(-1), "[": () => this.setEdge(0), "]": () => this.setEdge(1), k: () => this.togglePin(),
        Escape: () => { this.clearRange(); this.choose(null); },
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !acts[event.key]) return;
      event.preventDefault();
      acts[event.key]();
    }

    searchKey(event) {
      if (event.key === "Enter") {
        event.preventDefault();
        const same = this.query === this.searchField.value.trim();
        (same ? Promise.resolve() : this.setQuery(this.searchField.value)).then(() => this.stepMatch(event.shiftKey ? -1 : 1));
      } else if (event.key === "Escape") {
        this.searchField.value = "";
        this.setQuery("");
        this.canvas.focus();
      }
    }

    move(by) {
      const places = this.places(), at = places.findIndex((one) => one.key === this.focus);
      const place = places[clamp(at + by, 0, places.length - 1)];
      if (!place) return;
      this.focus = place.key;
      this.say(place.group
        ? place.group + ", " + place.count + " ranks: Enter " + (this.folded.has(place.group) ? "unfolds" : "folds") + " the group"
        : "rank " + place.rank + (this.open.has(place.rank) ? ", open" : "") + ": Enter shows its lanes, full stop its first slice");
      this.showRange();
      this.scrollTo(place);
      this.draw();
    }

    toggleFocused() {
      const place = this.places().find((one) => one.key === this.focus);
      if (place) place.group ? this.toggleGroup(place.group) : this.toggle(place.rank);
    }

    listen() {
      const place = (event) => {
        const box = this.canvas.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
      };
      let drag = null, moved = false;
      this.canvas.addEventListener("pointerdown", (event) => {
        if (!this.extent) return;
        drag = { at: place(event), from: this.from, to: this.to, measures: event.shiftKey, begin: this.ns(place(event)[0]) };
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
        if (drag.measures) {
          this.hover(this.rankAt(y));
          return this.drawRange(drag.begin, this.ns(x));
        }
        const by = ((x - drag.at[0]) / this.width()) * (drag.to - drag.from);
        this.show(drag.from - by, drag.to - by);
      });
      this.canvas.addEventListener("pointerup", (event) => {
        if (!drag) return;
        const { measures, begin } = drag;
        drag = null;
        if (measures) return moved && this.setRange(begin, this.ns(clamp(place(event)[0], this.gutter, this.gutter + this.width())));
        if (moved) return;
        const found = this.hit(...place(event));
        if (found && found.group) {
          this.focus = "group " + found.group;
          this.toggleGroup(found.group);
        } else if (found && found.gutter) {
          this.focus = "rank " + found.rank;
          this.toggle(found.rank);
        } else {
          if (found) this.focus = "rank " + found.rank;
          this.choose(found);
        }
        this.showRange();
      });
      this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; this.hover(null); });
      this.canvas.addEventListener("dblclick", (event) => this.zoom(0.25, (place(event)[0] - this.gutter) / this.width()));
      this.canvas.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
        event.preventDefault();
        if (event.shiftKey) return this.pan((event.deltaY || event.deltaX) / this.width());
        this.zoom(Math.pow(1.0016, event.deltaY), clamp((place(event)[0] - this.gutter) / this.width(), 0, 1));
      }, { passive: false });
      this.canvas.addEventListener("keydown", (event) => this.extent && this.key(event));
      this.body.addEventListener("scroll", () => { if (this.extent) { this.draw(); this.ask(); } });
      /* A painting before it may have noted the new width; more rows may be in sight now. */
      new ResizeObserver(() => { this.viewWidth = this.body.clientWidth; this.draw(); this.ask(); }).observe(this.body);
      document.addEventListener("keydown", (event) => {
        if (this.main) return;
        const free = event.target === document.body || (this.root.contains(event.target) && !event.target.matches("input, select"));
        if (event.key !== "/" || !free || !this.root.isConnected || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        this.searchField.focus();
      });
      /* At once: nothing waits for an animation frame before the page is printed. */
      document.addEventListener("stepsplit:theme", () => { if (this.extent) { this.looks(); this.paint(); } });
    }

    point(x, y, event) {
      const found = y < AXIS ? null : this.hit(x, y);
      this.canvas.style.cursor = event.shiftKey ? "crosshair" : found ? "pointer" : "grab";
      this.hover(this.rankAt(y));
      this.tip.hidden = !found || found.gutter || Boolean(found.group);
      if (this.tip.hidden) return;
      this.showTip(found, event.clientX, event.clientY);
      this.findName(found, () => this.tip.hidden || this.tipFor !== this.nameKey(found) || this.showTip(found, event.clientX, event.clientY));
    }

    rankAt(y) {
      const under = (this.hits || []).find((one) => one.rank !== undefined && y >= Math.max(one.y, AXIS) && y < one.y + one.height);
      return under ? under.rank : null;
    }

    showTip(found, x, y) {
      const [head, rest] = this.words(found), box = this.root.getBoundingClientRect();
      this.tipFor = this.nameKey(found);
      this.tip.replaceChildren(node("b", "", head), node("div", "", rest));
      this.tip.style.left = clamp(x - box.left + 14, 0, Math.max(0, box.width - 340)) + "px";
      this.tip.style.top = y - box.top + 16 + "px";
    }

    hover(rank) {
      if (rank === this.hovered) return;
      this.hovered = rank;
      if (this.isCompact()) this.draw();
      if (this.range) this.showRange();
    }

    /* The range while it is dragged: drawn, but not yet measured. */
    drawRange(a, b) {
      this.range = { from: Math.min(a, b), to: Math.max(a, b) };
      this.splits = null;
      this.showRange();
      this.draw();
    }

    /* Perfetto's page accepts a trace by postMessage after answering a PING. The window must be
       opened in the click handler; the data stays in this browser. */
    perfetto() {
      const site = this.root.dataset.perfetto, page = window.open(site);
      if (!page) return this.say("The browser blocked the new window.");
      this.say("Reading the trace for Perfetto ...");
      const trace = fetch("/api/v1/runs/" + this.run + "/perfetto").then((answer) => answer.arrayBuffer());
      const asking = setInterval(() => page.postMessage("PING", site), 100);
      /* Without a way to the internet the new tab would stay empty. */
      const offline = setTimeout(() => {
        clearInterval(asking);
        window.removeEventListener("message", answer);
        page.close();
        this.say(new URL(site).hostname + " does not answer: download the trace and open it in a Perfetto that you can reach.");
      }, Number(this.root.dataset.patience || 15000));
      const answer = async (event) => {
        if (event.origin !== new URL(site).origin || event.data !== "PONG") return;
        clearInterval(asking);
        clearTimeout(offline);
        window.removeEventListener("message", answer);
        page.postMessage({ perfetto: { buffer: await trace, title: document.title } }, site);
        this.say("The trace was sent to Perfetto.");
      };
      window.addEventListener("message", answer);
    }
  }

  for (const { methods } of [window.stepsplitPainting, window.stepsplitRows, window.stepsplitQueries, window.stepsplitRange, window.stepsplitSecond]) {
    Object.assign(Timeline.prototype, methods);
  }

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
