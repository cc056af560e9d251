// The tokens of an answer, tinted by their probability, and the candidates in the place of each.

import { button, byId, clean, h, percent } from "./dom.js";
import { stepsElement } from "./steps.js";

const decoder = new TextDecoder("utf-8", { fatal: true });
const VISIBLE = { "\n": "↵\n", "\t": "⇥\t" };

const likelihood = (logprob) => percent(Math.exp(logprob));
const SOURCES = { prompt: "copied from the prompt", answer: "copied from the answer itself", model: "by the draft model", heads: "by the model's heads", probe: "to measure a step" };
const visible = (text) => clean(text).replace(/[\n\t]/g, (each) => VISIBLE[each]);
export const quoted = (text) => `“${visible(text).trimEnd() || "␠".repeat(text.length || 1)}”`;

/** Return a sentence about what was drafted in the place of a token, an empty one without a draft. */
function aboutDraft(draft) {
  if (!draft) return "";
  const likely = draft.probability === null ? "" : `, with ${percent(draft.probability)}`;
  const what = draft.accepted ? "" : ` ${quoted(draft.text)}, which was refused`;
  return `Drafted${what}: ${SOURCES[draft.source]}${likely}, as token ${draft.depth} of the draft.`;
}

/** Return the tokens of the answer itself: those of the reasoning come before them. */
export function tokensOf(tokens, text) {
  const encoder = new TextEncoder();
  let left = encoder.encode(text).length;
  let first = tokens.length;
  while (first > 0 && left > 0) left -= tokens[--first].bytes.length;
  return tokens.slice(first);
}

/** Return the text of tokens, or null where it ends within a character. */
export function textOf(tokens) {
  try {
    return decoder.decode(new Uint8Array(tokens.flatMap((each) => each.bytes)));
  } catch {
    return null;
  }
}

function tokenElement(token, at, text = visible(token.token)) {
  const probability = Math.exp(token.logprob);
  const element = h(
    "span",
    { class: probability < 0.1 ? "token unlikely" : "token", role: "button", tabindex: at ? "-1" : "0", "data-at": at, title: likelihood(token.logprob) + (token.draft?.accepted ? ", drafted" : "") },
    text,
  );
  element.style.setProperty("--surprise", `${Math.round((1 - probability) * 60)}%`);
  return element;
}

const MOSTLY = 0.4; // share of the tokens that must be seen in the rendered text
const AHEAD = 80; // characters of marks that may stand before a rendered one

/** Make the text of a rendered answer its tokens: each character is the next such one of the text as it was written. */
function tint(element, tokens) {
  const written = tokens.map((token) => token.token).join("");
  const tokenOf = tokens.flatMap((token, at) => Array(token.token.length).fill(at));
  let next = 0;
  const place = (char) => {
    const found = written.indexOf(char, next);
    if (found < 0 || found - next > (/\s/.test(char) ? 2 : AHEAD)) return -1;
    next = found + 1;
    return tokenOf[found];
  };
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT, (node) => (node.parentElement.closest("math, .code-head") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT));
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  for (const node of nodes) {
    const runs = [];
    for (const char of node.data.split("")) {
      const at = place(char);
      if (runs.at(-1)?.at === at) runs.at(-1).text += char;
      else runs.push({ at, text: char });
    }
    node.replaceWith(...runs.map(({ at, text }) => (at < 0 ? text : tokenElement(tokens[at], at, text))));
  }
}

/** Tokens in a line of their own; `take(kept, text)` branches there, `why(begins)` returns the steps of the sampler. */
export class TokenView {
  constructor(take, why = null) {
    this.tokens = [];
    this.take = take;
    this.why = why;
    this.element = h("div", {
      class: "tokens",
      role: "group",
      "aria-label": "Tokens; arrow keys move, Enter opens",
      click: (event) => event.target.dataset.at && this.open(Number(event.target.dataset.at)),
      keydown: (event) => this.key(event),
    });
  }

  add(tokens) {
    this.element.append(...tokens.map((token, index) => tokenElement(token, this.tokens.length + index)));
    this.tokens.push(...tokens);
  }

  /** Show tokens in their rendered text instead of as it was written: marks of Markdown are not shown. */
  addRendered(tokens, rendered) {
    tint(rendered, tokens);
    const shown = new Set([...rendered.querySelectorAll(".token")].map((each) => each.dataset.at));
    if (shown.size < tokens.length * MOSTLY) return void this.add(tokens); // bytes and blanks, not words
    this.tokens.push(...tokens);
    this.element.classList.replace("tokens", "tinted");
    this.element.append(...rendered.childNodes);
    const first = this.element.querySelector(".token");
    if (first) first.tabIndex = 0;
  }

