/* Uploads a dropped recording: create a run, send each file in parts, finish, open its page. */
(function () {
  "use strict";

  const API = "/api/v1/runs";
  const PART_BYTES = 8 << 20;
  const PAUSES_MS = [500, 1000, 2000, 4000, 8000, 16000];
  const byId = (id) => document.getElementById(id);
  let busy = false;

  /* File inputs are outside of the page's tree, which Dash recreates. */
  function chooser(id, folder) {
    const input = document.createElement("input");
    input.type = "file";
    input.id = id;
    input.multiple = true;
    input.hidden = true;
    input.webkitdirectory = folder;
    input.addEventListener("change", () => {
      const files = Array.from(input.files, (file) => ({
        path: file.webkitRelativePath || file.name,
        file,
      }));
      input.value = "";
      send(files);
    });
    document.body.append(input);
  }
  chooser("upload-files", false);
  chooser("upload-folder", true);

  function readAll(reader) {
    return new Promise((resolve, reject) => {
      const found = [];
      /* A reader returns at most 100 entries per call; an empty list is the end. */
      const next = () =>
        reader.readEntries((entries) => {
          if (!entries.length) return resolve(found);
          found.push(...entries);
          next();
        }, reject);
      next();
    });
  }

  async function walk(entry) {
    const path = entry.fullPath.replace(/^\/+/, "");
    if (entry.isFile) {
      const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
      return [{ path, file }];
    }
    const children = await readAll(entry.createReader());
    return (await Promise.all(children.map(walk))).flat();
  }

  async function dropped(transfer) {
    /* Read before the first await: the list is emptied after the event. */
    const items = Array.from(transfer.items).filter((item) => item.kind === "file");
    const taken = items.map((item) => {
      const entry = item.webkitGetAsEntry();
      if (entry) return walk(entry);
      const file = item.getAsFile();
      return file ? [{ path: file.name, file }] : [];
    });
    return (await Promise.all(taken)).flat();
  }

  function showStatus(text, failed) {
    const status = byId("upload-status");
    if (!status) return;
    status.textContent = text;
    status.classList.toggle("failed", Boolean(failed));
  }

  function progress(done, total) {
    const bar = byId("upload-bar");
    const track = byId("upload-track");
    if (!bar || !track) return;
    track.classList.toggle("active", total > 0);
    bar.style.width = total > 0 ? (100 * done) / total + "%" : "0";
  }

  const megabytes = (bytes) => (bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0);

  const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

  /* Temporary errors worth a retry: a lost connection, a busy server. */
  class TemporaryError extends Error {}
  const RETRY_STATUS = [408, 429, 500, 502, 503, 504];

  async function withRetries(ask) {
    for (let failures = 0; ; failures++) {
      try {
        return await ask();
      } catch (error) {
        if (!(error instanceof TemporaryError) || failures === PAUSES_MS.length) throw error;
        await pause(PAUSES_MS[failures]);
      }
    }
  }

  async function request(url, options) {
    let response;
    try {
      response = await fetch(url, options);
    } catch (error) {
      throw new TemporaryError("connection lost; reload the page to start again");
    }
    const answer = await response.json().catch(() => ({}));
    const message = answer.error || "the server answered " + response.status;
    if (RETRY_STATUS.includes(response.status)) throw new TemporaryError(message);
    return { response, answer, message };
  }

  async function post(url, body) {
    const { response, answer, message } = await withRetries(() =>
      request(url, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
      })
    );
    if (!response.ok) throw new Error(message);
    return answer;
  }

  const readOffset = (response) => ({
    bytes: Number(response.headers.get("Upload-Offset") || 0),
    complete: response.headers.get("Upload-Complete") === "?1",
  });

  /* What the server has stored of a file. */
  async function fetchOffset(url) {
    const { response, message } = await withRetries(() => request(url, { method: "HEAD" }));
    if (response.status === 404) return { bytes: 0, complete: false };
    if (!response.ok) throw new Error(message);
    return readOffset(response);
  }

  /* Digests are available only on localhost and by https. */
  async function digestOf(part) {
    if (!window.crypto || !window.crypto.subtle) return {};
    const digest = await window.crypto.subtle.digest("SHA-256", await part.arrayBuffer());
    const text = btoa(String.fromCharCode(...new Uint8Array(digest)));
    return { "Content-Digest": "sha-256=:" + text + ":" };
  }

  async function append(url, file, offset) {
    const part = file.slice(offset, offset + PART_BYTES);
    const ends = offset + part.size >= file.size;
    const { response, message } = await request(url, {
      method: "PATCH",
      headers: {
        "Upload-Offset": String(offset),
        "Upload-Complete": ends ? "?1" : "?0",
        ...(await digestOf(part)),
      },
      body: part,
    });
    const knows = response.headers.has("Upload-Offset");
    if (response.ok || (response.status === 409 && knows)) return readOffset(response);
    /* Damaged or cut off in transit, or an earlier request still has the file locked. */
    if (knows || response.headers.has("Retry-After")) throw new TemporaryError(message);
    throw new Error(message);
  }

  async function sendFile(url, file, onProgress) {
    let stored = { bytes: 0, complete: false };
    let failures = 0;
    while (!stored.complete) {
      try {
        stored = await append(url, file, stored.bytes);
        failures = 0;
      } catch (error) {
        if (!(error instanceof TemporaryError) || failures === PAUSES_MS.length) throw error;
        await pause(PAUSES_MS[failures++]);
        stored = await fetchOffset(url);
      }
      onProgress(stored.bytes);
    }
  }

  /* Name and tags of the form; without a name the server chooses one by the files. */
  function readLabels() {
    const name = byId("upload-name").value.trim();
    const tags = window.stepsplitParseTags(byId("upload-tags").value, ",");
    return name ? { name, tags } : { tags };
  }

  const folderOf = (path) => path.split("/").slice(0, -1).join("/");
  const isTrace = (path) => /rank[-_. ]?[0-9]/i.test(path.split("/").pop());

  /* Of a run.json that is opened before it is sent; that of 100,000 ranks has 20 MB. */
  const MAX_RUN_FILE_BYTES = 64 << 20;

  /* The recordings of the files, by folder, as split_recordings of upload.py: folders that have
     traces of the same ranks with the same names; other files belong to all of them. */
  function splitRecordings(files) {
    const folders = new Map();
    for (const { path } of files.filter((item) => isTrace(item.path))) {
      const name = path.split("/").pop();
      folders.set(name, (folders.get(name) || new Set()).add(folderOf(path)));
    }
    const repeated = [...folders.values()].filter((found) => found.size > 1);
    const places = repeated.flatMap((found) => [...found].map((one) => one.split("/").filter(Boolean)));
    if (!places.length) return new Map();
    let depth = 0;
    while (places.every((parts) => parts.length > depth && parts[depth] === places[0][depth])) depth++;
    const headOf = (parts) => parts.slice(0, depth + 1).join("/");
    const top = places[0].slice(0, depth).join("/");
    const runs = new Map(places.map((parts) => [headOf(parts), []]).sort());
    for (const item of files) {
      const folder = folderOf(item.path);
      const head = folder === top && !isTrace(item.path) ? null : headOf(folder.split("/").filter(Boolean));
      for (const [name, own] of runs) if (head === name || !runs.has(head)) own.push(item);
    }
    return runs;
  }

  /* As FOLDERS_OF_A_RECORDING of run_spec.py: what lies in them is of the folder around them. */
  const FOLDERS_OF_A_RECORDING = ["nccl", "memory", "tables", "samples", "ranks", "hosts", "launches"];
  function recordingOf(path) {
    const folder = folderOf(path);
    return FOLDERS_OF_A_RECORDING.includes(folder.split("/").pop()) ? folderOf(folder) : folder;
  }

  /* Whether the traces lie in the folders of different roles of one job, by their run.json or
     a rank's record: of a process group of several roles only that of rank 0 has a run.json. */
  async function areRoles(files) {
    const folders = new Set(files.filter((item) => isTrace(item.path)).map((item) => recordingOf(item.path)));
    const roles = new Set();
    const names = new Set();
    for (const folder of folders) {
      const own = files.filter((one) => folderOf(one.path) === folder);
      const nameOf = (one) => one.path.split("/").pop();
      const item =
        own.find((one) => nameOf(one) === "run.json") ||
        own.find((one) => /^rank[0-9]+_record\.json$/.test(nameOf(one)));
      if (!item || item.file.size > MAX_RUN_FILE_BYTES) return false;
      try {
        const spec = JSON.parse(await item.file.text());
        if (!spec || !spec.role) return false;
        roles.add(spec.role);
        names.add(spec.name || spec.run);
      } catch {
        return false;
      }
    }
    return names.size === 1 && roles.size === folders.size;
  }

  /* Asks whether several recordings become a run each. Resolves to the runs to be, with their files
     and, if several, the name of their folder; [] to cancel. */
  async function askWhichRuns(files) {
    const runs = splitRecordings(files);
    const place = byId("upload-question");
    if (!runs.size || !place || (await areRoles(files))) return [{ files }];
    return new Promise((resolve) => {
      const text = document.createElement("p");
      text.textContent = "These are " + runs.size + " recordings: " + [...runs.keys()].join(", ");
      const choices = [
        ["A run for each", [...runs].map(([path, own]) => ({ folder: path.split("/").pop(), files: own }))],
        ["All in one run", [{ files }]],
        ["Cancel", []],
      ].map(([label, chosen]) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = label;
        button.addEventListener("click", () => {
          place.replaceChildren();
          resolve(chosen);
        });
        return button;
      });
      place.replaceChildren(text, ...choices);
      choices[0].focus();
    });
  }

  async function sendAll(files, labels) {
    const total = files.reduce((sum, item) => sum + item.file.size, 0);
    const run = await post(API, labels);
    let before = 0;
    for (const [index, item] of files.entries()) {
      const url = API + "/" + run.id + "/files/" + item.path.split("/").map(encodeURIComponent).join("/");
      await sendFile(url, item.file, (loaded) => {
        progress(before + loaded, total);
        showStatus(
          "file " + (index + 1) + " of " + files.length + ": " + item.path + ", " +
            megabytes(before + loaded) + " of " + megabytes(total) + " MB"
        );
      }).catch((error) => {
        throw new Error(item.path + ": " + error.message);
      });
      before += item.file.size;
    }
    await post(API + "/" + run.id + "/finish", {});
    return run.id;
  }

  /* One of several runs is named by its folder; a name of the form comes before it. */
  async function sendRuns(runs) {
    const labels = readLabels();
    const ids = [];
    for (const { folder, files } of runs) {
      const name = [labels.name, folder].filter(Boolean).join(" ");
      ids.push(await sendAll(files, name ? { ...labels, name } : labels));
    }
    window.location.assign(ids.length === 1 ? "/run/" + ids[0] : "/");
  }

  /* The stated mesh is a file of the upload; null if the field is invalid. */
  function meshFile() {
    const field = byId("upload-mesh");
    const text = field ? field.value.trim() : "";
    if (field && !field.reportValidity()) return null;
    return text ? [{ path: "mesh.txt", file: new File([text], "mesh.txt") }] : [];
  }

  async function send(files) {
    /* Skip files such as .DS_Store. */
    const wanted = files.filter((item) => !item.path.split("/").some((part) => part.startsWith(".")));
    if (busy) return showStatus("another upload is running", true);
    if (!wanted.length) return showStatus("no files to upload: the folder is empty", true);
    const mesh = meshFile();
    if (!mesh) return showStatus("the mesh is axes and sizes such as pp=2,dp=2,tp=2", true);
    busy = true;
    showStatus("starting");
    try {
      const runs = await askWhichRuns([...wanted, ...mesh]);
      if (runs.length) await sendRuns(runs);
      else showStatus("");
    } catch (error) {
      progress(0, 0);
      showStatus(error.message, true);
    } finally {
      busy = false;
    }
  }

  const zoneOf = (event) => event.target.closest && event.target.closest("#drop-zone");

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("#choose-files, #choose-folder");
    if (button) byId(button.id === "choose-files" ? "upload-files" : "upload-folder").click();
  });
  document.addEventListener("dragover", (event) => {
    /* On the whole page: a file dropped outside of the zone must not replace the page. */
    event.preventDefault();
    const zone = byId("drop-zone");
    if (zone) zone.classList.toggle("over", Boolean(zoneOf(event)));
  });
  document.addEventListener("drop", async (event) => {
    event.preventDefault();
    const zone = zoneOf(event);
    if (!zone) return;
    zone.classList.remove("over");
    try {
      send(await dropped(event.dataTransfer));
    } catch (error) {
      showStatus("cannot read the files: " + error.message, true);
    }
  });
})();
