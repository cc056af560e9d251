// The settings beside the chat: system prompt, sampling with its origins, reasoning, theme.

import { h, recall, remember } from "./dom.js";

const FIELDS = {
  temperature: { label: "Temperature", min: 0, max: 100, step: "any" },
  top_k: { label: "Top-k", min: 0, step: 1 },
  top_p: { label: "Top-p", min: 0, max: 1, step: "any" },
  min_p: { label: "Min-p", min: 0, max: 1, step: "any" },
  repeat_penalty: { label: "Repeat penalty", min: 0.01, max: 100, step: "any" },
  seed: { label: "Seed", min: 0, step: 1, empty: "drawn for each answer" },
  max_tokens: { label: "Maximum tokens", min: 1, step: 1, empty: "until the end" },
};
const ORIGINS = { default: "default", model: "of the model's file", catalogue: "recommended for this model", session: "of the server", flag: "of the server" };

/** The fields, and what they say. `changedSystem` is called with a new system prompt; `exports` is shown below. */
export class Settings {
  constructor(element, changedSystem, exports) {
    this.inputs = {};
    this.hints = {};
    this.system = h("textarea", { id: "system", rows: "4", change: () => changedSystem(this.system.value) });
    this.thinking = select("thinking", { "": "as the model does", true: "on", false: "off" });
    this.theme = select("theme", { "": "as the system", light: "light", dark: "dark" });
    this.theme.value = recall("theme");
    this.theme.addEventListener("change", () => (remember("theme", this.theme.value), this.showTheme()));
    this.showTheme();
    element.replaceChildren(
      h("h2", {}, "System prompt"),
      h("label", { class: "hidden", for: "system" }, "System prompt"),
      this.system,
      h("h2", {}, "Sampling"),
      ...Object.entries(FIELDS).map(([name, field]) => this.field(name, field)),
      h("label", { class: "field" }, "Reasoning", this.thinking),
      h("h2", {}, "Page"),
      h("label", { class: "field" }, "Theme", this.theme),
      h("h2", {}, "Export"),
      exports,
    );
  }

  field(name, { label, empty, ...limits }) {
    const input = h("input", { type: "number", ...limits, "aria-describedby": `origin-${name}`, input: () => this.showOrigin(name) });
    this.inputs[name] = input;
    this.hints[name] = h("span", { class: "hint", id: `origin-${name}` }, empty ?? "");
    return h("label", { class: "field" }, label, input, this.hints[name]);
  }

  /** Show what the model would use where the user says nothing. */
  showModel({ sampling, thinks }) {
    for (const [name, { value, origin }] of Object.entries(sampling)) {
      this.inputs[name].placeholder = Number(value.toPrecision(6));
      this.hints[name].dataset.origin = ORIGINS[origin] ?? origin;
      this.showOrigin(name);
    }
    this.thinking.disabled = !thinks;
  }

  showOrigin(name) {
    const origin = this.hints[name].dataset.origin ?? FIELDS[name].empty ?? "";
    this.hints[name].textContent = this.inputs[name].value ? "set here" : origin;
  }

  showTheme() {
    document.documentElement.dataset.theme = this.theme.value;
  }

  /** Return the fields of a request for an answer. */
  get values() {
    const given = Object.entries(this.inputs).filter(([, input]) => input.value !== "" && input.validity.valid);
    const values = Object.fromEntries(given.map(([name, input]) => [name, input.valueAsNumber]));
    return this.thinking.value && !this.thinking.disabled ? { ...values, thinking: this.thinking.value === "true" } : values;
  }
}

const select = (id, options) => h("select", { id }, Object.entries(options).map(([value, text]) => h("option", { value }, text)));