  placeOf(at) {
    return this.element.querySelector(`[data-at="${at}"]`);
  }

  key(event) {
    const at = Number(event.target.dataset.at);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (to !== undefined && this.tokens[to]) {
      const place = this.placeOf(to);
      if (!place) return void event.preventDefault(); // a mark of Markdown
      event.target.tabIndex = -1;
      place.tabIndex = 0;
      place.focus();
    } else if (event.key === "Enter" || event.key === " ") this.open(at);
    else return;
    event.preventDefault();
  }

  open(at) {
    const token = this.tokens[at];
    const dialog = byId("token");
    const step = (to) => () => this.tokens[to] && (dialog.close(), this.open(to));
    const others = 1 - token.top_logprobs.reduce((sum, each) => sum + Math.exp(each.logprob), 0);
    const isListed = token.top_logprobs.some((each) => same(each, token));
    const candidates = isListed ? token.top_logprobs : [...token.top_logprobs, token];
    const body = h(
      "div",
      {},
      h("p", { class: "hint" }, "The likeliest candidates in its place, before any sampling step."),
      h("ul", { class: "candidates" }, candidates.map((each) => this.candidate(at, each))),
      token.draft ? h("p", { class: "hint" }, aboutDraft(token.draft)) : "",
      h("p", { class: "hint" }, isListed ? `All others together: ${percent(Math.max(0, others))}` : ""),
    );
    dialog.replaceChildren(
      h("h2", { id: "token-title" }, `Token ${at + 1}: ${quoted(token.token)}, ${likelihood(token.logprob)}`),
      body,
      h(
        "div",
        { class: "buttons" },
        this.why && button("Steps and sliders", (event) => this.showSteps(at, body, event.currentTarget)),
        button("Previous", step(at - 1), { disabled: at === 0 }),
        button("Next", step(at + 1), { disabled: at + 1 >= this.tokens.length }),
        button("Close", () => dialog.close(), { autofocus: true }),
      ),
    );
    dialog.onkeydown = ({ key, target }) => {
      if (target.type !== "range") ({ ArrowLeft: step(at - 1), ArrowRight: step(at + 1) })[key]?.();
    };
    dialog.onclose = () => this.placeOf(at)?.focus();
    dialog.showModal();
  }

  /** Show the candidates after each step of the sampler: the engine computes this token once more. */
  async showSteps(at, body, pressed) {
    const begins = at ? textOf(this.tokens.slice(0, at)) : "";
    pressed.disabled = true;
    const data = begins === null ? null : await this.why(begins);
    const none = begins === null ? "This token begins within a character." : "The steps of this token can't be computed.";
    const take = (text, share) => this.taker(at, { token: text, bytes: [...new TextEncoder().encode(text)], logprob: Math.log(share) });
    const parts = data?.steps.length ? stepsElement(data, this.tokens[at].token, quoted, take) : [h("p", { class: "hint" }, none)];
    body.replaceChildren(...parts);
    body.querySelector("input")?.focus();
  }

  candidate(at, each) {
    const chosen = same(each, this.tokens[at]);
    const bar = h("span", { class: "bar" });
    bar.style.setProperty("--share", `${Math.exp(each.logprob) * 100}%`);
    return h(
      "li",
      chosen ? { class: "chosen" } : {},
      h("code", {}, quoted(each.token)),
      h("span", { class: "share" }, bar, likelihood(each.logprob)),
      chosen ? h("span", { class: "hint" }, "chosen") : this.taker(at, each),
    );
  }

  /** Return the button that goes on with another candidate. */
  taker(at, each) {
    const text = each.token.includes("\ufffd") ? null : textOf([...this.tokens.slice(0, at), each]);
    if (text === null) return h("span", { class: "hint" }, "part of a character");
    const take = () => {
      byId("token").onclose = null;
      byId("token").close();
      this.take([...this.tokens.slice(0, at), { ...each, top_logprobs: this.tokens[at].top_logprobs }], text);
    };
    return button("Take", take, { "aria-label": `Take ${quoted(each.token)} instead` });
  }
}

const same = (one, other) => one.bytes.length === other.bytes.length && one.bytes.every((byte, at) => byte === other.bytes[at]);
