// Several answers to one question, decoded together in columns: their figures, and the first token where each parts from the first one.

import { answer as streamed } from "./api.js";
import { button, clean, h, number, short } from "./dom.js";
import { LiveMarkdown } from "./markdown.js";
import { quoted } from "./tokens.js";
import { LABELS } from "./settings.js";
import { answerParts, ENDS, figures } from "./turns.js";

class Column {
  constructor(body) {
    this.body = body;
    this.parts = answerParts(body.model);
    this.text = new LiveMarkdown(this.parts.text, () => this.ended || this.showTime());
    this.doing = "waiting";
    this.hint = h("p", { class: "hint waiting" }, "waiting …");
    this.buttons = h("div", { class: "buttons" });
    this.parts.below.replaceChildren(this.buttons, this.hint);
    this.tokens = [];
  }

  async run(signal) {
    this.began = performance.now();
    const clock = setInterval(() => this.ended || this.text.text || (this.hint.textContent = `${this.doing} … ${this.seconds}`), 250);
    try {
      for await (const events of streamed(this.body, signal)) for (const [name, data] of events) this.take(name, data);
    } catch (error) {
      this.ended = true;
      this.hint.textContent = error.name === "AbortError" ? "stopped" : clean(error.message);
    }
    clearInterval(clock);
    this.hint.classList.remove("waiting");
    this.text.end();
  }

  take(name, data) {
    if (name === "started") this.doing = "prefill";
    else if (name === "prefill") this.doing = `prefill ${number(data.computed_tokens)} tokens`;
    else if (name === "reasoning") {
      this.doing = "reasoning";
      this.parts.folded.hidden = false;
      this.parts.reasoning.append(clean(data.text));
    } else if (name === "text") {
      this.tokens.push(...(data.tokens ?? []));
      this.text.add(data.text);
    } else if (name === "finished") {
      this.ended = true;
      this.hint.textContent = [clean(this.body.model), settingsIn(this.body), this.seconds, ENDS[data.reason], figures(data)].filter(Boolean).join(" · ");
    } else if (name === "failed") throw new Error(data.message);
  }

  get seconds() {
    return `${short((performance.now() - this.began) / 1000)} s`;
  }

  showTime() {
    this.hint.textContent = `${this.tokens.length} tokens, ${this.seconds}`;
  }
}

/** Return what differs from the model's own settings, e.g. "temperature 0.5". */
const settingsIn = ({ chat, question, together, tools, without_tools, candidates, model, ...values }) =>
  Object.entries(values).map(([name, value]) => `${LABELS[name] ?? name} ${value}`).join(", ");

export class Comparison {
  /** `sides` are the fields of the requests; `goOn(id)` is called with the answer that the chat goes on with. */
  constructor(chat, question, sides, goOn) {
    this.question = question;
    this.goOn = goOn;
    this.stopper = new AbortController();
    this.columns = sides.map((side) => new Column({ ...side, chat, question, together: true, candidates: 0 }));
    this.told = h("p", { class: "hint", role: "status" });
    this.element = h("div", {}, h("div", { class: "columns" }, this.columns.map((each) => each.parts.element)), this.told);
  }

  async run() {
    await Promise.all(this.columns.map((each) => each.run(this.stopper.signal)));
    const [first, ...others] = this.columns.map((each) => each.tokens);
    const parts = others.map((each, at) => `${others.length > 1 ? `1 and ${at + 2}: ` : ""}${parting(first, each)}`);
    this.told.textContent = parts.join(" ");
  }

  stop() {
    this.stopper.abort();
  }

  /** Give each column the saved answer with its text; `current` is the one that the chat goes on with. */
  name(answers, current) {
    const left = [...answers];
    for (const { buttons, text } of this.columns) {
      const at = left.findIndex((each) => each.text === text.text);
      if (at < 0) continue;
      const [{ id }] = left.splice(at, 1);
      const words = id === current ? "The chat goes on with this one" : "Go on with this one";
      buttons.replaceChildren(button(words, () => this.goOn(id)));
    }
  }
}

/** Say where two answers part. Tokens of two models begin at different places, so their bytes are compared. */
export function parting(one, other) {
  const [left, right] = [one, other].map((tokens) => tokens.flatMap((token, at) => token.bytes.map((byte) => [byte, at])));
  const end = Math.max(left.length, right.length);
  let same = 0;
  while (same < end && left[same]?.[0] === right[same]?.[0]) same += 1;
  if (same === end) return one.length ? "Both answers are the same." : "";
  const token = (tokens, bytes) => (bytes[same] ? quoted(tokens[bytes[same][1]].token) : "its end");
  const at = (left[same] ?? right[same])[1];
  return `They part at token ${at + 1}: ${token(one, left)} and ${token(other, right)}.`;
}
