// The list of runs: filter, selection for the comparison, and rows that are kept up to date.
"use strict";
(() => {
  const rows = byId("rows"), filter = byId("filter"), compare = byId("compare"), favorites = byId("favorites");
  const chosen = new Set();

  function applyState() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows.rows) {
      const text = row.textContent.toLowerCase(), box = row.querySelector("input");
      const isWanted = favorites.getAttribute("aria-pressed") === "false" || "favorite" in row.dataset;
      row.hidden = !isWanted || !words.every((word) => text.includes(word));
      box.checked = chosen.has(box.value);
    }
    compare.disabled = chosen.size < 2;
    byId("delete").disabled = !chosen.size;
    compare.textContent = chosen.size ? tr("Compare {0}", chosen.size) : tr("Compare");
  }

  rows.addEventListener("change", (event) => {
    chosen[event.target.checked ? "add" : "delete"](event.target.value);
    applyState();
  });
  filter.addEventListener("input", applyState);
  compare.addEventListener("click", () => {
    location.href = "/runs/compare?" + new URLSearchParams([...chosen].map((key) => ["run", key]));
  });

  favorites.addEventListener("click", () => {
    favorites.setAttribute("aria-pressed", favorites.getAttribute("aria-pressed") === "false");
    applyState();
  });

  async function showRows() {
    rows.innerHTML = await ask("/api/runs/rows");  // from our own template, which escapes every name
    rows.closest(".card").hidden = !rows.rows.length;
    for (const key of [...chosen]) if (![...rows.rows].some((row) => row.dataset.key === key)) chosen.delete(key);
    applyState();
  }

  async function showDeleted() {
    byId("deleted").innerHTML = await ask("/api/deleted");
    byId("deleted-part").hidden = !byId("deleted").rows.length;
  }

  // Does it, shows both lists as they are now, and says what was done or what is wrong.
  let isChanging = false;
  async function change(action, text) {
    if (isChanging) return;  // a double click is one
    isChanging = true;
    try {
      await action();
      byId("deleted-line").hidden = !text;
      byId("deleted-line").textContent = text;
      showProblems(byId("job-problems"), []);
      await Promise.all([showRows(), showDeleted()]);
    } catch (error) { showProblems(byId("job-problems"), listProblems(error)); }
    isChanging = false;
    returnFocus(byId("deleted").querySelector("button"), filter);
  }

  byId("delete").addEventListener("click", () => {
    const keys = [...chosen], names = keys.map((key) => key.split("/").at(-1)).join(", ");
    change(async () => {
      await ask("/api/runs/delete", { runs: keys });
      byId("deleted-part").open = true;
    }, tr("Deleted: {0}. Put back brings the files back.", names));
  });
  byId("deleted").addEventListener("click", (event) => {
    const button = event.target.closest("button"), entry = button?.closest("tr").dataset.entry;
    if (!entry) return;
    if ("restore" in button.dataset) change(() => ask("/api/deleted/restore", { entry }), tr("The files are back."));
    else if (confirm(tr("Delete these files for good?"))) change(() => ask("/api/deleted/remove", { entry }), "");
  });

  if (location.hash === "#deleted-part") byId("deleted-part").open = true;  // from the page of a run that was deleted
  poll(async () => {
    if (!rows.contains(document.activeElement)) await showRows();
    return 4000;
  });
})();
