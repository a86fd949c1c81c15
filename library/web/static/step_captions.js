// Captions by hand, a word in all of them, or by a model; each change can be undone.
"use strict";
(() => {
  const dataset = encodeKey(byId("captions").dataset.dataset), step = encodeKey(byId("project").dataset.key), PAGE = 60;
  let total = 0;
  const api = (name) => `/api/pictures/${name}/${dataset}`;
  const fail = (error) => showProblems(byId("step-problems"), listProblems(error));

  async function load() {
    const state = await ask(api("state"));
    if (!state.is_ready) { await followWork(); return load(); }
    if (state.problems.length) { showProblems(byId("step-problems"), state.problems); return; }
    byId("undo").disabled = !state.num_undo;
    byId("undo").textContent = state.num_undo ? tr("Undo ({0})", state.num_undo) : tr("Undo");
    const missing = state.warnings.find((each) => each.id === "no caption")?.count ?? 0;
    byId("summary").textContent = missing ? tr("{0} of {1} have no caption.", missing, state.total) : tr("All {0} have a caption.", state.total);
    const rows = await readRows(0, Math.max(PAGE, byId("caption-list").children.length));
    byId("caption-list").replaceChildren(...rows);
    byId("more").hidden = rows.length >= total;
  }

  async function readRows(from, count) {
    const rows = [];
    while (rows.length < count) {
      const answer = await ask(`${api("rows")}?${new URLSearchParams({ from: from + rows.length, count: Math.min(count - rows.length, 400) })}`);
      total = answer.total;
      rows.push(...answer.rows.map(makeRow));
      if (from + rows.length >= total) break;
    }
    return rows;
  }
  byId("more").addEventListener("click", async () => {
    try {
      const list = byId("caption-list"), rows = await readRows(list.children.length, PAGE);
      list.append(...rows);
      byId("more").hidden = list.children.length >= total;
      rows[0]?.querySelector("textarea").focus();
    } catch (error) { fail(error); }
  });

  function makeRow(row) {
    const id = `c-${row.index}`, saved = make("span", { className: "saved" });
    saved.setAttribute("role", "status");
    const area = make("textarea", { id, value: row.caption, rows: 2, disabled: !row.is_editable });
    const frame = make("div", { className: "frame" }, make("img", { src: `/thumbnail/${row.index}/${dataset}?v=${row.hash}`, alt: "", loading: "lazy" }));
    const wrong = make("p", { className: "wrong", hidden: true });
    let known = row.caption;
    area.addEventListener("change", async () => {
      try {
        await ask(api("captions"), { captions: { [row.index]: area.value }, known: { [row.index]: known } });
        known = area.value;
        saved.textContent = tr("saved");
        wrong.hidden = true;
        const state = await ask(api("state"));
        byId("undo").disabled = !state.num_undo;
        byId("undo").textContent = tr("Undo ({0})", state.num_undo);
      } catch (error) { wrong.hidden = false; wrong.textContent = listProblems(error).join("\n"); saved.textContent = ""; }
    });
    area.addEventListener("input", () => { saved.textContent = ""; });
    area.addEventListener("keydown", (event) => {  // Ctrl+Enter goes to the next one, which saves this one
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      (line.nextElementSibling?.querySelector("textarea") ?? byId("next-step")).focus();
    });
    const line = make("div", { className: "caption-row" }, frame, make("div", {},
      make("label", { htmlFor: id }, make("span", { textContent: row.name }), saved), area, wrong));
    return line;
  }

  async function followWork() {
    byId("work").hidden = false;
    for (;;) {
      const work = await ask(api("work"));
      if (!work.is_running) { byId("work").hidden = true; return work; }
      const bar = byId("work-bar");
      if (work.total) { bar.max = work.total; bar.value = work.completed; } else bar.removeAttribute("value");
      byId("work-text").textContent = work.total ? tr("{0}: {1} of {2}", work.title, work.completed, work.total) : `${work.title}…`;
      await new Promise((done) => setTimeout(done, 300));
    }
  }

  async function run(start, describe, button) {
    showProblems(byId("step-problems"), []);
    byId("result").textContent = "";
    button.disabled = true;
    try {
      await start();
      const work = await followWork();
      await load();
      if (work.problems?.length) showProblems(byId("step-problems"), work.problems);
      else byId("result").textContent = describe(work.count ?? 0);
    } catch (error) { fail(error); }
    button.disabled = button.id === "undo" && !/\d/.test(button.textContent);
    returnFocus(button, document.querySelector("#caption-list textarea"));
  }

  byId("work-stop").addEventListener("click", () => ask(api("stop"), {}).catch(fail));
  byId("undo").addEventListener("click", () => run(() => ask(api("undo"), {}), (number) => (number === 1 ? tr("1 caption put back") : tr("{0} captions put back", number)), byId("undo")));
  byId("tag-action").addEventListener("change", (event) => {
    byId("replacement").hidden = event.target.value !== "replace";
    byId("start-part").hidden = event.target.value !== "add";
  });
  byId("tags-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const body = { action: byId("tag-action").value, tag: byId("tag").value, replacement: byId("replacement").value, is_at_start: byId("at-start").checked };
    run(() => ask(api("tags"), body), (number) => (number === 1 ? tr("1 caption changed") : tr("{0} captions changed", number)), byId("apply-tags"));
  });
  byId("model-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const body = { model: byId("caption-model").value, trigger_word: byId("trigger").value, if_exists: byId("if-exists").value };
    run(() => ask(`/api/train/caption/${step}`, body), (number) => (number === 1 ? tr("1 caption written") : tr("{0} captions written", number)), byId("write-captions"));
  });

  load().catch(fail);
})();
