/* A watched run's page updates by itself, but not while it is not visible; its alerts; a range that
   is dragged in one of its charts is that of all of them, and in the address. */
(function () {
  "use strict";

  const toMinute = (ms, round) => new Date(round(ms / 60_000) * 60_000).toISOString().slice(0, 16).replace("T", " ");

  /* For Dash: the search of the address after a chart has been zoomed. */
  function zoom(...charts) {
    const { triggered } = window.dash_clientside.callback_context, query = new URLSearchParams(location.search);
    const change = triggered.length === 1 ? triggered[0].value || {} : {};
    const [first, last] = [0, 1].map((i) => Date.parse(String(change["xaxis.range[" + i + "]"]).replace(" ", "T") + "Z"));
    if (change["xaxis.autorange"]) ["from", "to"].forEach((name) => query.delete(name));
    else if (last > first) {
      query.set("from", toMinute(first, Math.floor));
      query.set("to", toMinute(last, Math.ceil));
      query.delete("range");
    } else return window.dash_clientside.no_update;
    return query.size ? "?" + String(query).replaceAll("%3A", ":").replaceAll("%2C", ",") : "";
  }
  window.dash_clientside = Object.assign({}, window.dash_clientside, { watch: { zoom } });

  document.addEventListener("visibilitychange", () => {
    if (document.getElementById("watch-live")) {
      window.dash_clientside.set_props("watch-tick", { disabled: document.hidden });
    }
  });

  async function actOnAlert(button) {
    const { run, alert, action, hours } = button.dataset;
    const body = { action };
    if (hours) body.hours = Number(hours);
    button.disabled = true;
    try {
      const path = "/api/v1/watch/" + encodeURIComponent(run) + "/alerts/" + alert;
      const headers = { "Content-Type": "application/json" };
      const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
      if (!answer.ok) throw new Error((await answer.json()).error);
      location.reload();
    } catch (error) {
      button.disabled = false;
      window.alert("The alert was not changed: " + error.message);
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("button[data-alert]");
    if (button) actOnAlert(button);
  });
})();
