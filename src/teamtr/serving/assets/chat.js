"use strict";
(() => {
const by = id => document.getElementById(id);
const key = decodeURIComponent(location.hash.replace(/^#key=/, ""));
const auth = {"Authorization": "Bearer " + key};
let conversation = [];
let running = null;

function add(parent, kind, name, text) {
  const made = document.createElement(kind);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function note(text, wrong) {
  by("note").textContent = text;
  by("note").className = wrong ? "error" : "";
}

function hint() {
  const name = by("model").value || "the team";
  add(by("talk"), "p", "hint", "Ask " + name + " something. What you write goes to this server alone.");
}

function stays() {
  const talk = by("talk");
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 80;
}

function follow(was) {
  if (was) by("talk").scrollTop = by("talk").scrollHeight;
}

async function told(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return "the server answered " + answer.status;
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    held += value;
    let end;
    while ((end = held.indexOf("\n\n")) >= 0) {
      const line = held.slice(0, end);
      held = held.slice(end + 2);
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

class Answer {
  constructor(model) {
    this.model = model;
    this.box = add(by("talk"), "div", "answer");
    this.text = "";
    this.turn = null;
  }

  discussion(said) {
    if (!this.details) {
      this.details = document.createElement("details");
      this.details.open = true;
      this.box.prepend(this.details);
      add(this.details, "summary", "", "Discussion");
    }
    if (said.begins) {
      const turn = add(this.details, "div", "turn");
      add(turn, "p", "name", said.agent);
      this.turn = add(turn, "p", "text", "");
    }
    this.turn.textContent += said.text;
  }

  content(text, agent) {
    if (!this.shown) {
      add(this.box, "p", "name", agent ? agent + " answers" : this.model);
      this.shown = add(this.box, "p", "text", "");
    }
    this.text += text;
    this.shown.textContent = this.text;
  }

  spent(chunk) {
    if (!this.shown) this.content("");
    const each = Object.entries(chunk.teamtr.usage).map(([agent, used]) => agent + " " + used.completion_tokens);
    add(this.box, "p", "spent", "tokens written: " + each.join(", ") + " \u00b7 seed " + chunk.teamtr.seed);
  }
}

async function ask(question) {
  const model = by("model").value;
  const whole = !model.includes("/");
  const messages = [...conversation, {role: "user", content: question}];
  for (const old of by("talk").querySelectorAll(".hint")) old.remove();
  add(add(by("talk"), "div", "user"), "p", "text", question);
  const answer = new Answer(model);
  follow(true);
  const body = {model, messages, stream: true, stream_options: {include_usage: true}};
  if (whole && by("show").checked) body.show = "discussion";
  running = new AbortController();
  by("send").textContent = "Stop";
  note("");
  try {
    const reply = await fetch("v1/chat/completions", {
      method: "POST", headers: {...auth, "Content-Type": "application/json"}, body: JSON.stringify(body), signal: running.signal,
    });
    if (!reply.ok) throw new Error(await told(reply));
    for await (const chunk of events(reply.body)) {
      const was = stays();
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) {
        const delta = choice.delta;
        if (delta.reasoning_content !== undefined) answer.discussion(delta.teamtr);
        if (delta.content) answer.content(delta.content, delta.teamtr && delta.teamtr.agent);
      }
      if (chunk.usage) answer.spent(chunk);
      follow(was);
    }
    if (!answer.text) answer.content("(no words)", "");
    conversation = [...messages, {role: "assistant", content: answer.text}];
  } catch (error) {
    const stopped = error.name === "AbortError";
    note(stopped ? "Stopped. The conversation goes on as if you had not asked." : error.message, !stopped);
    by("question").value = by("question").value || question;
  } finally {
    running = null;
    by("send").textContent = "Send";
  }
}

by("form").addEventListener("submit", event => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const question = by("question").value;
  if (!question.trim()) return;
  by("question").value = "";
  ask(question);
});
by("question").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) by("form").requestSubmit();
  }
});
by("clear").addEventListener("click", () => {
  if (running) running.abort();
  conversation = [];
  by("talk").replaceChildren();
  note("");
  hint();
  by("question").focus();
});
by("model").addEventListener("change", () => by("clear").click());

(async () => {
  by("talk").replaceChildren();
  try {
    const reply = await fetch("v1/models", {headers: auth});
    if (!reply.ok) throw new Error(reply.status === 401 ? "This link has no valid key: open the one that `teamtr serve` printed." : await told(reply));
    for (const model of (await reply.json()).data) add(by("model"), "option", "", model.id);
    by("title").textContent = by("model").value;
    document.title = by("model").value + " \u00b7 TeamTR";
    hint();
    by("question").focus();
  } catch (error) {
    note(error.message, true);
  }
  document.documentElement.dataset.ready = "yes";
})();
})();
