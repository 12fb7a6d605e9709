// The sections of a report, each a function of its data.

const agentClass = (data, name) => {
  const k = data.run.agents.indexOf(name);
  return k < 0 ? "agent-none" : "agent-" + (k % 8);
};
const kept = (u) => u.kept;
const nameTag = (data, who) => el("span", { class: "who " + agentClass(data, who) }, who);

const quantile = (values, q) => {
  const sorted = values.filter(isNumber).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))] : 1;
};

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
        ` after ${last.stage} stages`) : el("p", { class: "result" }, "No evaluation yet")),
    el("dl", { class: "facts" }, facts.map(([k, v]) => el("div", null, el("dt", null, k), el("dd", null, v)))),
    data.notes.length ? el("div", { class: "notes", role: "note" }, el("b", null, "What is missing"),
      el("ul", null, data.notes.map((note) => el("li", null, note)))) : null);
}

function headlinesSection(data) {
  return el("section", { id: "headlines", "aria-label": "At a glance" }, el("div", { class: "cards" },
    data.headlines.map((card) => el("article", { class: "card " + card.tone },
      el("h3", null, card.question), el("p", { class: "headline" }, card.headline), el("p", null, card.text)))));
}

function learningSection(data) {
  const evals = data.evals, updates = data.updates;
  const at = evals.map((e) => ({ x: e.sampled_tokens, y: e.success, low: e.low, high: e.high,
    tip: () => `stage ${e.stage}: ${percent(e.success, 1)}${e.low === null ? "" : ` (${percent(e.low)} to ${percent(e.high)})`}\n${num(e.sampled_tokens)} sampled tokens` }));
  const training = updates.map((u) => ({ x: u.sampled_tokens_total, y: u.success, tip: () => `training batch before update ${u.update} (${u.agent}): ${percent(u.success, 1)}` }));
  const exact = updates.filter((u) => isNumber(u.exact_success)).map((u) => ({ x: u.sampled_tokens_total, y: u.exact_success }));
  const confidence = evals.length && evals[0].confidence ? Math.round(100 * evals[0].confidence) : 95;
  const together = data.coordination.map((c, k) => ({ x: c.stage, y: c.consensus, tip: () => `stage ${c.stage}: every statement right in ${percent(c.consensus, 1)}` }));
  const passed = evals.length ? Object.keys(evals[evals.length - 1].pass_at_k) : [];
  return section("learning", "Learning", "Success on held-out problems, against what it cost to get there.",
    chart({ title: "Success over sampled tokens", cls: "wide", height: 290,
      x: { label: "tokens sampled for training", min: 0 }, y: { label: "success, %", format: (v) => Math.round(100 * v), min: 0, max: 1 },
      legend: [{ label: `held-out, ${confidence} % interval over problems`, cls: "good-line", mark: "dot" }, { label: "training batches", cls: "faint", mark: "dot" },
        exact.length ? { label: "exact", cls: "exact", mark: "line" } : null].filter(Boolean),
      layers: [{ type: "dots", points: training, cls: "faint", size: 1.8 }, { type: "line", points: exact, cls: "exact" },
        { type: "band", points: at, cls: "good-line" }, { type: "line", points: at, cls: "good-line" }, { type: "dots", points: at.length > 30 ? at.map((p) => ({ ...p, low: null })) : at, cls: "good-line", size: at.length > 30 ? 2.5 : 4 }],
      caption: "Good: the held-out line rises and its band leaves the band it started in. Training dots far above it mean memorised problems." }),
    el("div", { class: "grid-2" },
      evals.length ? el("div", { class: "panel" }, el("h3", null, "First and last evaluation"),
        table(["measure", "first", "last"], [
          [`avg@${evals[0].samples}`, percent(evals[0].success, 1), percent(evals[evals.length - 1].success, 1)],
          ...passed.filter((k) => k !== "1").map((k) => ["pass@" + k, percent(evals[0].pass_at_k[k], 1), percent(evals[evals.length - 1].pass_at_k[k], 1)]),
          ["majority", percent(evals[0].majority, 1), percent(evals[evals.length - 1].majority, 1)],
          ["consensus on correct", percent(evals[0].consensus, 1), percent(evals[evals.length - 1].consensus, 1)],
        ]),
        el("p", { class: "caption" }, `${num(evals[evals.length - 1].problems)} problems × ${num(evals[evals.length - 1].samples)} samples. Stability (standard deviation of improvements between evaluations, lower is better): ${num(data.stability.deviation)}${isNumber(data.stability.noise) ? `, where sampling alone would show ${num(data.stability.noise)}` : ""}; of ${data.stability.judged} updates whose gain was measured, ${data.stability.regressing} lowered it with the whole interval (about one in forty would by chance).`)) : null,
      chart({ title: "Coordination", x: { label: "stage", whole: true }, y: { label: "episodes, %", format: (v) => Math.round(100 * v), min: 0, max: 1 },
        layers: [{ type: "line", points: together, cls: "agent-4" }, { type: "dots", points: together, cls: "agent-4" }],
        nothing: "No evaluation recorded what the agents stated.",
        caption: "Episodes in which every agent that states an answer states the right one. Good: rises with success." })));
}

