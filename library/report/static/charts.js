// Draws charts that library/report/charts.py describes, with uPlot: in the report of a run and on the web page.
"use strict";
const Charts = (() => {
  const ENGLISH = { step: "step", group: "group", low: "low", high: "high",
                    keys: "arrow keys read values, plus and minus zoom, 0 shows all" };
  const words = typeof CHART_WORDS === "undefined" ? ENGLISH : CHART_WORDS;
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const seriesColor = (curve, number) => color(curve.is_faint ? "--faint" : `--series-${number % 10}`);

  function formatValue(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return String(+value.toPrecision(4));
  }

  // The value at the cursor, or before it where this curve has none; without a cursor, the last one.
  function showNearest(plot, value, number, index) {
    const values = plot.data[number];
    let at = index ?? values.length - 1;
    while (at > 0 && values[at] == null) at -= 1;
    return formatValue(values[at]);
  }

  // Curves have steps of their own: lay them over one list of steps, with the band of each as two more columns.
  function align(chart) {
    const tables = chart.curves.map((curve) => {
      const hasBand = curve.low.length > 0;
      return hasBand ? [curve.x, curve.y, curve.low, curve.high] : [curve.x, curve.y];
    });
    return tables.length ? uPlot.join(tables) : [[]];
  }

  function buildSeries(chart) {
    const series = [{ label: chart.kind === "bars" ? words.group : words.step,
                      value: (plot, x) => (chart.kind === "bars" ? chart.labels[x] ?? "" : x ?? plot.data[0].at(-1)) }];
    const bands = [];
    let number = 0;
    chart.curves.forEach((curve, index) => {
      const stroke = seriesColor(curve, number);
      number += curve.is_faint ? 0 : 1;
      const entry = { label: curve.name, stroke, width: curve.is_faint ? 1 : 1.7, spanGaps: true,
                      points: { show: curve.x.length < 3, size: 5 }, value: showNearest };
      if (chart.kind === "bars") {
        const side = chart.curves.length === 1 ? 0 : index === 0 ? -1 : 1;
        Object.assign(entry, { paths: uPlot.paths.bars({ size: [side ? 0.38 : 0.7, 40], align: side }),
                               fill: index === 0 && side ? color("--faint") : color("--series-0"),
                               stroke: "transparent", width: 0, points: { show: false } });
      }
      series.push(entry);
      if (curve.low.length) {
        const first = series.length;
        for (const edge of ["low", "high"]) {
          series.push({ label: `${curve.name}, ${words[edge]}`, stroke: "transparent", width: 0, spanGaps: true,
                        points: { show: false }, isEdge: true });
        }
        bands.push({ series: [first + 1, first], fill: stroke + "33" });
      }
    });
    return { series, bands };
  }

  function buildAxes(chart) {
    const common = { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false },
                     font: "11px system-ui, sans-serif" };
    const x = { ...common, space: 60, size: 26 };
    if (chart.kind === "bars") {
      x.grid = { show: false };
      x.splits = (plot) => chart.labels.map((_, index) => index).filter((index) =>
        index % Math.ceil(chart.labels.length / Math.max(1, plot.width / 70)) === 0);
      x.values = (_, splits) => splits.map((index) => chart.labels[index] ?? "");
    }
    return [x, { ...common, size: 62, values: (_, ticks) => ticks.map(formatValue) }];
  }

  function draw(holder, chart, sync) {
    const { series, bands } = buildSeries(chart);
    const isBars = chart.kind === "bars";
    const size = () => ({ width: Math.max(holder.clientWidth, 200), height: 210 });
    const scales = { x: { time: false } };
    if (isBars) {
      scales.x.range = () => [-0.5, chart.labels.length - 0.5];
      scales.y = { range: (_, low, high) => [Math.min(0, low ?? 0), (high || 1) * 1.05] };
    }
    const plot = new uPlot({
      ...size(), series, bands, scales, axes: buildAxes(chart), legend: { live: true },
      cursor: isBars ? { drag: { x: false }, points: { show: false } }
                     : { drag: { x: true, y: false }, sync: sync ? { key: sync } : undefined },
    }, align(chart), holder);
    plot.root.querySelectorAll(".u-legend .u-series").forEach((row, number) => { row.hidden = !!series[number].isEdge; });
    new ResizeObserver(() => plot.width !== Math.max(holder.clientWidth, 200) && plot.setSize(size())).observe(holder);
    if (!isBars) setUpKeys(plot, holder, chart.title);
    return { plot, shape: shapeOf(chart) };
  }

  // Arrow keys move the cursor, + and - zoom at it, 0 shows all.
  function setUpKeys(plot, holder, title) {
    Object.assign(holder, { tabIndex: 0, role: "group", ariaLabel: `${title}: ${words.keys}` });
    holder.addEventListener("keydown", (event) => {
      const steps = plot.data[0], { min, max } = plot.scales.x;
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -steps.length, End: steps.length }[event.key];
      const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
      if (event.ctrlKey || event.altKey || event.metaKey || (!step && !factor && event.key !== "0")) return;
      event.preventDefault();
      const at = Math.min(steps.length - 1, Math.max(0, (plot.cursor.idx ?? steps.length - 1) + (step ?? 0)));
      if (factor) {
        const half = (max - min) * factor / 2, low = Math.max(steps[0], steps[at] - half);
        plot.setScale("x", { min: low, max: Math.min(steps.at(-1), low + 2 * half) });
      } else if (event.key === "0" || steps[at] < min || steps[at] > max) {
        plot.setScale("x", { min: steps[0], max: steps.at(-1) });
      }
      plot.setCursor({ left: plot.valToPos(steps[at], "x"), top: plot.bbox.height / 2 / devicePixelRatio });
    });
  }

  const shapeOf = (chart) => chart.kind + chart.curves.map((c) => `|${c.name}:${c.low.length > 0}`).join("")
    + chart.labels.join(",");

  // Draw into a grid, or only replace the data where a chart is there already, so that zoom and cursor stay.
  function show(grid, charts, sync) {
    grid.drawn ??= new Map();
    const titles = new Set(charts.map((chart) => chart.title));
    for (const [title, entry] of grid.drawn) {
      if (!titles.has(title)) { entry.card.remove(); entry.plot.destroy(); grid.drawn.delete(title); }
    }
    for (const chart of charts) {
      let entry = grid.drawn.get(chart.title);
      if (entry && entry.shape === shapeOf(chart)) {
        const scale = entry.plot.scales.x, data = entry.plot.data[0];
        const isZoomed = data.length > 1 && (scale.min > data[0] || scale.max < data[data.length - 1]);
        entry.plot.setData(align(chart), !isZoomed);
        if (isZoomed) entry.plot.redraw();
        continue;
      }
      const card = entry?.card ?? document.createElement("section");
      card.className = "card chart";
      card.replaceChildren();
      const title = document.createElement("h3"), holder = document.createElement("div");
      title.textContent = chart.title;
      holder.className = "plot";
      card.append(title, holder);
      if (!entry) grid.append(card);
      grid.drawn.set(chart.title, { card, ...draw(holder, chart, sync) });
    }
    grid.charts = charts;
  }

  // Colors are read when a chart is drawn, so all are drawn again when dark and light change.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const grid of document.querySelectorAll(".charts")) {
      const charts = grid.charts;
      if (charts) { show(grid, []); show(grid, charts, "run"); }
    }
  });

  return { show };
})();
