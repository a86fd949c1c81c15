// Two pictures or clips over each other at full size: of two steps of a run, or of two runs at one step.
"use strict";
const Viewer = (() => {
  let data = { columns: [], rows: [] }, open = null, onStep = null, isHeard = false;
  const viewer = byId("viewer"), body = byId("viewer-body");
  const layers = ["under", "over"].map((name) => ({ picture: byId(`viewer-${name}`), clip: byId(`viewer-${name}-video`) }));
  const [under, over] = layers;

  // Columns are steps or runs; each row has the pictures of a prompt by column.
  function setData(columns, rows) {
    data = { columns, rows };
    if (viewer.open && data.rows[open.row]) show(open.row, open.right);
  }

  function show(rowNumber, columnId) {
    const row = data.rows[rowNumber], columns = data.columns.filter((column) => row.images[column.id]);
    if (!columns.length) return;
    const right = row.images[columnId] ? columnId : columns.at(-1).id;
    const left = open && row.images[open.left] ? open.left : columns[0].id;
    open = { row: rowNumber, left, right };
    byId("viewer-title").textContent = row.prompt;
    const describe = (column) => (row.labels ? `${column.label}, ${row.labels[column.id]}` : column.label);
    for (const side of ["left", "right"]) {
      const select = byId(`viewer-${side}`);
      select.replaceChildren(...columns.map((c) => make("option", { value: c.id, textContent: describe(c) })));
      select.value = open[side];
      const picture = byId(side === "left" ? "viewer-under" : "viewer-over");
      picture.alt = `${row.prompt}, ${describe(columns.find((column) => column.id === open[side]))}`;
      const link = byId(`viewer-${side}-clip`), clip = (row.clips || {})[open[side]];
      link.hidden = !clip;
      if (clip) link.href = clip;
    }
    if (!viewer.open) viewer.showModal();
    fill(under, row.images[open.left], (row.clips || {})[open.left]);
    fill(over, row.images[open.right], (row.clips || {})[open.right]);
    split();
  }

  // A clip is played with its sound; the animated image is shown where the browser cannot play it.
  function fill(layer, image, clip) {
    const { picture, clip: video } = layer;
    picture.src = image;
    video.setAttribute("aria-label", picture.alt);
    if ((video.getAttribute("src") ?? "") === (clip ?? "")) return;
    picture.hidden = Boolean(clip);
    video.hidden = !clip;
    if (clip) {
      video.src = clip;
      for (const each of layers) if (!each.clip.hidden) each.clip.currentTime = 0;
      video.play().catch(() => {});
    } else empty(video);
  }

  function empty(video) {
    video.removeAttribute("src");
    video.load();
  }

  function split() {
    const at = +byId("viewer-split").value;
    for (const each of Object.values(over)) each.style.clipPath = `inset(0 0 0 ${at}%)`;
    // The clip of which more is seen is heard.
    const heard = [at < 50 ? over : under, under, over].find((each) => !each.clip.hidden);
    for (const each of layers) each.clip.muted = !isHeard || each !== heard;
    byId("viewer-sound").hidden = !heard;
  }

  function toggleSound() {
    isHeard = !isHeard;
    byId("viewer-sound").setAttribute("aria-pressed", isHeard);
    split();
  }

  function move(stepBy, rowBy) {
    const rowNumber = Math.min(data.rows.length - 1, Math.max(0, open.row + rowBy)), row = data.rows[rowNumber];
    const columns = data.columns.filter((column) => row.images[column.id]);
    if (!columns.length) return;
    const at = columns.findIndex((column) => column.id === open.right) + stepBy;
    show(rowNumber, columns[Math.min(columns.length - 1, Math.max(0, at))].id);
  }

  // The picture that is seen alone is the other one then.
  function changeSides() {
    byId("viewer-split").value = +byId("viewer-split").value >= 50 ? 0 : 100;
    split();
  }

  function toggleFullScreen() {
    if (document.fullscreenElement) document.exitFullscreen();
    else body.requestFullscreen?.();
  }

  byId("viewer-split").addEventListener("input", split);
  byId("viewer-close").addEventListener("click", () => viewer.close());
  byId("viewer-full").addEventListener("click", toggleFullScreen);
  byId("viewer-sound").addEventListener("click", toggleSound);
  for (const { picture, clip } of layers) {
    clip.addEventListener("error", () => {
      if (!clip.hasAttribute("src")) return;
      picture.hidden = false;
      clip.hidden = true;
      split();
    });
  }
  // Both clips show the same moment.
  under.clip.addEventListener("timeupdate", () => {
    const apart = Math.abs(under.clip.currentTime - over.clip.currentTime);
    if (!over.clip.hidden && apart > 0.1 && under.clip.currentTime < over.clip.duration) over.clip.currentTime = under.clip.currentTime;
  });
  // The picture that opened it may have been drawn anew meanwhile.
  viewer.addEventListener("close", () => {
    if (document.fullscreenElement) document.exitFullscreen();
    for (const { picture, clip } of layers) {
      [picture.hidden, clip.hidden] = [false, true];
      if (clip.hasAttribute("src")) empty(clip);
    }
    const pictures = [...document.querySelectorAll("[data-picture]")];
    returnFocus(pictures.find((each) => each.dataset.picture === `${open.row} ${open.right}`), pictures[0]);
  });
  for (const side of ["left", "right"]) {
    byId(`viewer-${side}`).addEventListener("change", (event) => { open[side] = event.target.value; show(open.row, open.right); });
  }
  byId("viewer-stage").addEventListener("pointermove", (event) => {
    const box = byId("viewer-stage").getBoundingClientRect();
    byId("viewer-split").value = 100 * (event.clientX - box.left) / box.width;
    split();
  });
  viewer.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const step = { "<": -1, ",": -1, ">": 1, ".": 1 }[event.key];
    if (by) move(...by);
    else if (step && onStep) onStep(step);
    else if (event.key.toLowerCase() === "f") toggleFullScreen();
    else if (event.key.toLowerCase() === "m" && !byId("viewer-sound").hidden) toggleSound();
    else if (event.key === " " && !event.target.matches("button")) changeSides();
    else return;
    event.preventDefault();
  });
  return { setData, show, listenToSteps: (listener) => { onStep = listener; } };
})();
