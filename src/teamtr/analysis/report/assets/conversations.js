// Reading conversations: filters, the dialogue, its tokens, its siblings, the same problem in other stages.

/** Batches by name, loaded when first looked at. `fetchBatch(name)` gives a promise of one. */
class Batches {
  constructor(rows, held, fetchBatch) {
    this.rows = rows;
    this.held = held;
    this.fetchBatch = fetchBatch;
    this.loaded = new Map();
    this.reader = null;
  }
  has(name) { return this.held(name); }
  /** The batches of a run that grew; what is known of the problems in them is kept. */
  update(rows) {
    const problems = new Map(this.rows.map((row) => [row.name, row.problems]));
    this.rows = rows.map((row) => ({ ...row, problems: row.problems ?? problems.get(row.name) }));
  }
  get(name) {
    if (!this.loaded.has(name)) {
      const promise = this.fetchBatch(name);
      promise.catch(() => this.loaded.delete(name));
      this.loaded.set(name, promise);
    }
    return this.loaded.get(name);
  }
  open(name) { this.reader.show(name); document.getElementById("conversations").scrollIntoView(); }
}

class Reader {
  constructor(data, batches) {
    this.data = data;
    this.batches = batches;
    batches.reader = this;
    this.batch = null;
    this.episode = null;
    this.limit = 60;
    this.tokens = false;
    const rows = batches.rows.filter((row) => batches.has(row.name));
    this.names = rows.map((row) => row.name);
    const changed = () => { this.limit = 60; this.list(); };
    const choice = (label, options) => {
      const select = el("select", { "aria-label": label, change: changed }, options.map(([value, text]) => el("option", { value }, text)));
      return [el("label", null, el("span", null, label), select), select];
    };
    [this.batchBox, this.batchChoice] = choice("stage and step", rows.map((row) => [row.name, `stage ${row.stage}, step ${row.step}`]));
    this.batchChoice.addEventListener("change", () => this.show(this.batchChoice.value));
    [this.verdictBox, this.verdict] = choice("verdict", [["", "any"]]);
    [this.mixedBox, this.mixed] = choice("disagreement", [["", "any"], ["siblings", "siblings differ in verdict"], ["agents", "agents' last words differ"], ["same", "agents' last words agree"]]);
    [this.measuredBox, this.measured] = choice("KL by token", [["", "any"], ["kl", "measured"]]);
    const numberBox = (label) => {
      const input = el("input", { type: "number", step: "any", "aria-label": label, input: changed });
      return [el("label", { class: "narrow" }, el("span", null, label), input), input];
    };
    [this.lowBox, this.low] = numberBox("reward from");
    [this.highBox, this.high] = numberBox("reward to");
    this.search = el("input", { type: "search", "aria-label": "text contains", input: changed });
    this.count = el("p", { class: "count", "aria-live": "polite" });
    this.items = el("div", { class: "episodes", role: "listbox", "aria-label": "episodes" });
    this.view = el("article", { class: "dialogue" });
    this.root = el("div", { class: "reader" },
      el("form", { class: "filters", submit: (event) => event.preventDefault() }, this.batchBox, this.verdictBox, this.mixedBox, this.measuredBox, this.lowBox, this.highBox,
        el("label", { class: "grow" }, el("span", null, "text contains"), this.search)),
      this.count, el("div", { class: "columns" }, this.items, this.view));
    if (this.names.length) this.show(this.names[this.names.length - 1]);
  }

  /** A live run may store more batches while it is read. */
  extend(rows) {
    for (const row of rows) {
      if (this.names.includes(row.name)) continue;
      this.names.push(row.name);
      this.batchChoice.append(el("option", { value: row.name }, `stage ${row.stage}, step ${row.step}`));
      if (this.names.length === 1) this.show(row.name);
    }
  }

  async show(name, pick) {
    this.batchChoice.value = name;
    this.count.textContent = "reading…";
    let batch;
    try { batch = await this.batches.get(name); } catch (error) {
      this.count.textContent = visible(`This batch cannot be shown (${error.message}).`);
      return;
    }
    if (this.batchChoice.value !== name) return;
    this.batch = batch;
    const kinds = [...new Set(batch.episodes.map((e) => e.verdict))];
    const before = this.verdict.value;
    this.verdict.replaceChildren(el("option", { value: "" }, "any"), ...kinds.map((k) => el("option", { value: k }, k)));
    this.verdict.value = kinds.includes(before) ? before : "";
    const rights = new Map();
    for (const e of batch.episodes) {
      if (!rights.has(e.problem)) rights.set(e.problem, new Set());
      rights.get(e.problem).add(e.verdict);
    }
    this.mixedProblems = new Set([...rights].filter(([, verdicts]) => verdicts.size > 1).map(([problem]) => problem));
    this.list();
    const found = pick ? batch.episodes.find(pick) : this.shown[0];
    if (found) this.read(found); else this.view.replaceChildren();
  }