function regionSection(data) {
  const updates = data.updates;
  const multiples = data.run.agents.filter((a) => updates.some((u) => u.agent === a)).map((agent) => {
    const own = updates.filter((u) => u.agent === agent), cls = agentClass(data, agent);
    const tip = (u) => `update ${u.update}, stage ${u.stage}: ${u.outcome}\nexact KL ${num(u.kl_full)}, upper ${num(u.kl_upper)} of ${num(u.radius)}\n${u.backtracks} back-offs, beta ${num(u.beta)}`;
    const top = Math.max(...own.map((u) => Math.max(1.35 * (u.radius || 0), kept(u) ? u.kl_upper || 0 : 0)));
    const per = own.find((u) => u.unit) || { unit: "message" };
    const mean = own.filter((u) => kept(u) && isNumber(u.kl_full));
    return chart({ title: agent, cls: cls + " small-multiple", height: 190,
      x: { label: "stage", whole: true }, y: { label: `nats per ${per.unit}`, min: 0, max: top },
      layers: [
        { type: "line", points: own.map((u) => ({ x: u.stage, y: u.radius })), cls: "radius" },
        { type: "dots", points: own.filter((u) => isNumber(u.kl_rejected)).map((u) => ({ x: u.stage, y: Math.min(u.kl_rejected, top), tip: () => `first try outside: ${num(u.kl_rejected)}\n${tip(u)}` })), cls: "faint", mark: "cross", size: 2.5 },
        { type: "dots", points: mean.map((u) => ({ x: u.stage, y: u.unit === "token" ? u.kl_upper : u.kl_full, low: u.unit === "token" ? u.kl_upper : u.kl_full, high: u.kl_upper, tip: () => tip(u), keep: u.outside })), cls, size: 2.6 },
        { type: "dots", points: own.filter((u) => !kept(u)).map((u) => ({ x: u.stage, y: 0, tip: () => `${u.outcome}: ${u.reason}\n${tip(u)}` })), cls: "bad", mark: "cross", size: 3.5 },
      ] });
  });
  const byAgent = (key) => data.run.agents.map((agent) => ({ agent, points: updates.filter((u) => u.agent === agent && isNumber(u[key])).map((u) => ({ x: u.stage, y: u[key], tip: () => `${agent}, stage ${u.stage}: ${num(u[key])}` })) }));
  const legend = data.run.agents.slice(0, 8).map((agent) => ({ label: agent, cls: agentClass(data, agent), mark: "dot" }));
  const spread = (k) => 0.5 * ((k + 0.5) / data.run.agents.length - 0.5); // agents of one stage stand beside each other
  const outside = updates.filter((u) => u.outside).length, held = updates.filter(kept).length;
  const restored = updates.filter((u) => u.outcome === "restored").length;
  const skipped = updates.filter((u) => u.skipped).length;
  const ratio = (key) => updates.filter((u) => isNumber(u[key]) && isNumber(u.kl_full) && u.kl_full > 0 && u.radius && u.unit === "message")
    .map((u) => ({ x: u.kl_full / u.radius, y: u[key] / u.radius, tip: () => `update ${u.update} (${u.agent}): exact ${num(u.kl_full)}, ${key.slice(3)} ${num(u[key])}` }));
  return section("region", "Trust region", "How far each update moved its agent, against the radius it was allowed.",
    el("p", { class: "stats" },
      el("span", { class: outside ? "pill bad" : "pill good" }, `${outside} of ${held} kept updates outside (${percent(held ? outside / held : 0)})`),
      el("span", { class: "pill" }, `${updates.filter((u) => (u.backtracks || 0) > 0).length} backed off`),
      el("span", { class: "pill" }, `${restored} restored`), el("span", { class: "pill" }, `${skipped} skipped`)),
    el("div", { class: "multiples" }, multiples),
    el("p", { class: "caption" }, "Dot: the exact KL from the policy before to the one after, over the full vocabulary; whisker: its upper bound over problems, which the gate judges; dashed line: the radius. Faint cross: a first try that was outside and was shortened (drawn at the edge when beyond the plot). Red cross: nothing kept. Good: every whisker ends under the line, and not far under it."),
    el("div", { class: "grid-2" },
      chart({ title: "Penalty weight beta", legend, x: { label: "stage", whole: true }, y: { label: "beta (no unit)", log: true },
        layers: byAgent("beta").map(({ agent, points }) => ({ type: "line", points: points.filter((p) => p.y > 0), cls: agentClass(data, agent) })),
        caption: "Steered so that updates end near their radius. Good: settles. At its floor or ceiling the penalty has lost its grip, and the gate alone holds the region." }),
      chart({ title: "Back-offs", legend, x: { label: "stage", whole: true }, y: { label: "steps back along the line", min: 0 },
        layers: byAgent("backtracks").map(({ agent, points }, k) => ({ type: "dots", points: points.map((p) => ({ ...p, x: p.x + spread(k) })), cls: agentClass(data, agent), size: 2.4 })),
        caption: "How often a try had to be shortened. Good: zero to two; more means that the step length is far too large." }),
      chart({ title: "Clipped", legend: [{ label: "ratios", cls: "agent-1", mark: "dot" }, { label: "advantages", cls: "agent-2", mark: "dot" }],
        x: { label: "update", whole: true }, y: { label: "share clipped, %", format: (v) => num(100 * v), min: 0 },
        layers: [["ratio_clip_rate", "agent-1"], ["advantage_clip_rate", "agent-2"]].map(([key, cls]) => ({ type: "dots", cls, size: 2.4, points: updates.filter((u) => isNumber(u[key])).map((u) => ({ x: u.update, y: u[key], tip: () => `update ${u.update} (${u.agent}): ${percent(u[key], 1)} of ${key.startsWith("ratio") ? "ratios" : "advantages"}` })) })),
        caption: "How often clipping held back a ratio during the steps (from the second on), and an advantage. Good: few; many clipped ratios mean steps that strain at the region, many clipped advantages mean rare rewards." }),
      chart({ title: "Sampler against learner", legend, x: { label: "stage", whole: true }, y: { label: "|Δ log p| per token, nats", min: 0 },
        layers: byAgent("mismatch_sampler").map(({ agent, points }) => ({ type: "dots", points, cls: agentClass(data, agent), size: 2.4 })),
        nothing: "No update recorded it.",
        caption: "How far the log-probabilities of the engine that sampled are from those of the engine that learns, on the same tokens. No ratio uses the sampler's. Good: near rounding, and not growing." }),
      chart({ title: "Would a sampled KL have held the region?",
        legend: [{ label: "k1 (the paper's)", cls: "agent-1", mark: "dot" }, { label: "k3", cls: "agent-2", mark: "dot" }],
        x: { label: "exact KL / radius", min: 0 }, y: { label: "sampled KL / radius", max: quantile([...ratio("kl_k1"), ...ratio("kl_k3")].map((p) => p.y), 0.98) * 1.1 },
        layers: [{ type: "diagonal" }, { type: "rule", y: 1, label: "radius" }, { type: "dots", points: ratio("kl_k1"), cls: "agent-1", size: 2.4 }, { type: "dots", points: ratio("kl_k3"), cls: "agent-2", size: 2.4 }],
        caption: "Good: dots on the diagonal. Dots across the horizontal line from where the exact KL lies would have been judged wrongly. The farthest two per cent are drawn at the edge." }),
      el("div", { class: "panel" }, el("h3", null, "Sampled against exact KL"),
        table(["estimate", "bias", "error", "flips", "flips near the edge"], data.kl_reliability.map((e) => [e.name.slice(3),
          e.bias_in_radii === null ? "–" : signed(e.bias_in_radii, 2), num(e.rmse_in_radii, 2), percent(e.flip_rate), e.near_updates ? `${percent(e.near_flip_rate)} of ${e.near_updates}` : "–"])),
        el("p", { class: "caption" }, "Bias and root-mean-square error in radii. A flip: the estimate and the exact KL lie on different sides of the radius; near the edge: the exact KL within half a radius of it. Good: zero.",
          data.zeta ? ` Estimation term zeta: mean ${num(data.zeta.proxy.mean)}, median ${num(data.zeta.proxy.p50)}, P90 ${num(data.zeta.proxy.p90)} per update; ${data.zeta.penalty_share ? percent(data.zeta.penalty_share.mean) : "an unknown part"} of the paper's penalty of a stage.` : ""),
        data.kl_subsamples.length ? [el("h3", { class: "below" }, "The sampled KL from some of the positions"),
          table(["positions", "median", "P90", "flips near the edge", "against exact"], data.kl_subsamples.map((k) => [percent(k.share), num(k.median_in_radii, 2), num(k.p90_in_radii, 2), k.near_updates ? `${percent(k.near_flip_rate)} of ${k.near_updates}` : "–", percent(k.exact_flip_rate)])),
          el("p", { class: "caption" }, `Of ${num(Math.max(...data.kl_subsamples.map((k) => k.updates)))} probed updates: the paper's estimate from a random share of token positions, its distance from that of all positions in radii. Flips: draws judged otherwise than all positions are, near the edge (within a fifth of the radius of it); or otherwise than by the exact KL. Good: zero. Steady is not yet right: compare with the exact KL.`)] : null)));
}

