// What a report opens with: the run, what is missing of it, and the answers to the questions of whoever trains a team.

function headerSection(data) {
  const run = data.run, last = data.evals[data.evals.length - 1];
  const facts = [
    ["state", run.state], ["stages", `${run.stages_done} of ${run.stages ?? "?"}`], ["updates", num(data.updates.length)],
    ["agents", run.agents.join(", ")], ["plan", run.preset ?? "unknown"], ["seed", run.seed ?? "unknown"],
    ["spent", `${num(data.cost.sampled_tokens)} tokens, ${num(data.cost.episodes)} episodes`], ["time", clock(run.seconds)],
  ];
  return el("header", { id: "top" },
    el("div", { class: "title" },
      el("h1", null, run.name),
      last ? el("p", { class: "result" }, el("b", null, percent(last.success)),
        ` of held-out problems solved`, last.low !== null ? ` (${percent(last.low)} to ${percent(last.high)})` : "",
        ` after ${last.stage} ${last.stage === 1 ? "stage" : "stages"}`) : el("p", { class: "result" }, "No evaluation yet")),
    el("dl", { class: "facts" }, facts.map(([k, v]) => el("div", null, el("dt", null, k), el("dd", null, v)))),
    data.notes.length ? el("div", { class: "notes", role: "note" }, el("b", null, "What is missing"),
      el("ul", null, data.notes.map((note) => el("li", null, note)))) : null);
}

function headlinesSection(data) {
  return el("section", { id: "headlines", "aria-label": "At a glance" }, el("div", { class: "cards" },
    data.headlines.map((card) => el("article", { class: "card " + card.tone },
      el("h3", null, card.question), el("p", { class: "headline" }, card.headline), el("p", null, card.text)))));
}

function comparisonHeader(compare) {
  return el("header", { id: "top" }, el("div", { class: "title" }, el("h1", null, "Comparison"),
    el("p", { class: "result" }, `${compare.runs.length} runs; the first is what the others are compared with`)));
}
