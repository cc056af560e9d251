// The settings beside the chat: system prompt, documents, tools, context window, sampling with its origins, theme.

import { button, clean, h, iconButton, number, recall, remember } from "./dom.js";
import { PARAMETERS } from "./parameters.js";
import { Servers } from "./servers.js";

const { seed, ...others } = PARAMETERS;
const FIELDS = {
  ...others,
  seed: { ...seed, empty: "drawn for each answer" },
  max_tokens: { label: "Maximum tokens", min: 1, step: 1, empty: "until the end" },
};
const counted = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const NO_FOLDER = "A folder of this machine: passages of its texts, PDFs and Word documents that fit go along with each question.";
export const LABELS = { ...Object.fromEntries(Object.entries(FIELDS).map(([name, { label }]) => [name, label])), thinking: "Reasoning" };
const ORIGINS = { default: "default", model: "the model's file", catalogue: "recommended for this model", preset: "your settings file", Modelfile: "Ollama's settings of this model" };
const MOST_ANSWERS = 4; // side by side

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
    const other = this.inputs[name].placeholder;
    this.hints[name].textContent = !this.inputs[name].value ? origin : other ? `yours; else ${other}, ${origin}` : "yours";
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

/** The fields, and what they say. `exports` is shown below. `changed` has functions that are called with new values:
 * system(prompt), window(tokens), phone(), close(), and folder(path, tell), which tells how far the folder is read. */
export class Settings {
  constructor(element, changed, exports) {
    this.system = h("textarea", { id: "system", rows: "4", change: () => changed.system(this.system.value) });
    this.documents = h("input", { id: "documents", placeholder: "~/Documents/project", spellcheck: "false", "aria-describedby": "documents-told", change: () => changed.folder(this.documents.value.trim(), (line) => this.tellFolder(line)) });
    this.folderTold = h("p", { class: "hint", id: "documents-told", role: "status" }, NO_FOLDER);
    this.window = h("input", { type: "number", id: "window-size", min: 256, step: 1, "aria-describedby": "window-told", change: () => this.window.validity.valid && changed.window(this.window.valueAsNumber || 0) });
    this.windowTold = h("span", { class: "hint", id: "window-told" }, "what fits");
    this.sampling = new Sampling("", Object.keys(FIELDS));
    this.thinking = select("thinking", { "": "default", true: "on", false: "off" });
    this.hasTools = h("input", { type: "checkbox", id: "tools", checked: true });
    this.eachTool = h("div", { class: "each" });
    this.tools = h("div", { hidden: true }, h("label", { class: "check" }, this.hasTools, " The model may call tools"), this.eachTool);
    this.noTools = h("p", { class: "hint" }, h("code", {}, "llmrun chat --web --tools all"), " offers ready-made ones.");
    this.servers = new Servers();
    this.theme = select("theme", { "": "as the system", light: "light", dark: "dark" });
    this.theme.value = recall("theme");
    this.theme.addEventListener("change", () => (remember("theme", this.theme.value), this.showTheme()));
    this.showTheme();
    this.figures = h("input", { type: "checkbox", id: "show-figures", checked: recall("figures") !== "off", change: () => (remember("figures", this.figures.checked ? "on" : "off"), this.showFigures()) });
    this.showFigures();
    this.preset = select("preset", { "": "none" });
    this.preset.addEventListener("change", () => this.usePreset());
    this.presetTold = h("span", { class: "hint" });
    this.presets = h("label", { class: "field" }, "Preset", this.preset, this.presetTold);
    this.answers = select("answers", Object.fromEntries(Array.from({ length: MOST_ANSWERS }, (_, at) => [at + 1, at + 1])));
    this.answers.addEventListener("change", () => (second.hidden = this.answers.value === "1"));
    this.model = select("second-model", { "": "same model" });
    this.second = new Sampling("second-", Object.keys(FIELDS).filter((name) => name !== "max_tokens"));
    const second = h(
      "div",
      { hidden: true },
      h("label", { class: "field" }, "Second model", this.model),
      h("p", { class: "hint" }, "What is empty is as above; further answers are as the first, with other seeds."),
      this.second.element,
    );
    element.replaceChildren(
      iconButton("close", "Close the settings", changed.close, { class: "ghost closes" }),
      this.presets,
      h("h2", {}, "System prompt"),
      h("label", { class: "hidden", for: "system" }, "System prompt"),
      this.system,
      h("h2", {}, "Documents"),
      h("label", { class: "hidden", for: "documents" }, "Folder of documents"),
      this.documents,
      this.folderTold,
      h("h2", {}, "Tools"),
      this.tools,
      this.noTools,
      this.servers.element,
      h("h2", {}, "Model"),
      h("label", { class: "field" }, "Context window", this.window, this.windowTold),
      h("label", { class: "field" }, "Reasoning", this.thinking),
      h("h2", {}, "Sampling"),
      this.sampling.element,
      h("h2", {}, "Side by side"),
      h("label", { class: "field" }, "Answers to each question", this.answers),
      second,
      h("h2", {}, "Page"),
      h("label", { class: "field" }, "Theme", this.theme),
      h("label", { class: "check" }, this.figures, " Figures below the answers"),
      h("p", { class: "buttons" }, button("Use on your phone", changed.phone, { "aria-haspopup": "dialog" })),
      h("h2", {}, "Export"),
      exports,
    );
  }