function certificateSection(data) {
  const held = data.updates.filter(kept), stale = held.filter((u) => u.stale).length, issued = data.updates.filter((u) => !u.stale);
  const judged = issued.filter((u) => u.gain && isNumber(u.gain.estimate));
  const points = (kind) => judged.filter((u) => isNumber(u.bounds[kind])).map((u) => ({ x: u.bounds[kind], y: u.gain.estimate,
    low: u.gain.exact ? null : u.gain.lower, high: u.gain.exact ? null : u.gain.upper,
    tip: () => `update ${u.update} (${u.agent})\ncertified at least ${signed(u.bounds[kind])}\n${u.gain.exact ? "exact" : "measured"} ${signed(u.gain.estimate)}${u.gain.exact ? "" : ` (${signed(u.gain.lower)} to ${signed(u.gain.upper)})`}` }));
  const over = (kind) => issued.filter((u) => isNumber(u.bounds[kind])).map((u) => ({ x: u.update, y: u.bounds[kind], tip: () => `update ${u.update} (${u.agent}): ${signed(u.bounds[kind])}` }));
  const words = { turn_aware: "ours (turn-aware), units of reward", single_step: "the paper's (single step), units of normalised advantage" };
  return section("certificate", "Certificate", "What each update was promised to gain at least, against what it gained.",
    stale ? el("p", { class: "stats" }, el("span", { class: "pill bad" }, `${stale} of ${held.length} kept updates without a certificate: batch was stale`)) : null,
    stale ? el("p", { class: "caption" }, "Those updates learnt from rollouts of an earlier team. A certificate bounds a step from the team that wrote its batch, so that none applies to theirs; those that an older log holds are neither drawn nor judged.") : null,
    el("div", { class: "grid-2" },
      chart({ title: "Promised and gained", x: { label: "certified gain (ours), reward" }, y: { label: "gain, reward" },
        layers: [{ type: "diagonal" }, { type: "rule", y: 0 }, { type: "dots", points: points("turn_aware"), cls: "agent-0", size: 2.8 }],
        nothing: "No update has both a certificate and a measured gain.",
        caption: "Gain measured on the next batch of the same problems (whisker: 95 % interval) or exact where known. Good: dots on or above the diagonal, and to the right of zero." }),
      chart({ title: "Our bound over the run", x: { label: "update", whole: true }, y: { label: "reward" },
        legend: [{ label: "certified", cls: "agent-0", mark: "line" }, { label: "gained", cls: "faint", mark: "dot" }],
        layers: [{ type: "rule", y: 0 }, { type: "dots", points: judged.map((u) => ({ x: u.update, y: u.gain.estimate })), cls: "faint", size: 2 }, { type: "line", points: over("turn_aware"), cls: "agent-0" }],
        caption: "Good: above zero, which promises an improvement before it is measured; and the gains above the line. Late in training little is left to gain, and the bound sinks below zero." }),
      chart({ title: "The paper's bound and the gain", x: { label: "certified, normalised advantage" }, y: { label: "gain, reward" },
        layers: [{ type: "rule", y: 0 }, { type: "dots", points: points("single_step"), cls: "agent-1", size: 2.8 }],
        nothing: "No update has both a certificate and a measured gain.",
        caption: "The paper's single-step bound charges for shifts of contexts that cannot happen when an agent speaks once, so it is far below zero. Its units are not those of the gain: compare order and sign only." }),
      chart({ title: "The paper's bound over the run", x: { label: "update", whole: true }, y: { label: "normalised advantage" },
        layers: [{ type: "rule", y: 0 }, { type: "line", points: over("single_step"), cls: "agent-1" }],
        caption: "Good: above zero; nearer zero is tighter." })),
    Object.keys(data.certificates).length ? table(["certificate", "updates judged", "positive", "rank correlation with the gain", "violations", "not applicable"],
      Object.entries(data.certificates).map(([kind, c]) => [words[kind] || kind, c.count + (c.exact ? " (exact)" : ""), `${c.positive} of ${c.count}`,
        c.rank_correlation === null ? "–" : num(c.rank_correlation, 2), c.count ? `${c.violations} (${percent(c.violation_rate)})` : "–", c.not_applicable ? `${c.not_applicable}: batch was stale` : "0"])) : null,
    el("p", { class: "caption" }, "A violation: the gain, interval and all, lies below the bound. Good: no more than the confidence allows (with 95 % intervals on both sides, about one in forty by chance), and a rank correlation above zero. " + (data.updates.some((u) => u.groups_aside) ? "Bounds are read on problems that were set aside (learner.certify_share): nothing was learnt from them." : "A bound is read on the batch that was climbed, so it is optimistic, and wide intervals of the gain hide it: few violations do not prove it. learner.certify_share sets problems aside for fair ones.")));
}

