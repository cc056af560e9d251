// The page of an explained answer: one token is chosen, and everything shows what the model did at that token.
// All text comes from the data and is put in as text, never as markup. explain.py makes the elements that this fills.
"use strict";

const KEEP = {
  top_k: (kept, k) => (k ? kept.slice(0, k) : kept),
  top_p: (kept, p) => {
    let before = 0;
    return kept.filter(({ share }) => {
      const stays = before < p;
      before += share;
      return stays;
    });
  },
  min_p: (kept, p) => kept.filter(({ share }) => share >= p * kept[0].share),
  temperature: (kept, t) =>
    t > 0 ? kept.map(({ index, share }) => ({ index, share: (share / kept[0].share) ** (1 / t) })) : kept.slice(0, 1),
};

/** What the sampler makes of probabilities, the likeliest first: probabilities in the same order, 0 for what is cut. */
function recompute(probabilities, order, values) {
  const normed = kept => {
    const sum = kept.reduce((total, { share }) => total + share, 0) || 1;
    return kept.map(({ index, share }) => ({ index, share: share / sum }));
  };
  let kept = normed(probabilities.map((share, index) => ({ index, share })));
  for (const step of order) {
    const left = normed(KEEP[step](kept, values[step]));
    kept = left.length ? left : kept.slice(0, 1);
  }
  const result = probabilities.map(() => 0);
  for (const { index, share } of kept) result[index] = share;
  return result;
}

