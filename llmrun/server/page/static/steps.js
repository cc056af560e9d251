// The candidates of a token after each step of the sampler, and what sliders of other settings would leave of them.

import { button, clean, h, number, percent } from "./dom.js";
import { PARAMETERS, STEPS } from "./parameters.js";
import "./sampler.js";

const SHOWN = 12; // candidates
const WITH_SLIDERS = Object.entries(PARAMETERS).filter(([, { slider }]) => slider);
const SLIDERS = Object.fromEntries(WITH_SLIDERS.map(([name, { label, slider }]) => [name, { label, ...slider }]));
const { recompute } = globalThis;

/** Return the settings of an answer's sampler: the order of the steps with sliders, and their values. */
function settingsOf({ order, values }) {
  const own = order.filter((step) => SLIDERS[step]);
  const start = Object.fromEntries(Object.entries(SLIDERS).map(([name, { off }]) => [name, own.includes(name) ? values[name] : off]));
  return { order: [...own, ...STEPS.filter((step) => SLIDERS[step] && !own.includes(step))], start };
}

/** Return the table and its sliders. `taker(text)` makes the button of a candidate, "" for the one of `chosen`. */
export function stepsElement(data, chosen, quoted, taker) {
  const { candidates, steps } = data;
  const all = steps[0].shares;
  const n_others = Math.max(steps[0].left - candidates.length, 0);
  const others = n_others ? Math.max(1 - all.reduce((sum, each) => sum + each, 0), 0) / n_others : 0;
  const { order, start } = settingsOf(data);
  const shown = candidates.map((_, index) => index).filter((index) => index < SHOWN || candidates[index] === chosen);
  const cell = (share, before) => h("td", { class: "align-right" }, share > 0 ? percent(share) : before > 0 ? "cut" : "");
  const results = shown.map(() => h("td", { class: "align-right result" }));
  const left = h("td", { class: "align-right result" });
  const rows = shown.map((index, row) =>
    h(
      "tr",
      candidates[index] === chosen ? { class: "chosen" } : {},
      h("th", { scope: "row" }, h("code", {}, quoted(candidates[index]))),
      results[row],
      ...steps.map(({ shares }, step) => cell(shares[index], step ? steps[step - 1].shares[index] : 1)),
      h("td", {}, candidates[index] === chosen ? "chosen" : taker(candidates[index], all[index])),
    ),
  );
  const headings = ["candidate", "by the sliders", ...steps.map(({ name }) => clean(name)), ""];
  const total = h("tr", {}, h("th", { scope: "row" }, "left"), left, ...steps.map((step) => h("td", { class: "align-right" }, number(step.left))), h("td", {}));
  const table = h("table", {}, h("thead", {}, h("tr", {}, headings.map((each) => (each ? h("th", { scope: "col" }, each) : h("td", {}))))), h("tbody", {}, rows, total));
  const inputs = Object.entries(SLIDERS).map(([name, { high, step }]) => h("input", { type: "range", name, min: 0, max: Math.max(high, start[name]), step, value: start[name], input: draw }));
  const outputs = inputs.map(() => h("output", {}));

  function draw() {
    const values = Object.fromEntries(inputs.map((input) => [input.name, input.valueAsNumber]));
    inputs.forEach((input, at) => (outputs[at].textContent = input.value));
    const found = recompute(all, [n_others, others], order, values);
    shown.forEach((index, row) => (results[row].textContent = found.shares[index] > 0 ? percent(found.shares[index]) : "cut"));
    left.textContent = number(found.left);
  }

  draw();
  const reset = button("As it was", () => {
    inputs.forEach((input) => (input.value = start[input.name]));
    draw();
  });
  return [
    h("div", { class: "sliders" }, inputs.map((input, at) => h("label", {}, h("span", {}, SLIDERS[input.name].label), input, outputs[at])), reset),
    h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Steps of the sampler" }, table),
    h("p", { class: "hint" }, `The sliders apply these four steps alone to the ${candidates.length} likeliest candidates; the other ${number(n_others)} are taken as equal.`),
  ];
}
