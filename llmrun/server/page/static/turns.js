// A question or an answer as an element, and the figures of an answer.

import { argumentsText } from "./calls.js";
import { button, clean, h, icon, number, short } from "./dom.js";
import { copy, render } from "./markdown.js";

export const ENDS = { length: "cut off: no more tokens were allowed", cancelled: "stopped", interrupted: "interrupted", repeats: "stopped: it repeated itself" };

/** Return the figures of an answer as [name, value, what it is]; the first ones are the usual ones. */
function figureRows(stats, limit) {
  const computed = stats.prompt_tokens - stats.reused_tokens;
  const decoded = stats.completion_tokens - 1;
  const rows = [
    ["speed", decoded > 0 && stats.decode_seconds > 0 && `${short(decoded / stats.decode_seconds)} tokens/s`, "Tokens of the answer a second, from the first to the last one"],
    ["first token", stats.ttft_seconds > 0 && `${short(stats.ttft_seconds)} s`, "Time from the question to the first token of the answer (TTFT)"],
    ["predicted here", limit && `${short(limit)} tokens/s`, "What llmrun plan predicts for this model on this machine when it is quiet"],
    ["answer", stats.completion_tokens && `${number(stats.completion_tokens)} tokens`, "Tokens of the answer, those of its reasoning too"],
    ["prompt", `${number(stats.prompt_tokens)} tokens${stats.reused_tokens ? `, ${number(stats.reused_tokens)} reused` : ""}`, "Tokens of the conversation before the answer; reused ones were still in the KV cache"],
    ["prefill", stats.prefill_seconds > 0 && computed > 0 && `${short(computed / stats.prefill_seconds)} tokens/s`, "Tokens of the prompt computed in a second"],
    ["between tokens", stats.itl_p50_seconds > 0 && `${short(stats.itl_p50_seconds * 1000)} ms, p95 ${short(stats.itl_p95_seconds * 1000)} ms`, "Time between two tokens: the median, and what 95 % stay below (ITL)"],
    ["drafts", stats.accepted_tokens > 0 && `${number(stats.accepted_tokens)} of ${number(stats.drafted_tokens)} accepted, ${short(stats.completion_tokens / stats.decode_steps)} tokens a step`, "Tokens drafted ahead and verified by one decode step: llmrun help speculation"],
  ];
  return rows.filter(([, value]) => value);
}

/** Return the figures of an answer in a line. */
export const figures = (stats, limit) => figureRows(stats, limit).map(([name, value]) => `${name} ${value}`).join(" · ");

/** Return the switch between the alternatives in one place. */
function alternatives(entry, go) {
  const all = entry.alternatives;
  if (all.length < 2) return null;
  const at = all.indexOf(entry.id);
  const kind = entry.role === "user" ? "question" : "answer";
  return h(
    "span",
    { class: "alternatives change", role: "group", "aria-label": `Other versions of this ${kind}` },
    button("‹", () => go(all[at - 1]), { class: "ghost", disabled: at === 0, "aria-label": "Version before" }),
    ` ${at + 1} of ${all.length} `,
    button("›", () => go(all[at + 1]), { class: "ghost", disabled: at + 1 === all.length, "aria-label": "Next version" }),
  );
}

/** Return a button below a turn: an icon, with its name for those who don't see it. */
const action = (name, words, click, properties = {}) =>
  h("button", { type: "button", click, title: words, ...properties, class: `ghost ${properties.class ?? ""}` }, icon(name), h("span", { class: "hidden" }, words));

/** Return a button that becomes a link to the explanation, which takes seconds to compute. */
function explainer(explain) {
  let stopper = null;
  const pressed = action("explain", "Explain", async () => {
    if (stopper) return void stopper.abort();
    stopper = new AbortController();
    const began = performance.now();
    let now = { doing: "waiting", share: 0 };
    const tell = (line = now) => {
      now = line;
      pressed.textContent = `Explaining, ${Math.round(now.share * 100)} %: ${now.doing} … ${Math.round((performance.now() - began) / 1000)} s, press to cancel`;
    };
    const clock = setInterval(() => tell(), 500);
    tell();
    const address = await explain(stopper.signal, tell);
    clearInterval(clock);
    stopper = null;
    pressed.replaceChildren(...rest);
    if (!address) return;
    const link = h("a", { href: address, target: "_blank", rel: "noopener" }, "Open the explanation");
    pressed.replaceWith(link);
    link.focus();
    const tab = window.open(address, "_blank"); // browsers refuse it some seconds after the press: the link stays
    if (tab) tab.opener = null;
  }, { class: "change", title: "Explain: compute this answer again, and show every step on a page of its own" });
  const rest = [...pressed.childNodes];
  return pressed;
}

/** Return the name of a file that came with a question, and the image itself; `load()` returns its bytes. */
function mediaElement(name, load) {
  const element = h("p", { class: "hint" }, `Attached: ${clean(name)}`);
  if (!/\.(png|jpe?g|gif|bmp|webp)$/i.test(name)) return element;
  const show = (bytes) => {
    const address = URL.createObjectURL(bytes);
    element.append(h("img", { src: address, alt: clean(name), load: () => URL.revokeObjectURL(address) }));
  };
  load().then(show).catch(() => element.append(" (not there any more)"));
  return element;
}

