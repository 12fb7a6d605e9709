// Plots as SVG, drawn for the width they have. Every one has axes with units and a caption that says what is good.

function ticksOf(low, high, count) {
  const span = high - low || 1;
  const raw = span / Math.max(count, 1);
  const power = Math.pow(10, Math.floor(Math.log10(raw)));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + step * 1e-9; t += step) {
    ticks.push(Math.abs(t) < step * 1e-9 ? 0 : t);
  }
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) ticks.push(Math.pow(10, p));
  return ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
}

function extent(values, axis) {
  const good = values.filter((v) => isNumber(v) && (!axis.log || v > 0));
  const from = isNumber(axis.low), to = isNumber(axis.high); // ends that are fixed
  let low = from ? axis.low : good.length ? good.reduce((a, b) => Math.min(a, b)) : 0;
  let high = to ? axis.high : good.length ? good.reduce((a, b) => Math.max(a, b)) : 1;
  if (axis.log) return low < high ? [low / 1.3, high * 1.3] : [low / 10, high * 10];
  if (low === high) [low, high] = [low - (from ? 0 : 0.5), high + 0.5];
  const pad = 0.06 * (high - low);
  return [from ? low : low - pad, to ? high : high + pad];
}

const valuesOf = (spec, which) =>
  which === "x" ? spec.series.flatMap((s) => s.x) : [...spec.levels.map(([y]) => y), ...spec.series.flatMap((s) => [...s.y, ...s.low, ...s.high])];

/** A chart as parts.py has it: title, caption, axes, series, levels, diagonal, nothing, color, height. */
function chart(spec, cls) {
  const holder = el("div", { class: "plot" });
  const named = spec.series.filter((s) => s.label).slice(0, 8); // there are eight colors
  const figure = el("figure", { class: ["chart", cls, spec.color].join(" ") },
    el("div", { class: "chart-head" },
      el("h3", null, spec.title),
      named.length ? el("div", { class: "legend" }, named.map((s) =>
        el("span", { class: "key " + s.color }, el("i", { class: s.kind === "line" ? "swatch line" : "swatch dot" }), s.label))) : null),
    holder,
    spec.caption ? el("figcaption", null, spec.caption) : null);
  if (!spec.series.some((s) => s.y.length)) {
    holder.append(el("p", { class: "nothing" }, spec.nothing));
    return figure;
  }
  holder.style.minHeight = heightOf(spec, 600) + "px";
  let drawn = 0;
  holder.draw = () => {
    const width = Math.round(holder.clientWidth);
    if (width > 40 && width !== drawn) { drawn = width; holder.replaceChildren(draw(spec, width)); holder.style.minHeight = ""; }
  };
  new ResizeObserver(() => soon(holder)).observe(holder);
  return figure;
}

const heightOf = (spec, width) => spec.height || (width < 420 ? 200 : 240);

// Plots wait for idle moments, those in sight first, so that a page of many stays responsive.
const waiting = new Set();
function soon(holder) {
  waiting.add(holder);
  if (waiting.size === 1) later(drawWaiting);
}
const later = (work) => (globalThis.requestIdleCallback ? requestIdleCallback(work, { timeout: 300 }) : setTimeout(work, 10));
function drawWaiting() {
  const end = performance.now() + 12;
  const inSight = (h) => { const r = h.getBoundingClientRect(); return r.bottom > 0 && r.top < innerHeight; };
  for (const holder of [...[...waiting].filter(inSight), ...waiting]) {
    if (!waiting.delete(holder)) continue;
    if (holder.isConnected) holder.draw();
    if (performance.now() > end) break;
  }
  if (waiting.size) later(drawWaiting);
}