function stalenessSection(data) {
  const lead = "What rollouts cached at the start of a stage would have hidden from its later updates.";
  const parts = [];
  if (data.weights) {
    const w = data.weights;
    parts.push(el("div", { class: "panel" }, el("h3", null, "Weights of the reused rollouts"),
      table(["after update", "episodes", "ESS / B", "P95", "P99", "largest", "share above 10"],
        [[num(w.update), num(w.episodes), percent(w.effective_share, 1), num(w.p95), num(w.p99), num(w.largest), percent(w.above_ten, 1)]]),
      el("p", { class: "caption" }, "Good: ESS / B near 100 %. It is what the reused episodes are worth in fresh ones; weights are stored with the newest checkpoint only.")));
  }
  if (data.probes) parts.push(probeCharts(data));
  if (data.staleness) {
    const order = [...new Set(data.staleness.map((s) => s.agent))];
    const legend = order.slice(0, 8).map((agent) => ({ label: agent, cls: agentClass(data, agent), mark: "dot" }));
    const drift = (agent) => data.staleness.filter((s) => s.agent === agent && s.drift).map((s) => ({ x: s.stage, y: s.drift.total_variation, chance: s.drift.chance,
      tip: () => `${agent}, stage ${s.stage}, step ${s.step}\ntotal variation ${num(s.drift.total_variation)}, by chance ${num(s.drift.chance)}\n${percent(s.drift.repeated)} of contexts repeat, compared by ${s.form}` }));
    const moved = (agent) => data.staleness.filter((s) => s.agent === agent && s.moved).map((s) => ({ x: s.stage + 0.12 * s.step, y: s.moved.estimate, low: s.moved.lower, high: s.moved.upper,
      tip: () => `${agent}, stage ${s.stage}, step ${s.step}: ${signed(s.moved.estimate)} (${signed(s.moved.lower)} to ${signed(s.moved.upper)})` }));
    parts.push(driftPanel(data), el("div", { class: "grid-2" },
      chart({ title: "Drift of contexts within a stage", legend, x: { label: "stage", whole: true }, y: { label: "total variation", min: 0 },
        layers: order.flatMap((agent) => [{ type: "dots", points: drift(agent).map((p) => ({ x: p.x, y: p.chance, tip: p.tip })), cls: agentClass(data, agent), mark: "cross", size: 3.5 }, { type: "dots", points: drift(agent), cls: agentClass(data, agent) }]),
        caption: `How much the contexts in which an agent speaks changed between stage start and its own update. Cross: what chance alone gives between two batches of one team. Dots on their crosses: stale rollouts would have done. Contexts are compared by the finest form of which half repeat: here ${[...new Set(data.staleness.map((s) => s.form).filter(Boolean))].map((f) => FORM_WORDS[f]).join("; ") || "none does"}.`,
        nothing: "No form of the contexts repeats often enough to be counted; where probes are logged, the weights tell." }),
      chart({ title: "Return moved since stage start", legend, x: { label: "stage", whole: true }, y: { label: "change of mean return" },
        layers: [{ type: "rule", y: 0 }, ...order.map((agent) => ({ type: "dots", points: moved(agent), cls: agentClass(data, agent) }))],
        caption: "The same problems, played again before a later update (95 % interval). Away from zero: the stage's first batch was out of date, and by how much." })));
  }
  if (!parts.length) parts.push(el("p", { class: "nothing" }, data.run.fresh === false
    ? "This plan reuses rollouts and its newest checkpoint holds no weights between updates: nothing to measure here."
    : "Not measured here. teamtr report RUN reads the stored episodes of several stages and measures it."));
  return section("staleness", "Staleness", lead, parts);
}

