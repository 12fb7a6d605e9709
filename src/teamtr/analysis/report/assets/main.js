// Putting the page together: a report that holds its data, a comparison, or a live view that asks its server.

function themeButton() {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
  const button = el("button", { class: "theme", "aria-label": "light or dark", click: () => {
    root.dataset.theme = dark() ? "light" : "dark";
    button.textContent = dark() ? "☀" : "☾";
  } }, dark() ? "☀" : "☾");
  return button;
}

const PARTS = [["headlines", "At a glance"], ["learning", "Learning"], ["region", "Trust region"], ["certificate", "Certificate"], ["staleness", "Staleness"],
  ["shift", "Token shift"], ["timeline", "Timeline"], ["conversations", "Conversations"], ["cost", "Accounting"], ["swap", "Swap"], ["reproduce", "Reproduce"]];
/** Links to the sections that this run has. */
const partsOf = (data) => PARTS.filter(([id]) => (id !== "swap" || data.swaps.length) && (id !== "shift" || (data.probes && data.probes.updates.some((p) => p.shift))));

function navigation(parts, extra) {
  return el("nav", { "aria-label": "sections" }, el("span", { class: "brand" }, "TeamTR"),
    el("div", { class: "links" }, parts.map(([id, text]) => el("a", { href: "#" + id }, text))), extra || null, themeButton());
}

function reportSections(data, batches, conversations) {
  return [headerSection(data), headlinesSection(data), learningSection(data), regionSection(data), certificateSection(data),
    stalenessSection(data), shiftSection(data), timelineSection(data, batches), conversations, costSection(data), swapSection(data), reproduceSection(data)].filter(Boolean);
}

async function unpack(id) {
  const text = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0));
  if (!globalThis.DecompressionStream) throw new Error("this browser is too old to unpack it");
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function startReport(held, page) {
  const data = held.report;
  const batches = new Batches(data.batches, (n) => n in held.blobs, (n) => unpack(held.blobs[n]));
  page.replaceChildren(navigation(partsOf(data)), ...reportSections(data, batches, conversationsSection(data, batches)), footer());
}

const footer = () => el("footer", null, "TeamTR. This page holds everything it shows and asks nobody for anything.");

// -- live --------------------------------------------------------------------------------------------------------

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", credentials: "omit" });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

class Live {
  constructor(page) {
    this.page = page;
    this.key = null;
    this.stamp = "";
    this.reader = null;
    this.search = el("input", { type: "search", placeholder: "search runs", "aria-label": "search runs", input: () => this.listRuns() });
    this.runs = el("div", { class: "runs" });
    this.status = el("span", { class: "status", "aria-live": "polite" }, "connecting…");
    this.body = el("div", null);
    page.replaceChildren(navigation(PARTS, this.status), el("div", { class: "runs-panel" }, this.search, this.runs), this.body);
    this.known = [];
    this.refreshRuns();
    this.poll();
  }
  async refreshRuns() {
    try {
      this.known = (await ask("api/runs")).runs;
      this.listRuns();
      if (!this.key && this.known.length) this.choose(this.known[0].key);
      if (!this.known.length) this.body.replaceChildren(el("p", { class: "nothing" }, "No runs yet. They appear here when training starts."));
    } catch (error) { this.status.textContent = visible(error.message); }
    setTimeout(() => this.refreshRuns(), 5000);
  }
  listRuns() {
    const wanted = this.search.value.toLowerCase();
    const found = this.known.filter((run) => run.name.toLowerCase().includes(wanted));
    this.runs.replaceChildren(...found.slice(0, 100).map((run) =>
      el("button", { class: "chip", "aria-pressed": String(run.key === this.key), click: () => this.choose(run.key) }, run.name)),
      found.length > 100 ? el("span", { class: "meta" }, `${found.length - 100} more: search`) : "");
  }
  choose(key) {
    this.key = key;
    this.stamp = "";
    this.batches = null;
    this.listRuns();
    this.update();
  }
  async poll() {
    if (this.key && !document.hidden) await this.update();
    setTimeout(() => this.poll(), 2000);
  }
  async update() {
    const key = this.key;
    let answer;
    try { answer = await ask(`api/run/${key}?stamp=${this.stamp}`); } catch (error) {
      this.status.textContent = visible(`not connected (${error.message})`);
      return;
    }
    if (key !== this.key) return;
    this.status.textContent = visible("live · " + new Date().toLocaleTimeString());
    if (answer.unchanged) return;
    this.stamp = answer.stamp;
    this.render(answer.report);
  }
  render(data) {
    const at = scrollY;
    if (!this.batches) {
      const key = this.key;
      this.batches = new Batches(data.batches, () => true, (n) => ask(`api/batch/${key}/${n}`));
      this.conversations = conversationsSection(data, this.batches);
    } else {
      const problems = new Map(this.batches.rows.map((row) => [row.name, row.problems]));
      this.batches.rows = data.batches.map((row) => ({ ...row, problems: problems.get(row.name) }));
      if (this.batches.reader) this.batches.reader.extend(data.batches);
      else if (data.batches.length) this.conversations = conversationsSection(data, this.batches);
    }
    this.body.replaceChildren(...reportSections(data, this.batches, this.conversations));
    scrollTo(0, at);
  }
}

function start() {
  installTips();
  const held = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  if (held.mode === "live") new Live(page);
  else if (held.mode === "compare") page.replaceChildren(navigation([["learning", "Learning"], ["difference", "Difference"], ["settings", "Settings"], ["numbers", "Numbers"]]), ...comparePage(held.compare).filter(Boolean), footer());
  else startReport(held, page);
  document.documentElement.dataset.ready = "yes";
}
start();
