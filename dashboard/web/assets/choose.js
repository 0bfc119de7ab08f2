/* Selections on a page are URL parameters: menus and fields with data-choice. The selected runs are
   those of this tab. */
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
    /* Another list begins with its first page. */
    if (location.pathname === "/") query.delete("page");
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
  const SEARCHES = ["q", "find"];
  let later;
  document.addEventListener("input", (event) => {
    const field = chosen(event);
    if (!field || !SEARCHES.includes(field.dataset.choice)) return;
    clearTimeout(later);
    later = setTimeout(() => choose(field, event.target.value.trim()), 350);
  });

  /* The selected runs by id: when each was added, and whether it can be compared. They stay selected
     while the list is searched, sorted and paged, which gives other runs the same boxes, and while
     one of them is looked at. */
  const KEPT = "stepsplit-selected-runs";
  let picked = new Map();
  try {
    picked = new Map(JSON.parse(sessionStorage.getItem(KEPT) || "[]"));
  } catch { /* Without storage, or with text of another program. */ }

  const boxes = () => [...document.querySelectorAll("[data-pick]")];
  const add = (box) => picked.set(box.dataset.pick, [box.dataset.added, Boolean(box.dataset.compared)]);

  function showPicked() {
    const bar = document.getElementById("picks");
    if (!bar) return;
    const shown = boxes(), all = document.getElementById("pick-all");
    for (const box of shown) setChecked(box, picked.has(box.dataset.pick));
    if (all) setChecked(all, shown.length > 0 && shown.every((box) => picked.has(box.dataset.pick)));
    const added = (id) => BigInt(picked.get(id)[0]);
    const ids = [...picked.keys()].sort((one, other) => (added(one) < added(other) ? -1 : 1));
    const odd = ids.filter((id) => !picked.get(id)[1]).length;
    const link = document.getElementById("compare-link");
    const count = ids.length + (ids.length === 1 ? " run" : " runs") + " selected";
    const hint = odd ? odd + " without a step cannot be compared"
      : ids.length > MOST ? "at most " + MOST + " are compared"
      : ids.length === 1 ? "select another run to compare" : "";
    setText(document.getElementById("compare-hint"), hint ? count + ": " + hint : count);
    setText(link, ids.length > 2 ? "compare " + ids.length + " selected" : "compare selected");
    link.className = !odd && ids.length >= 2 && ids.length <= MOST ? "button on" : "button off";
    const two = "/compare?baseline=" + ids[0] + "&candidate=" + ids[1];
    link.href = ids.length > 2 ? "/compare?runs=" + ids.join(",") : ids.length ? two : "/compare";
    if (bar.hidden !== !ids.length) bar.hidden = !ids.length;
  }

  function setText(part, text) {
    if (part.textContent !== text) part.textContent = text;
  }

  function setChecked(box, on) {
    if (box.getAttribute("aria-checked") !== String(on)) box.setAttribute("aria-checked", String(on));
  }

  function keepPicked() {
    try {
      sessionStorage.setItem(KEPT, JSON.stringify([...picked]));
    } catch { /* They are forgotten with the page. */ }
    showPicked();
  }

  document.addEventListener("click", (event) => {
    if (!event.target.closest) return;
    const box = event.target.closest("[data-pick]");
    if (event.target.closest("#clear-picks")) picked.clear();
    else if (event.target.closest("#pick-all")) {
      const shown = boxes(), all = shown.every((one) => picked.has(one.dataset.pick));
      shown.forEach((one) => (all ? picked.delete(one.dataset.pick) : add(one)));
    } else if (!box) return;
    else if (!picked.delete(box.dataset.pick)) add(box);
    keepPicked();
  });

  window.stepsplitPicked = {
    list: () => [...picked.keys()],
    remove: (id) => { picked.delete(id); keepPicked(); },
  };

  /* A menu closes by Escape, a click elsewhere, or when the focus leaves it. */
  const closeMenus = (inside) => document.querySelectorAll("details.menu[open]").forEach((menu) => {
    if (!menu.contains(inside)) menu.open = false;
  });
  document.addEventListener("click", (event) => closeMenus(event.target));
  document.addEventListener("keydown", (event) => {
    const menu = event.key === "Escape" && event.target.closest && event.target.closest("details.menu[open]");
    if (menu) {
      menu.open = false;
      menu.querySelector("summary").focus();
    }
  });

  new MutationObserver(showPicked).observe(document.body, {
    childList: true,
    subtree: true,
    attributeFilter: ["data-pick"],
  });
})();