  /** Show what applies to a model, which may not be loaded yet. */
  showModel({ sampling, thinks, tools, ctx, n_ctx, n_ctx_train }) {
    this.tools.hidden = !tools.length;
    this.noTools.hidden = tools.length > 0;
    const off = new Set(this.leftOut);
    this.eachTool.replaceChildren(...tools.map((name) => h("label", { class: "check" }, h("input", { type: "checkbox", value: name, checked: !off.has(name) }), ` ${clean(name)}`)));
    this.window.value = ctx || "";
    this.window.placeholder = n_ctx || "";
    this.window.max = n_ctx_train || "";
    this.windowTold.textContent = `${ctx ? "yours" : n_ctx ? "the server" : "what fits, when it is loaded"}; trained on ${number(n_ctx_train)}`;
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
    this.preset.disabled = !found.length;
    this.presetTold.textContent = found.length ? "" : "none yet: llmrun help settings";
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

  /** Show the folder of a chat's documents. */
  showFolder(folder) {
    this.documents.value = folder;
    this.folderTold.textContent = folder ? "Passages that fit go along with each question." : NO_FOLDER;
  }

  tellFolder({ done, total, files, passages, left_out }) {
    const others = left_out?.length ? `; left out: ${clean(left_out[0])}${left_out.length > 1 ? ` and ${number(left_out.length - 1)} more` : ""}` : "";
    this.folderTold.textContent = total ? `Reading ${number(done + 1)} of ${number(total)} files …` : files === undefined ? NO_FOLDER : `${counted(passages, "passage")} of ${counted(files, "file")}${others}`;
  }

  /** Return the names of tools that the model is not told. */
  get leftOut() {
    return [...[...this.eachTool.querySelectorAll("input:not(:checked)")].map((each) => each.value), ...this.servers.off];
  }

  showFigures() {
    document.documentElement.dataset.figures = this.figures.checked ? "on" : "off";
  }

  showTheme() {
    document.documentElement.dataset.theme = this.theme.value;
  }

  /** Return the fields of a request for an answer. */
  get values() {
    const values = { ...this.sampling.values, tools: this.hasTools.checked, without_tools: this.leftOut };
    return this.thinking.value && !this.thinking.disabled ? { ...values, thinking: this.thinking.value === "true" } : values;
  }

  /** Return the fields of the requests for all answers beside one with `values` of a model. */
  sides(values) {
    const second = { ...values, ...this.second.values, ...(this.model.value ? { model: this.model.value } : {}) };
    const further = (at) => ({ ...values, ...(values.seed === undefined ? {} : { seed: values.seed + at }) });
    return Array.from({ length: Number(this.answers.value) }, (_, at) => [values, second][at] ?? further(at));
  }
}

const select = (id, options) => h("select", { id }, Object.entries(options).map(([value, text]) => h("option", { value }, text)));
