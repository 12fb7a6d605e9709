// Several runs on one axis.

function comparePage(compare) {
  const runs = compare.runs;
  const cls = (k) => "agent-" + (k % 8);
  const lines = runs.map((run, k) => run.evals.map((e) => ({ x: e.sampled_tokens, y: e.success, low: e.low, high: e.high,
    tip: () => `${run.label}, stage ${e.stage}: ${percent(e.success, 1)}\n${num(e.sampled_tokens)} sampled tokens` })));
  const rewards = runs.map((run) => run.rewards.map(([x, y]) => ({ x, y })));
  const legend = runs.map((run, k) => ({ label: run.label, cls: cls(k), mark: "dot" }));
  const interval = (d) => `${signed(100 * d.low)} to ${signed(100 * d.high)}`;
  return [
    el("header", { id: "top" }, el("div", { class: "title" }, el("h1", null, "Comparison"),
      el("p", { class: "result" }, `${runs.length} runs; the first is what the others are compared with`))),
    section("learning", "Learning", "On an axis of sampled tokens: what counts is success for the same cost.",
      chart({ title: "Held-out success over sampled tokens", cls: "wide", height: 320, legend, x: { label: "tokens sampled for training", min: 0 },
        y: { label: "success, %", format: (v) => Math.round(100 * v), min: 0, max: 1 },
        layers: [...lines.map((points, k) => ({ type: "band", points, cls: cls(k) })), ...lines.map((points, k) => ({ type: "line", points, cls: cls(k) })), ...lines.map((points, k) => ({ type: "dots", points, cls: cls(k) }))],
        caption: "Good: a line above and to the left of the others, with bands that do not overlap." }),
      chart({ title: "Reward of training batches over sampled tokens", cls: "wide", legend, x: { label: "tokens sampled for training", min: 0 }, y: { label: "mean reward" },
        layers: rewards.map((points, k) => ({ type: "line", points, cls: cls(k) })),
        caption: "Mean reward of each batch. Good: rises early and does not fall back." })),
    section("difference", "Difference in final success", null,
      table(["run", "final success", "difference, points", "95 % interval, points", "how it was paired"], runs.map((run, k) => {
        const d = compare.differences.find((x) => x.run === k);
        return [run.label, run.final ? percent(run.final.success, 1) : "–", d ? signed(100 * d.estimate) : k ? "–" : "reference", d ? interval(d) : "", d ? d.basis : ""];
      })),
      el("p", { class: "caption" }, "Good for a run: an interval wholly above zero. Paired bootstrap over problems where both runs played the same ones; else the two intervals are combined, which is wider.")),
    section("settings", "Settings that differ", null, compare.settings.length
      ? table(["setting", ...runs.map((r) => r.label)], compare.settings.map((s) => [s.key, ...s.values.map((v) => v === null ? "–" : v)]), false)
      : el("p", { class: "nothing" }, "None of the settings that are known.")),
    section("numbers", "Other numbers", null,
      table(["run", "stages", "updates", "sampled tokens", "time", "kept", "outside", "stability", "order"], runs.map((r) => [r.label, num(r.stages_done), num(r.updates), num(r.sampled_tokens), clock(r.seconds), num(r.kept), num(r.outside), num(r.stability), r.order])),
      compare.order ? el("p", { class: "caption" }, `Order of updates: means ${Object.entries(compare.order.means).map(([o, m]) => `${o}: ${percent(m, 1)}`).join("; ")}. Spread ${num(100 * compare.order.spread)} points, runs of one order differ by ${compare.order.within === null ? "an unknown amount (no order was run twice)" : num(100 * compare.order.within) + " points"}: only a spread well above it means that order matters.`) : null),
    compare.notes.length ? section("notes", "What is missing", null, el("ul", null, compare.notes.map((n) => el("li", null, n)))) : null,
  ];
}
