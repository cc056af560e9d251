// The settings beside the chat: system prompt, sampling with its origins, reasoning, theme.

import { clean, h, recall, remember } from "./dom.js";
import { PARAMETERS } from "./parameters.js";

const { seed, ...others } = PARAMETERS;
const FIELDS = {
  ...others,
  seed: { ...seed, empty: "drawn for each answer" },
  max_tokens: { label: "Maximum tokens", min: 1, step: 1, empty: "until the end" },
};
export const LABELS = { ...Object.fromEntries(Object.entries(FIELDS).map(([name, { label }]) => [name, label])), thinking: "Reasoning" };
const ORIGINS = { default: "default", model: "the model's file", catalogue: "recommended for this model", session: "the server", flag: "the server" };

/** The fields of the sampler; `prefix` begins their ids. */
class Sampling {
  constructor(prefix, names) {
    this.inputs = {};
    this.hints = {};
    this.element = h("div", {}, names.map((name) => this.field(prefix, name, FIELDS[name])));
  }

  field(prefix, name, { label, empty, min, max, step }) {
    const id = `${prefix}origin-${name}`;
    const input = h("input", { type: "number", min, ...(max === undefined ? {} : { max }), step, "aria-describedby": id, input: () => this.showOrigin(name) });
    this.inputs[name] = input;
    this.hints[name] = h("span", { class: "hint", id }, empty ?? "");
    return h("label", { class: "field" }, label, input, this.hints[name]);
  }

  /** Show what the model would use where the user says nothing. */
  show(sampling) {
    for (const [name, { value, origin }] of Object.entries(sampling)) {
      if (!this.inputs[name]) continue;
      this.inputs[name].placeholder = Number(value.toPrecision(6));
      this.hints[name].dataset.origin = ORIGINS[origin] ?? origin;
      this.showOrigin(name);
    }
  }

  showOrigin(name) {
    const origin = this.hints[name].dataset.origin ?? FIELDS[name].empty ?? "";
    this.hints[name].textContent = this.inputs[name].value ? "you" : origin;
  }

  /** Put values into the fields; those without one are empty. */
  fill(values) {
    for (const [name, input] of Object.entries(this.inputs)) {
      input.value = values[name] ?? "";
      this.showOrigin(name);
    }
  }

  /** Return the fields of a request for an answer. */
  get values() {
    const given = Object.entries(this.inputs).filter(([, input]) => input.value !== "" && input.validity.valid);
    return Object.fromEntries(given.map(([name, input]) => [name, input.valueAsNumber]));
  }
}

/** The fields, and what they say. `changedSystem` is called with a new system prompt; `exports` is shown below. */
export class Settings {
  constructor(element, changedSystem, exports) {
    this.system = h("textarea", { id: "system", rows: "4", change: () => changedSystem(this.system.value) });
    this.sampling = new Sampling("", Object.keys(FIELDS));
    this.thinking = select("thinking", { "": "default", true: "on", false: "off" });
    this.hasTools = h("input", { type: "checkbox", id: "tools", checked: true });
    this.tools = h("label", { class: "check", hidden: true }, this.hasTools, " Tools: ", h("span", {}));
    this.theme = select("theme", { "": "as the system", light: "light", dark: "dark" });
    this.theme.value = recall("theme");
    this.theme.addEventListener("change", () => (remember("theme", this.theme.value), this.showTheme()));
    this.showTheme();
    this.figures = h("input", { type: "checkbox", id: "show-figures", checked: recall("figures") !== "off", change: () => (remember("figures", this.figures.checked ? "on" : "off"), this.showFigures()) });
    this.showFigures();
    this.preset = select("preset", { "": "none" });
    this.preset.addEventListener("change", () => this.usePreset());
    this.presets = h("label", { class: "field", hidden: true }, "Preset", this.preset);
    this.isDouble = h("input", { type: "checkbox", id: "double", change: () => (second.hidden = !this.isDouble.checked) });
    this.model = select("second-model", { "": "same model" });
    this.second = new Sampling("second-", Object.keys(FIELDS).filter((name) => name !== "max_tokens"));
    const second = h(
      "div",
      { hidden: true },
      h("label", { class: "field" }, "Second model", this.model),
      h("p", { class: "hint" }, "What is empty is as above."),
      this.second.element,
    );
    element.replaceChildren(
      this.presets,
      h("h2", {}, "System prompt"),
      h("label", { class: "hidden", for: "system" }, "System prompt"),
      this.system,
      h("h2", {}, "Sampling"),
      this.sampling.element,
      h("label", { class: "field" }, "Reasoning", this.thinking),
      this.tools,
      h("h2", {}, "Side by side"),
      h("label", { class: "check" }, this.isDouble, " Two answers to each question"),
      second,
      h("h2", {}, "Page"),
      h("label", { class: "field" }, "Theme", this.theme),
      h("label", { class: "check" }, this.figures, " Figures below the answers"),
      h("h2", {}, "Export"),
      exports,
    );
  }

  showModel({ sampling, thinks, tools }) {
    this.tools.hidden = !tools.length;
    this.tools.lastChild.textContent = clean(tools.join(", "));
    this.sampling.show(sampling);
    this.thinking.disabled = !thinks;
  }

  /** Show the models that can be the second one. */
  showModels(names) {
    const { value } = this.model;
    this.model.replaceChildren(h("option", { value: "" }, "same model"), ...names.map((name) => h("option", { value: name }, clean(name))));
    this.model.value = names.includes(value) ? value : "";
  }

  /** Offer the presets of the settings file; `useModel(name)` chooses the model of one. */
  showPresets(found, useModel) {
    this.found = found;
    this.useModel = useModel;
    this.presets.hidden = !found.length;
    this.preset.replaceChildren(h("option", { value: "" }, "none"), ...found.map(({ name }) => h("option", { value: name }, clean(name))));
  }

  choose(name) {
    this.preset.value = name;
    this.usePreset();
  }

  /** Fill the fields in as the chosen preset says; what it leaves open is empty. */
  usePreset() {
    const preset = this.found.find(({ name }) => name === this.preset.value) ?? { values: {} };
    this.sampling.fill(preset.values);
    this.thinking.value = String(preset.thinking ?? "");
    this.system.value = preset.system ?? "";
    this.system.dispatchEvent(new Event("change"));
    if (preset.model) this.useModel(preset.model);
  }

  showFigures() {
    document.documentElement.dataset.figures = this.figures.checked ? "on" : "off";
  }

  showTheme() {
    document.documentElement.dataset.theme = this.theme.value;
  }

  /** Return the fields of a request for an answer. */
  get values() {
    const values = { ...this.sampling.values, tools: this.hasTools.checked };
    return this.thinking.value && !this.thinking.disabled ? { ...values, thinking: this.thinking.value === "true" } : values;
  }

  /** Return the fields of a request for the second answer beside one with `values` of a model. */
  secondValues(values) {
    return { ...values, ...this.second.values, ...(this.model.value ? { model: this.model.value } : {}) };
  }
}

const select = (id, options) => h("select", { id }, Object.entries(options).map(([value, text]) => h("option", { value }, text)));
