/* "describe the job": the job.toml of a run as fields or as text. The server merges fields with the
   file and checks it; this script only shows what it answers. */
(function () {
  "use strict";

  const INTRODUCTION =
    "Filled in from the recording and its job.toml. Empty fields use the defaults. " +
    "The run is analyzed again and compared with the model.";

  function make(tag, properties, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  const button = (id, text, type = "button") => make("button", { id, type, textContent: text });

  /* Outside of the page's tree, which Dash recreates. */
  const fields = make("div", { id: "job-fields" });
  const text = make("textarea", { id: "job-text", rows: 18, spellcheck: false });
  const asText = make("div", { className: "job-as-text", hidden: true },
    make("label", { htmlFor: "job-text", textContent: "job.toml" }), text);
  const status = make("div", { id: "job-status", className: "drop-status" });
  status.setAttribute("role", "alert");
  const send = button("job-send", "Analyze", "submit");
  const toggle = button("job-toggle", "Edit as text");
  const form = make("form", { noValidate: true },
    make("h2", { id: "job-title", textContent: "Describe the job" }),
    make("p", { className: "note", textContent: INTRODUCTION }),
    fields, asText,
    make("div", { className: "job-end" }, status,
      make("div", { className: "drop-buttons" },
        send, toggle, button("job-file", "Use a job.toml"), button("job-cancel", "Cancel"))));
  const dialog = make("dialog", { id: "job-form", className: "card form job-form" }, form);
  dialog.setAttribute("aria-labelledby", "job-title");
  const file = make("input", { id: "job-upload", type: "file", accept: ".toml", hidden: true });
  document.body.append(dialog, file);

  let runId = "", opener = null, base = "", isText = false;

  function say(message, failed = false) {
    status.textContent = message;
    status.classList.toggle("failed", failed);
    const named = failed && /\b(model|parallel|training|hardware)\.(\w+)/.exec(message);
    for (const one of fields.querySelectorAll("[aria-invalid]")) one.removeAttribute("aria-invalid");
    const input = named && document.getElementById("job-" + named[1] + "-" + named[2]);
    if (!input || isText) return;
    input.setAttribute("aria-invalid", "true");
    input.focus();
  }

  /* Runs a step of the form: its error is shown, and what was entered stays. */
  async function attempt(failure, step) {
    say("");
    send.disabled = true;
    try {
      await step();
    } catch (error) {
      say(failure + ": " + error.message, true);
    } finally {
      send.disabled = false;
    }
  }

  async function ask(method, path, body) {
    const type = typeof body === "string" ? "text/plain" : "application/json";
    const content = typeof body === "object" ? JSON.stringify(body) : body;
    const headers = body === undefined ? {} : { "Content-Type": type };
    const address = "/api/v1/runs/" + runId + path;
    const answer = await fetch(address, { method, headers, body: content });
    const read = await answer.json().catch(() => ({ error: "the server answered " + answer.status }));
    if (!answer.ok) throw new Error(read.error);
    return read;
  }

  function buildInput(field) {
    const id = "job-" + field.table + "-" + field.key;
    if (!field.choices.length) {
      return make("input", { id, autocomplete: "off", value: field.value });
    }
    const options = ["", ...field.choices].map((one) => make("option", { value: one, textContent: one }));
    return make("select", { id, value: field.value }, ...options);
  }

  function buildField(field) {
    const input = buildInput(field);
    input.value = field.value;
    Object.assign(input.dataset, { table: field.table, key: field.key, initial: field.value });
    if (field.other) Object.assign(input, { disabled: true, placeholder: "see the text" });
    const label = make("label", { htmlFor: input.id, textContent: field.key });
    const hint = make("span", { id: input.id + "-hint", className: "note", textContent: field.hint });
    if (field.needed) hint.prepend(make("b", { textContent: "needed for the model" }));
    input.setAttribute("aria-describedby", hint.id);
    const className = field.needed ? "job-field needed" : "job-field";
    return make("div", { className }, label, input, hint);
  }

  function showForm(shown) {
    base = shown.toml;
    text.value = base;
    const groups = shown.groups.map((group) =>
      make("fieldset", {}, make("legend", { textContent: group.title }),
        make("div", { className: "job-grid" }, ...group.fields.map(buildField))));
    fields.replaceChildren(...groups);
    /* What cannot be read is corrected as text. */
    showText(!groups.length);
    if (shown.error) say(shown.error, true);
  }

  function showText(on) {
    isText = on;
    fields.hidden = on;
    asText.hidden = !on;
    toggle.textContent = on ? "Edit as fields" : "Edit as text";
  }

  function parseValue(input) {
    const value = input.value.trim();
    if (!value) return null;
    if (value === "true" || value === "false") return value === "true";
    return /^-?\d{1,18}(\.\d+)?$/.test(value) ? Number(value) : value;
  }

  /* The text, or the changed fields with the text that they change. */
  function collect() {
    if (isText) return text.value;
    const changes = {};
    for (const input of fields.querySelectorAll("[data-key]")) {
      if (input.disabled || input.value.trim() === input.dataset.initial) continue;
      const table = (changes[input.dataset.table] ||= {});
      table[input.dataset.key] = parseValue(input);
    }
    return { toml: base, ...changes };
  }

  const merge = () => ask("POST", "/job/form", collect());

  function open(from) {
    opener = from;
    runId = from.dataset.job;
    fields.replaceChildren();
    showText(false);
    dialog.showModal();
    attempt("Not read", async () => {
      showForm(await ask("GET", "/job/form"));
      const first = fields.querySelector(".needed input, .needed select") || (isText ? text : fields.querySelector("input"));
      first.focus();
    });
  }

  /* Once the page is as long as before, it is scrolled to where it was. */
  function keepScroll() {
    const place = window.scrollY, path = location.pathname;
    const observer = new MutationObserver(() => {
      const isSame = location.pathname === path;
      if (isSame && document.documentElement.scrollHeight - window.innerHeight < place) return;
      observer.disconnect();
      if (isSame) window.scrollTo(0, place);
    });
    const stop = () => observer.disconnect();
    for (const one of ["wheel", "keydown", "pointerdown"]) {
      window.addEventListener(one, stop, { once: true });
    }
    observer.observe(document.getElementById("page"), { childList: true, subtree: true });
  }

  /* The page asks for the run's state, as if it had been pending when it was opened. */
  function showProgress() {
    const page = document.getElementById("page");
    keepScroll();
    page.focus({ preventScroll: true });
    window.dash_clientside.set_props("tick", { disabled: false, n_intervals: Date.now() });
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt("Not analyzed", async () => {
      await ask("PUT", "/job", collect());
      /* It is about to be replaced. */
      opener = null;
      dialog.close();
      showProgress();
    });
  });
  toggle.addEventListener("click", () => attempt("Not read", async () => {
    const on = !isText;
    showForm(await merge());
    showText(on);
  }));
  /* The sizes of a preset replace those of the other fields. */
  fields.addEventListener("change", (event) => {
    const id = event.target.id;
    if (id !== "job-model-preset") return;
    attempt("Not read", async () => {
      showForm(await merge());
      document.getElementById(id).focus();
    });
  });
  file.addEventListener("change", async () => {
    const chosen = file.files[0];
    text.value = await chosen.text();
    file.value = "";
    showText(true);
    say(chosen.name + " is not sent before you choose Analyze.");
    text.focus();
  });
  dialog.addEventListener("close", () => {
    if (opener && opener.isConnected) opener.focus();
  });
  document.addEventListener("click", (event) => {
    const clicked = event.target.closest && event.target.closest("button");
    if (!clicked) return;
    if (clicked.dataset.job) open(clicked);
    if (clicked.id === "job-file") file.click();
    if (clicked.id === "job-cancel") dialog.close();
  });
})();
