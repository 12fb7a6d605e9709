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
  let low = axis.min ?? (good.length ? good.reduce((a, b) => Math.min(a, b)) : 0);
  let high = axis.max ?? (good.length ? good.reduce((a, b) => Math.max(a, b)) : 1);
  if (axis.log) return low < high ? [low / 1.3, high * 1.3] : [low / 10, high * 10];
  if (low === high) [low, high] = [low - (axis.min === undefined ? 0.5 : 0), high + 0.5];
  const pad = 0.06 * (high - low);
  return [axis.min === undefined ? low - pad : low, axis.max === undefined ? high + pad : high];
}

function valuesOf(layers, which) {
  const found = [];
  for (const layer of layers) {
    if (layer.type === "rule") { if (layer[which] !== undefined) found.push(layer[which]); continue; }
    for (const p of layer.points || []) {
      found.push(p[which]);
      if (which === "y") found.push(p.low, p.high);
    }
  }
  return found;
}

/** spec: {title, caption, x: {label, format, log, min, max}, y: {...}, layers, legend, height} */
function chart(spec) {
  const holder = el("div", { class: "plot" });
  const figure = el("figure", { class: "chart " + (spec.cls || "") },
    el("div", { class: "chart-head" },
      el("h3", null, spec.title),
      spec.legend ? el("div", { class: "legend" }, spec.legend.map((entry) =>
        el("span", { class: "key " + (entry.cls || "") }, el("i", { class: "swatch " + (entry.mark || "line") }), entry.label))) : null),
    holder,
    spec.caption ? el("figcaption", null, spec.caption) : null);
  const empty = !valuesOf(spec.layers, "y").some(isNumber);
  if (empty) {
    holder.append(el("p", { class: "nothing" }, spec.nothing || "Nothing of this is in the log."));
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

/** At most `most` points: every n-th, and all that are marked to be kept. */
function thin(points, most) {
  const every = Math.ceil(points.length / most);
  return every <= 1 ? points : points.filter((p, k) => p.keep || k % every === 0 || k === points.length - 1);
}

/** A line of many points keeps the lowest and the highest of every stretch, so that no peak is lost. */
function thinLine(points, most) {
  const every = Math.ceil((2 * points.length) / most);
  if (every <= 2) return points;
  const kept = [];
  for (let k = 0; k < points.length; k += every) {
    const part = points.slice(k, k + every);
    const low = part.reduce((a, b) => (b.y < a.y ? b : a)), high = part.reduce((a, b) => (b.y > a.y ? b : a));
    kept.push(...(low === high ? [low] : part.indexOf(low) < part.indexOf(high) ? [low, high] : [high, low]));
  }
  return kept;
}

function draw(spec, width) {
  const height = heightOf(spec, width);
  const box = { left: 64, right: 14, top: 10, bottom: 40 };
  const [x0, x1] = extent(valuesOf(spec.layers, "x"), spec.x);
  const [y0, y1] = extent(valuesOf(spec.layers, "y"), spec.y);
  const inner = { w: width - box.left - box.right, h: height - box.top - box.bottom };
  const place = (axis, v, low, high) =>
    axis.log ? (Math.log(Math.max(v, low)) - Math.log(low)) / (Math.log(high) - Math.log(low)) : (v - low) / (high - low);
  const px = (v) => box.left + inner.w * place(spec.x, v, x0, x1);
  const py = (v) => box.top + inner.h * (1 - Math.min(Math.max(place(spec.y, v, y0, y1), -0.02), 1.02));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `${spec.title}: ${spec.y.label} over ${spec.x.label}` });
  const grid = svg("g", { class: "grid" });
  const formatX = spec.x.format || compact, formatY = spec.y.format || compact;
  for (const t of spec.y.log ? logTicks(y0, y1) : ticksOf(y0, y1, Math.max(2, inner.h / 42))) {
    grid.append(svg("line", { x1: box.left, x2: width - box.right, y1: py(t), y2: py(t) }),
      svg("text", { x: box.left - 7, y: py(t) + 4, class: "tick end" }, formatY(t)));
  }
  for (const t of spec.x.log ? logTicks(x0, x1) : ticksOf(x0, x1, Math.max(2, inner.w / 95))) {
    if (spec.x.whole && !Number.isInteger(t)) continue;
    grid.append(svg("line", { x1: px(t), x2: px(t), y1: height - box.bottom, y2: height - box.bottom + 4, class: "notch" }),
      svg("text", { x: px(t), y: height - box.bottom + 17, class: "tick middle" }, formatX(t)));
  }
  grid.append(svg("line", { x1: box.left, x2: width - box.right, y1: height - box.bottom, y2: height - box.bottom, class: "axis" }),
    svg("text", { x: box.left + inner.w / 2, y: height - 5, class: "label middle" }, spec.x.label),
    svg("text", { x: 12, y: box.top + inner.h / 2, class: "label middle",
      transform: `rotate(-90 12 ${box.top + inner.h / 2})` }, spec.y.label));
  picture.append(grid);
  for (const layer of spec.layers) picture.append(LAYERS[layer.type](layer, px, py, { x0, x1, y0, y1, box, width, height }));
  return picture;
}

