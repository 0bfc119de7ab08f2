/* Questions to the timeline: where a name occurs, how a marked range splits, what a shape is. The
   server answers them; in an exported page, the data in the file. timeline.js adds these methods to
   its class. */
(function () {
  "use strict";

  const { time, timeRange } = window.stepsplitPainting;
  const PAGE = 50, TYPING_MS = 250, HOVER_MS = 120, MOST_TEXT = 200;

  const search = {
    /* Searches once typing pauses. */
    typeQuery(text) {
      clearTimeout(this.typing);
      this.typing = setTimeout(() => this.setQuery(text), TYPING_MS);
    },

    async setQuery(text) {
      clearTimeout(this.typing);
      this.query = text.trim().slice(0, MOST_TEXT);
      this.found = null;
      this.current = null;
      this.showCount();
      this.refresh();
      if (this.query) await this.loadMatches({ near: Math.round(this.from) });
    },

    /* Matches around a number or time; `first` becomes the number of the first one. */
    async loadMatches(where) {
      const query = this.query, ask = new URLSearchParams({ q: query, limit: PAGE, ...where });
      if (this.shown) ask.set("ranks", this.shownRanks().join(","));
      let found;
      try {
        found = this.run ? await this.read("/search?" + ask) : this.searchFile(where);
      } catch (error) {
        this.say("Cannot search: " + error.message);
        return false;
      }
      if (query !== this.query) return false;
      this.found = { ...found, counts: new Map(found.ranks) };
      this.showCount();
      this.draw();
      return true;
    },

    showCount() {
      const found = this.found, count = found && found.count.toLocaleString("en");
      const shown = this.current === null ? count + " found" : (this.current + 1).toLocaleString("en") + " of " + count;
      this.counter.textContent = !this.query ? "" : !found ? "…" : found.count ? shown : "none found";
      for (const one of [this.previousButton, this.nextButton]) one.disabled = !(found && found.count);
    },

    matchCount(rank) { return this.found ? this.found.counts.get(rank) || 0 : null; },

    /* Chooses the next (1) or previous (-1) match. */
    async stepMatch(by) {
      const found = this.found;
      if (!found || !found.count) return;
      const start = this.current === null ? (by > 0 ? found.first : found.first - 1) : this.current + by;
      const number = ((start % found.count) + found.count) % found.count;
      if (number < found.first || number >= found.first + found.matches.length) {
        const at = by > 0 ? number : Math.max(0, number - PAGE + 1);
        if (!(await this.loadMatches({ at }))) return;
      }
      this.current = number;
      this.showCount();
      const match = this.found.matches[number - this.found.first];
      if (match) this.goTo(this.describe(match));
    },

    /* Moves the window to a slice, opens the lanes of its rank, and chooses it. */
    goTo(one) {
      if (!this.makeVisible(one.rank)) return this.say("The filter hides rank " + one.rank + ".");
      if (one.lane !== "buckets") this.open.add(one.rank);
      this.focus = "rank " + one.rank;
      const span = this.to - this.from, middle = one.start + one.dur / 2;
      const wide = one.dur > 0.8 * span ? 1.6 * one.dur : one.dur < span / 400 ? 60 * Math.max(one.dur, 1) : span;
      if (wide !== span || one.start < this.from || one.start + one.dur > this.to) this.show(middle - wide / 2, middle + wide / 2);
      this.choose(one);
      this.reveal(one.rank);
    },

    describe(slice) {
      return { ...slice, bucket: this.index.buckets[slice.bucket].name, exact: true };
    },

    searchFile(where) {
      const text = this.query.toLowerCase(), names = this.data.names.map((name) => name.toLowerCase().includes(text));
      const matches = [], shown = new Set(this.shownRanks());
      for (const row of this.data.rows) {
        if (row.lane === "buckets" || !shown.has(row.rank)) continue;
        row.name.forEach((name, i) => {
          if (names[name]) matches.push({ rank: row.rank, lane: row.lane, depth: row.depth, start: row.start[i], dur: row.dur[i], bucket: row.bucket[i], name: this.data.names[name], owner: row.owner[i] });
        });
      }
      matches.sort((a, b) => a.start - b.start);
      const counts = new Map();
      for (const one of matches) counts.set(one.rank, (counts.get(one.rank) || 0) + 1);
      for (const row of this.data.rows) {
        if (row.lane === "buckets") row.matched = matches.filter((one) => one.rank === row.rank).map((one) => [one.start, one.start + one.dur]);
      }
      const first = where.at !== undefined ? where.at : matches.filter((one) => one.start < where.near).length;
      return { count: matches.length, ranks: [...counts], first, matches: matches.slice(first, first + PAGE) };
    },
  };

  const measure = {
    /* Sets the begin (0) or end (1) of the range to the chosen slice or the window's middle. */
    setEdge(which) {
      const one = this.chosen, middle = (this.from + this.to) / 2;
      this.edges[which] = Math.round(one ? one.start + which * one.dur : middle);
      const [from, to] = this.edges;
      if (from === null || to === null) {
        this.say((which ? "End" : "Begin") + " of the range set; " + (which ? "[ sets the begin." : "] sets the end."));
        return this.draw();
      }
      this.setRange(from, to);
    },

    setRange(a, b) {
      const from = Math.round(Math.min(a, b)), to = Math.round(Math.max(a, b));
      this.edges = [from, to];
      this.range = to > from ? { from, to } : null;
      this.measureRange();
      this.draw();
      if (this.second && this.second.extent && this.range) {
        const offset = this.second.secondOffset();
        this.second.setRange(from + offset, to + offset);
      }
    },

    clearRange() {
      this.edges = [null, null];
      this.range = this.splits = null;
      this.showRange();
      (this.main || this).showTable();
      if (!this.second) return;
      this.second.clearRange();
      this.second.draw();
    },

    async measureRange() {
      this.splits = null;
      this.remember();
      this.showRange();
      (this.main || this).showTable();
      const range = this.range, ranks = this.shownRanks().join(",");
      if (!range) return;
      try {
        const ask = new URLSearchParams({ ...range, ranks });
        const body = this.run ? await this.read("/measure?" + ask) : this.measureFile(range);
        if (range !== this.range || ranks !== this.shownRanks().join(",")) return;
        this.splits = new Map(body.ranks.map((one) => [one.rank, one]));
      } catch (error) {
        this.say("Cannot measure: " + error.message);
      }
      this.showRange();
      (this.main || this).showTable();
    },

    /* The split of the range on the rank under the pointer, else on the focused one. */
    showRange() {
      const line = this.rangeLine, range = this.range;
      line.replaceChildren();
      line.hidden = !range;
      if (!range) return;
      const add = (text, className, title) => {
        const span = document.createElement("span");
        span.textContent = text;
        if (className) span.className = className;
        if (title) span.title = title;
        line.append(span);
        return span;
      };
      const zero = this.zero(), rank = this.hovered !== null ? this.hovered : this.focusedRank();
      const exact = (ns) => ns.toLocaleString("en") + " ns";
      add((this.main ? "below: " : this.second ? "above: " : "") + "range " + time(range.to - range.from), "tl-range-length", exact(range.to - range.from) + ", " + timeRange(range.from - zero, range.to - zero));
      const split = rank === null || !this.splits ? null : this.splits.get(rank);
      if (split) {
        add("rank " + rank, "tl-range-rank");
        split.buckets.forEach((ns, i) => {
          const one = add((split.approximate ? "≈ " : "") + this.index.buckets[i].name + " " + time(ns), "", exact(ns));
          one.dataset.bucket = this.index.buckets[i].name;
          one.dataset.ns = ns;
        });
        const missing = range.to - range.from - split.covered;
        if (missing > 0) add("not recorded " + time(missing), "", exact(missing));
      }
      this.button(line, "zoom to it", "zoom to the range", () => this.show(range.from, range.to));
      if (!this.main) {
        const count = this.shownRanks().length;
        this.button(line, this.stats ? "hide the table" : "table of " + count + (count === 1 ? " rank" : " ranks"), "how the range splits over all shown ranks", () => {
          this.stats = !this.stats;
          this.remember();
          this.showRange();
          this.showTable();
        });
        if (this.run) this.button(line, "add a note", "write a note on this range", () => this.askNote());
      }
      this.button(line, "clear", "clear the range", () => { this.clearRange(); this.remember(); this.draw(); });
    },

    /* From the bands in the file; approximate where these contain shapes of many slices. */
    measureFile({ from, to }) {
      const shown = new Set(this.shownRanks());
      const ranks = this.data.rows.filter((row) => row.lane === "buckets" && shown.has(row.rank)).map((row) => {
        const buckets = this.index.buckets.map(() => 0);
        let approximate = false;
        row.start.forEach((start, i) => {
          const inside = Math.min(start + row.dur[i], to) - Math.max(start, from);
          if (inside <= 0) return;
          approximate = approximate || row.name[i] < 0;
          buckets[row.bucket[i]] += row.name[i] < 0 ? Math.round((inside * row.cover[i]) / 255) : inside;
        });
        return { rank: row.rank, buckets, approximate, covered: buckets.reduce((sum, ns) => sum + ns, 0) };
      });
      return { ranks };
    },
  };

  const names = {
    /* The name that takes most of a band's shape, for its tip and status; "" while unknown. */
    nameOf(one) {
      return this.names.get(this.nameKey(one)) || "";
    },

    nameKey(one) { return [one.rank, one.start, one.dur, one.bucket].join(); },

    /* Looks the name up once the pointer rests on the shape, and calls back with it. */
    findName(one, act, wait = HOVER_MS) {
      const key = this.nameKey(one);
      clearTimeout(this.naming);
      if (one.lane !== "buckets" || one.name || one.bucket === "idle" || this.names.has(key)) return;
      this.naming = setTimeout(async () => {
        const bucket = this.index.buckets.findIndex((each) => each.name === one.bucket);
        const ask = new URLSearchParams({ rank: one.rank, bucket, from: Math.floor(one.start), to: Math.ceil(one.start + one.dur) });
        const body = await (this.run ? this.read("/name?" + ask).catch(() => ({ name: null })) : this.nameFromFile(one, bucket));
        this.names.set(key, body.name || "");
        if (body.name) act();
      }, wait);
    },

    nameFromFile(one, bucket) {
      const total = new Map();
      for (const row of this.data.rows) {
        if (row.rank !== one.rank || row.lane === "buckets") continue;
        row.start.forEach((start, i) => {
          const inside = Math.min(start + row.dur[i], one.start + one.dur) - Math.max(start, one.start);
          if (inside > 0 && row.bucket[i] === bucket && row.name[i] >= 0) total.set(row.name[i], (total.get(row.name[i]) || 0) + inside);
        });
      }
      const best = [...total].sort((a, b) => b[1] - a[1])[0];
      return { name: best ? this.data.names[best[0]] : null };
    },
  };

  const address = {
    /* The address of what is shown. */
    addressQuery() {
      const query = new URLSearchParams({ from: Math.round(this.from), to: Math.round(this.to) });
      const set = (name, value) => { if (value) query.set(name, value); };
      if (this.open.size || this.index.ranks.length <= 4) query.set("open", [...this.open].sort((a, b) => a - b).join(","));
      set("q", this.query);
      for (const [name, value] of Object.entries(this.ownChoices())) set(name, value);
      set("stats", this.stats ? "1" : "");
      for (const key of this.noteKeys()) query.append("note", key);
      for (const [name, value] of Object.entries(this.second ? this.second.secondQuery() : {})) {
        /* An empty one says that all lanes are closed. */
        if (value || name === "with_open") query.set(name, value);
      }
      const one = this.chosen;
      set("slice", one && one.exact ? [one.rank, one.lane, one.depth, one.start].join(",") : "");
      return query;
    },

    /* What each of two timelines has for itself. */
    ownChoices() {
      return {
        group: this.by,
        fold: [...this.folded].join(","),
        show: this.filter,
        rows: this.compactChoice === null ? "" : this.compactChoice ? "compact" : "full",
        measure: this.range ? this.range.from + "-" + this.range.to : "",
        pin: this.pins.join(","),
      };
    },

    /* The choices of an address, before the first window is shown. */
    restoreChoices(asked) {
      const rows = asked.get("rows");
      if (rows === "compact" || rows === "full") this.compactChoice = rows === "compact";
      const pins = (asked.get("pin") || "").split(",").filter((one) => /^\d{1,8}$/.test(one)).map(Number);
      this.pins = [...new Set(pins)].filter((rank) => this.everyRank.has(rank)).slice(0, 8);
      this.stats = asked.get("stats") === "1";
      this.restoreNotes(asked);
      if (asked.get("group")) this.setGrouping(asked.get("group"));
      (asked.get("fold") || "").split(",").filter(Boolean).forEach((name) => this.folded.add(name));
      if (asked.get("show")) this.setFilter(asked.get("show"));
    },

    /* What needs the server's answers: the search, the range and the chosen slice. */
    restoreAnswers(asked) {
      const range = /^(-?\d{1,18})-(-?\d{1,18})$/.exec(asked.get("measure") || "");
      if (range) this.setRange(Number(range[1]), Number(range[2]));
      if (asked.get("q")) {
        this.searchField.value = asked.get("q");
        this.setQuery(asked.get("q"));
      }
      const slice = /^(\d{1,8}),(.*),(\d{1,3}),(-?\d{1,18})$/.exec(asked.get("slice") || "");
      if (slice) this.restoreSlice(slice.slice(1), asked.has("from"));
    },

    async restoreSlice([rank, lane, depth, start], hasWindow) {
      const ask = new URLSearchParams({ rank, lane, depth, start });
      const { slice } = await this.read("/slice?" + ask).catch(() => ({ slice: null }));
      if (!slice) return this.say("The slice of this address is not in the run.");
      const one = this.describe(slice);
      if (!hasWindow) return this.goTo(one);
      if (one.lane !== "buckets") this.open.add(one.rank);
      this.makeVisible(one.rank);
      this.focus = "rank " + one.rank;
      this.choose(one);
      this.reveal(one.rank);
    },

    repeatQueries() {
      if (this.query) this.setQuery(this.query);
      if (this.range) this.measureRange();
    },
  };

  window.stepsplitQueries = { methods: { ...search, ...measure, ...names, ...address } };
})();