const FORM_WORDS = { identity: "word for word", statements: "by what was stated", agreement: "by who agrees with whom" };

/** D_occ in every form: those that count contexts are lower bounds, the one by weights is an upper bound. */
function driftPanel(data) {
  const rows = Object.keys(FORM_WORDS).map((form) => {
    const found = data.staleness.map((s) => s.drifts[form]).filter(Boolean), mean = (key) => found.reduce((sum, d) => sum + d[key], 0) / found.length;
    return found.length ? [FORM_WORDS[form], percent(mean("repeated")), num(mean("total_variation")), num(mean("chance")), ...(mean("repeated") >= 0.5 ? [num(mean("excess")), num(mean("corrected"))] : ["–", "–"])] : null;
  }).filter(Boolean);
  const weights = data.probes ? data.probes.updates.map((p) => p.weights).filter((w) => isNumber(w.total_variation)) : [];
  if (weights.length) rows.push(["by importance weights", "not needed", num(weights.reduce((sum, w) => sum + w.total_variation, 0) / weights.length), "–", "–", "upper bound"]);
  return el("div", { class: "panel" }, el("h3", null, "D_occ, by what is compared"),
    table(["contexts compared", "repeat", "total variation", "by chance", "at least", "estimate"], rows),
    el("p", { class: "caption" }, "Means over the later updates of a stage. Counting sees only contexts that repeat, and a coarser form can only show less: at least: total variation less chance; estimate: chance taken out in quadrature, rough. The weights give the total variation between whole conversations, which no context can exceed. Good: near zero."));
}