const pathOf = (points, px, py) =>
  points.map((p, k) => (k ? "L" : "M") + px(p.x).toFixed(1) + " " + py(p.y).toFixed(1)).join("");

const LAYERS = {
  line(layer, px, py) {
    const points = thinLine(layer.points.filter((p) => isNumber(p.x) && isNumber(p.y)), 800);
    const group = svg("g", { class: "series " + (layer.cls || "") });
    if (points.length > 1) group.append(svg("path", { d: pathOf(points, px, py), class: "line" }));
    return group;
  },
  band(layer, px, py) {
    const points = layer.points.filter((p) => isNumber(p.low) && isNumber(p.high));
    const group = svg("g", { class: "series " + (layer.cls || "") });
    if (!points.length) return group;
    const upper = points.map((p) => ({ x: p.x, y: p.high }));
    const lower = points.map((p) => ({ x: p.x, y: p.low })).reverse();
    group.append(svg("path", { d: pathOf([...upper, ...lower], px, py) + "Z", class: "band" }));
    return group;
  },
  dots(layer, px, py) {
    const group = svg("g", { class: "series " + (layer.cls || "") });
    for (const p of thin(layer.points, 400)) {
      if (!isNumber(p.x) || !isNumber(p.y)) continue;
      const x = px(p.x), y = py(p.y), tip = p.tip, r = layer.size || 3;
      if (isNumber(p.low) && isNumber(p.high)) {
        group.append(svg("line", { x1: x, x2: x, y1: py(p.low), y2: py(p.high), class: "whisker" }));
      }
      const mark = p.mark || layer.mark || "dot";
      if (mark === "cross") {
        group.append(svg("path", { d: `M${x - r} ${y - r}L${x + r} ${y + r}M${x - r} ${y + r}L${x + r} ${y - r}`, class: "cross" }));
      } else {
        group.append(svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r, class: mark }));
      }
      if (tip) group.append(svg("circle", { cx: x, cy: y, r: r + 4, class: "target", tip }));
    }
    return group;
  },
  rule(layer, px, py, frame) {
    const group = svg("g", { class: "rule " + (layer.cls || "") });
    if (layer.y !== undefined) {
      group.append(svg("line", { x1: frame.box.left, x2: frame.width - frame.box.right, y1: py(layer.y), y2: py(layer.y) }));
      if (layer.label) group.append(svg("text", { x: frame.width - frame.box.right - 2, y: py(layer.y) - 4, class: "tick end" }, layer.label));
    }
    return group;
  },
  diagonal(layer, px, py, frame) {
    const low = Math.max(frame.x0, frame.y0), high = Math.min(frame.x1, frame.y1);
    const group = svg("g", { class: "rule" });
    if (low < high) group.append(svg("line", { x1: px(low), y1: py(low), x2: px(high), y2: py(high) }));
    return group;
  },
};

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