export function questionElement(entry, { edit, go, answer, media }) {
  const text = h("div", { class: "text", dir: "auto" }, clean(entry.text));
  const element = h("article", { class: "question", "aria-label": "You" });
  const shownMedia = entry.media.map((name, at) => mediaElement(name, () => media(at)));
  const show = () =>
    element.replaceChildren(
      text,
      ...(entry.files ? [h("details", { class: "hint" }, h("summary", {}, "Text files"), h("pre", { class: "plain" }, clean(entry.files)))] : []),
      ...(entry.passages.length ? [passagesElement(entry)] : []),
      ...shownMedia,
      h("div", { class: "buttons" }, answer && button("Answer", answer, { class: "change" }), action("edit", "Edit", open, { class: "change" }), alternatives(entry, go)),
    );
  const open = () => {
    const input = h("textarea", { rows: "3", "aria-label": "Question" });
    input.value = entry.text;
    const send = () => input.value.trim() && edit(input.value);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") (event.stopPropagation(), show(), element.querySelector("button")?.focus());
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), send());
    });
    element.replaceChildren(input, h("div", { class: "buttons" }, button("Cancel", show), button("Ask this instead", send, { class: "main change" })));
    input.focus();
  };
  show();
  return element;
}

/** Return the passages of documents that were sent with a question, numbered as the model saw them. */
function passagesElement({ passages, passages_line }) {
  const note = ({ place, heading, score, text }) =>
    h("li", {}, h("details", {}, h("summary", {}, clean([place, heading, score >= 0.005 && `score ${number(score, 2)}`].filter(Boolean).join(" · "))), h("pre", { class: "plain" }, clean(text))));
  return h("details", { class: "hint passages" }, h("summary", {}, passages_line), h("ol", {}, passages.map(note)));
}

/** Return the text before calls of tools, and each call; `decide(id, decision)` answers the question whether it may run. */
export function roundElement({ text, calls }, decide) {
  const ask = (call, element) => {
    const press = (words, decision) => button(words, () => (decide(call.id, decision), row.remove()), { "aria-label": `${words}: ${call.name}` });
    const row = h("div", { class: "buttons" }, press("Allow once", "once"), press("Always in this chat", "always"), press("No", "no"));
    element.append(row);
  };
  const show = (call) => {
    const element = h("div", { class: "call", "data-call": call.id }, h("p", {}, icon("tool"), "Tool ", h("code", {}, clean(call.name))), h("pre", { class: "plain" }, argumentsText(call.arguments)));
    if (call.result !== undefined) element.append(resultElement(call.result));
    if (call.asks) ask(call, element);
    return element;
  };
  return h("div", { class: "round" }, h("p", { class: "plain" }, clean(text)), calls.map(show));
}

export const resultElement = (text) => h("details", {}, h("summary", {}, "Result"), h("pre", { class: "plain" }, clean(text)));

/** Return the name of a model as the list of models has it: of a file's path the last part. */
export function shortName(model) {
  const parts = clean(model).split(/[\\/]/);
  return parts[0] && !parts[0].endsWith(":") ? clean(model) : parts.at(-1).replace(/\.gguf$/, "");
}

/** Return the parts of an answer: its reasoning folded, its text, and a row below. */
export function answerParts(model) {
  const summary = h("summary", {}, "Reasoning");
  const reasoning = h("div", { class: "text", dir: "auto" });
  const folded = h("details", { class: "reasoning", hidden: true }, summary, reasoning);
  const rounds = h("div", {});
  const text = h("div", { class: "text markdown", dir: "auto" });
  const below = h("div", { class: "below" });
  const name = shortName(model);
  const element = h("article", { class: "answer", "aria-label": `Answer of ${name}` }, h("div", { class: "author" }, icon("mark"), h("b", {}, name)), folded, rounds, text, below);
  return { element, folded, summary, reasoning, rounds, text, below };
}

export function answerElement(entry, { retry, resume, go, explain, limit, view, seconds }) {
  const parts = answerParts(entry.model);
  parts.folded.hidden = !entry.reasoning;
  if (seconds) parts.summary.textContent = `Reasoning, ${short(seconds)} s`;
  parts.reasoning.textContent = clean(entry.reasoning);
  parts.rounds.append(...entry.rounds.map((each) => roundElement(each)));
  if (view) parts.text.replaceChildren(view.element);
  else render(parts.text, entry.text);
  parts.below.replaceChildren(
    h("div", { class: "buttons" }, action("copy", "Copy", copy(entry.text)), action("retry", "Retry", retry, { class: "change", title: "Retry: answer again" }), resume && action("continue", "Continue", resume, { class: "change", title: "Continue this answer where it ended" }), explainer(explain), alternatives(entry, go)),
  );
  showFigures(parts.element, entry, limit);
  return parts.element;
}

/** Show the figures of an answer: the main ones in a line, all of them below it when it is opened. */
export function showFigures(element, entry, limit) {
  const rows = figureRows(entry.stats, limit);
  const main = rows.filter(([name]) => name === "speed" || name === "first token").map(([name, value]) => (name === "speed" ? value : `${name} after ${value}`));
  const words = ENDS[entry.finish] ?? "";
  const numbers = h("span", { class: "numbers" }, `${words && main.length ? " · " : ""}${main.join(" · ")}`);
  const old = element.querySelector(".below > .figures");
  const rest = h("dl", {}, rows.flatMap(([name, value, what]) => [h("dt", { title: what }, name), h("dd", { title: what }, value)]));
  const made = h("details", { class: "figures hint", open: old?.open }, h("summary", { title: "All figures" }, words && h("span", { class: "end" }, words), numbers, !words && !main.length && "Figures"), rest);
  old ? old.replaceWith(made) : element.querySelector(".below").append(made);
}
