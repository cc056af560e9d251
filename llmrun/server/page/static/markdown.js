// Markdown of a model as elements: HTML off, no images, links only to the web and only by a click.

import MarkdownIt from "./vendor/markdown-it.js";
import { button, clean, h } from "./dom.js";
import { drawFormulas } from "./formulas.js";
import { highlight } from "./highlight.js";

const LONGEST = 200_000; // characters; a longer text is shown as it is
const COST = 4; // times the last rendering's time has to pass before the next one
const REDRAW = 90; // ms at least between two drawings: the browser shares the processor with the engine

const markdown = new MarkdownIt({ html: false, linkify: false, breaks: true }).disable("image");
markdown.validateLink = (address) => /^(https?:\/\/|mailto:)/i.test(address.trim());
markdown.renderer.rules.link_open = (tokens, at, options, env, renderer) => {
  tokens[at].attrSet("target", "_blank");
  tokens[at].attrSet("rel", "noopener noreferrer nofollow");
  return renderer.renderToken(tokens, at, options);
};
markdown.renderer.rules.th_open = markdown.renderer.rules.td_open = (tokens, at, options, env, renderer) => {
  const style = tokens[at].attrGet("style"); // which the Content-Security-Policy refuses
  tokens[at].attrs = style ? [["class", style.replace("text-align:", "align-")]] : null;
  return renderer.renderToken(tokens, at, options);
};

const CLOSING = { $$: "$$", "\\[": "\\]", "\\(": "\\)", $: "$" };
const LONGEST_FORMULA = 2000; // characters

/** Return [begin, end, after] of the formula at a place of a text, or null: "$5 and $6" and "$HOME/bin:$PATH" are none. */
function formulaAt(text, at) {
  const opening = Object.keys(CLOSING).find((each) => text.startsWith(each, at));
  if (!opening) return null;
  const begin = at + opening.length;
  const closing = CLOSING[opening];
  const end = text.slice(begin, begin + LONGEST_FORMULA).indexOf(closing) + begin;
  const after = end + closing.length;
  return end <= begin || (opening === "$" && isNoFormula(text, at, end)) ? null : [begin, end, after];
}

