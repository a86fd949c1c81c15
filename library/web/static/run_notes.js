// The note of a run, and its deletion.
"use strict";
(() => {
  const run = byId("run").dataset.key, note = byId("note"), state = byId("note-state");
  let saved = note.value;

  async function save() {
    try {
      await ask("/api/runs/notes", { run, note: note.value });
      saved = note.value;
      state.textContent = tr("saved");
    } catch (error) { state.textContent = listProblems(error).join("\n"); }
  }
  byId("save-note").addEventListener("click", save);
  note.addEventListener("input", () => { state.textContent = note.value === saved ? "" : tr("not saved yet"); });
  note.addEventListener("keydown", (event) => { if (event.key === "Enter" && event.ctrlKey) save(); });
  addEventListener("beforeunload", (event) => { if (note.value !== saved) event.preventDefault(); });

  document.addEventListener("click", async (event) => {
    if (event.target.id !== "delete") return;
    try {
      await ask("/api/runs/delete", { runs: [run] });
      saved = note.value;
      location.href = "/runs#deleted-part";
    } catch (error) { showProblems(byId("job-problems"), listProblems(error)); }
  });
})();
