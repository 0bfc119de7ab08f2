/* Painting of the timeline: bands, lanes, the axis, and the link from a wait to the rank it waits
   for. timeline.js adds these methods to its class. */
(function () {
  "use strict";

  const GUTTER = 168, AXIS = 34, BAND = 22, LANE = 15, GAP = 5, LEAST_NS = 20, WAIT_MS = 40;
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
      this.ink = of("--ink"); this.muted = of("--muted"); this.line = of("--line"); this.paper = of("--paper"); this.accent = of("--accent");
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
      const places = this.places();
      const total = places.length ? places[places.length - 1].y + places[places.length - 1].height : AXIS;
      const height = Math.min(Math.max(total + 8, 120), Math.round(window.innerHeight * 0.72));
      this.body.style.height = height + "px";
      this.space.style.height = Math.max(0, total + 8 - height) + "px";
      const ratio = window.devicePixelRatio || 1, width = this.body.clientWidth;
      if (this.canvas.width !== width * ratio || this.canvas.height !== height * ratio) {
        this.canvas.width = width * ratio;
        this.canvas.height = height * ratio;
        this.canvas.style.width = width + "px";
        this.canvas.style.height = height + "px";
      }
      const pen = this.canvas.getContext("2d"), top = this.body.scrollTop;
      pen.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.clearRect(0, 0, width, height);
      pen.textBaseline = "middle";
      this.hits = [];
      for (const place of places) {
        const y = place.y - top;
        if (y + place.height < AXIS || y > height) continue;
        this.paintRank(pen, place, y);
      }
      this.paintLink(pen, places, top);
      this.paintAxis(pen, width, height);
      if (this.enough()) this.root.dataset.drawn = Math.round(this.from) + "," + Math.round(this.to);
    },

    paintRank(pen, place, y) {
      const rows = (this.byRank && this.byRank.get(place.rank)) || [];
      const focused = this.index.ranks[this.focus] && this.index.ranks[this.focus].rank === place.rank;
      if (rows.length) this.paintRow(pen, rows[0], y, BAND, place.rank);
      place.lanes.forEach((row, i) => this.paintRow(pen, row, y + BAND + i * LANE, LANE, place.rank));
      pen.fillStyle = this.paper;
      pen.fillRect(0, y, GUTTER - 1, place.height);
      pen.fillStyle = this.ink;
      pen.font = (focused ? "700 " : "600 ") + "12px system-ui, sans-serif";
      pen.fillText((this.open.has(place.rank) ? "▾ " : "▸ ") + "rank " + place.rank, 4, y + BAND / 2, GUTTER - 8);
      const more = [place.stage === null ? "" : "stage " + place.stage, place.host || ""].filter(Boolean).join(" · ");
      pen.font = "11px system-ui, sans-serif";
      pen.fillStyle = this.muted;
      pen.fillText(more, 70, y + BAND / 2, GUTTER - 76);
      place.lanes.forEach((row, i) => {
        if (row.depth) return;
        pen.fillText(row.lane, 18, y + BAND + i * LANE + LANE / 2, GUTTER - 24);
      });
      this.hits.push({ rank: place.rank, gutter: true, y, height: BAND });
    },

    paintRow(pen, row, y, height, rank) {
      const right = GUTTER + this.width();
      pen.font = "11px system-ui, sans-serif";
      for (let i = 0; i < row.start.length; i++) {
        const x0 = Math.max(this.x(row.start[i]), GUTTER), x1 = Math.min(this.x(row.start[i] + row.dur[i]), right);
        if (x1 < GUTTER || x0 > right) continue;
        const exact = row.name[i] >= 0, wide = Math.max(x1 - x0, 0.6);
        const own = exact ? this.data.names[row.name[i]] : "";
        pen.globalAlpha = 0.25 + (0.75 * row.cover[i]) / 255;
        pen.fillStyle = this.fills[row.bucket[i]];
        pen.fillRect(x0, y + 1, wide > 3 && exact ? wide - 0.5 : wide, height - 2);
        pen.globalAlpha = 1;
        if (wide > 24 && exact) this.write(pen, row, i, own, x0, y, wide, height);
      }
      this.hits.push({ rank, row, y, height });
    },

    write(pen, row, i, name, x0, y, wide, height) {
      const bucket = this.index.buckets[row.bucket[i]], owner = row.owner[i];
      const band = row.lane === "buckets";
      if (bucket.name === "idle" && !band) return;
      /* The longest label that fits; a kernel's name may be cut off at its end. */
      const labels = band ? (owner >= 0 ? ["waits for rank " + owner, "→ " + owner] : [bucket.name]) : [shortName(name)];
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
        if (x > GUTTER - 4 && x < width - 40) pen.fillText(this.short(t, each), x + 3, AXIS - 9);
      }
      for (const one of this.index.steps) {
        const x = this.x(one.from);
        if (x < GUTTER - 1 || x > width) continue;
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
      const y = own.y - top + (at < 0 ? 0 : BAND + at * LANE), high = at < 0 ? BAND : LANE;
      const x0 = clamp(this.x(one.start), GUTTER, GUTTER + this.width()), x1 = clamp(this.x(one.start + one.dur), GUTTER, GUTTER + this.width());
      pen.strokeStyle = this.ink;
      pen.lineWidth = 1.5;
      pen.strokeRect(x0, y + 1, Math.max(x1 - x0, 2), high - 2);
      if (!to || one.owner < 0) return;
      const y1 = to.y - top + BAND / 2, y0 = y + high / 2;
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

  window.stepsplitPainting = { GUTTER, AXIS, BAND, LANE, GAP, LEAST_NS, WAIT_MS, clamp, time, timeRange, shortName, methods };
})();
