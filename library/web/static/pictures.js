// The pictures of a dataset: filters, bulk edits of tags, and the editor of one caption.
"use strict";
(() => {
  const key = encodeKey(byId("dataset").dataset.key), editor = byId("editor"), caption = byId("caption");
  const grid = new PictureGrid(byId("grid"), key, (position) => openEditor(position));
  let opened = null, numUndo = 0, isBusy = false;

  const filter = () => ({ text: byId("text").value, warning: byId("warning").value, bucket: byId("bucket").value });

  async function applyFilter() {
    await grid.select(new URLSearchParams(filter()).toString());
    byId("count").textContent = grid.total === 1 ? tr("1 picture") : tr("{0} pictures", grid.total.toLocaleString());
  }

  function fill(select, first, options) {
    const chosen = select.value;
    select.replaceChildren(make("option", { value: "", textContent: first }),
      ...options.map(([value, text]) => make("option", { value, textContent: text })));
    select.value = chosen;
    if (select.selectedIndex < 0) select.value = "";
    select.hidden = !options.length;
  }

  function showState(state) {
    byId("summary").textContent = tr("{0} pictures, scanned in {1} s", state.total.toLocaleString(), state.seconds.toFixed(1));
    fill(byId("warning"), tr("all, with and without warnings"), state.warnings.map((w) => [w.id, `${w.text}: ${w.count}`]));
    fill(byId("bucket"), tr("all buckets"), state.buckets.map((b) => [b.id, `${b.id}: ${b.count}`]));
    byId("known-tags").replaceChildren(...state.tags.map((t) => make("option", { value: t.tag, textContent: `${t.count}` })));
    byId("notes").replaceChildren(...state.notes.map((text) => make("li", { textContent: text })));
    byId("notes-part").hidden = !state.notes.length;
    showUndo(state.num_undo);
  }

  function showUndo(count) {
    numUndo = count;
    byId("undo").textContent = count ? tr("Undo ({0})", count) : tr("Undo");
    enableButtons();
  }

  function enableButtons() {
    byId("undo").disabled = isBusy || !numUndo;
    byId("rescan").disabled = byId("apply-tags").disabled = isBusy;
  }

  // Disable what begins a scan, an edit or an undo, from the click until its outcome is shown.
  async function whileBusy(action) {
    isBusy = true;
    enableButtons();
    try { return await action(); }
    finally { isBusy = false; enableButtons(); }
  }

  async function start() {
    byId("workspace").hidden = true;
    await follow();
    const state = await ask(`/api/pictures/state/${key}`);
    showProblems(byId("problems"), state.problems);
    byId("workspace").hidden = !state.total;
    showState(state);
    if (state.total) await applyFilter();
    const work = await ask(`/api/pictures/work/${key}`);
    if (work.is_running) await finish(work);  // an edit that another tab began
  }

  // Show how far the scan or an edit is until it ends; return what came of it.
  function follow() {
    return new Promise((done) => poll(async () => {
      const work = await ask(`/api/pictures/work/${key}`), bar = byId("work-bar");
      byId("work").hidden = !work.is_running;
      if (!work.is_running) { done(work); return null; }
      if (work.total) { bar.max = work.total; bar.value = work.completed; } else bar.removeAttribute("value");
      byId("work-text").textContent = work.total ? tr("{0}: {1} of {2}", work.title, work.completed.toLocaleString(), work.total.toLocaleString()) : `${work.title}…`;
      byId("work-stop").disabled = work.is_stopping;
      return 300;
    }));
  }

  async function finish(work) {
    const end = work.is_running ? await follow() : work;
    await refresh();
    if (end.problems.length) throw new Refusal(end.problems);
    return end;
  }

  byId("work-stop").addEventListener("click", () => attempt(async () => {
    byId("work-stop").disabled = true;
    await ask(`/api/pictures/stop/${key}`, {});
  }));

  async function refresh() {
    showState(await ask(`/api/pictures/state/${key}`));
    await applyFilter();
  }

  async function attempt(action, holder = byId("problems")) {
    const focused = document.activeElement;
    try { holder.replaceChildren(); return await action(); }
    catch (error) { showProblems(holder, listProblems(error)); return null; }
    finally { if (focused !== document.body) returnFocus(focused, byId("grid")); }
  }

  // Tags of all pictures that the filter selects.
  const edit = (isDry) => ({ ...filter(), action: byId("tag-action").value, tag: byId("tag").value, dry_run: isDry,
                             replacement: byId("replacement").value, is_at_start: byId("at-start").checked });

  byId("tag-action").addEventListener("change", (event) => {
    byId("replacement").hidden = event.target.value !== "replace";
    byId("start-part").hidden = event.target.value !== "add";
  });
  byId("try-tags").addEventListener("click", () => attempt(async () => {
    const answer = await ask(`/api/pictures/tags/${key}`, edit(true));
    byId("tags-result").textContent = tr("{0} captions would change", answer.count.toLocaleString());
    byId("examples").replaceChildren(...answer.examples.map((each) => make("div", {},
      make("strong", { textContent: each.name }), " ", make("del", { textContent: each.before }), " ",
      make("ins", { textContent: each.after }))));
  }));
  byId("tags-form").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(() => whileBusy(async () => {
      byId("tags-result").textContent = "";
      byId("examples").replaceChildren();
      const { count } = await finish(await ask(`/api/pictures/tags/${key}`, edit(false)));
      byId("tags-result").textContent = count === 1 ? tr("1 caption changed") : tr("{0} captions changed", count.toLocaleString());
    }));
  });
  byId("undo").addEventListener("click", () => attempt(() => whileBusy(
    async () => finish(await ask(`/api/pictures/undo/${key}`, {})))));
  byId("rescan").addEventListener("click", () => attempt(() => whileBusy(
    async () => { await ask(`/api/pictures/scan/${key}`, {}); await start(); })));

  // One picture.
  async function openEditor(position) {
    if (position < 0 || position >= grid.total) return;
    const row = await grid.getRow(position);
    opened = { position, row };
    byId("editor-name").textContent = row.name;
    const crop = row.is_random_crop ? tr("cropped at random") : tr("cropped in the middle");
    byId("editor-facts").textContent = tr("{0}, trained at {1}", row.size.join("×"), row.bucket.join("×"))
      + (row.crop[2] < 0.999 || row.crop[3] < 0.999 ? `, ${crop}` : "") + tr(", {0} times per epoch", row.repeats)
      + (row.is_reg ? tr(", regularization") : "");
    byId("editor-warnings").replaceChildren(...Object.values(row.warnings).map((text) => make("span", { className: "tag", textContent: text })));
    caption.value = row.caption;
    caption.readOnly = !row.is_editable;
    byId("save").disabled = !row.is_editable;
    byId("editor-problems").replaceChildren();
    if (!editor.open) editor.showModal();
    const holder = byId("editor-picture");
    holder.replaceChildren(buildShot(row, key, holder.clientWidth, Math.min(innerHeight * 0.75, 900), true));
    grid.choose(position);
    caption.focus();
  }

  async function save() {
    const { row } = opened, text = caption.value;
    if (text === row.caption || !row.is_editable) return true;
    return attempt(async () => {
      const body = { captions: { [row.index]: text }, known: { [row.index]: row.caption } };
      const answer = await ask(`/api/pictures/captions/${key}`, body).catch(async (error) => {
        await showRow();  // with what another window has written
        throw error;
      });
      showUndo(answer.num_undo);
      return showRow(text);
    }, byId("editor-problems"));
  }

  // Ask again for the picture that is open; return true.
  async function showRow(written) {
    const { position, row } = opened;
    const page = await ask(`/api/pictures/rows/${key}?${new URLSearchParams({ ...filter(), from: position, count: 1 })}`);
    const isSelected = page.rows[0]?.index === row.index;
    if (isSelected) grid.update(position, page.rows[0]);
    else await applyFilter();  // it is no longer selected
    opened.row = { ...row, caption: isSelected ? page.rows[0].caption : written ?? row.caption };
    return true;
  }

  const go = async (by) => { if (await save()) await openEditor(opened.position + by); };
  byId("save").addEventListener("click", async () => { if (await save()) editor.close(); });
  const mayClose = () => caption.value === opened.row.caption || confirm(tr("Close without saving the caption?"));
  byId("close").addEventListener("click", () => { if (mayClose()) editor.close(); });
  editor.addEventListener("cancel", (event) => { if (!mayClose()) event.preventDefault(); });
  byId("previous").addEventListener("click", () => go(-1));
  byId("next").addEventListener("click", () => go(1));
  editor.addEventListener("close", () => byId("grid").focus({ preventScroll: true }));
  editor.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); go(1); }
    if (event.altKey && event.key === "ArrowLeft") { event.preventDefault(); go(-1); }
    if (event.altKey && event.key === "ArrowRight") { event.preventDefault(); go(1); }
  });

  let timer;
  byId("text").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(applyFilter, 200); });
  for (const id of ["warning", "bucket"]) byId(id).addEventListener("change", applyFilter);
  attempt(() => whileBusy(start));
})();
