/* A second timeline below the first, of another run or of the same one, which shows the same part of
   its own step. timeline.js adds these methods to its class: `main` is the first timeline in the
   second one, `second` the second one in the first. */
(function () {
  "use strict";

  const MOST_RUNS = 100, RUN_ID = /^[\w-]{1,40}$/;

  const methods = {
    /* The menu that opens it; its runs are read when they are first asked for. */
    buildSecondMenu(bar) {
      this.secondMenu = this.menu(bar, "second timeline", (value) => this.openSecond(value));
      this.secondMenu.className = "tl-second-menu";
      this.option(this.secondMenu, "", "one timeline");
      this.option(this.secondMenu, this.run, "below: this run again");
      for (const kind of ["pointerdown", "focus"]) this.secondMenu.addEventListener(kind, () => this.listRuns());
    },

    async listRuns() {
      if (this.runsListed) return;
      this.runsListed = true;
      const answer = await fetch("/api/v1/runs?state=done&last=" + MOST_RUNS).catch(() => null);
      const { runs } = answer && answer.ok ? await answer.json() : { runs: [] };
      const known = [...this.secondMenu.options].map((one) => one.value);
      for (const one of runs) {
        if (one.world_size !== null && !known.includes(one.id)) this.option(this.secondMenu, one.id, "below: " + one.name);
      }
    },

    /* asked are the choices of the address that begin with "with". */
    async openSecond(run, asked = new URLSearchParams()) {
      if (this.second) this.second.root.remove();
      this.second = null;
      if (RUN_ID.test(run)) {
        if (![...this.secondMenu.options].some((one) => one.value === run)) this.option(this.secondMenu, run, "below: " + run);
        const place = document.createElement("div");
        place.className = "timeline tl-second";
        place.dataset.run = run;
        this.body.after(place);
        this.second = new this.constructor(place, this, asked);
      }
      this.secondMenu.value = this.second ? run : "";
      this.showRange();
      this.refresh();
      this.showTable();
    },

    /* What stands above the second timeline: of what it is, and what may differ from the first. */
    buildSecondHead() {
      const bar = document.createElement("div"), name = document.createElement("a");
      bar.className = "tl-bar";
      name.textContent = "run " + this.run;
      name.href = "/run/" + this.run;
      name.className = "tl-name";
      fetch("/api/v1/runs/" + this.run).then((answer) => answer.json()).then((run) => {
        if (!run.name) return;
        name.textContent = run.name;
        const own = [...this.main.secondMenu.options].find((one) => one.value === this.run);
        if (own && this.run !== this.main.run) own.textContent = "below: " + run.name;
      }, () => {});
      bar.append(name, this.steps, this.groupMenu, this.filterField, this.compactButton, this.lanesButton);
      this.button(bar, "close", "close the second timeline", () => this.main.openSecond(""));
      bar.append(this.where);
      return bar;
    },

    /* How much later the second timeline's step begins than the step that the first one shows. */
    secondOffset() {
      const steps = this.main.index.steps, shown = this.main.shownStep() || steps[0];
      const own = this.index.steps, at = steps.indexOf(shown) + this.shift;
      return own[Math.min(Math.max(at, 0), own.length - 1)].from - shown.from;
    },

    /* Shows the step of this number beside the one that the first timeline shows. */
    pairStep(number) {
      const steps = this.main.index.steps, shown = this.main.shownStep() || steps[0];
      const at = this.index.steps.findIndex((one) => String(one.step) === String(number));
      if (at >= 0) this.shift = at - steps.indexOf(shown);
      this.align();
    },

    /* Of the same number in the same run, else the middle of one run is that of the other. */
    pairFirst(asked) {
      const find = (index, step) => index.steps.findIndex((one) => String(one.step) === String(step));
      const middle = find(this.index, this.middle()) - find(this.main.index, this.main.middle());
      this.shift = this.run === this.main.run ? 0 : middle;
      this.pairStep(asked.get("with_step"));
      /* What is marked above is marked below, unless the address has a range of its own. */
      const range = this.main.range, offset = this.secondOffset();
      if (range && !asked.has("with_measure")) this.setRange(range.from + offset, range.to + offset);
    },

    align() {
      if (!this.extent || !this.main.extent) return;
      const offset = this.secondOffset();
      this.from = this.main.from + offset;
      this.to = this.main.to + offset;
      this.draw();
      this.ask();
    },

    /* The second timeline's part of the address. */
    secondQuery() {
      /* What was asked for stays while it loads. */
      if (!this.extent) return { with: this.run, ...Object.fromEntries([...this.askedSecond].filter(([name]) => name.startsWith("with_"))) };
      const step = this.shownStep();
      const parts = { with: this.run, with_step: step ? step.step : "" };
      for (const [name, value] of Object.entries(this.ownChoices())) parts["with_" + name] = value;
      parts.with_open = [...this.open].sort((a, b) => a - b).join(",");
      return parts;
    },

    /* Its choices in the address, under the names that they have for the first one. */
    secondChoices() {
      const asked = new URLSearchParams();
      for (const [name, value] of this.askedSecond) {
        if (name.startsWith("with_") && name !== "with_step") asked.set(name.slice("with_".length), value);
      }
      return asked;
    },

    restoreSecond(asked) {
      const run = asked.get("with") || "";
      if (this.run && run) this.openSecond(run, asked);
    },
  };

  window.stepsplitSecond = { methods };
})();