function probeCharts(data) {
  const judged = data.probes.updates.filter((p) => p.gap);
  const agents = [...new Set(judged.map((p) => p.agent))];
  const legend = agents.slice(0, 8).map((agent) => ({ label: agent, cls: agentClass(data, agent), mark: "dot" }));
  const layer = (agent, value, words) => ({ type: "dots", cls: agentClass(data, agent), points: judged.filter((p) => p.agent === agent).map((p) => ({ x: p.stage, y: value(p), tip: () => `${agent}, stage ${p.stage}, step ${p.step}\n${words(p)}` })) });
  const total = (key) => Object.entries(data.probes.by_stage).map(([stage, gap]) => ({ x: Number(stage), y: gap[key] }));
  const gaps = (agent) => judged.filter((p) => p.agent === agent).map((p) => ({ x: p.stage + 0.12 * p.step, y: p.gap.estimate, low: p.gap.lower, high: p.gap.upper, tip: () => `${agent}, stage ${p.stage}, step ${p.step}\nsurrogate on fresh rollouts ${signed(p.fresh)}, on those of the stage's first team ${signed(p.stale)}\ndifference ${signed(p.gap.estimate)} (${signed(p.gap.lower)} to ${signed(p.gap.upper)})` }));
  return el("div", { class: "grid-2" },
    chart({ title: "Stale gap of each probed update", legend, x: { label: "stage", whole: true }, y: { label: "fresh − stale surrogate" },
      layers: [{ type: "rule", y: 0 }, ...agents.map((agent) => ({ type: "dots", points: gaps(agent), cls: agentClass(data, agent) }))],
      caption: "What new rollouts of the team before an update say it is worth, less what rollouts of the team that began the stage say, in units of the normalized advantage, with 95 % intervals over problems. No update learned from either batch. Good: intervals that hold zero." }),
    chart({ title: "Δ stale of each probed stage", legend: [{ label: "sum of the gaps' sizes", cls: "agent-1", mark: "line" }, { label: "by sampling alone", cls: "faint", mark: "line" }], x: { label: "stage", whole: true }, y: { label: "sum of |fresh − stale|", min: 0 },
      layers: [{ type: "line", points: total("noise"), cls: "faint" }, { type: "line", points: total("total"), cls: "agent-1" }, { type: "dots", points: total("total"), cls: "agent-1" }],
      caption: "Sizes add up even where nothing is stale: the faint line is what sampling alone would show. Good: the two lie together." }),
    chart({ title: "What the stage's first rollouts are still worth", legend, x: { label: "stage", whole: true }, y: { label: "ESS / B, %", format: (v) => Math.round(100 * v), min: 0, max: 1 },
      layers: agents.map((agent) => layer(agent, (p) => p.weights.effective_share, (p) => `ESS / B ${percent(p.weights.effective_share, 1)}, P95 ${num(p.weights.p95)}, P99 ${num(p.weights.p99)}, largest ${num(p.weights.largest)}, above ten ${percent(p.weights.above_ten, 1)}${isNumber(p.weights.total_variation) ? `\ntotal variation of conversations ${num(p.weights.total_variation)} ± ${num(1.96 * p.weights.total_variation_error, 2)}` : ""}`)),
      nothing: "No probe carried rollouts past an update.",
      caption: "Effective share of the first rollouts when reweighted to the team before an update. Good: near 100 %: then reusing them costs little." }));
}

