/* What a user does with a run on its pages, or with the selected runs: edit, analyze again, delete. */
(function () {
  "use strict";

  const byId = (id) => document.getElementById(id);

  async function send(method, path, body, type = "text/plain") {
    const headers = { "Content-Type": type };
    const answer = await fetch("/api/v1/runs/" + path, { method, headers, body });
    const isGone = method === "DELETE" && answer.status === 404;
    if (!answer.ok && !isGone) throw new Error((await answer.json()).error);
  }

  /* Tags of lines, or of parts between commas, as an object. */
  function parseTags(text, separator) {
    const tags = {};
    for (const line of text.split(separator).map((part) => part.trim()).filter(Boolean)) {
      const at = line.indexOf("=");
      if (at < 1) throw new Error("a tag is KEY=VALUE, such as branch=main, not " + line);
      tags[line.slice(0, at).trim()] = line.slice(at + 1).trim();
    }
    return tags;
  }
  window.stepsplitParseTags = parseTags;

  async function save(runId) {
    const status = byId("edit-status");
    status.textContent = "";
    try {
      const edit = {
        name: byId("edit-name").value,
        tags: parseTags(byId("edit-tags").value, "\n"),
        note: byId("edit-note").value,
      };
      await send("PATCH", runId, JSON.stringify(edit), "application/json");
      location.reload();
    } catch (error) {
      status.textContent = "Not saved: " + error.message;
    }
  }

  async function analyzeAgain(button) {
    button.disabled = true;
    try {
      await send("POST", button.dataset.retry + "/analyze");
      location.reload();
    } catch (error) {
      button.disabled = false;
      window.alert("The run was not queued: " + error.message);
    }
  }

  async function remove(button) {
    const question = "Delete " + button.dataset.name + " with its files and its report?";
    if (!window.confirm(question)) return;
    button.disabled = true;
    try {
      await send("DELETE", button.dataset.delete);
      location.assign("/");
    } catch (error) {
      button.disabled = false;
      window.alert("The run was not deleted: " + error.message);
    }
  }

  /* The selected runs, one after the other; those that were done are selected no more. */
  async function doToPicked(status, act) {
    const ids = window.stepsplitPicked.list();
    let done = 0;
    try {
      for (const id of ids) {
        status.textContent = done + " of " + ids.length + " runs";
        await act(id);
        done += 1;
      }
      return true;
    } catch (error) {
      status.textContent = done + " of " + ids.length + " runs were changed: " + error.message;
      return false;
    }
  }

  async function tagPicked() {
    const status = byId("tag-status"), lines = byId("tag-lines").value.split("\n").map((line) => line.trim()).filter(Boolean);
    const gone = lines.filter((line) => !line.includes("="));
    let tags;
    try {
      tags = parseTags(lines.filter((line) => line.includes("=")).join("\n"), "\n");
    } catch (error) {
      status.textContent = "Not saved: " + error.message;
      return;
    }
    const isDone = await doToPicked(status, async (id) => {
      const answer = await fetch("/api/v1/runs/" + id);
      if (answer.status === 404) return;
      if (!answer.ok) throw new Error((await answer.json()).error);
      const all = { ...(await answer.json()).tags, ...tags };
      gone.forEach((key) => delete all[key]);
      await send("PATCH", id, JSON.stringify({ tags: all }), "application/json");
    });
    if (isDone) location.reload();
  }

  async function deletePicked() {
    const count = window.stepsplitPicked.list().length;
    const which = count === 1 ? "the selected run with its" : "the " + count + " selected runs with their";
    if (!window.confirm("Delete " + which + " files and reports?")) return;
    const isDone = await doToPicked(byId("compare-hint"), async (id) => {
      await send("DELETE", id);
      window.stepsplitPicked.remove(id);
    });
    if (isDone) location.reload();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("button");
    if (!button) return;
    if (button.dataset.edit) {
      byId("edit-run").showModal();
      byId("edit-save").dataset.run = button.dataset.edit;
    }
    if (button.dataset.retry) analyzeAgain(button);
    if (button.dataset.delete) remove(button);
    if (button.id === "edit-save") save(button.dataset.run);
    if (button.id === "tag-picks") byId("tag-runs").showModal();
    if (button.id === "tag-save") tagPicked();
    if (button.id === "tag-cancel") byId("tag-runs").close();
    if (button.id === "delete-picks") deletePicked();
    if (button.id === "edit-cancel") byId("edit-run").close();
  });
})();
