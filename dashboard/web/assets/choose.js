/* Selections on a page are URL parameters: menus, fields and links with data-choice. The selected
   runs are those of this tab. */
(function () {
  "use strict";

  const MOST = 12;

  /* Dash follows the URL only after a popstate event. Links of tables use it too. */
  window.stepsplitOpen = (address) => {
    history.pushState(null, "", address);
    window.dispatchEvent(new PopStateEvent("popstate"));
  };
  const go = (search) => window.stepsplitOpen(location.pathname + search);

  /* The list in a parameter. A part without "=" belongs to the tag before, whose value has commas. */
  function parseList(name, text) {
    return text.split(name === "tag" ? /,(?=[^,]*=)/ : ",").filter(Boolean);
  }

  const usualOf = (part) => {
    const holder = part.closest("[data-usual]");
    return holder ? holder.dataset.usual : "";
  };
  const read = (part) => new URLSearchParams(location.search).get(part.dataset.choice) ?? usualOf(part);

  /* The choice is made on the address as it is now, as the page may be that of the address before. */
  function choose(part, value) {
    const name = part.dataset.choice, query = new URLSearchParams(location.search);
    /* Another list begins with its first page. */
    if (location.pathname === "/") query.delete("page");
    if (value === "" || value === usualOf(part)) query.delete(name);
    else query.set(name, value);
    const search = query.size ? "?" + String(query).replaceAll("%2C", ",").replaceAll("%3A", ":") : "";
    if (search !== location.search) go(search);
  }

  function chooseItem(part, item, on) {
    const name = part.dataset.choice, others = parseList(name, read(part)).filter((one) => one !== item);
    choose(part, (on ? [...others, item] : others).join(","));
  }

  const chosen = (event) => event.target.closest && event.target.closest("[data-choice]");

  document.addEventListener("change", (event) => {
    const field = chosen(event), value = event.target.value;
    if (!field || typeof value !== "string") return;
    if (!field.dataset.list) choose(field, value.trim());
    else if (value) {
      chooseItem(field, value, true);
      event.target.value = "";
    }
  });

  /* Search while typing. */
  const SEARCHES = ["q", "find"];
  let later;
  document.addEventListener("input", (event) => {
    const field = chosen(event), path = location.pathname;
    if (!field || !SEARCHES.includes(field.dataset.choice)) return;
    clearTimeout(later);
    /* The page may have been left meanwhile. */
    later = setTimeout(() => location.pathname === path && choose(field, event.target.value.trim()), 350);
  });

  /* Before the link itself is followed. */
  document.addEventListener("click", (event) => {
    const part = chosen(event);
    if (!part || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    const { value, cycle, add, drop, toggle } = part.dataset, isLink = part.tagName === "A";
    /* A tag on the page of a run leads to the list. */
    if (isLink && part.pathname !== location.pathname) window.stepsplitOpen(part.href);
    else if (value !== undefined) choose(part, value);
    else if (add !== undefined || drop !== undefined) chooseItem(part, add ?? drop, add !== undefined);
    else if (toggle !== undefined) chooseItem(part, toggle, !parseList(part.dataset.choice, read(part)).includes(toggle));
    else if (cycle !== undefined) {
      const values = cycle.split("|");
      choose(part, values[(values.indexOf(read(part)) + 1) % values.length]);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }, true);

  /* What is chosen, on parts of the page that stay. */
  function showChosen() {
    for (const part of document.querySelectorAll("[data-choice]")) {
      const { choice, toggle, list } = part.dataset, input = part.querySelector("input");
      if (toggle !== undefined) setChecked(part, parseList(choice, read(part)).includes(toggle));
      else if (part.tagName === "SELECT" && !list) {
        if ([...part.options].some((one) => one.value === read(part))) part.value = read(part);
      }
      else if (input && input !== document.activeElement && input.value !== read(part)) {
        window.dash_clientside.set_props(input.id, { value: read(part) });
      }
    }
  }
  window.addEventListener("popstate", showChosen);

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
    /* By a search, on another page of the list; the page Compare has no list. */
    const unseen = all ? ids.length - shown.filter((box) => picked.has(box.dataset.pick)).length : 0;
    const count = ids.length + (ids.length === 1 ? " run" : " runs") + " selected"
      + (unseen ? ", " + unseen + " not in this list" : "");
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