function timelineSection(data, openBatch) {
  const details = el("div", { class: "details", "aria-live": "polite" }, el("p", { class: "nothing" }, "Choose an update."));
  const stored = new Map(data.batches.map((b) => [b.stage + "/" + b.step, b]));
  const stages = new Map();
  for (const u of data.updates) { if (!stages.has(u.stage)) stages.set(u.stage, []); stages.get(u.stage).push(u); }
  const sign = (u) => (kept(u) ? (u.outside ? "!" : "") : u.outcome === "restored" ? "↺" : "–");
  const show = (u, button) => {
    openBatch.selected = u.update;
    for (const other of document.querySelectorAll(".cell[aria-pressed=true]")) other.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", "true");
    const own = stored.get(u.stage + "/" + u.step);
    const source = own || [...data.batches].reverse().find((b) => b.stage === u.stage && b.step <= u.step);
    details.replaceChildren(el("p", null, nameTag(data, u.agent), ` update ${u.update}, stage ${u.stage}, step ${u.step}: `, el("b", null, u.outcome.replaceAll("_", " ")), u.reason ? ` (${u.reason})` : ""),
      table(["version", "KL exact", "upper / radius", "surrogate", "fraction kept", "back-offs", "batch success", "gain", "seconds"],
        [[`${u.version_before} → ${u.version_after}`, num(u.kl_full), `${num(u.kl_upper)} / ${num(u.radius)}`, num(u.surrogate), percent(u.fraction), num(u.backtracks), percent(u.success, 1), u.gain ? signed(u.gain.estimate) : "–", num(u.seconds)]]),
      u.stale && kept(u) ? el("p", { class: "meta" }, "No certificate applies: batch was stale.") : "",
      !u.stale && Object.keys(u.bounds).length ? el("p", { class: "meta" }, `Certified at least: ${Object.entries(u.bounds).map(([kind, b]) => `${signed(b)} (${kind.replaceAll("_", " ")})`).join(", ")}.`) : "",
      source ? el("p", null, own ? "Learnt from a batch of its own, sampled under the team as it was then. " : `Learnt from the batch of step ${source.step}: rollouts reused. `,
        openBatch.has(source.name) ? el("button", { class: "link", click: () => openBatch.open(source.name) }, "Read its conversations") : "Its conversations are not in this file's sample.") : "");
  };
  const built = section("timeline", "Timeline", "Every stage from left to right, its updates from top to bottom in their order.",
    el("div", { class: "legend" }, data.run.agents.map((a) => el("span", { class: "key " + agentClass(data, a) }, el("i", { class: "swatch dot" }), a)),
      el("span", { class: "key" }, "↺ restored"), el("span", { class: "key" }, "– skipped"), el("span", { class: "key" }, "! outside")),
    el("div", { class: "scroll timeline" }, [...stages].map(([stage, updates]) => el("div", { class: "stage" },
      updates.map((u) => el("button", { class: "cell " + agentClass(data, u.agent) + (kept(u) ? "" : " lost"), "aria-pressed": "false",
        "aria-label": `stage ${stage}, ${u.agent}, ${u.outcome}`, tip: () => `stage ${stage}, step ${u.step}: ${u.agent}\n${u.outcome}, KL ${num(u.kl_upper)} of ${num(u.radius)}`,
        click: (event) => show(u, event.currentTarget), ...(u.update === openBatch.selected ? { "data-again": true } : {}) }, sign(u))),
      el("span", { class: "stage-number" }, stage % 5 === 0 ? stage : "")))),
    details,
    el("p", { class: "caption" }, "Good: no marks. A restored update gave nothing back inside its region; weights were put back bit for bit."));
  const again = built.querySelector("[data-again]"); // a live page is drawn anew and keeps what was chosen
  if (again) show(data.updates.find((u) => u.update === openBatch.selected), again);
  return built;
}

