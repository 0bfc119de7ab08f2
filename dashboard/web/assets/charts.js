/* The script of the charts runs while the server makes the content of a run's page that has charts,
   not after it: Dash runs it when the first chart is there, unless Plotly is. app.py sends it with
   such a page, and marks the page. */
(function () {
  "use strict";

  if (!document.querySelector('meta[name="charts"]')) return;
  const observer = new MutationObserver(() => {
    if (!document.getElementById("page")) return;
    observer.disconnect();
    /* Once the content has been asked for. */
    setTimeout(() => {
      if (window.Plotly) return;
      const script = document.createElement("script");
      script.src = "/_dash-component-suites/plotly/package_data/plotly.min.js";
      document.body.append(script);
    }, 0);
  });
  observer.observe(document.documentElement, { childList: true, subtree: true });
})();
