// Replaced agents: was the protocol kept, how far the alignment came, what the swap cost and how the team recovered.

const MOMENTS = { before: "before", at_swap: "as it came", after: "after alignment" };

function swapSection(data) {
  if (!data.swaps.length) return null;
  return section("swap", "Swap", "Agents that were replaced in the middle of the run.", data.swaps.map((swap) => swapPart(data, swap)));
}

function swapPart(data, swap) {
  const a = swap.alignment, per = a ? a.unit : "message";
  const moments = Object.keys(MOMENTS).filter((when) => swap.success[when]);
  const start = swap.stage ?? 0;
  const at = (when) => ({ ...swap.success[when], y: swap.success[when].success, x: start, tip: () => `${MOMENTS[when]}: ${percent(swap.success[when].success, 1)}${rangeOf(swap.success[when])}` });
  const earlier = data.evals.filter((e) => isNumber(e.stage) && e.stage < start).map((e) => ({ x: e.stage, y: e.success, low: e.low, high: e.high, tip: () => `stage ${e.stage}: ${percent(e.success, 1)}` }));
  const later = swap.recovery.map((e) => ({ x: e.stage, y: e.success, low: e.low, high: e.high, tip: () => `stage ${e.stage}, ${e.stage - start} after the swap: ${percent(e.success, 1)}${rangeOf(e)}` }));
  const before = swap.success.before ? swap.success.before.success : null;
  return el("div", { class: "swap" },
    el("h3", null, nameTag(data, swap.agent), ` before stage ${swap.stage}: ${swap.models[0]} → ${swap.models[1]} (${swap.mode})`),
    el("p", { class: "stats" },
      el("span", { class: swap.certified ? "pill" : "pill bad" }, swap.certified ? "certified" : "uncertified"),
      el("span", { class: "pill" }, `shock ${inPoints(swap.shock)}`),
      isNumber(swap.direct_shock) ? el("span", { class: "pill" }, `${inPoints(swap.direct_shock)} as it came`) : null,
      a && a.within_radius !== null ? el("span", { class: a.within_radius ? "pill good" : "pill bad" }, a.within_radius ? "alignment reached the radius" : "alignment did not reach the radius") : null,
      el("span", { class: swap.exact_kl ? "pill" : "pill bad" }, swap.exact_kl ? "exact KL" : "no exact KL: the two spell differently")),
    swap.certified ? null : el("p", { class: "caption" }, "No bound says that the team is as good as before a swap; the updates after it carry certificates again."),
    el("div", { class: "grid-2" },
      chart({ title: "Recovery", legend: [{ label: "before the swap", cls: "faint", mark: "dot" }, { label: "after it", cls: agentClass(data, swap.agent), mark: "dot" }],
        x: { label: "stage", whole: true }, y: { label: "success, %", format: (v) => Math.round(100 * v), min: 0, max: 1 },
        layers: [isNumber(before) ? { type: "rule", y: before, label: "before" } : null, { type: "line", points: earlier, cls: "faint" }, { type: "dots", points: earlier, cls: "faint" },
          { type: "dots", points: moments.map(at), cls: agentClass(data, swap.agent), mark: "cross", size: 4 },
          { type: "line", points: [...moments.slice(-1).map(at), ...later], cls: agentClass(data, swap.agent) }, { type: "dots", points: later, cls: agentClass(data, swap.agent) }].filter(Boolean),
        caption: "Held-out success. Crosses: before, as the new agent came, and after its alignment, on the same problems. Good: a small drop, and back above the dashed line within a few stages. The shock is what was lost: before less as installed." }),
      a ? alignmentChart(data, swap, a, per) : null,
      el("div", { class: "panel" }, el("h3", null, "Success around the swap"),
        table(["", "success", "from", "to"], moments.map((when) => [MOMENTS[when], percent(swap.success[when].success, 1), percent(swap.success[when].low, 1), percent(swap.success[when].high, 1)])),
        a ? el("p", { class: "caption" }, feasibility(a, per)) : el("p", { class: "caption" }, "Put in as it was, without alignment.")),
      el("div", { class: "panel" }, el("h3", null, "Protocol checklist"),
        swap.checklist.length ? table(["point", "", "note"], swap.checklist.map((item) => [item.point, el("b", { class: item.ok ? "yes" : "no" }, item.ok ? "ok" : "differs"), item.note]), false) : el("p", { class: "nothing" }, "No checklist is in the log."),
        el("p", { class: "caption" }, "Good: ok everywhere. What differs did not forbid the swap: the alignment had to bridge it."))));
}

function alignmentChart(data, swap, a, per) {
  const exact = a.loss !== "cross_entropy", name = exact ? "KL from old to new" : "cross-entropy";
  const looks = a.curve.map((look) => ({ x: look.step, y: look.kl, low: look.kl, high: look.upper, tip: () => `step ${num(look.step)}: ${num(look.kl)}, upper ${num(look.upper)} nats per ${per}` }));
  const trained = a.curve.map((look) => ({ x: look.step, y: look.train_kl })).filter((p) => isNumber(p.y));
  return chart({ title: "Alignment: held-out probes", legend: [{ label: name, cls: agentClass(data, swap.agent), mark: "dot" }, trained.length ? { label: "on probes trained on", cls: "faint", mark: "line" } : null].filter(Boolean),
    x: { label: "alignment steps", min: 0 }, y: { label: `nats per ${per}`, log: [...looks, ...trained].every((p) => p.y > 0) },
    layers: [isNumber(a.radius) ? { type: "rule", y: a.radius, label: "radius" } : null, { type: "line", points: trained, cls: "faint" }, { type: "line", points: looks, cls: agentClass(data, swap.agent) }, { type: "dots", points: looks, cls: agentClass(data, swap.agent), size: 2.8 }].filter(Boolean),
    nothing: "The log holds no curve of the alignment.",
    caption: exact ? "Over the full vocabulary, on probes that were not aligned on; whisker: its upper bound. Good: ends under the dashed line, which is where alignment stops." : "The two spell differently, so no KL and no radius apply: the new agent learnt from the old one's texts. Good: falls and settles." });
}

function feasibility(a, per) {
  const parts = [`Plug-in feasibility: ${num(a.steps)} steps${isNumber(a.steps_in_all) && a.steps_in_all > a.steps ? ` (${num(a.steps_in_all)} tried)` : ""} on ${num(a.probes)} probes, ${num(a.held_out)} of them held out.`];
  if (isNumber(a.radius)) parts.push(`Held-out KL ${num(a.kl)}, upper bound ${num(a.kl_upper)} of a radius of ${num(a.radius)} nats per ${per}.`);
  if (a.unseen) parts.push(`On ${num(a.unseen.messages)} messages that steered nothing: ${num(a.unseen.kl)}, upper bound ${num(a.unseen.kl_upper)}.`);
  if (isNumber(a.surrogate)) parts.push(`Surrogate by the old team's advantages: ${signed(a.surrogate)} (good: not far below zero).`);
  if (a.text_gap) parts.push(`Text gap ${num(a.text_gap.nats_per_message)} nats per message, ${num(a.text_gap.nats_per_character)} per character.`);
  if (a.note) parts.push(a.note + ".");
  return parts.join(" ");
}

const inPoints = (share) => (isNumber(share) ? num(100 * share) + " points" : "unknown");
const rangeOf = (m) => (isNumber(m.low) && isNumber(m.high) ? ` (${percent(m.low)} to ${percent(m.high)})` : "");
