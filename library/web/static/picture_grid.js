// A grid of any number of pictures: only the cells that are seen exist, and only their rows are asked for.
"use strict";
class PictureGrid {
  static PAGE = 100;

  constructor(holder, key, onOpen) {
    Object.assign(this, { holder, key, onOpen, total: 0, chosen: 0, rows: new Map(), pending: new Set(), cells: new Map(),
                          query: "", generation: 0 });
    addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.layOut()).observe(holder);
    holder.addEventListener("keydown", (event) => this.onKey(event));
    holder.addEventListener("focus", () => this.draw());
  }

  // Show the pictures that a filter selects; what is known of others is forgotten.
  async select(query) {
    this.query = query;
    this.generation += 1;
    this.rows.clear();
    this.pending.clear();
    for (const cell of this.cells.values()) cell.remove();
    this.cells.clear();
    await this.load(0);
    this.chosen = Math.min(this.chosen, Math.max(0, this.total - 1));
    this.layOut();
  }

  async load(page) {
    if (this.pending.has(page) || this.rows.has(page * PictureGrid.PAGE)) return;
    this.pending.add(page);
    const generation = this.generation, from = page * PictureGrid.PAGE;
    const query = new URLSearchParams({ ...Object.fromEntries(new URLSearchParams(this.query)), from, count: PictureGrid.PAGE });
    try {
      const answer = await ask(`/api/pictures/rows/${this.key}?${query}`);
      if (generation !== this.generation) return;
      this.total = answer.total;
      answer.rows.forEach((row, number) => this.rows.set(from + number, row));
    } finally {
      if (generation === this.generation) this.pending.delete(page);
    }
    this.draw();
  }

  async getRow(position) {
    while (!this.rows.has(position)) {
      await this.load(Math.floor(position / PictureGrid.PAGE));
      if (!this.rows.has(position)) await new Promise((done) => setTimeout(done, 50));
    }
    return this.rows.get(position);
  }

  layOut() {
    const width = this.holder.clientWidth;
    if (!width) return;
    this.columns = Math.max(2, Math.floor(width / 200));
    this.cellWidth = Math.floor(width / this.columns);
    this.cellHeight = this.cellWidth + 64;
    this.holder.style.height = `${Math.ceil(this.total / this.columns) * this.cellHeight}px`;
    for (const cell of this.cells.values()) cell.remove();
    this.cells.clear();
    this.draw();
  }

  draw() {
    if (!this.columns) return;
    const top = -this.holder.getBoundingClientRect().top;
    const firstRow = Math.max(0, Math.floor(top / this.cellHeight) - 1);
    const first = firstRow * this.columns;
    const last = Math.min(this.total, (Math.ceil((top + innerHeight) / this.cellHeight) + 1) * this.columns);
    for (const [position, cell] of this.cells) {
      if (position < first || position >= last) { cell.remove(); this.cells.delete(position); }
    }
    const missing = new Set();
    for (let position = first; position < last; position += 1) {
      const row = this.rows.get(position);
      if (!row) { missing.add(Math.floor(position / PictureGrid.PAGE)); continue; }
      if (!this.cells.has(position)) {
        const cell = this.build(position, row);
        this.cells.set(position, cell);
        this.holder.append(cell);
      }
    }
    if (missing.size) this.askSoon([...missing]);
    for (const [position, cell] of this.cells) {
      cell.classList.toggle("chosen", position === this.chosen);
      cell.setAttribute("aria-selected", position === this.chosen);
    }
    this.holder.setAttribute("aria-activedescendant", `cell-${this.chosen}`);
  }

  // While scrolling fast, pages that are passed are not asked for: only those that are seen when it is time to ask.
  askSoon(pages) {
    this.wanted = pages;
    this.timer ??= setTimeout(() => {
      this.timer = null;
      if (this.pending.size >= 3) { this.askSoon(this.wanted); return; }
      const next = Math.max(...this.wanted) + 1;
      for (const page of [...this.wanted, ...(next < this.total / PictureGrid.PAGE ? [next] : [])]) this.load(page);
    }, 60);
  }

  build(position, row) {
    const side = this.cellWidth - 12;
    const frame = make("div", { className: "frame" }, buildShot(row, this.key, side, side, false));
    frame.style.height = `${side}px`;
    const cell = make("div", { className: "cell" }, frame,
      make("div", { className: "line" }, make("span", { textContent: row.name, title: row.name }),
           make("span", { textContent: row.bucket.join("×") })),
      make("div", { className: "text", textContent: row.caption || tr("no caption") }),
      make("div", { className: "badges" }, ...Object.entries(row.warnings).map(([kind, text]) =>
        make("span", { className: "tag", textContent: kind, title: text }))));
    for (const [name, value] of [["role", "option"], ["aria-posinset", position + 1], ["aria-setsize", this.total]]) {
      cell.setAttribute(name, value);
    }
    cell.id = `cell-${position}`;
    cell.setAttribute("aria-label", `${row.name}: ${row.caption || tr("no caption")}`);
    cell.dataset.position = position;
    Object.assign(cell.style, { left: `${(position % this.columns) * this.cellWidth}px`, width: `${this.cellWidth}px`,
      top: `${Math.floor(position / this.columns) * this.cellHeight}px`, height: `${this.cellHeight}px` });
    cell.addEventListener("click", () => { this.chosen = position; this.draw(); this.onOpen(position); });
    return cell;
  }

  update(position, row) {
    this.rows.set(position, row);
    this.cells.get(position)?.remove();
    this.cells.delete(position);
    this.draw();
  }

  choose(position) {
    this.chosen = Math.min(this.total - 1, Math.max(0, position));
    const top = Math.floor(this.chosen / this.columns) * this.cellHeight + this.holder.getBoundingClientRect().top;
    if (top < 60) scrollBy(0, top - 60);
    if (top + this.cellHeight > innerHeight) scrollBy(0, top + this.cellHeight - innerHeight);
    this.draw();
  }

  onKey(event) {
    const page = this.columns * Math.max(1, Math.floor(innerHeight / this.cellHeight));
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, PageUp: -page,
                 PageDown: page, Home: -this.chosen, End: this.total }[event.key];
    if (by !== undefined) { event.preventDefault(); this.choose(this.chosen + by); }
    if (event.key === "Enter" && this.total) { event.preventDefault(); this.onOpen(this.chosen); }
  }
}

// A picture, fitted into a width and height, with what is cropped away darkened.
function buildShot(row, key, width, height, isLarge) {
  const scale = Math.min(width / row.size[0], height / row.size[1]);
  const address = `/thumbnail/${row.index}/${key}?v=${row.hash}${isLarge ? "&large" : ""}`;
  const shot = make("div", { className: "shot" }, make("img", { src: address, alt: "", loading: "lazy", decoding: "async" }));
  Object.assign(shot.style, { width: `${row.size[0] * scale}px`, height: `${row.size[1] * scale}px` });
  const [left, top, cropWidth, cropHeight] = row.crop;
  if (cropWidth < 0.999 || cropHeight < 0.999) {
    const crop = make("div", { className: "crop", title: row.is_random_crop ? tr("cropped at random") : tr("what is trained") });
    Object.assign(crop.style, { left: `${left * 100}%`, top: `${top * 100}%`, width: `${cropWidth * 100}%`, height: `${cropHeight * 100}%` });
    shot.append(crop);
  }
  return shot;
}
