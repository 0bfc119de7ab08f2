/* A mark of a chart that stands for a rank, step, call or run leads to it. A chart says where in its
   layout: meta.link is an address in which {x}, {y}, {number} (the first number of x), {custom} and
   {key} (of the trace's meta.keys) stand for those of the mark. */
(function () {
  "use strict";

  const at = (list, number) => {
    const place = Array.isArray(number) ? number : [number];
    return place.reduce((found, one) => (found === undefined || found === null ? found : found[one]), list);
  };

  function findAddress(plot, point) {
    const link = plot.layout && plot.layout.meta && plot.layout.meta.link;
    if (!link || !point) return null;
    const trace = point.data || {}, number = point.pointNumber;
    const label = (value) => new DOMParser().parseFromString(String(value ?? ""), "text/html").body.textContent;
    const known = {
      x: encodeURIComponent(label(point.x)),
      y: encodeURIComponent(label(point.y)),
      number: (/\d+/.exec(String(point.x)) || [])[0],
      custom: point.customdata === undefined ? at(trace.customdata, number) : point.customdata,
      key: trace.meta && trace.meta.keys ? trace.meta.keys[number] : undefined,
    };
    let isWhole = true;
    const address = link.replace(/\{(\w+)\}/g, (_, name) => {
      const value = known[name];
      if (value === undefined || value === null || value === "" || value === -1) isWhole = false;
      return value;
    });
    return isWhole && address.startsWith("/") && !address.startsWith("//") ? address : null;
  }

  function listen(plot) {
    plot.leads = true;
    plot.on("plotly_hover", (event) => plot.classList.toggle("leads", Boolean(findAddress(plot, event.points[0]))));
    plot.on("plotly_unhover", () => plot.classList.remove("leads"));
    plot.on("plotly_click", (event) => {
      const address = findAddress(plot, event.points[0]), click = event.event || {};
      if (!address) return;
      if (click.ctrlKey || click.metaKey) window.open(address, "_blank", "noopener");
      else {
        window.stepsplitOpen(address);
        window.scrollTo(0, 0);
      }
    });
  }

  let waiting = 0;
  new MutationObserver(() => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const plot of document.querySelectorAll(".js-plotly-plot")) if (plot.on && !plot.leads) listen(plot);
    }, 30);
  }).observe(document.body, { childList: true, subtree: true });

  window.stepsplitMarks = { findAddress };
})();
