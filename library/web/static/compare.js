// Several runs: curves over each other, and pictures of the same prompt side by side.
"use strict";
(() => {
  const runs = JSON.parse(byId("compared").textContent), slider = byId("preview-step");
  let data = { columns: [], rows: [] }, signature = "";

  // The last picture of a run that is not later than the step of the slider; epochs and steps do not mix.
  function findColumn(images) {
    const kind = data.columns[+slider.value]?.id.startsWith("e");
    return data.columns.slice(0, +slider.value + 1).findLast(({ id }) => images[id] && id.startsWith("e") === kind);
  }

  function buildRow({ prompt, runs: byRun }) {
    const row = { prompt, images: {}, clips: {}, labels: {} };
    for (const { key } of runs) {
      const found = byRun[key] && findColumn(byRun[key].images);
      if (!found) continue;
      row.images[key] = byRun[key].images[found.id];
      if (byRun[key].clips[found.id]) row.clips[key] = byRun[key].clips[found.id];
      row.labels[key] = found.label;
    }
    return row;
  }

  function draw() {
    if (!data.columns.length) return;
    const rows = data.rows.map(buildRow), focused = document.activeElement?.dataset?.picture;
    byId("preview-label").textContent = data.columns[+slider.value].label;
    slider.setAttribute("aria-valuetext", data.columns[+slider.value].label);
    Viewer.setData(runs.map(({ key, name }) => ({ id: key, label: name })), rows);
    const head = make("tr", {}, make("th"), ...runs.map(({ name }) => make("th", { textContent: name })));
    const body = rows.map((row, number) => make("tr", {}, make("td", { textContent: row.prompt }),
      ...runs.map(({ key, name }) => drawCell(row, number, key, name))));
    byId("previews").replaceChildren(make("table", {}, make("tbody", {}, head, ...body)));
    if (focused) returnFocus(byId("previews").querySelector(`[data-picture="${CSS.escape(focused)}"]`), slider);
  }

  function drawCell(row, number, key, name) {
    if (!row.images[key]) return make("td", { className: "soft small", textContent: "–" });
    const image = make("img", { src: row.images[key], alt: `${row.prompt}, ${name}, ${row.labels[key]}`, loading: "lazy" });
    const button = make("button", { className: "picture", title: tr("Compare at full size") }, image);
    button.dataset.picture = `${number} ${key}`;
    button.addEventListener("click", () => Viewer.show(number, key));
    return make("td", {}, button, make("div", { className: "soft small", textContent: row.labels[key] }));
  }

  function moveSlider(by) {
    slider.value = Math.min(+slider.max, Math.max(0, +slider.value + by));
    draw();
  }

  async function loadPictures() {
    const answer = await ask("/api/compare/previews" + location.search), isNew = JSON.stringify(answer);
    if (isNew === signature) return;
    const wasAtEnd = +slider.value >= data.columns.length - 1;
    [data, signature] = [answer, isNew];
    slider.max = Math.max(0, data.columns.length - 1);
    if (wasAtEnd) slider.value = slider.max;
    byId("pictures-part").hidden = !data.rows.length;
    byId("preview-bar").hidden = data.columns.length < 2;
    draw();
  }

  slider.addEventListener("input", draw);
  Viewer.listenToSteps(moveSlider);
  poll(async () => {
    const answer = await ask("/api/compare" + location.search);
    Charts.show(byId("curves"), answer.curves, "compare");
    if (answer.is_complete) await loadPictures();
    return answer.is_complete ? 5000 : 50;
  });
})();
