/* Light or dark: as the system says, until the button says otherwise. Runs before the page shows. */
(function () {
  "use strict";
  const root = document.documentElement;
  const kept = () => {
    try { return localStorage.getItem("stepsplit-theme"); } catch (error) { return null; }
  };
  if (kept()) root.dataset.theme = kept();
  document.addEventListener("click", (event) => {
    if (!event.target.closest || !event.target.closest("#theme")) return;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("stepsplit-theme", root.dataset.theme); } catch (error) { /* not kept */ }
    document.dispatchEvent(new Event("stepsplit:theme"));
  });
})();
