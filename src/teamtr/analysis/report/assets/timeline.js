// Every update of the run as a cell; the one that is chosen is told in full, and leads to its conversations.

OWN.timeline = (data, batches) => {
  const details = el("div", { class: "details", "aria-live": "polite" }, el("p", { class: "nothing" }, "Choose an update."));
  const stored = new Map(data.batches.map((b) => [b.stage + "/" + b.step, b]));
  const stages = new Map();
  for (const u of data.updates) { if (!stages.has(u.stage)) stages.set(u.stage, []); stages.get(u.stage).push(u); }
  const sign = (u) => (u.kept ? (u.outside ? "!" : "") : u.outcome === "restored" ? "↺" : "–");
  const decisions = new Map((data.rollouts ? data.rollouts.decisions : []).map((d) => [d.update, d]));
  const origin = (u, own, source) => {
    const decision = decisions.get(u.update);
    const told = !own ? `Learnt from the batch of step ${source.step}: rollouts reused`
      : decision && decision.action === "redraw" ? "Learnt from a batch of an earlier team, redrawn in part"
      : "Learnt from a batch of its own, sampled under the team as it was then";
    return told + (decision ? ` (${decision.reason}). ` : ". ");
  };
  const show = (u, button) => {
    batches.selected = u.update;
    for (const other of document.querySelectorAll(".cell[aria-pressed=true]")) other.setAttribute("aria-pressed", "false");
    button.setAttribute("aria-pressed", "true");
    const own = stored.get(u.stage + "/" + u.step);
    const source = own || [...data.batches].reverse().find((b) => b.stage === u.stage && b.step <= u.step);
    details.replaceChildren(el("p", null, nameTag(data, u.agent), ` update ${u.update}, stage ${u.stage}, step ${u.step}: `, el("b", null, u.outcome.replaceAll("_", " ")), u.reason ? ` (${u.reason})` : ""),
      table(["version", "KL exact", "upper / radius", "surrogate", "fraction kept", "back-offs", "batch success", "gain", "seconds"],
        [[`${u.version_before} → ${u.version_after}`, num(u.kl_full), `${num(u.kl_upper)} / ${num(u.radius)}`, num(u.surrogate), percent(u.fraction), num(u.backtracks), percent(u.success, 1), u.gain ? signed(u.gain.estimate) : "–", num(u.seconds)]]),
      u.stale && u.kept ? el("p", { class: "meta" }, "No certificate applies: batch was stale.") : "",
      !u.stale && Object.keys(u.bounds).length ? el("p", { class: "meta" }, `Certified at least: ${Object.entries(u.bounds).map(([kind, b]) => `${signed(b)} (${kind.replaceAll("_", " ")})`).join(", ")}.`) : "",
      source ? el("p", null, origin(u, own, source),
        batches.has(source.name) ? el("button", { class: "link", click: () => batches.open(source.name) }, "Read its conversations") : "Its conversations are not in this file's sample.") : "");
  };
  const cells = el("div", { class: "scroll timeline" }, [...stages].map(([stage, updates]) => el("div", { class: "stage" },
    updates.map((u) => el("button", { class: "cell " + agentClass(data, u.agent) + (u.kept ? "" : " lost"), "aria-pressed": "false",
      "aria-label": `stage ${stage}, ${u.agent}, ${u.outcome}`, tip: () => `stage ${stage}, step ${u.step}: ${u.agent}\n${u.outcome}, KL ${num(u.kl_upper)} of ${num(u.radius)}`,
      click: (event) => show(u, event.currentTarget), ...(u.update === batches.selected ? { "data-again": true } : {}) }, sign(u))),
    el("span", { class: "stage-number" }, stage % 5 === 0 ? stage : ""))));
  const again = cells.querySelector("[data-again]"); // a live page is drawn anew and keeps what was chosen
  if (again) show(data.updates.find((u) => u.update === batches.selected), again);
  return [
    el("div", { class: "legend" }, data.run.agents.map((a) => el("span", { class: "key " + agentClass(data, a) }, el("i", { class: "swatch dot" }), a)),
      el("span", { class: "key" }, "↺ restored"), el("span", { class: "key" }, "– skipped"), el("span", { class: "key" }, "! outside")),
    cells, details,
    el("p", { class: "caption" }, "Good: no marks. A restored update gave nothing back inside its region; weights were put back bit for bit."),
  ];
};
