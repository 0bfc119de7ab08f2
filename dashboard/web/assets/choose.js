/* Selections on a page are URL parameters: menus and fields with data-choice, and the runs to
   compare, which have a list or, for two of them, a parameter each. */
(function () {
  "use strict";

  const MOST = 12;

  /* Dash follows the URL only after a popstate event. Links of tables use it too. */
  window.stepsplitOpen = (address) => {
    history.pushState(null, "", address);
    window.dispatchEvent(new PopStateEvent("popstate"));
  };
  const go = (search) => window.stepsplitOpen(location.pathname + search);

  function choose(field, value) {
    const query = new URLSearchParams(location.search);
    if (field.dataset.choice === "runs") {
      query.delete("baseline");
      query.delete("candidate");
    }
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

  /* The runs to compare: when each was added, by its id. They stay selected while the list is
     searched and sorted, which gives other runs the same boxes. */
  const picked = new Map();

  function showPicked() {
    const link = document.getElementById("compare-link");
    if (!link) return;
    for (const box of document.querySelectorAll("[data-pick]")) {
      box.setAttribute("aria-checked", String(picked.has(box.dataset.pick)));
    }
    const ids = [...picked.keys()].sort((one, other) => (picked.get(one) < picked.get(other) ? -1 : 1));
    const ready = ids.length >= 2 && ids.length <= MOST;
    const hints = ["", "select another run to compare"];
    const hint = ids.length > MOST ? "at most " + MOST + " runs are compared" : hints[ids.length] || "";
    const text = ids.length > 2 ? "compare " + ids.length + " selected" : "compare selected";
    setText(document.getElementById("compare-hint"), hint);
    setText(link, text);
    link.className = ready ? "button on" : "button off";
    document.getElementById("clear-picks").hidden = !ids.length;
    const two = "/compare?baseline=" + ids[0] + "&candidate=" + ids[1];
    link.href = ids.length > 2 ? "/compare?runs=" + ids.join(",") : ids.length ? two : "/compare";
  }

  function setText(part, text) {
    if (part.textContent !== text) part.textContent = text;
  }

  document.addEventListener("click", (event) => {
    if (!event.target.closest) return;
    const box = event.target.closest("[data-pick]");
    if (event.target.closest("#clear-picks")) picked.clear();
    else if (!box) return;
    else if (!picked.delete(box.dataset.pick)) picked.set(box.dataset.pick, BigInt(box.dataset.added));
    showPicked();
  });

  new MutationObserver(showPicked).observe(document.body, {
    childList: true,
    subtree: true,
    attributeFilter: ["data-pick"],
  });
})();