  matches(e) {
    if (this.verdict.value && e.verdict !== this.verdict.value) return false;
    if (this.mixed.value === "siblings" && !this.mixedProblems.has(e.problem)) return false;
    if (this.mixed.value === "agents" && !e.disagree) return false;
    if (this.mixed.value === "same" && e.disagree) return false;
    if (this.measured.value === "kl" && !e.said.some((s) => s.kl)) return false;
    if (this.low.value !== "" && !(e.reward >= Number(this.low.value))) return false;
    if (this.high.value !== "" && !(e.reward <= Number(this.high.value))) return false;
    const wanted = this.search.value.toLowerCase();
    const problem = this.batch.problems[e.problem];
    return !wanted || [problem.id, problem.prompt, e.answer, ...e.said.map((s) => s.text)].some((t) => String(t).toLowerCase().includes(wanted));
  }

  list() {
    if (!this.batch) return;
    this.shown = this.batch.episodes.filter((e) => this.matches(e));
    this.count.textContent = `${this.shown.length} of ${this.batch.episodes.length} episodes` +
      (this.batch.stored > this.batch.episodes.length ? ` here; ${this.batch.stored} are stored in this batch` : "");
    const items = this.shown.slice(0, this.limit).map((e) => {
      const item = el("button", { class: "episode", role: "option", "aria-selected": String(e === this.episode), click: () => this.read(e) },
        el("span", { class: "verdict " + e.verdict }, e.verdict), el("span", { class: "id" }, this.batch.problems[e.problem].id, el("span", { class: "meta" }, ` #${e.sibling + 1}`)),
        el("span", { class: "reward" }, num(e.reward)), el("span", { class: "snippet" }, e.said.map((s) => s.text).join(" · ").slice(0, 90)));
      item.episode = e;
      return item;
    });
    if (this.shown.length > this.limit) items.push(el("button", { class: "link", click: () => { this.limit += 200; this.list(); } }, "show more"));
    this.items.replaceChildren(...items);
  }

  read(e) {
    this.episode = e;
    for (const item of this.items.children) item.setAttribute("aria-selected", String(item.episode === e));
    const batch = this.batch, problem = batch.problems[e.problem];
    const given = Object.entries(problem.private).filter(([, text]) => text);
    this.view.replaceChildren(...[
      el("header", null,
        el("h3", null, problem.id, " ", el("span", { class: "verdict " + e.verdict }, e.verdict)),
        el("p", { class: "meta" }, `stage ${batch.stage}, step ${batch.step} · reward ${num(e.reward)} · advantage ${e.advantage === null ? "unknown" : signed(e.advantage)}`),
        problem.prompt ? el("blockquote", { class: "prompt" }, messageNodes(problem.prompt)) : null,
        given.length ? el("p", { class: "meta" }, "shown only to: ", given.map(([who, text]) => [nameTag(this.data, who), " ", el("bdi", { class: "quote" }, messageNodes(text)), " "])) : null,
        problem.answer !== null ? el("p", { class: "meta" }, "wanted: ", el("bdi", { class: "quote" }, messageNodes(problem.answer)), " · answered: ", el("bdi", { class: "quote" }, messageNodes(e.answer))) : null,
        el("label", { class: "switch" }, el("input", { type: "checkbox", ...(this.tokens ? { checked: true } : {}), change: (event) => { this.tokens = event.target.checked; this.read(e); } }), "tokens")),
      el("div", { class: "turns" }, e.said.map((turn) => this.turn(turn))),
      this.tokens ? el("p", { class: "caption" }, "Each token as sampled; the redder, the less likely the sampler thought it. ", e.said.some((s) => s.kl)
        ? "A bar above a token: how far the update that learnt from this batch moved what could stand there (exact KL at this position, nats; full at 0.1)."
        : this.batch.probed ? "KL by token was measured on other messages of this batch: choose “KL by token: measured” above to find them." : "KL by token is measured where the team file asks for probes (diagnostics.every).") : null,
      this.siblings(e), this.acrossStages(e)].filter(Boolean));
  }

