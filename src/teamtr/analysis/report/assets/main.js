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

const OPENING = { key: "headlines", title: "At a glance" };
const linksTo = (sections) => sections.map(({ key, title }) => el("a", { href: "#" + key }, title));

function navigation(links, extra) {
  return el("nav", { "aria-label": "sections" }, el("span", { class: "brand" }, "TeamTR"), links, extra || null, themeButton());
}

function reportSections(data, sections, batches) {
  return [headerSection(data), headlinesSection(data), ...sections.map((shown) => drawSection(shown, data, batches))];
}

async function unpack(id) {
  const text = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(text, (c) => c.charCodeAt(0));
  if (!globalThis.DecompressionStream) throw new Error("this browser is too old to unpack it");
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

function startReport(held, page) {
  const batches = new Batches(held.report.batches, (n) => n in held.blobs, (n) => unpack(held.blobs[n]));
  const links = el("div", { class: "links" }, linksTo([OPENING, ...held.sections]));
  page.replaceChildren(navigation(links), ...reportSections(held.report, held.sections, batches), footer());
}

function startComparison(held, page) {
  const links = el("div", { class: "links" }, linksTo(held.sections));
  page.replaceChildren(navigation(links), comparisonHeader(held.compare), ...held.sections.map((shown) => drawSection(shown)), footer());
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
    this.links = el("div", { class: "links" });
    this.search = el("input", { type: "search", placeholder: "search runs", "aria-label": "search runs", input: () => this.listRuns() });
    this.runs = el("div", { class: "runs" });
    this.status = el("span", { class: "status", "aria-live": "polite" }, "connecting…");
    this.body = el("div", null);
    page.replaceChildren(navigation(this.links, this.status), el("div", { class: "runs-panel" }, this.search, this.runs), this.body);
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
    this.render(answer.report, answer.sections);
  }
  render(data, sections) {
    const at = scrollY, key = this.key;
    this.batches ??= new Batches([], () => true, (n) => ask(`api/batch/${key}/${n}`));
    this.batches.update(data.batches);
    this.links.replaceChildren(...linksTo([OPENING, ...sections]));
    this.body.replaceChildren(...reportSections(data, sections, this.batches));
    scrollTo(0, at);
  }
}

function start() {
  installTips();
  const held = JSON.parse(document.getElementById("data").textContent);
  const page = document.getElementById("page");
  if (held.mode === "live") new Live(page);
  else if (held.mode === "compare") startComparison(held, page);
  else startReport(held, page);
  document.documentElement.dataset.ready = "yes";
}
start();
