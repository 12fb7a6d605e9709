// Building the page. Text enters it only here, as text: no markup is ever parsed from a string.

const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b\\u000c\\u000e-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f" +
    "\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]|\\p{Surrogate}",
  "gu",
);

const codeOf = (character) =>
  "⟨U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩";

/** Characters that hide or reorder text become their code, so that what is read is what is there. */
function visible(text) {
  return String(text).replace(HIDDEN, codeOf);
}

/** The same for a message, with each such code marked. */
function messageNodes(text) {
  const nodes = [];
  let from = 0;
  for (const match of String(text).matchAll(HIDDEN)) {
    if (match.index > from) nodes.push(document.createTextNode(text.slice(from, match.index)));
    nodes.push(el("span", { class: "hidden-character", title: "a character that hides or reorders text" }, codeOf(match[0])));
    from = match.index + match[0].length;
  }
  nodes.push(document.createTextNode(String(text).slice(from)));
  return nodes;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "tip") element.tip = value;
    else if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value === true ? "" : visible(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const isNumber = (x) => typeof x === "number" && Number.isFinite(x);

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 6 });

/** A number for a person: three significant digits, thousands grouped; what is no number as it is. */
function num(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (!isNumber(x)) return String(x);
  if (Number.isInteger(x)) return GROUPED.format(x);
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e").replace("e-", "e−");
  return GROUPED.format(Number(x.toPrecision(digits)));
}
const percent = (x, digits = 0) => (isNumber(x) ? (100 * x).toFixed(digits) + " %" : "–");
const signed = (x, digits = 3) => (isNumber(x) ? (x > 0 ? "+" : "") + num(x, digits) : "–");
function compact(x) {
  const size = Math.abs(x);
  if (size >= 1e9) return num(x / 1e9) + " G";
  if (size >= 1e6) return num(x / 1e6) + " M";
  if (size >= 1e4) return num(x / 1e3) + " k";
  return num(x);
}
function clock(seconds) {
  if (!isNumber(seconds)) return "–";
  if (seconds < 10) return seconds.toFixed(1) + " s";
  if (seconds < 60) return Math.round(seconds) + " s";
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? minutes + " min" : Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}

function table(header, rows, numeric = true) {
  const cell = (tag) => (x, k) => el(tag, { class: numeric && k > 0 ? "number" : null }, x);
  return el("div", { class: "scroll" },
    el("table", null,
      el("thead", null, el("tr", null, header.map(cell("th")))),
      el("tbody", null, rows.map((row) => el("tr", null, row.map(cell("td")))))));
}

function section(id, title, lead, ...children) {
  return el("section", { id, "aria-labelledby": id + "-title" },
    el("h2", { id: id + "-title" }, title),
    lead ? el("p", { class: "lead" }, lead) : null,
    children);
}