  turn(turn) {
    const cls = turn.environment ? "environment" : agentClass(this.data, turn.who);
    const body = this.tokens && turn.ids ? this.tokenView(turn) : el("bdi", { class: "said" }, messageNodes(turn.text));
    return el("div", { class: "turn " + cls },
      el("div", { class: "speaker" }, turn.who, turn.environment ? el("span", { class: "meta" }, " environment") : el("span", { class: "meta" }, ` ${turn.ids.length} tokens${turn.finish === "length" ? ", cut at the limit" : ""} · version ${turn.version}${turn.kl ? ` · moved by ${num(turn.kl.reduce((a, b) => a + b, 0))} nats` : ""}`)),
      body, turn.cut ? el("p", { class: "meta" }, `${num(turn.cut)} more characters are not shown`) : null);
  }

  tokenView(turn) {
    const pieces = this.batch.pieces[turn.who] || {};
    return el("bdi", { class: "said tokens" }, turn.ids.map((id, k) => {
      const logprob = turn.logprobs[k], text = pieces[id];
      const kl = turn.kl ? turn.kl[k] : undefined;
      const token = el("span", { class: isNumber(kl) ? "token moved" : "token", tip: () => `token ${id}, log-probability ${num(logprob)} (${percent(Math.exp(logprob), 1)})${isNumber(kl) ? `\nexact KL of the update ${num(kl)} nats` : ""}` },
        text === undefined || text === "" ? `#${id}` : text === "\n" ? "⏎" : text);
      token.style.setProperty("--doubt", Math.min(1, Math.max(0, isNumber(logprob) ? -logprob / 5 : 1)).toFixed(2));
      if (isNumber(kl)) token.style.setProperty("--kl", Math.min(1, Math.max(kl, 0) / 0.1).toFixed(2));
      return token;
    }));
  }

  siblings(e) {
    const group = this.batch.episodes.filter((other) => other.problem === e.problem);
    return el("div", { class: "strip" }, el("h4", null, `Its group: ${group.length} episodes of this problem, with their advantages`),
      group.map((other) => el("button", { class: "chip " + other.verdict, "aria-pressed": String(other === e), tip: () => `reward ${num(other.reward)}: ${other.answer}`, click: () => this.read(other) },
        other.advantage === null ? num(other.reward) : signed(other.advantage, 2))));
  }

  acrossStages(e) {
    const id = this.batch.problems[e.problem].id;
    const strip = el("div", { class: "strip" }, el("h4", null, "The same problem in other stages"));
    const known = this.batches.rows.filter((row) => this.batches.has(row.name) && (row.problems ? row.problems.includes(id) : row.name === this.batch.name));
    for (const row of known) {
      strip.append(el("button", { class: "chip", "aria-pressed": String(row.name === this.batch.name), click: async () => {
        const batch = await this.batches.get(row.name);
        this.show(row.name, (other) => batch.problems[other.problem].id === id);
      } }, `stage ${row.stage}.${row.step}`));
    }
    if (this.batches.rows.some((row) => !row.problems && this.batches.has(row.name))) {
      strip.append(el("button", { class: "link", click: () => this.look(e) }, "look in other batches"));
    }
    return strip;
  }

  /** Live: nobody knows yet which batch holds which problem; look into some, evenly spaced. */
  async look(e) {
    const rows = this.batches.rows.filter((row) => !row.problems && this.batches.has(row.name));
    const step = Math.max(1, Math.floor(rows.length / 12));
    await Promise.all(rows.filter((_, k) => k % step === 0).map(async (row) => {
      row.problems = (await this.batches.get(row.name)).problems.map((p) => p.id);
    }));
    if (this.episode === e) this.read(e);
  }
}

OWN.conversations = (data, batches) => {
  const sample = data.sample;
  const lead = sample ? `${num(sample.episodes)} episodes of ${sample.batches} of ${sample.stored_batches} stored batches are in this file: ${sample.rule}.`
    : "Every stored batch can be read; it is loaded when chosen.";
  if (!batches.rows.some((row) => batches.has(row.name))) return [el("p", { class: "nothing" }, "No conversations are stored with this run.")];
  if (batches.reader) batches.reader.extend(batches.rows); // a live page is drawn anew around what is being read
  else new Reader(data, batches);
  return [el("p", { class: "lead" }, lead), batches.reader.root];
};
