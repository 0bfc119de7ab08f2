/* Painting of the timeline: bands, lanes, the axis, and the link from a wait to the rank it waits
   for. timeline.js adds these methods to its class. */
(function () {
  "use strict";

  const WIDE_GUTTER = 168, NARROW_GUTTER = 76, NARROW_PX = 600, AXIS = 34, BAND = 22, LANE = 15, GAP = 5, HEADING = 20, LEAST_NS = 20, WAIT_MS = 40;
  const DIMMED = 0.22, MARK = 5;
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  function time(ns) {
    const size = Math.abs(ns);
    if (size >= 1e9) return (ns / 1e9).toFixed(3) + " s";
    if (size >= 1e6) return (ns / 1e6).toFixed(3) + " ms";
    if (size >= 1e3) return (ns / 1e3).toFixed(2) + " µs";
    return Math.round(ns) + " ns";
  }

  function timeRange(from, to) {
    const size = Math.max(Math.abs(from), Math.abs(to));
    const [unit, of] = size >= 1e9 ? ["s", 1e9] : size >= 1e6 ? ["ms", 1e6] : ["µs", 1e3];
    const digits = clamp(Math.ceil(-Math.log10((to - from) / of / 100)), 0, 6);
    return (from / of).toFixed(digits) + " to " + (to / of).toFixed(digits) + " " + unit;
  }

  function shortName(name) {
    /* Kernel names have long template arguments: keep the part before them. */
    const plain = name.replace(/^void /, "").split(/[<(]/)[0];
    return plain.split("::").pop() || name;
  }

  const methods = {
    looks() {
      const style = getComputedStyle(document.documentElement);
      const of = (name) => style.getPropertyValue(name).trim();
      const dark = document.documentElement.dataset.theme === "dark";
      this.ink = of("--ink"); this.muted = of("--muted"); this.line = of("--line"); this.paper = of("--paper"); this.accent = of("--accent"); this.raised = of("--raised");
      this.fills = this.index.buckets.map((look) => {
        const color = dark ? look.dark : look.color;
        return look.hatched ? this.hatched(color) : color;
      });
      this.dark = dark;
    },

    hatched(color) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const pen = tile.getContext("2d");
      pen.fillStyle = color;
      pen.fillRect(0, 0, 6, 6);
      pen.strokeStyle = "rgba(255,255,255,0.7)";
      pen.lineWidth = 1.4;
      for (const shift of [-6, 0, 6]) {
        pen.beginPath();
        pen.moveTo(shift, 6);
        pen.lineTo(shift + 6, 0);
        pen.stroke();
      }
      return this.canvas.getContext("2d").createPattern(tile, "repeat");
    },

    paint() {
      this.compactButton.setAttribute("aria-pressed", String(this.isCompact()));
      const focused = this.focusedRank();
      this.pinButton.textContent = (this.pins.includes(focused) ? "unpin rank" : "pin rank") + (focused === null ? "" : " " + focused);
      const places = this.places();
      const total = places.length ? places[places.length - 1].y + places[places.length - 1].height : AXIS;
      const height = Math.min(Math.max(total + 8, 120), this.mostHeight());
      const width = this.fitCanvas(height, total + 8);
      const pen = this.canvas.getContext("2d"), top = this.body.scrollTop;
      pen.clearRect(0, 0, width, height);
      pen.textBaseline = "middle";
      this.hits = [];
      this.matching = this.query ? this.data.names.map((name) => name.toLowerCase().includes(this.query.toLowerCase())) : null;
      const pinned = places.filter((place) => place.pinned);
      const under = pinned.length ? pinned[pinned.length - 1].y + pinned[pinned.length - 1].height : AXIS;
      const seen = places.filter((place) => !place.pinned && place.y + place.height - top >= under && place.y - top <= height);
      this.paintRows(pen, seen, top, AXIS, width, height);
      /* Over those that have scrolled below them. */
      if (pinned.length) {
        const own = this.hits;
        this.hits = [];
        pen.fillStyle = this.paper;
        pen.fillRect(0, AXIS, width, under - AXIS);
        this.paintRows(pen, pinned, 0, AXIS, width, under - AXIS);
        pen.fillStyle = this.line;
        pen.fillRect(0, under - 2, width, 2);
        this.hits = [...this.hits, ...own.filter((one) => one.y + one.height > under)];
      }
      this.paintLink(pen, places, top);
      this.paintRange(pen, height);
      this.paintAxis(pen, width, height);
      this.paintNotes(pen, height);
      if (this.enough()) this.root.dataset.drawn = Math.round(this.from) + "," + Math.round(this.to);
    },

    /* Rows with the labels beside them, of places that the page has scrolled by top. */
    paintRows(pen, places, top, from, width, height) {
      places.forEach((place) => place.group || this.paintRank(pen, place, place.y - top));
      pen.fillStyle = this.paper;
      pen.fillRect(0, from, this.gutter - 1, height);
      places.forEach((place) => (place.group ? this.paintHeading(pen, place, place.y - top, width) : this.paintLabel(pen, place, place.y - top)));
    },

    /* Gives the canvas its size; the space below it makes the body as long as all rows. */
    fitCanvas(height, total) {
      this.body.style.height = height + "px";
      this.space.style.height = Math.max(0, total - height) + "px";
      const ratio = window.devicePixelRatio || 1, width = this.viewWidth = this.body.clientWidth;
      if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
        this.canvas.width = Math.round(width * ratio);
        this.canvas.height = Math.round(height * ratio);
        this.canvas.style.width = width + "px";
        this.canvas.style.height = height + "px";
      }
      this.canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
      return width;
    },

    paintRank(pen, place, y) {
      const rows = (this.byRank && this.byRank.get(place.rank)) || [];
      if (rows.length) this.paintRow(pen, rows[0], y, place.band, place.rank);
      place.lanes.forEach((row, i) => this.paintRow(pen, row, y + BAND + i * LANE, LANE, place.rank));
      this.hits.push({ rank: place.rank, gutter: true, y, height: place.small ? place.height : BAND });
    },

    paintRow(pen, row, y, height, rank) {
      const right = this.gutter + this.width(), edge = height > 8 ? 1 : 0, isBand = row.lane === "buckets";
      pen.font = "11px system-ui, sans-serif";
      for (let i = 0; i < row.start.length; i++) {
        const x0 = Math.max(this.x(row.start[i]), this.gutter), x1 = Math.min(this.x(row.start[i] + row.dur[i]), right);
        if (x1 < this.gutter || x0 > right) continue;
        const exact = row.name[i] >= 0, wide = Math.max(x1 - x0, 0.6);
        const own = exact ? this.data.names[row.name[i]] : "";
        const dimmed = this.matching && (isBand || !(exact && this.matching[row.name[i]]));
        pen.globalAlpha = (0.25 + (0.75 * row.cover[i]) / 255) * (dimmed ? DIMMED : 1);
        pen.fillStyle = this.fills[row.bucket[i]];
        pen.fillRect(x0, y + edge, wide > 3 && exact && edge ? wide - 0.5 : wide, height - 2 * edge);
        pen.globalAlpha = 1;
        if (wide > 24 && exact && edge && !dimmed) this.write(pen, row, i, own, x0, y, wide, height);
      }
      if (this.matching && row.matched) this.paintMatched(pen, row.matched, y, height, right);
      this.hits.push({ rank, row, y, height });
    },

    /* Where matches of the search are, on a band. */
    paintMatched(pen, matched, y, height, right) {
      const high = Math.min(MARK, height);
      pen.fillStyle = this.ink;
      for (const [from, to] of matched) {
        const x0 = Math.max(this.x(from), this.gutter), x1 = Math.min(this.x(to), right);
        if (x1 >= this.gutter && x0 <= right) pen.fillRect(x0, y + height - high, Math.max(x1 - x0, 1), high);
      }
    },

    write(pen, row, i, name, x0, y, wide, height) {
      const bucket = this.index.buckets[row.bucket[i]], owner = row.owner[i];
      const band = row.lane === "buckets";
      if (bucket.name === "idle" && !band) return;
      /* The longest label that fits; a kernel's name may be cut off at its end. */
      const waits = name ? [name + ", waits for rank " + owner, "waits for rank " + owner, "→ " + owner] : ["waits for rank " + owner, "→ " + owner];
      const labels = band ? (owner >= 0 ? waits : name ? [bucket.name + ": " + name, bucket.name] : [bucket.name]) : [shortName(name)];
      const text = labels.find((label) => pen.measureText(label).width < wide - 10) || (band ? "" : labels[0]);
      if (!text) return;
      pen.save();
      pen.beginPath();
      pen.rect(x0 + 2, y, wide - 4, height);
      pen.clip();
      const long = pen.measureText(text).width;
      if (bucket.hatched && long < wide) {
        pen.fillStyle = this.paper;
        pen.globalAlpha = 0.75;
        pen.fillRect(x0 + 3, y + 3, long + 4, height - 6);
        pen.globalAlpha = 1;
        pen.fillStyle = this.ink;
      } else pen.fillStyle = bucket.name === "compute" || bucket.name === "p2p" || bucket.name === "copy" ? "#fff" : bucket.name === "idle" ? this.muted : "#1b2430";
      if (this.dark && !bucket.hatched && bucket.name !== "idle") pen.fillStyle = "#10151b";
      pen.fillText(text, x0 + 5, y + height / 2 + 0.5);
      pen.restore();
    },

    paintAxis(pen, width, height) {
      pen.fillStyle = this.paper;
      pen.fillRect(0, 0, width, AXIS);
      pen.strokeStyle = this.line;
      pen.lineWidth = 1;
      pen.font = "11px system-ui, sans-serif";
      const zero = this.zero();
      const each = this.tick();
      for (let t = Math.ceil((this.from - zero) / each) * each; t <= this.to - zero; t += each) {
        const x = this.x(t + zero);
        pen.beginPath();
        pen.moveTo(x, AXIS - 6);
        pen.lineTo(x, AXIS);
        pen.stroke();
        pen.fillStyle = this.muted;
        if (x > this.gutter - 4 && x < width - 40) pen.fillText(this.short(t, each), x + 3, AXIS - 9);
      }
      for (const one of this.index.steps) {
        const x = this.x(one.from);
        if (x < this.gutter - 1 || x > width) continue;
        pen.strokeStyle = this.muted;
        pen.setLineDash([3, 3]);
        pen.beginPath();
        pen.moveTo(x, 4);
        pen.lineTo(x, height);
        pen.stroke();
        pen.setLineDash([]);
        pen.fillStyle = this.ink;
        pen.fillText("step " + one.step, x + 4, 9);
      }
    },

    /* The measured range, or its one edge that is set. */
    paintRange(pen, height) {
      const right = this.gutter + this.width(), x = (ns) => clamp(this.x(ns), this.gutter, right);
      pen.strokeStyle = this.accent;
      pen.lineWidth = 1.5;
      const line = (ns) => {
        if (this.x(ns) < this.gutter || this.x(ns) > right) return;
        pen.beginPath();
        pen.moveTo(this.x(ns), AXIS);
        pen.lineTo(this.x(ns), height);
        pen.stroke();
      };
      if (this.range) {
        pen.fillStyle = this.accent;
        pen.globalAlpha = 0.12;
        pen.fillRect(x(this.range.from), AXIS, x(this.range.to) - x(this.range.from), height - AXIS);
        pen.globalAlpha = 1;
        [this.range.from, this.range.to].forEach(line);
      } else this.edges.filter((ns) => ns !== null).forEach(line);
    },

    /* The step in the middle of the window; times are shown from its begin. */
    shownStep() {
      const middle = (this.from + this.to) / 2;
      return this.index.steps.find((one) => one.from <= middle && middle < one.to);
    },

    zero() {
      return (this.shownStep() || this.index.steps[0] || { from: 0 }).from;
    },

    tick() {
      const about = ((this.to - this.from) / this.width()) * 96;
      const ten = Math.pow(10, Math.floor(Math.log10(about)));
      return [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= about);
    },

    short(ns, each) {
      const [unit, of] = each >= 1e9 ? ["s", 1e9] : each >= 1e6 || Math.abs(ns) >= 1e6 ? ["ms", 1e6] : ["µs", 1e3];
      return (ns / of).toFixed(clamp(Math.ceil(-Math.log10(each / of)), 0, 6)) + " " + unit;
    },

    paintLink(pen, places, top) {
      const one = this.chosen;
      if (!one) return;
      const own = places.find((place) => place.rank === one.rank), to = places.find((place) => place.rank === one.owner);
      if (!own) return;
      const at = own.lanes.findIndex((row) => row.lane === one.lane && row.depth === one.depth);
      const y = own.y - (own.pinned ? 0 : top) + (at < 0 ? 0 : BAND + at * LANE), high = at < 0 ? own.band : LANE;
      const x0 = clamp(this.x(one.start), this.gutter, this.gutter + this.width()), x1 = clamp(this.x(one.start + one.dur), this.gutter, this.gutter + this.width());
      pen.strokeStyle = this.ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(x0, y + 1, Math.max(x1 - x0, 2), Math.max(high - 2, 2));
      if (!to || one.owner < 0) return;
      const y1 = to.y - (to.pinned ? 0 : top) + to.band / 2, y0 = y + high / 2;
      pen.strokeStyle = this.accent;
      pen.lineWidth = 2;
      pen.beginPath();
      pen.moveTo(x1, y0);
      pen.bezierCurveTo(x1 + 40, y0, x1 + 40, y1, x1, y1);
      pen.stroke();
      pen.beginPath();
      pen.arc(x1, y1, 4, 0, 7);
      pen.fillStyle = this.accent;
      pen.fill();
    },
  };

  window.stepsplitPainting = { WIDE_GUTTER, NARROW_GUTTER, NARROW_PX, AXIS, BAND, LANE, GAP, HEADING, LEAST_NS, WAIT_MS, clamp, time, timeRange, shortName, methods };
})();