/** Whether dollars at two places of a text are money, or variables of a shell. */
function isNoFormula(text, at, end) {
  const next = text[end + 1] ?? "";
  const isOpened = !/[a-z0-9]/i.test(text[at - 1] ?? "") && !/^\$(\s|\d[\d.,]*(?![\w.,^\\{*/+=$-]))/.test(text.slice(at, at + 100));
  const isClosed = !/\s/.test(text[end - 1]) && !/[a-z0-9{]/i.test(next) && !(next === "(" && text[at + 1] === "(");
  return !isOpened || !isClosed;
}

markdown.inline.ruler.before("escape", "formula", (state, silent) => {
  const found = formulaAt(state.src, state.pos);
  if (!found || found[2] > state.posMax) return false;
  if (!silent) Object.assign(state.push("formula", "code", 0), { content: state.src.slice(found[0], found[1]).trim(), info: state.src.startsWith("$$", state.pos) ? "display" : "" });
  state.pos = found[2];
  return true;
});
markdown.block.ruler.before("fence", "formula", (state, first, last, silent) => {
  const begin = state.bMarks[first] + state.tShift[first];
  if (!/^(\$\$|\\\[)/.test(state.src.slice(begin, begin + 2))) return false;
  const found = formulaAt(state.src, begin);
  if (!found) return false;
  let line = first;
  while (line < last && state.eMarks[line] < found[2]) line += 1;
  if (line >= last || state.src.slice(found[2], state.eMarks[line]).trim()) return false;
  if (!silent) {
    const token = state.push("formula", "code", 0);
    Object.assign(token, { content: state.src.slice(found[0], found[1]).trim(), info: "display", block: true, map: [first, line + 1] });
    state.line = line + 1;
  }
  return true;
}, { alt: ["paragraph"] });

// A definition of a link, which Markdown shows nowhere, is what was said: a source, often named by nothing else.
markdown.core.ruler.after("block", "definitions", (state) => {
  const lines = state.src.split("\n");
  const tokens = [];
  const add = (type, nesting, level, fields) => tokens.push(Object.assign(new state.Token(type, "p", nesting), { block: true, level }, fields));
  for (const token of state.tokens) {
    if (token.type !== "reference_definition") {
      tokens.push(token);
      continue;
    }
    const [first, end] = token.map;
    const source = lines.slice(first, end).map((line, at) => (at ? line.replace(/^[\s>]+/, "") : line.slice(line.indexOf("["))));
    const text = `\\${source.join("\n").replace(/(?<!<)https?:\/\/[^\s<>]+/, "<$&>")}`;
    const [open, inline, close] = tokens.slice(-3);
    if (close?.info === "definition" && open.map[1] === first) {
      inline.content += `\n${text}`;
      open.map[1] = end;
      continue;
    }
    add("paragraph_open", 1, token.level, { map: [first, end] });
    add("inline", 0, token.level + 1, { content: text, children: [] });
    add("paragraph_close", -1, token.level, { info: "definition" });
  }
  state.tokens = tokens;
});

markdown.renderer.rules.formula = (tokens, at) => {
  const { content, info, block } = tokens[at];
  const code = `<code class="formula ${info}">${markdown.utils.escapeHtml(content)}</code>`;
  return block ? `<p class="wide">${code}</p>\n` : code;
};

markdown.core.ruler.push("last", ({ env, tokens }) => {
  env.last = tokens.findLast((token) => token.map && !token.level)?.map[0] ?? 0; // line on which the last block begins
});

// The only place where text becomes HTML.
const rules = { createHTML: (text, env) => markdown.render(text, env) };
const policy = globalThis.trustedTypes?.createPolicy("markdown", rules) ?? rules;

export const render = (element, text) => renderFrom(element, 0, clean(text));

/** Render a text in place of the children from a number on; return the line on which its last block begins. */
function renderFrom(element, first, shown) {
  const env = { last: 0 };
  const made = h("div");
  if (shown.length > LONGEST) made.append(h("pre", { class: "plain" }, shown));
  else made.innerHTML = policy.createHTML(shown, env);
  for (const block of made.querySelectorAll("pre")) {
    const code = block.textContent;
    const language = block.firstElementChild?.className.replace(/^language-/, "") ?? "";
    block.tabIndex = 0;
    const shown = block.cloneNode(true);
    if (language && shown.firstElementChild) highlight(shown.firstElementChild, language);
    block.replaceWith(h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, language), button("Copy", copy(code), { class: "ghost", "aria-label": "Copy this code" })), shown));
  }
  for (const table of made.querySelectorAll("table")) {
    const wide = h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(wide);
    wide.append(table);
    for (const empty of table.querySelectorAll("th:empty")) empty.replaceWith(h("td")); // it names nothing
  }
  drawFormulas(made);
  replaceChanged(element, first, [...made.childNodes]);
  return env.last;
}

/** Replace the children from a number on that differ: what is above is not laid out again, and stays selected. */
function replaceChanged(element, first, made) {
  const shown = [...element.childNodes].slice(first);
  let same = 0;
  while (same < shown.length && same < made.length && shown[same].isEqualNode(made[same])) same += 1;
  for (const old of shown.slice(same)) old.remove();
  element.append(...made.slice(same));
}

/** Return a listener that copies a text. */
export const copy = (text) => {
  let shown = null; // of the button, before the first press
  return async (event) => {
    const pressed = event.currentTarget;
    shown ??= [...pressed.childNodes];
    try {
      await navigator.clipboard.writeText(text);
      pressed.textContent = "Copied";
    } catch {
      pressed.textContent = "Not allowed";
    }
    setTimeout(() => pressed.replaceChildren(...shown), 1500);
  };
};

/** Render a growing text as often as its length allows: its last block, since the ones before it don't change any more. */
export class LiveMarkdown {
  constructor(element, drawn = () => null) {
    this.element = element;
    this.drawn = drawn;
    this.due = 0;
    this.clear();
  }

  clear() {
    this.text = this.open = ""; // the whole text, and that from the last block on
    this.n_closed = 0; // child nodes before the last block
    this.element.replaceChildren();
  }

  add(text) {
    this.text += text;
    this.open += text;
    if (performance.now() >= this.due) this.draw();
    else this.timer ??= setTimeout(() => this.draw(), this.due - performance.now());
  }

  /** Draw all of it: a link in the first block may have its address in the last one. */
  end() {
    this.open = this.text;
    this.n_closed = 0;
    this.draw();
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now();
    this.open = clean(this.open);
    const last = renderFrom(this.element, this.n_closed, this.open);
    if (last) {
      this.open = this.open.split("\n").slice(last).join("\n");
      this.n_closed = [...this.element.childNodes].indexOf(this.element.lastElementChild);
    }
    this.drawn();
    const now = performance.now();
    this.due = now + Math.max(REDRAW, (now - began) * COST);
  }
}
