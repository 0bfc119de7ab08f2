/* Below the timeline: how a marked range splits over all shown ranks, by bucket and by kernel, beside
   that of the second timeline; and notes on ranges, which are in the address and in an exported
   page. timeline.js adds these methods to its class. */
(function () {
  "use strict";

  const { time, timeRange, clamp, AXIS } = window.stepsplitPainting;
  const SHOWN_NAMES = 25, MOST_NOTES = 30, MOST_NOTE = 200;
  const NOTE = /^(-?\d{1,18})-(-?\d{1,18}):([^]{1,200})$/;

  const node = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  function buildTable(caption, heads, rows) {
    const place = node("div", "tl-table"), frame = node("div", "scroll"), table = node("table"), head = node("tr"), top = node("thead"), body = node("tbody");
    table.append(top, body);
    table.setAttribute("aria-label", caption);
    /* Where it is wider than the page it scrolls, by the keyboard too. */
    frame.tabIndex = 0;
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", caption);
    place.append(node("p", "tl-caption", caption), frame);
    top.append(head);
    heads.forEach((text, i) => { head.append(node("th", i ? "number" : "", text)); head.lastChild.scope = "col"; });
    for (const row of rows) {
      const line = node("tr");
      row.forEach((cell, i) => {
        const place = node("td", i ? "number" : "");
        const words = i || typeof cell !== "string" ? cell : node("div", "name", cell);
        if (!i && typeof cell === "string") words.title = cell;
        place.append(words);
        line.append(place);
      });
      body.append(line);
    }
    frame.append(table);
    return place;
  }

  const statistics = {
    /* The time of names in the range over the shown ranks; null where it cannot be had. */
    async readNames() {
      const range = this.range, ranks = this.shownRanks().join(","), had = this.names_of;
      if (!range || (had && had.range === range && had.ranks === ranks)) return;
      const own = (this.names_of = { range, ranks });
      this.nameTimes = null;
      const ask = new URLSearchParams({ ...range, ranks });
      const asked = this.run ? this.read("/names?" + ask) : Promise.resolve(this.namesFromFile(range));
      const body = await asked.catch((error) => ({ names: [], error: error.message }));
      if (range !== this.range || own !== this.names_of) return;
      this.nameTimes = body;
      (this.main || this).showTable();
    },

    namesFromFile({ from, to }) {
      const found = new Map(), ranks = new Set(this.shownRanks());
      const lanes = this.data.rows.filter((row) => row.lane !== "buckets" && ranks.has(row.rank));
      /* A file of many ranks has no lanes, and a shape of many slices no name. */
      let unnamed = !lanes.length;
      for (const row of lanes) {
        row.start.forEach((start, i) => {
          const inside = Math.min(start + row.dur[i], to) - Math.max(start, from);
          if (inside <= 0) return;
          unnamed = unnamed || row.name[i] < 0;
          if (row.name[i] < 0) return;
          const name = this.data.names[row.name[i]], key = name + "\n" + row.bucket[i];
          const one = found.get(key) || { name, bucket: row.bucket[i], calls: 0, total_ns: 0, by: new Map() };
          one.calls += 1;
          one.total_ns += inside;
          one.by.set(row.rank, (one.by.get(row.rank) || 0) + inside);
          found.set(key, one);
        });
      }
      const names = [...found.values()].sort((a, b) => b.total_ns - a.total_ns);
      for (const one of names) [one.worst_rank, one.worst_ns] = [...one.by].sort((a, b) => b[1] - a[1])[0];
      return { names, count: names.length, unnamed };
    },

    /* The tables of the first timeline; of the second one in the same rows. */
    showTable() {
      const place = this.table;
      if (!place) return;
      place.replaceChildren();
      if (!this.stats || !this.range) return;
      const both = [this, this.second].filter((one) => one && one.range);
      both.forEach((one) => one.readNames());
      if (both.some((one) => !one.splits)) return;
      place.append(this.tableOfBuckets(both), ...this.tableOfNames(both));
    },

    /* Of each side the given heads; with two sides, what is above and below, and the difference. */
    headsOf(both, heads) {
      if (both.length === 1) return heads;
      return [...["above", "below"].flatMap((side) => heads.map((head) => head + ", " + side)), "below − above"];
    },

    tableOfBuckets(both) {
      const two = both.length > 1;
      const rows = this.index.buckets.map((look, i) => {
        const sides = both.map((one) => {
          const splits = [...one.splits.values()], sum = splits.reduce((ns, split) => ns + split.buckets[i], 0);
          const worst = splits.reduce((most, split) => (most && most.buckets[i] >= split.buckets[i] ? most : split), null);
          return { worst, mean: sum / Math.max(splits.length, 1), of: one.range.to - one.range.from };
        });
        const cells = sides.flatMap(({ mean, of }) => [time(mean), ((100 * mean) / of).toFixed(1) + " %"]);
        if (two) return [look.name, ...cells, this.signed(sides[1].mean - sides[0].mean)];
        const { worst } = sides[0], most = worst ? worst.buckets[i] : 0;
        return [look.name, ...cells, most ? this.rankLink(worst.rank, most) : ""];
      });
      const ranks = both.map((one) => one.splits.size + (one.splits.size === 1 ? " rank" : " ranks")).join(" and ");
      return buildTable("The range by bucket, mean of " + ranks, ["bucket", ...this.headsOf(both, ["time", "share"]), ...(two ? [] : ["most"])], rows);
    },

    tableOfNames(both) {
      if (both.some((one) => !one.nameTimes)) return [];
      const failed = both.find((one) => one.nameTimes.error), two = both.length > 1;
      if (failed) return [node("p", "message", "No table of kernels: " + failed.nameTimes.error)];
      const sides = both.map((one) => new Map(one.nameTimes.names.map((each) => [each.name + "\n" + each.bucket, each])));
      const mean = (k, key) => (sides[k].has(key) ? sides[k].get(key).total_ns / Math.max(both[k].splits.size, 1) : 0);
      /* A side with more names than the server sends may have others for up to the least of these. */
      const isCut = (k) => both[k].nameTimes.count > both[k].nameTimes.names.length;
      const rest = both.map((one, k) => (isCut(k) ? Math.min(...[...sides[k].keys()].map((key) => mean(k, key))) : 0));
      const lacking = (key) => [0, 1].find((k) => two && isCut(k) && !sides[k].has(key));
      const weight = (key) => {
        const k = lacking(key);
        if (k !== undefined) return Math.max(mean(1 - k, key) - rest[k], 0);
        return two ? Math.abs(mean(1, key) - mean(0, key)) : mean(0, key);
      };
      const keys = [...new Set(sides.flatMap((own) => [...own.keys()]))].sort((a, b) => weight(b) - weight(a));
      const { unnamed } = both[0].nameTimes;
      if (!keys.length) return [node("p", "message", unnamed ? "This file has no names of kernels in this range." : "No kernel in this range.")];
      const rows = keys.slice(0, SHOWN_NAMES).map((key) => {
        /* A name may have line breaks of its own. */
        const end = key.lastIndexOf("\n"), name = key.slice(0, end), bucket = key.slice(end + 1);
        const cells = sides.flatMap((own, k) => (own.has(key) ? [own.get(key).calls.toLocaleString("en"), time(mean(k, key))] : ["", ""]));
        const last = two ? (lacking(key) === undefined ? this.signed(mean(1, key) - mean(0, key)) : "") : this.rankLink(sides[0].get(key).worst_rank, sides[0].get(key).worst_ns);
        return [name + "  ·  " + this.index.buckets[bucket].name, ...cells, last];
      });
      const left = Math.max(...both.map((one) => one.nameTimes.count)) - rows.length;
      const order = (two ? ", largest difference first" : ", most time first") + (left > 0 ? "; " + left.toLocaleString("en") + " more names" : "") + (unnamed ? "; some have no name in this file" : "");
      const caption = "The range by kernel and call, calls of all ranks, time as their mean, those that overlap counted each" + order;
      return [buildTable(caption, ["name", ...this.headsOf(both, ["calls", "time"]), ...(two ? [] : ["most"])], rows)];
    },

    signed(ns) { return (Math.round(ns) === 0 ? "" : ns < 0 ? "−" : "+") + time(Math.abs(ns)); },

    rankLink(rank, ns) {
      const place = node("span");
      place.append(time(ns) + ", ");
      this.button(place, "rank " + rank, "show rank " + rank, () => {
        this.open.add(rank);
        this.focus = "rank " + rank;
        this.makeVisible(rank);
        this.refresh();
        this.reveal(rank);
      });
      return place;
    },
  };

  const notes = {
    /* The notes of an address, or of an exported page. */
    restoreNotes(asked) {
      const texts = this.run ? asked.getAll("note") : this.index.notes || [];
      for (const text of texts.slice(0, MOST_NOTES)) {
        const found = NOTE.exec(text);
        if (found) this.notes.push({ from: Number(found[1]), to: Number(found[2]), text: found[3] });
      }
      this.showNotes();
    },

    /* A field for a note on the range, not in its line, which is built again as the pointer moves. */
    askNote() {
      this.showNotes();
      this.noteList.hidden = false;
      const field = this.field(this.noteList, "what is seen here", "note on the range", "Enter adds it, Escape does not", MOST_NOTE);
      field.focus();
      field.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== "Escape") return;
        event.preventDefault();
        if (event.key === "Enter") this.addNote(field.value);
        this.showNotes();
        this.canvas.focus();
      });
    },

    addNote(text) {
      const words = text.trim().slice(0, MOST_NOTE);
      if (!words || !this.range || this.notes.length >= MOST_NOTES) return;
      this.notes.push({ ...this.range, text: words });
      this.showNotes();
      this.remember();
      this.draw();
    },

    noteKeys() { return this.notes.map((one) => one.from + "-" + one.to + ":" + one.text); },

    showNotes() {
      const place = this.noteList;
      place.replaceChildren();
      /* A file has one step. */
      const elsewhere = (!this.run && this.index.notes_elsewhere) || [];
      place.hidden = !this.notes.length && !elsewhere.length;
      if (place.hidden) return;
      place.append(node("b", "", "notes"));
      for (const words of elsewhere) place.append(node("span", "tl-note", words + " (this file has only step " + this.index.steps[0].step + ")"));
      this.notes.forEach((one, i) => {
        const line = node("span", "tl-note"), step = this.index.steps.find((each) => each.from <= one.from && one.from < each.to);
        const where = (step ? "step " + step.step + ", " : "") + timeRange(one.from - (step || this.index.steps[0]).from, one.to - (step || this.index.steps[0]).from);
        this.button(line, i + 1 + " " + one.text, "go to the note: " + where, () => {
          const edge = 0.3 * (one.to - one.from);
          this.show(one.from - edge, one.to + edge);
          this.setRange(one.from, one.to);
        });
        line.append(node("span", "tl-where-note", where));
        if (this.run) this.button(line, "×", "remove the note " + one.text, () => { this.notes.splice(i, 1); this.showNotes(); this.remember(); this.draw(); });
        place.append(line);
      });
      if (!this.run) return;
      const link = node("a", "button", "export with these notes");
      link.href = "/api/v1/runs/" + this.run + "/report.html?" + new URLSearchParams(this.noteKeys().map((key) => ["note", key]));
      place.append(link);
    },

    /* Brackets below the axis with the number of each note. */
    paintNotes(pen, height) {
      const right = this.gutter + this.width();
      this.notes.forEach((one, i) => {
        const x0 = this.x(one.from), x1 = this.x(one.to);
        if (x1 < this.gutter || x0 > right) return;
        const left = clamp(x0, this.gutter, right), end = Math.max(clamp(x1, this.gutter, right), left + 2);
        pen.fillStyle = this.accent;
        pen.globalAlpha = 0.07;
        pen.fillRect(left, AXIS, end - left, height - AXIS);
        pen.globalAlpha = 1;
        pen.fillRect(left, AXIS - 3, end - left, 3);
        pen.font = "700 11px system-ui, sans-serif";
        const text = i + 1 + " " + one.text, room = Math.max(end - left, 16);
        pen.save();
        pen.beginPath();
        pen.rect(left, 14, room, AXIS - 17);
        pen.clip();
        pen.fillStyle = this.paper;
        pen.fillRect(left, 14, room, AXIS - 17);
        pen.fillStyle = this.accent;
        pen.fillText(text, left + 2, 22);
        pen.restore();
      });
    },
  };

  window.stepsplitRange = { methods: { ...statistics, ...notes } };
})();