function start(data) {
  const chosen = { at: data.start, layer: data.lens.length ? data.lens[0].length - 1 : 0 };
  const all = selector => [...document.querySelectorAll(selector)];
  const views = Object.fromEntries(all("[data-view]").map(each => [each.dataset.view, each]));
  const chips = all("[data-at]"), sliders = all("input[type=range]");
  const length = data.first + data.tokens.length;
  const name = at => data.names[data.tokens[at]];
  const percent = share => (share > 0 && share < 0.0005 ? "<0.1%" : (share * 100).toFixed(1) + "%");

  function make(tag, attributes, ...children) {
    const svg = ["svg", "path", "line"].includes(tag);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  /** A table; a cell is a text, or a share of 1 that is drawn as a bar. side: "n" where columns hold numbers. */
  function table(headings, rows, side = "n") {
    const heads = headings.map((each, column) => make("th", { scope: "col", class: column ? side : "" }, each));
    const cell = (value, column) => {
      if (!column) return make("th", { scope: "row" }, value);
      if (typeof value !== "number") return make("td", { class: side }, value);
      return make("td", { class: "n share", style: `--share:${value * 100}%` }, percent(value));
    };
    const lines = rows.map(row => make("tr", {}, ...row.map(cell)));
    const whole = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...lines));
    return make("div", { class: "wide", tabindex: 0 }, whole);
  }

  /** A line for each series over the layers, and the same as a table. Series: [name, values, what a value is called] */
  function lines(view, title, series) {
    const most = Math.max(...series.flatMap(([, values]) => values)) || 1;
    const count = series[0][1].length;
    const x = index => (index * 720) / Math.max(count - 1, 1), y = value => 178 - (value / most) * 170;
    const paths = series.map(([, values], number) =>
      make("path", { class: `line k${number}`, d: "M" + values.map((v, i) => `${x(i)} ${y(v)}`).join("L") }));
    const said = series.map(([each, values, shown]) => `${each} from ${shown(values[0])} to ${shown(values.at(-1))}`);
    const label = `${title}: ${said.join("; ")}`;
    const size = { viewBox: "0 0 720 180", preserveAspectRatio: "none", class: "plot lines" };
    const axis = make("line", { x1: 0, x2: 720, y1: 179, y2: 179, class: "axis" });
    const picture = make("svg", { ...size, role: "img", "aria-label": label }, axis, ...paths);
    const ends = [1, count].map(layer => make("span", {}, `layer ${layer}`));
    const keys = series.map(([each], number) => make("span", { class: `key k${number}` }, each));
    const rows = series[0][1].map((_, at) => [`${at + 1}`, ...series.map(([, values, shown]) => shown(values[at]))]);
    const numbers = table(["layer", ...series.map(([each]) => each)], rows);
    const folded = make("details", {}, make("summary", {}, "As a table"), numbers);
    folded.open = Boolean(view.querySelector("details")?.open);
    view.replaceChildren(
      make("p", { class: "small" }, `${title}, up to ${series[0][2](most)}`), picture,
      make("p", { class: "ends small" }, ...ends), make("p", { class: "small" }, ...keys), folded);
  }

  const show = {
    token(view) {
      const { at } = chosen;
      const below = parts => (parts.length ? [make("ul", {}, ...parts.map(tree))] : []);
      const tree = ([text, parts]) => make("li", {}, make("code", {}, text), ...below(parts));
      const where = data.first + at + 1, part = where <= data.prompt ? "the prompt" : "the answer";
      const made = data.trees[at];
      const place = ` is token ${where} of ${length}, in ${part}; its number in the vocabulary is ${data.tokens[at]}.`;
      view.replaceChildren(
        make("p", {}, make("b", {}, name(at)), place),
        ...(made?.[1].length ? [make("ul", { class: "tree" }, tree(made))] : []));
    },
    layers(view) {
      const number = value => value.toFixed(1);
      const series = data.norms.map(([each, values]) => [each, values.map(layer => layer[chosen.at]), number]);
      lines(view, `Lengths of vectors at ${name(chosen.at)}`, series);
    },
    lens(view) {
      const column = data.lens[chosen.at], [ids, shares, next, rank] = column[chosen.layer];
      const came = chosen.at + 1 < data.tokens.length ? name(chosen.at + 1) : "";
      const said = came && `; the token that came, ${came}, is number ${rank + 1} with ${percent(next)}`;
      const candidates = table(["candidate", "probability"], ids.map((id, place) => [data.names[id], shares[place]]));
      const path = view.lastElementChild ?? make("div", {});
      view.replaceChildren(
        make("p", {}, `After ${name(chosen.at)}, behind layer ${chosen.layer + 1}${said}:`), candidates, path);
      path.hidden = !came;
      const title = "Probability of the token that came, behind each layer";
      if (came) lines(path, title, [[came, column.map(cell => cell[2]), percent]]);
    },
    attention(view) {
      for (const row of all(".heads .row")) row.setAttribute("y", chosen.at);
      const said = ([token, share]) => `${data.names[token]} ${percent(share)}`;
      const rows = data.heads.map(([head, looks]) => [head, looks[chosen.at].map(said).join(", ")]);
      view.replaceChildren(table(["head", `looks from ${name(chosen.at)} most at`], rows, "w"));
    },
    experts(view) {
      const rows = data.experts.map(([layer, woken]) => [`${layer + 1}`, woken[chosen.at].join(" ")]);
      view.replaceChildren(table(["layer", `experts of ${name(chosen.at)}, the heaviest first`], rows, "w"));
    },
    time(view) {
      const shares = values => values.map(value => value / values.reduce((sum, each) => sum + each, 0));
      const series = data.time.map(([each, values]) => [each, shares(values), percent]);
      lines(view, "Each layer's share of the phase's time", series);
    },
    sampling(view) {
      const at = data.first + chosen.at + 1, choice = data.choices[at - (length - data.choices.length)];
      document.querySelector(".sliders").hidden = !choice || choice.forced;
      if (!choice || choice.forced) {
        const why = choice ? "the grammar left no choice"
          : at >= length ? "the answer ends"
          : at < data.prompt ? "the prompt goes on, so nothing was drawn"
          : "this choice is not remembered";
        view.replaceChildren(make("p", {}, `After ${name(chosen.at)}: ${why}.`));
        return;
      }
      const values = Object.fromEntries(sliders.map(each => [each.name, Number(each.value)]));
      const result = recompute(choice.model, data.order, values);
      const cell = (share, before) => (share > 0 ? percent(share) : before > 0 ? "cut" : "");
      const rows = choice.shown.map((index, row) => [
        choice.texts[row] + (index === choice.chosen ? " ◀ chosen" : ""),
        ...choice.steps.map(([, , shares], step) => cell(shares[row], step ? choice.steps[step - 1][2][row] : 1)),
        result[index] || "",
      ]);
      const left = result.filter(share => share > 0).length;
      rows.push(["left", ...choice.steps.map(([, remaining]) => remaining.toLocaleString("en")), `${left}`]);
      const likely = percent(result[choice.chosen]), headings = choice.steps.map(([each]) => each);
      const seen = choice.model.reduce((sum, share) => sum + share, 0);
      const how = "The last column is computed in this page, by these four steps alone, from the "
        + `${choice.model.length} likeliest candidates; the model gave them ${percent(seen)} together.`;
      const came = `After ${name(chosen.at)} the model chose ${choice.text}. `
        + `With the sliders as they stand its probability is ${likely}:`;
      view.replaceChildren(
        make("p", {}, came), table(["candidate", ...headings, "by the sliders"], rows),
        make("p", { class: "small" }, how));
    },
  };

  function choose(at, layer = chosen.layer) {
    chosen.at = Math.min(Math.max(at, 0), data.tokens.length - 1);
    chosen.layer = Math.min(Math.max(layer, 0), (data.lens[0]?.length ?? 1) - 1);
    const chip = chips[chosen.at], strip = chip.parentNode;
    for (const each of chips) {
      each.setAttribute("aria-pressed", each === chip);
      each.tabIndex = each === chip ? 0 : -1;
    }
    if (strip.contains(document.activeElement)) chip.focus({ preventScroll: true });
    if (strip.scrollHeight > strip.clientHeight) strip.scrollTop = chip.offsetTop - strip.clientHeight / 2;
    for (const each of all(".lens td, .lens th")) {
      const own = each.cellIndex - 1 === chosen.at;
      each.classList.toggle("here", own);
      if (own && each.dataset.layer == chosen.layer) each.setAttribute("aria-current", "true");
      else each.removeAttribute("aria-current");
    }
    const wide = document.querySelector(".lens")?.parentNode, here = wide?.querySelector("th.here");
    if (here) wide.scrollLeft = here.offsetLeft - wide.clientWidth / 2;
    for (const [each, view] of Object.entries(views)) show[each](view);
  }

  function slide() {
    for (const each of sliders) each.nextElementSibling.textContent = each.value;
    show.sampling(views.sampling);
  }

  for (const each of chips) each.onclick = () => choose(Number(each.dataset.at));
  for (const each of sliders) each.oninput = slide;
  for (const each of all(".lens td"))
    each.onclick = () => choose(each.cellIndex - 1, Number(each.dataset.layer));
  for (const each of all(".heads svg"))
    each.onclick = event => {
      const box = each.getBoundingClientRect();
      choose(Math.floor(((event.clientY - box.top) / box.height) * data.tokens.length));
    };
  const again = document.querySelector(".sliders button");
  if (again) again.onclick = () => { for (const each of sliders) each.value = each.defaultValue; slide(); };
  document.addEventListener("keydown", event => {
    const { target } = event, inLens = target.querySelector?.(":scope > .lens");
    const scrolls = target.matches?.(".wide, input") && !inLens;
    if (scrolls || event.altKey || event.ctrlKey || event.metaKey) return;
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    const [across, up] = ways[event.key] ?? [0, 0];
    if (!across && !(up && inLens)) return;
    event.preventDefault();
    choose(chosen.at + across, chosen.layer + up);
  });
  views.token.setAttribute("aria-live", "polite");
  choose(data.start);
}

if (typeof document !== "undefined") start(JSON.parse(document.getElementById("data").textContent));
