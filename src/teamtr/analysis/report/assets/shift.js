// Which tokens an update moved, inside its region and beyond it.

function shiftSection(data) {
  const shifted = data.probes ? data.probes.updates.filter((p) => p.shift) : [];
  if (!shifted.length) return null;
  const update = new Map(data.updates.map((u) => [u.update, u]));
  const latest = (outside) => data.run.agents.map((agent) => shifted.filter((p) => p.agent === agent && Boolean(update.get(p.update)?.outside) === outside).at(-1)).filter(Boolean);
  const inside = latest(false), outside = latest(true);
  const stretched = (inside.length ? inside : outside).filter((p) => p.shift.stretched);
  const beyond = outside.length
    ? outside.map((p) => ({ ...p, moved: p.shift.moved_R, flips: p.shift.flipped, kl: update.get(p.update)?.kl_full, how: `stage ${p.stage}` }))
    : stretched.map((p) => ({ ...p, moved: p.shift.stretched.moved_R, flips: p.shift.stretched.flipped, kl: p.shift.stretched.kl, how: `${num(p.shift.stretched.times)} × stage ${p.stage}` }));
  const within = inside.map((p) => ({ ...p, moved: p.shift.moved_R, flips: p.shift.flipped, kl: update.get(p.update)?.kl_full, how: `stage ${p.stage}` }));
  const top = Math.max(...[...within, ...beyond].flatMap((p) => p.moved.slice(0, -1)).filter(isNumber), 1e-12);
  const drawn = (title, rows, caption) => chart({ title, legend: rows.slice(0, 8).map((p) => ({ label: `${p.agent}, ${p.how}`, cls: agentClass(data, p.agent), mark: "line" })),
    x: { label: "rank before the update", log: true }, y: { label: "mean |Δ log-probability|, nats", min: 0, max: 1.05 * top },
    layers: rows.flatMap((p) => {
      const points = p.moved.slice(0, -1).map((y, r) => ({ x: r + 1, y, tip: () => `${p.agent}, ${p.how}: rank ${r + 1}, ${num(y)}` }));
      return [{ type: "line", points, cls: agentClass(data, p.agent) }, { type: "dots", points, cls: agentClass(data, p.agent), size: 2.2 }];
    }),
    nothing: "No probed update of this kind is in the log.", caption });
  const radius = (p) => { const r = update.get(p.update)?.radius; return isNumber(p.kl) && r ? `${num(p.kl / r, 2)} radii` : "–"; };
  return section("shift", "Token shift", "Which tokens an update moved, by their rank before it.",
    el("div", { class: "grid-2" },
      drawn("Inside the region", within, "The last probed update of each agent that was kept inside. Good: small everywhere; the same scale as beside."),
      drawn("Beyond the region", beyond, outside.length
        ? "The last probed update of each agent that was kept outside its region. Large changes among unlikely tokens move the policy's tail, which samples rarely show."
        : "What leaving the region would have done: the same steps, made longer. Nothing of this was kept. Large changes among unlikely tokens move the policy's tail, which samples rarely show.")),
    el("div", { class: "panel" }, el("h3", null, "Mass and flips"),
      table(["agent", "update", "exact KL", "top token", "beyond the ranks", "top changed"], [
        ...within.map((p) => [p.agent, p.how, radius(p), `${percent(p.shift.before_R[0], 1)} → ${percent(p.shift.after_R[0], 1)}`, `${percent(p.shift.before_R.at(-1), 2)} → ${percent(p.shift.after_R.at(-1), 2)}`, percent(p.flips, 1)]),
        ...beyond.map((p) => [p.agent, p.how, radius(p), "", "", percent(p.flips, 1)])]),
      el("p", { class: "caption" }, "Exact KL per message in radii (where the radius is per message). Mean probability over positions, before and after the update, of the most likely token and of all tokens beyond the ranks drawn; and the share of positions whose most likely token changed. Good inside a region: few.")));
}
