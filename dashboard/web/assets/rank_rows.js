/* The rows of the timeline: which ranks are shown in which order and height, and the shapes of a
   window as the server packs them. timeline.js adds these methods to its class. */
(function () {
  "use strict";

  const { AXIS, BAND, LANE, GAP, HEADING, WIDE_GUTTER, clamp } = window.stepsplitPainting;
  const MANY_RANKS = 64, LEAST_PX = 2, MOST_PX = 8, LABEL_PX = 13, MOST_PINS = 8;
  const LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZab";

  /* Calls back with (letter, first slot, slots) of each run of a text such as A12.3B. */
  function eachRun(text, act) {
    let slot = 0;
    for (const [, letter, times] of (text || "").matchAll(/([A-Za-z.#])(\d*)/g)) {
      const width = times ? Number(times) : 1;
      act(letter, slot, width);
      slot += width;
    }
  }

  /* A row as columns of equal length; shapes of many slices come first and have the name -1. */
  function unpackRow(row, from, to) {
    const shapes = { start: [], dur: [], bucket: [], cover: [], name: [], owner: [] };
    const edge = (slot) => from + Math.floor(((to - from) * slot) / row.slots);
    const add = (start, dur, bucket, cover, name, owner) => {
      shapes.start.push(start); shapes.dur.push(dur); shapes.bucket.push(bucket);
      shapes.cover.push(cover); shapes.name.push(name); shapes.owner.push(owner);
    };
    eachRun(row.merged, (letter, slot, width) => {
      const code = LETTERS.indexOf(letter);
      if (code >= 0) add(edge(slot), edge(slot + width) - edge(slot), code >> 2, 255 * ((code & 3) + 1) / 4, -1, -1);
    });
    let end = from;
    (row.gap || []).forEach((gap, i) => {
      const start = end + gap, dur = row.dur[i];
      add(start, dur, Number(row.bucket[i]), 255, row.name ? row.name[i] : 0, row.owner ? row.owner[i] : -1);
      end = start + dur;
    });
    const matched = row.matched === undefined ? null : [];
    eachRun(row.matched, (letter, slot, width) => { if (letter === "#") matched.push([edge(slot), edge(slot + width)]); });
    return { rank: row.rank, lane: row.lane, depth: row.depth, ...shapes, matched };
  }

  function unpackWindow(body) {
    return { ...body, rows: body.rows.map((row) => unpackRow(row, body.from, body.to)) };
  }

  /* The ranks of a filter such as "0-7, 12, stage 2, node03"; throws an Error with the odd part. */
  function parseRanks(text, index) {
    const shown = new Set();
    for (const part of text.split(",").map((one) => one.trim().toLowerCase()).filter(Boolean)) {
      const range = /^(?:rank )?(\d{1,8})(?:\s*-\s*(\d{1,8}))?$/.exec(part);
      const groups = index.groupings.flatMap((one) => one.groups).filter((one) => one.name.toLowerCase() === part);
      const found = range
        ? index.ranks.filter((one) => one.rank >= Number(range[1]) && one.rank <= Number(range[2] || range[1])).map((one) => one.rank)
        : groups.length ? groups[0].ranks
        : index.ranks.filter((one) => (one.host || "").toLowerCase().includes(part) || "stage " + one.stage === part).map((one) => one.rank);
      if (!found.length) throw new Error("no rank, stage, group or host of this run is “" + part + "”");
      found.forEach((rank) => shown.add(rank));
    }
    return shown;
  }

  const methods = {
    /* Groups with the ranks that the filter leaves; one group without a name if not grouped. */
    groups() {
      const known = new Map(this.index.ranks.map((one) => [one.rank, one]));
      const grouping = this.index.groupings.find((one) => one.by === this.by);
      const groups = grouping ? grouping.groups : [{ name: "", ranks: [...known.keys()] }];
      return groups
        .map((one) => ({ name: one.name, ranks: one.ranks.filter((rank) => known.has(rank) && (!this.shown || this.shown.has(rank))).map((rank) => known.get(rank)) }))
        .filter((one) => one.ranks.length);
    },

    shownRanks() {
      const ranks = this.groups().flatMap((one) => one.ranks.map((each) => each.rank));
      return [...new Set([...this.pins, ...ranks])];
    },

    /* Pins the focused rank above the others, where it stays while they scroll, or lets it go. */
    togglePin() {
      const rank = this.focusedRank();
      if (rank === null) return this.say("Choose a rank to pin: click its row.");
      const pinned = this.pins.includes(rank), shown = this.shownRanks().length;
      this.pins = pinned ? this.pins.filter((one) => one !== rank) : [...this.pins, rank].slice(-MOST_PINS);
      this.say("rank " + rank + (pinned ? " is no longer pinned" : " is pinned above the others"));
      /* A filter may hide the rank where it is not pinned. */
      if (this.shownRanks().length !== shown) this.repeatQueries();
      this.refresh();
    },

    /* The rank with its stage and host, and the group in which it is drawn. */
    rankWords(rank) {
      const one = this.index.ranks.find((each) => each.rank === rank) || { stage: null };
      const group = this.by && this.groups().find((each) => each.ranks.some((own) => own.rank === rank));
      const parts = ["rank " + rank, group ? group.name : one.stage === null ? "" : "stage " + one.stage, one.host || ""];
      return [...new Set(parts)].filter(Boolean).join(", ");
    },

    isCompact() {
      return this.compactChoice === null ? this.shownRanks().length > MANY_RANKS : this.compactChoice;
    },

    /* The height of a closed rank: a full band, or as few pixels as let all ranks fit. */
    closedHeight(groups) {
      if (!this.isCompact()) return BAND + GAP;
      const visible = groups.filter((one) => !this.folded.has(one.name));
      const count = visible.reduce((sum, one) => sum + one.ranks.filter((each) => !this.open.has(each.rank)).length, 0);
      const headings = groups[0] && groups[0].name ? groups.length * HEADING : 0;
      return clamp(Math.floor((this.mostHeight() - AXIS - 8 - headings) / Math.max(count, 1)), LEAST_PX, MOST_PX);
    },

    /* Two timelines share the screen. */
    mostHeight() {
      const share = this.isCompact() ? 0.8 : 0.72;
      return Math.round(window.innerHeight * (this.main || this.second ? share / 2 : share));
    },

    /* What is drawn from top to bottom: headings of groups, and ranks with their lanes. */
    places() {
      const groups = this.groups(), closed = this.closedHeight(groups), compact = this.isCompact();
      const places = [];
      let y = AXIS;
      const add = (place) => { places.push({ ...place, y }); y += place.height; };
      const known = new Map(this.index.ranks.map((one) => [one.rank, one]));
      for (const rank of this.pins.filter((one) => known.has(one))) {
        const lanes = this.open.has(rank) ? this.lanesOf(rank) : [];
        add({ ...known.get(rank), key: "rank " + rank, lanes, height: BAND + lanes.length * LANE + GAP, band: BAND, pinned: true });
      }
      for (const group of groups) {
        if (group.name) add({ key: "group " + group.name, group: group.name, count: group.ranks.length, lanes: [], height: HEADING });
        if (this.folded.has(group.name)) continue;
        for (const one of group.ranks) {
          if (this.pins.includes(one.rank)) continue;
          const isOpen = this.open.has(one.rank), lanes = isOpen ? this.lanesOf(one.rank) : [];
          const height = isOpen ? BAND + lanes.length * LANE + GAP : closed;
          const band = isOpen || !compact ? BAND : closed - (closed >= 4 ? 1 : 0);
          add({ ...one, key: "rank " + one.rank, lanes, height, band, small: !isOpen && compact });
        }
      }
      if (compact) this.chooseLabels(places, closed);
      return places;
    },

    /* Of rows that are lower than a label only some have one: no two labels overlap. */
    chooseLabels(places, closed) {
      const each = [1, 2, 4, 8, 16, 32].find((n) => n * closed >= LABEL_PX) || 64;
      const small = places.filter((one) => one.small);
      const taken = places.filter((one) => !one.small).map((one) => {
        const half = (one.group ? HEADING : BAND) / 2;
        return [one.y + half, half];
      });
      const half = LABEL_PX / 2;
      const take = (one) => {
        const middle = this.labelMiddle(one);
        one.labeled = taken.every(([other, room]) => Math.abs(other - middle) >= room + half);
        if (one.labeled) taken.push([middle, half]);
      };
      /* The row under the pointer always has one. */
      const first = (one) => one.key === this.focus || one.rank === this.hovered;
      small.filter((one) => one.rank === this.hovered).forEach((one) => { one.labeled = true; taken.push([this.labelMiddle(one), half]); });
      small.filter((one) => first(one) && one.rank !== this.hovered).forEach(take);
      small.filter((one) => !first(one) && one.rank % each === 0).forEach(take);
    },

    /* The label of the first rows is not cut off by the axis. */
    labelMiddle(place) { return Math.max(place.y + place.band / 2, AXIS + LABEL_PX / 2); },

    focusedRank() {
      const place = this.places().find((one) => one.key === this.focus);
      return place && place.rank !== undefined ? place.rank : null;
    },

    /* Whether the rank is drawn, after unfolding its group; false if the filter hides it. */
    makeVisible(rank) {
      const group = this.groups().find((one) => one.ranks.some((each) => each.rank === rank));
      if (group) this.folded.delete(group.name);
      return Boolean(group);
    },

    setGrouping(by) {
      this.by = this.index.groupings.some((one) => one.by === by) ? by : "";
      this.groupMenu.value = this.by;
      this.folded.clear();
      this.refresh();
    },

    /* Shows the ranks of the filter; if it is odd, says so and leaves the ranks as they are. */
    setFilter(text) {
      this.filterField.value = text;
      try {
        const shown = text.trim() ? parseRanks(text, this.index) : null;
        this.shown = shown;
        this.filter = text.trim();
        this.filterField.removeAttribute("aria-invalid");
        this.say(shown ? shown.size + " of " + this.index.ranks.length + " ranks shown" : "all ranks shown");
      } catch (error) {
        this.filterField.setAttribute("aria-invalid", "true");
        this.say("Cannot filter: " + error.message + ". Examples: 0-7, 12 or stage 2 or a host's name.");
        return;
      }
      if (!this.places().some((one) => one.key === this.focus)) this.focus = (this.places()[0] || { key: "" }).key;
      this.repeatQueries();
      this.refresh();
    },

    setCompact(choice) {
      this.compactChoice = choice;
      this.refresh();
    },

    toggleGroup(name) {
      this.folded.has(name) ? this.folded.delete(name) : this.folded.add(name);
      this.refresh();
    },

    refresh() {
      this.ask();
      this.draw();
    },

    paintLabel(pen, place, y) {
      if (place.small && !place.labeled) return;
      const focused = place.key === this.focus, middle = y - place.y + this.labelMiddle(place);
      pen.font = (focused ? "700 " : "600 ") + (place.small ? "11px" : "12px") + " system-ui, sans-serif";
      pen.fillStyle = focused ? this.accent : this.ink;
      pen.fillText((place.pinned ? "● " : this.open.has(place.rank) ? "▾ " : "▸ ") + "rank " + place.rank, 4, middle, this.gutter - 8);
      pen.font = "11px system-ui, sans-serif";
      pen.fillStyle = this.muted;
      const count = this.query ? this.matchCount(place.rank) : null;
      const more = count !== null ? count.toLocaleString("en") + " found" : [place.stage === null ? "" : "stage " + place.stage, place.host || ""].filter(Boolean).join(" · ");
      if (this.gutter === WIDE_GUTTER) pen.fillText(more, 74, middle, this.gutter - 80);
      place.lanes.forEach((row, i) => {
        if (!row.depth) pen.fillText(row.lane, 18, y + BAND + i * LANE + LANE / 2, this.gutter - 24);
      });
    },

    paintHeading(pen, place, y, width) {
      pen.fillStyle = this.raised;
      pen.fillRect(0, y, width, place.height - 1);
      pen.font = (place.key === this.focus ? "700 " : "600 ") + "12px system-ui, sans-serif";
      pen.fillStyle = place.key === this.focus ? this.accent : this.ink;
      const name = (this.folded.has(place.group) ? "▸ " : "▾ ") + place.group, wide = pen.measureText(name).width;
      pen.fillText(name, 4, y + place.height / 2);
      pen.font = "11px system-ui, sans-serif";
      pen.fillStyle = this.muted;
      pen.fillText(place.count + (place.count === 1 ? " rank" : " ranks"), 14 + wide, y + place.height / 2);
      this.hits.push({ group: place.group, y, height: place.height });
    },
  };

  window.stepsplitRows = { unpackWindow, parseRanks, methods };
})();
