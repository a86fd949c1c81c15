// Pictures and folders that are dropped or chosen, or a folder of the server's disk: each file is one request.
"use strict";
const stepKey = byId("project").dataset.key;
(() => {
  const TYPES = /\.(png|jpe?g|webp|bmp|avif|jxl|txt|caption)$/i, TOGETHER = 3;
  const drop = byId("drop");
  const showStepProblems = (lines) => showProblems(byId("step-problems"), lines);

  async function readEntry(entry, path, found) {
    if (entry.isFile) {
      const file = await new Promise((done, fail) => entry.file(done, fail));
      found.push({ file, path: path + entry.name });
      return;
    }
    const reader = entry.createReader();
    for (;;) {  // a call returns at most 100 entries
      const entries = await new Promise((done, fail) => reader.readEntries(done, fail));
      if (!entries.length) return;
      for (const each of entries) await readEntry(each, `${path}${entry.name}/`, found);
    }
  }

  // Files of a system that nobody has made, such as .DS_Store, are passed over in silence.
  const isHidden = (path) => path.split("/").some((part) => part.startsWith(".") || part === "Thumbs.db" || part === "desktop.ini");

  async function upload(files) {
    const wanted = files.filter(({ path }) => !isHidden(path));
    if (!wanted.length) { showStepProblems([tr("There were no files in it.")]); return; }
    let key = stepKey;
    if (!key) {
      const folder = wanted[0].path.includes("/") ? wanted[0].path.split("/")[0] : "";
      const name = /^\d+_/.test(folder) ? folder.replace(/^\d+_/, "") : folder;
      key = (await ask("/api/train/new", { name })).key;
    }
    const refused = [];
    let next = 0, done = 0;
    const bar = byId("progress");
    byId("progress-part").hidden = false;
    const work = async () => {
      while (next < wanted.length) {
        const { file, path } = wanted[next++];
        try { await send(key, file, path); } catch (error) { refused.push(...listProblems(error)); }
        done += 1;
        bar.max = wanted.length;
        bar.value = done;
        byId("progress-text").textContent = tr("{0} of {1} files", done, wanted.length);
      }
    };
    await Promise.all(Array.from({ length: TOGETHER }, work));
    sessionStorage.setItem("refused", JSON.stringify(refused));
    if (location.pathname === `/train/pictures/${encodeKey(key)}`) location.reload();
    else location.href = `/train/pictures/${encodeKey(key)}`;
  }

  async function send(key, file, path) {
    const answer = await fetch(`/api/train/upload/${encodeKey(key)}?${new URLSearchParams({ path })}`, { method: "POST", body: file });
    if (answer.ok) return;
    const value = await answer.json();
    throw new Refusal(value.problems ? value.problems.map((each) => each.line) : [`${path}: ${value.error}`]);
  }

  const start = (files) => upload(files).catch((error) => showStepProblems(listProblems(error)));
  const take = (input) => start([...input.files].map((file) => ({ file, path: file.webkitRelativePath || file.name })));

  if (drop) {
    if (stepKey) drop.classList.add("small-drop");
    byId("choose-files").addEventListener("click", () => byId("files").click());
    byId("choose-folder").addEventListener("click", () => byId("folder").click());
    byId("files").addEventListener("change", (event) => take(event.target));
    byId("folder").addEventListener("change", (event) => take(event.target));
    for (const name of ["dragenter", "dragover"]) drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
    drop.addEventListener("dragleave", () => drop.classList.remove("over"));
    drop.addEventListener("drop", async (event) => {
      event.preventDefault();
      drop.classList.remove("over");
      const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean), found = [];
      for (const entry of entries) await readEntry(entry, "", found);
      start(found.length ? found : [...event.dataTransfer.files].map((file) => ({ file, path: file.name })));
    });
    // A file that misses the field would replace the page.
    for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
  }

  const refused = JSON.parse(sessionStorage.getItem("refused") || "[]");
  sessionStorage.removeItem("refused");
  if (refused.length) {
    const list = refused.slice(0, 20).map((text) => make("p", { className: "notice", textContent: tr("Not taken: {0}", text) }));
    if (refused.length > 20) list.push(make("p", { textContent: tr("… and {0} more", refused.length - 20) }));
    byId("refused").append(...list);
  }

  byId("choose-machine")?.addEventListener("click", async (event) => {
    const part = byId("machine");
    part.hidden = !part.hidden;
    event.target.setAttribute("aria-expanded", !part.hidden);
    if (part.hidden) return;
    try {
      const { folders } = await ask("/api/train/folders");
      byId("machine-folders").replaceChildren(...folders.map((each) => {
        const button = make("button", { type: "button", className: "option-card" }, make("span", {}, make("strong", { textContent: each.path }),
          make("span", { className: "sentence", textContent: each.count === 1 ? tr("1 picture") : tr("{0} pictures", each.count) })));
        button.addEventListener("click", async () => {
          try { location.href = `/train/pictures/${encodeKey((await ask("/api/train/new", { folder: each.key })).key)}`; }
          catch (error) { showStepProblems(listProblems(error)); }
        });
        return button;
      }));
      if (!folders.length) byId("machine-folders").replaceChildren(make("p", { className: "soft", textContent: tr("None below the opened folders.") }));
    } catch (error) { showStepProblems(listProblems(error)); }
  });
})();
