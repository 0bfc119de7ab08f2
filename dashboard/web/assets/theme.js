/* Light or dark theme: the system's, until the button is used. Runs before the page is shown. */
(function () {
  "use strict";

  const KEY = "stepsplit-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem(KEY); } catch (error) { /* no storage for file:// pages */ }

  let isPrinting = false;
  function show() {
    root.dataset.theme = isPrinting ? "light" : chosen || (system.matches ? "dark" : "light");
    document.dispatchEvent(new Event("stepsplit:theme"));
  }

  show();
  system.addEventListener("change", show);
  window.addEventListener("beforeprint", () => { isPrinting = true; show(); });
  window.addEventListener("afterprint", () => { isPrinting = false; show(); });
  document.addEventListener("click", (event) => {
    if (!event.target.closest || !event.target.closest("#theme")) return;
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem(KEY, chosen); } catch (error) { /* applies to this page only */ }
    show();
  });
})();
