/* What a user does with a run on its pages: edit, describe the job, analyze again, delete. */
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

  /* Outside of the page's tree, which Dash recreates. */
  const jobFile = document.createElement("input");
  jobFile.type = "file";
  jobFile.id = "job-upload";
  jobFile.accept = ".toml";
  jobFile.hidden = true;
  jobFile.addEventListener("change", async () => {
    const text = await jobFile.files[0].text();
    jobFile.value = "";
    attachJob(text);
  });
  document.body.append(jobFile);

  /* The fields of the form as a job.toml, which the recording completes. */
  function writeJob() {
    const mesh = byId("job-mesh");
    if (!mesh.reportValidity()) return null;
    const sizes = mesh.value.split(",").map((part) => part.trim()).filter(Boolean);
    const preset = byId("job-hardware").value;
    const lines = sizes.length ? ["[parallel]", ...sizes.map((one) => one.replace("=", " = "))] : [];
    if (preset) lines.push("[hardware]", 'preset = "' + preset + '"');
    if (!lines.length) byId("job-status").textContent = "Choose the hardware, a mesh or a file.";
    return lines.length ? lines.join("\n") + "\n" : null;
  }

  async function attachJob(text) {
    const status = byId("job-status");
    status.textContent = "";
    try {
      await send("PUT", byId("job-send").dataset.run + "/job", text);
      location.reload();
    } catch (error) {
      status.textContent = "Not analyzed: " + error.message;
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

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("button");
    if (!button) return;
    if (button.dataset.edit) {
      byId("edit-run").showModal();
      byId("edit-save").dataset.run = button.dataset.edit;
    }
    if (button.dataset.retry) analyzeAgain(button);
    if (button.dataset.delete) remove(button);
    if (button.dataset.job) {
      byId("job-form").showModal();
      byId("job-send").dataset.run = button.dataset.job;
    }
    if (button.id === "job-send") {
      const text = writeJob();
      if (text) attachJob(text);
    }
    if (button.id === "job-file") jobFile.click();
    if (button.id === "job-cancel") byId("job-form").close();
    if (button.id === "edit-save") save(button.dataset.run);
    if (button.id === "edit-cancel") byId("edit-run").close();
  });
})();