function draw(spec, width) {
  const height = heightOf(spec, width);
  const box = { left: 64, right: 14, top: 10, bottom: 40 };
  const [x0, x1] = extent(valuesOf(spec, "x"), spec.x);
  const [y0, y1] = extent(valuesOf(spec, "y"), spec.y);
  const inner = { w: width - box.left - box.right, h: height - box.top - box.bottom };
  const place = (axis, v, low, high) =>
    axis.log ? (Math.log(Math.max(v, low)) - Math.log(low)) / (Math.log(high) - Math.log(low)) : (v - low) / (high - low);
  const px = (v) => box.left + inner.w * place(spec.x, v, x0, x1);
  const py = (v) => box.top + inner.h * (1 - Math.min(Math.max(place(spec.y, v, y0, y1), -0.02), 1.02));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `${spec.title}: ${spec.y.label} over ${spec.x.label}` });
  const grid = svg("g", { class: "grid" });
  const format = (axis, v) => (axis.percent ? num(100 * v) : compact(v));
  for (const t of spec.y.log ? logTicks(y0, y1) : ticksOf(y0, y1, Math.max(2, inner.h / 42))) {
    grid.append(svg("line", { x1: box.left, x2: width - box.right, y1: py(t), y2: py(t) }),
      svg("text", { x: box.left - 7, y: py(t) + 4, class: "tick end" }, format(spec.y, t)));
  }
  for (const t of spec.x.log ? logTicks(x0, x1) : ticksOf(x0, x1, Math.max(2, inner.w / 95))) {
    if (spec.x.whole && !Number.isInteger(t)) continue;
    grid.append(svg("line", { x1: px(t), x2: px(t), y1: height - box.bottom, y2: height - box.bottom + 4, class: "notch" }),
      svg("text", { x: px(t), y: height - box.bottom + 17, class: "tick middle" }, format(spec.x, t)));
  }
  grid.append(svg("line", { x1: box.left, x2: width - box.right, y1: height - box.bottom, y2: height - box.bottom, class: "axis" }),
    svg("text", { x: box.left + inner.w / 2, y: height - 5, class: "label middle" }, spec.x.label),
    svg("text", { x: 12, y: box.top + inner.h / 2, class: "label middle",
      transform: `rotate(-90 12 ${box.top + inner.h / 2})` }, spec.y.label));
  picture.append(grid);
  const right = width - box.right, dashed = svg("g", { class: "rule" });
  const low = Math.max(x0, y0), high = Math.min(x1, y1);
  if (spec.diagonal && low < high) dashed.append(svg("line", { x1: px(low), y1: py(low), x2: px(high), y2: py(high) }));
  for (const [y, label] of spec.levels) {
    dashed.append(svg("line", { x1: box.left, x2: right, y1: py(y), y2: py(y) }));
    if (label) dashed.append(svg("text", { x: right - 2, y: py(y) - 4, class: "tick end" }, label));
  }
  picture.append(dashed, ...spec.series.map((s) => svg("g", { class: "series " + s.color }, SERIES[s.kind](s, px, py))));
  return picture;
}

const pathOf = (xs, ys, px, py) => xs.map((x, k) => (k ? "L" : "M") + px(x).toFixed(1) + " " + py(ys[k]).toFixed(1)).join("");

/** Each kind of series as nodes. */
const SERIES = {
  line: (s, px, py) => (s.x.length > 1 ? svg("path", { d: pathOf(s.x, s.y, px, py), class: "line" }) : null),
  band: (s, px, py) => (s.x.length
    ? svg("path", { d: pathOf([...s.x, ...[...s.x].reverse()], [...s.high, ...[...s.low].reverse()], px, py) + "Z", class: "band" }) : null),
  dots: (s, px, py) => marks(s, px, py, (x, y) => svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: s.size, class: "dot" })),
  crosses: (s, px, py) => marks(s, px, py, (x, y) =>
    svg("path", { d: `M${x - s.size} ${y - s.size}L${x + s.size} ${y + s.size}M${x - s.size} ${y + s.size}L${x + s.size} ${y - s.size}`, class: "cross" })),
};

/** A mark for each point, with its whisker below and the target of its tip above. */
const marks = (s, px, py, mark) => s.x.map((value, k) => {
  const x = px(value), y = py(s.y[k]), [low, high] = [s.low[k], s.high[k]];
  return [
    isNumber(low) && isNumber(high) ? svg("line", { x1: x, x2: x, y1: py(low), y2: py(high), class: "whisker" }) : null,
    mark(x, y),
    s.tips.length ? svg("circle", { cx: x, cy: y, r: s.size + 4, class: "target", tip: s.tips[k] }) : null,
  ];
});

/** One tip for the whole page, shown over whatever carries one. */
function installTips() {
  const box = el("div", { class: "tip", hidden: true });
  document.body.append(box);
  document.addEventListener("pointermove", (event) => {
    const tip = event.target.tip, text = typeof tip === "function" ? tip() : tip;
    box.hidden = !text;
    if (!text) return;
    box.textContent = visible(text);
    const left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
    const top = event.clientY + 18 + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : event.clientY + 18;
    box.style.left = Math.max(8, left) + "px";
    box.style.top = top + "px";
  });
}
