/* Selections on a page are URL parameters: menus and fields with data-choice, and the two runs to
   compare. */
(function () {
  "use strict";

  /* Dash follows the URL only after a popstate event. */
  function go(search) {
    history.pushState(null, "", location.pathname + search);
    window.dispatchEvent(new PopStateEvent("popstate"));
  }

  function choose(field, value) {
    const query = new URLSearchParams(location.search);
    if (value === "" || value === field.dataset.usual) query.delete(field.dataset.choice);
    else query.set(field.dataset.choice, value);
    go(query.size ? "?" + query : "");
  }

  const chosen = (event) => event.target.closest && event.target.closest("[data-choice]");

  document.addEventListener("change", (event) => {
    const field = chosen(event);
    if (field) choose(field, event.target.value.trim());
  });

  /* Search while typing. */
  let later;
  document.addEventListener("input", (event) => {
    const field = chosen(event);
    if (!field || field.dataset.choice !== "q") return;
    clearTimeout(later);
    later = setTimeout(() => choose(field, event.target.value.trim()), 350);
  });

  document.addEventListener("click", (event) => {
    const box = event.target.closest && event.target.closest("[data-pick]");
    if (!box) return;
    box.setAttribute("aria-checked", box.getAttribute("aria-checked") === "true" ? "false" : "true");
    const picked = Array.from(document.querySelectorAll('[data-pick][aria-checked="true"]'));
    picked.sort((one, other) => (BigInt(one.dataset.added) < BigInt(other.dataset.added) ? -1 : 1));
    const link = document.getElementById("compare-link");
    link.className = picked.length === 2 ? "on" : "off";
    if (picked.length === 2) link.href = "/compare?baseline=" + picked[0].dataset.pick + "&candidate=" + picked[1].dataset.pick;
  });
})();