function costSection(data) {
  const cost = data.cost, phases = (t) => [...new Set(Object.values(t).flatMap((row) => Object.keys(row)))];
  const grid = (t, format) => {
    const columns = phases(t);
    const rows = Object.entries(t).map(([agent, row]) => [agent, ...columns.map((p) => (row[p] === undefined ? "–" : format(row[p]))), format(Object.values(row).reduce((a, b) => a + b, 0))]);
    const total = columns.map((p) => format(Object.values(t).reduce((sum, row) => sum + (row[p] || 0), 0)));
    return table(["", ...columns, "all"], [...rows, ["all", ...total, format(Object.values(t).flatMap((row) => Object.values(row)).reduce((a, b) => a + b, 0))]]);
  };
  const o = cost.overhead;
  return section("cost", "Accounting", "Where tokens and time went.",
    el("p", { class: "stats" },
      el("span", { class: "pill" }, `${num(cost.sampled_tokens)} tokens sampled`), el("span", { class: "pill" }, `${num(cost.episodes)} episodes`),
      o.token_ratio ? el("span", { class: "pill" }, `${o.token_ratio.toFixed(2)} × the tokens of naive sequential`) : null,
      o.seconds_ratio ? el("span", { class: "pill" }, `about ${o.seconds_ratio.toFixed(2)} × its time`) : null),
    el("div", { class: "grid-2" },
      el("div", { class: "panel" }, el("h3", null, "Tokens by agent and phase"), grid(cost.tokens, (x) => num(Math.round(x)))),
      el("div", { class: "panel" }, el("h3", null, "Seconds by agent and phase"), grid(cost.seconds, (x) => num(Number(x.toFixed(2)), 4)))),
    el("p", { class: "caption" }, cost.complete ? "" : "Without a checkpoint the log alone tells no sampling by agent. ",
      "Overhead: naive sequential training samples once a stage, so it is charged the tokens of each stage's first step; its time is ours less the same share of sampling. ",
      `Evaluations are apart: ${num(cost.eval_tokens)} tokens, ${clock(cost.eval_seconds)}.`));
}

function reproduceSection(data) {
  const r = data.reproduce, run = data.run;
  return section("reproduce", "How to reproduce", "The resolved team file and the command; on a CPU the same seed gives the same bits.",
    el("pre", null, r.commands.join("\n")),
    el("p", { class: "caption" }, `teamtr ${r.version}; threads ${run.threads ?? "unknown"}; resumed ${run.resumed} times; precision ${Object.entries(run.precisions).map(([a, p]) => a + " " + p).join(", ") || "unknown"}; sampling ${Object.entries(run.samplers).map(([a, p]) => a + " " + p).join(", ") || "unknown"}; noise floors ${Object.entries(run.floors).map(([a, f]) => a + " " + num(f)).join(", ") || "unknown"} nats.`),
    r.team_file ? el("details", null, el("summary", null, "team.yaml"), el("pre", null, r.team_file)) : null);
}
