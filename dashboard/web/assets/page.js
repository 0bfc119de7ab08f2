/* The title of the page that is shown, which links of the menus lead to it, and wide tables, which
   the keyboard scrolls. */
(function () {
  "use strict";

  function textOf(selector) {
    const found = document.querySelector(selector);
    return found ? found.textContent : "";
  }

  function mark() {
    const parts = [textOf("#page h1"), textOf(".tabs .on"), "stepsplit"];
    document.title = parts.filter(Boolean).join(" - ");
    for (const link of document.querySelectorAll(".pages a, .tabs a")) {
      if (link.pathname === location.pathname) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    for (const part of document.querySelectorAll(".scroll")) {
      if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
      else part.removeAttribute("tabindex");
    }
  }

  /* Not for each of the thousands of elements that a chart adds. */
  let waiting = 0;
  function markSoon() {
    clearTimeout(waiting);
    waiting = setTimeout(mark, 20);
  }
  window.addEventListener("resize", markSoon);
  new MutationObserver(markSoon).observe(document.body, { childList: true, subtree: true });
})();
