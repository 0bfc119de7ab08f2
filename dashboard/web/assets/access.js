/* Tokens on the page of admins: a new one, whose secret is shown once, and revoked ones. */
(function () {
  "use strict";

  const byId = (id) => document.getElementById(id), PATH = "/api/v1/tokens";

  async function send(method, path, body) {
    const headers = { "Content-Type": "application/json" };
    const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body) });
    if (!answer.ok) throw new Error((await answer.json()).error);
    return answer.status === 204 ? null : answer.json();
  }

  async function create() {
    const status = byId("token-status"), days = byId("token-days").value.trim();
    const body = { name: byId("token-name").value, role: byId("token-role").value };
    if (days) body.days = Number(days);
    try {
      const made = await send("POST", PATH, body);
      status.textContent = "The secret of " + made.name + ", shown only now: " + made.secret + " (reload the page to list it)";
    } catch (error) {
      status.textContent = "Not created: " + error.message;
    }
  }

  async function revoke(button) {
    if (!window.confirm("Revoke " + button.dataset.name + " and end its sessions?")) return;
    try {
      await send("DELETE", PATH + "/" + button.dataset.revoke);
      location.reload();
    } catch (error) {
      byId("token-status").textContent = "Not revoked: " + error.message;
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("button");
    if (!button) return;
    if (button.id === "token-create") create();
    if (button.dataset.revoke) revoke(button);
  });
})();
