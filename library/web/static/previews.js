// Previews as a grid, prompt by step, with a slider over the steps.
"use strict";
const Previews = (() => {
  const MAX_COLUMNS = 7;
  let data = { columns: [], rows: [] }, signature = "";
  const slider = byId("preview-step");

  async function load(key) {
    const answer = await ask(`/api/previews/${key}`);
    const isNew = JSON.stringify(answer);
    if (isNew === signature) return;
    const wasAtEnd = +slider.value >= data.columns.length - 1;
    [data, signature] = [answer, isNew];
    slider.max = Math.max(0, data.columns.length - 1);
    if (wasAtEnd) slider.value = slider.max;
    byId("preview-bar").hidden = data.columns.length < 2;
    Viewer.setData(data.columns, data.rows);
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
      holder.replaceChildren(make("p", { className: "empty", textContent: tr("No previews yet. They need sample_prompts.") }));
      return;
    }
    const columns = chooseColumns(), focused = document.activeElement?.dataset?.picture;
    byId("preview-label").textContent = data.columns[+slider.value].label;
    slider.setAttribute("aria-valuetext", data.columns[+slider.value].label);
    const head = make("tr", {}, make("th"), ...columns.map((c) => make("th", { textContent: c.label })));
    const rows = data.rows.map((row, rowNumber) => make("tr", {}, make("td", { textContent: row.prompt }),
      ...columns.map((column) => {
        if (!row.images[column.id]) return make("td");
        const image = make("img", { src: row.images[column.id], alt: `${row.prompt}, ${column.label}`, loading: "lazy" });
        const button = make("button", { className: "picture", title: tr("Compare at full size") }, image);
        button.dataset.picture = `${rowNumber} ${column.id}`;
        button.addEventListener("click", () => Viewer.show(rowNumber, column.id));
        return make("td", {}, button);
      })));
    holder.replaceChildren(make("table", {}, make("tbody", {}, head, ...rows)));
    if (focused) returnFocus(holder.querySelector(`[data-picture="${focused}"]`), slider);
  }

  slider.addEventListener("input", draw);
  return { load };
})();
