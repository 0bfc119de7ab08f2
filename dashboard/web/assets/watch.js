/* A watched run's page updates by itself, but not while it is not visible; its alerts. */
(function () {
  "use strict";

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
