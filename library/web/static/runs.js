// The list of runs: filter, selection for the comparison, and rows that are kept up to date.
"use strict";
(() => {
  const rows = byId("rows"), filter = byId("filter"), compare = byId("compare");
  const chosen = new Set();

  function applyState() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows.rows) {
      const text = row.textContent.toLowerCase(), box = row.querySelector("input");
      row.hidden = !words.every((word) => text.includes(word));
      box.checked = chosen.has(box.value);
    }
    compare.disabled = chosen.size < 2;
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  }

  rows.addEventListener("change", (event) => {
    chosen[event.target.checked ? "add" : "delete"](event.target.value);
    applyState();
  });
  filter.addEventListener("input", applyState);
  compare.addEventListener("click", () => {
    location.href = "/runs/compare?" + new URLSearchParams([...chosen].map((key) => ["run", key]));
  });

  poll(async () => {
    const html = await ask("/api/runs/rows");
    if (!rows.contains(document.activeElement)) {
      rows.innerHTML = html;  // from our own template, which escapes every name
      rows.closest(".card").hidden = !rows.rows.length;
      applyState();
    }
    return 4000;
  });
})();
