// What sections show, drawn from plain values: one function for each kind of part. None of them knows a section.

/** What parts cannot express: OWN[key] = (data, batches) => nodes, set by the script that a section names. */
const OWN = {};

const agentClass = (data, name) => {
  const k = data.run.agents.indexOf(name);
  return k < 0 ? "agent-none" : "agent-" + (k % 8);
};
const nameTag = (data, who) => el("span", { class: "who " + agentClass(data, who) }, who);

const captionOf = (text) => (text ? el("p", { class: "caption" }, text) : null);
const toned = (cell) => (Array.isArray(cell) ? el("b", { class: cell[1] || null }, cell[0]) : cell);

const PARTS = {
  facts: (part) => el("p", { class: "stats" }, part.items.map(([text, tone]) => el("span", { class: tone ? "pill " + tone : "pill" }, text))),
  text: (part) => captionOf(part.text),
  nothing: (part) => el("p", { class: "nothing" }, part.text),
  code: (part) => (part.folded ? el("details", null, el("summary", null, part.folded), el("pre", null, part.text)) : el("pre", null, part.text)),
  table(part) {
    const rows = part.rows.length ? table(part.header, part.rows.map((row) => row.map(toned)), part.numeric) : el("p", { class: "nothing" }, "Nothing of this is in the log.");
    return part.title ? el("div", { class: "panel" }, el("h3", null, part.title), rows, captionOf(part.caption)) : [rows, captionOf(part.caption)];
  },
  chart: (part) => chart(part, "wide"),
  multiples: (part) => [el("div", { class: "multiples" }, part.charts.map((one) => chart(one, "small-multiple"))), captionOf(part.caption)],
  grid: (part) => el("div", { class: "grid-2" }, part.parts.map((one) => (one.part === "chart" ? chart(one, "") : drawPart(one)))),
  group: (part) => el("div", { class: "group" }, el("h3", null, el("span", { class: "who " + part.color }, part.name), " " + part.title), part.parts.map(drawPart)),
};

const drawPart = (part) => PARTS[part.part](part);

function drawSection(shown, data, batches) {
  return section(shown.key, shown.title, shown.lead, shown.parts.map(drawPart), shown.own ? OWN[shown.key](data, batches) : null);
}
