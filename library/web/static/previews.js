// Previews as a grid, prompt by step, with a slider over the steps and two pictures over each other at full size.
"use strict";
const Previews = (() => {
  const MAX_COLUMNS = 7;
  let data = { columns: [], rows: [] }, signature = "", open = null;
  const slider = byId("preview-step"), viewer = byId("viewer");

  async function load(key) {
    const answer = await ask(`/api/previews/${key}`);
    const isNew = JSON.stringify(answer);
    if (isNew === signature) return;
    const wasAtEnd = +slider.value >= data.columns.length - 1;
    [data, signature] = [answer, isNew];
    slider.max = Math.max(0, data.columns.length - 1);
    if (wasAtEnd) slider.value = slider.max;
    byId("preview-bar").hidden = data.columns.length < 2;
    draw();
  }

  // The first column, and evenly spaced ones up to the step of the slider.
  function chooseColumns() {
    const last = +slider.value, count = Math.min(MAX_COLUMNS, last + 1);
    if (count <= 1) return data.columns.slice(0, 1);
    return [...Array(count).keys()].map((n) => data.columns[Math.round(n * last / (count - 1))]);
  }

  function draw() {
    const holder = byId("previews");
    if (!data.rows.length) {
      holder.replaceChildren(make("p", { className: "empty", textContent: "No previews yet. They need sample_prompts." }));
      return;
    }
    const columns = chooseColumns(), focused = document.activeElement?.dataset?.picture;
    byId("preview-label").textContent = data.columns[+slider.value].label;
    const head = make("tr", {}, make("th"), ...columns.map((c) => make("th", { textContent: c.label })));
    const rows = data.rows.map((row, rowNumber) => make("tr", {}, make("td", { textContent: row.prompt }),
      ...columns.map((column) => {
        if (!row.images[column.id]) return make("td");
        const image = make("img", { src: row.images[column.id], alt: `${row.prompt}, ${column.label}`, loading: "lazy" });
        const button = make("button", { className: "picture", title: "Compare at full size" }, image);
        button.dataset.picture = `${rowNumber} ${column.id}`;
        button.addEventListener("click", () => show(rowNumber, column.id));
        return make("td", {}, button);
      })));
    holder.replaceChildren(make("table", {}, make("tbody", {}, head, ...rows)));
    if (focused) returnFocus(holder.querySelector(`[data-picture="${focused}"]`), slider);
  }

  function show(rowNumber, columnId) {
    const row = data.rows[rowNumber], columns = data.columns.filter((column) => row.images[column.id]);
    const left = open && row.images[open.left] ? open.left : columns[0].id;
    open = { row: rowNumber, left, right: columnId };
    byId("viewer-title").textContent = row.prompt;
    for (const side of ["left", "right"]) {
      const select = byId(`viewer-${side}`);
      select.replaceChildren(...columns.map((c) => make("option", { value: c.id, textContent: c.label })));
      select.value = open[side];
    }
    byId("viewer-under").src = row.images[open.left];
    byId("viewer-over").src = row.images[open.right];
    for (const side of ["left", "right"]) {
      const link = byId(`viewer-${side}-clip`), clip = (row.clips || {})[open[side]];
      link.hidden = !clip;
      if (clip) link.href = clip;
    }
    split();
    if (!viewer.open) viewer.showModal();
  }

  const split = () => { byId("viewer-over").style.clipPath = `inset(0 0 0 ${byId("viewer-split").value}%)`; };

  function move(stepBy, rowBy) {
    const rowNumber = Math.min(data.rows.length - 1, Math.max(0, open.row + rowBy)), row = data.rows[rowNumber];
    const columns = data.columns.filter((column) => row.images[column.id]);
    const at = columns.findIndex((column) => column.id === open.right) + stepBy;
    show(rowNumber, columns[Math.min(columns.length - 1, Math.max(0, at))].id);
  }

  slider.addEventListener("input", draw);
  byId("viewer-split").addEventListener("input", split);
  byId("viewer-close").addEventListener("click", () => viewer.close());
  for (const side of ["left", "right"]) {
    byId(`viewer-${side}`).addEventListener("change", (event) => { open[side] = event.target.value; show(open.row, open.right); });
  }
  byId("viewer-stage").addEventListener("pointermove", (event) => {
    const box = byId("viewer-under").getBoundingClientRect();
    byId("viewer-split").value = 100 * (event.clientX - box.left) / box.width;
    split();
  });
  viewer.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select")) return;
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (by) { event.preventDefault(); move(...by); }
  });
  return { load };
})();
