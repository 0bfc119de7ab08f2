/* Light or dark: as the system says, until the button says otherwise. Runs before the page shows. */
(function () {
  "use strict";

  const KEY = "stepsplit-theme";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem(KEY); } catch (error) { /* a page from a file may keep nothing */ }

  function show() {
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
    document.dispatchEvent(new Event("stepsplit:theme"));
  }

  show();
  system.addEventListener("change", show);
  document.addEventListener("click", (event) => {
    if (!event.target.closest || !event.target.closest("#theme")) return;
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem(KEY, chosen); } catch (error) { /* it holds for this page */ }
    show();
  });
})();
