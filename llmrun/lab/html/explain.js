// The page of an explained answer: fills the elements of explain.html.jinja with the figures of the chosen token.
// All text comes from the data and is inserted as text, never as markup.
"use strict";

function start(data) {
  const chosen = { at: data.start, layer: data.lens.length ? data.lens[0].length - 1 : 0 };
  const all = selector => [...document.querySelectorAll(selector)];
  const views = Object.fromEntries(all("[data-view]").map(each => [each.dataset.view, each]));
  const chips = all("[data-at]"), sliders = all("input[type=range]");
  const length = data.first + data.tokens.length;
  const name = at => data.names[data.tokens[at]];
  const percent = share => (share > 0 && share < 0.0005 ? "<0.1%" : (share * 100).toFixed(1) + "%");

  function make(tag, attributes, ...children) {
    const drawn = ["svg", "g", "path", "line", "circle", "text", "title"].includes(tag);
    const made = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  /** Make a table; a cell is a text, or a share of 1 that is drawn as a bar. side: "n" for columns of numbers. */
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

  /** Draw a line for each series over the layers, and a table. Series: [name, values, formatter of a value] */
  function lines(view, title, series) {
    const maximum = Math.max(...series.flatMap(([, values]) => values)) || 1;
    const count = series[0][1].length;
    const x = index => (index * 720) / Math.max(count - 1, 1), y = value => 178 - (value / maximum) * 170;
    const paths = series.map(([, values], number) =>
      make("path", { class: `line k${number}`, d: "M" + values.map((v, i) => `${x(i)} ${y(v)}`).join("L") }));
    const parts = series.map(([each, values, shown]) => `${each} from ${shown(values[0])} to ${shown(values.at(-1))}`);
    const label = `${title}: ${parts.join("; ")}`;
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
      make("p", { class: "small" }, `${title}, up to ${series[0][2](maximum)}`), picture,
      make("p", { class: "ends small" }, ...ends), make("p", { class: "small" }, ...keys), folded);
  }

  // The plane of the embeddings has one scale for both axes and all tokens.
  const spots = data.places?.flatMap(each => [each, ...each[3]]) ?? [];
  const ends = [1, 2].map(axis => spots.map(spot => spot[axis])).map(all => [Math.min(...all), Math.max(...all)]);
  const unit = Math.max((ends[0][1] - ends[0][0]) / 560, (ends[1][1] - ends[1][0]) / 340) || 1;
  const from = (value, axis) => (value - (ends[axis][0] + ends[axis][1]) / 2) / unit;

  /** Draw dots with names, [token, x, y, kind], the most important first; names that overlap are left out. */
  function plane(dots, label) {
    const taken = [];
    const drawn = dots.map(([token, x, y, kind]) => {
      const across = 310 + from(x, 0), down = 180 - from(y, 1), text = data.names[token];
      const box = [across, down, across + 12 + 7.3 * text.length, down + 14];
      const hidden = taken.some(other =>
        box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3]);
      if (!hidden) taken.push(box);
      const dot = make("circle", { cx: across, cy: down, r: kind === "chosen" ? 6 : 4 });
      const parts = hidden ? [] : [make("text", { x: across + 9, y: down + 4 }, text)];
      const group = make("g", { class: kind }, make("title", {}, text), dot, ...parts);
      const at = data.tokens.indexOf(token);
      if (at >= 0) group.onclick = () => choose(at);
      return group;
    });
    const size = { viewBox: "0 0 720 360", class: "plot plane" };
    const picture = make("svg", { ...size, role: "img", "aria-label": label }, ...drawn.reverse());
    return make("div", { class: "wide", tabindex: 0 }, picture);
  }

  const show = {
    token(view) {
      const { at } = chosen;
      const below = parts => (parts.length ? [make("ul", {}, ...parts.map(tree))] : []);
      const tree = ([text, parts]) => make("li", {}, make("code", {}, text), ...below(parts));
      const position = data.first + at + 1, part = position <= data.prompt ? "the prompt" : "the answer";
      const made = data.trees[at];
      const place = ` is token ${position} of ${length}, in ${part}; its number in the vocabulary is ${data.tokens[at]}.`;
      view.replaceChildren(
        make("p", {}, make("b", {}, name(at)), place),
        ...(made?.[1].length ? [make("ul", { class: "tree" }, tree(made))] : []));
    },
    embeddings(view) {
      const [token, x, y, near] = data.places.find(([each]) => each === data.tokens[chosen.at]);
      const others = data.places.filter(([each]) => each !== token).map(each => [...each.slice(0, 3), "own"]);
      const dots = [[token, x, y, "chosen"], ...near.map(each => [...each.slice(0, 3), "near"]), ...others];
      const rows = near.map(([each, , , cosine]) => [data.names[each], cosine.toFixed(2)]);
      const text = near.length ? `the nearest are ${rows.map(row => row.join(" ")).join(", ")}`
        : "a control token, whose neighbours have no meaning";
      view.replaceChildren(
        plane(dots, `Embeddings in a plane, ${data.names[token]} among ${others.length} others: ${text}`),
        near.length ? table([`nearest to ${data.names[token]}`, "cosine"], rows)
          : make("p", {}, `${data.names[token]} is ${text}.`));
      const wide = view.firstChild, dot = view.querySelector(".chosen circle").getBoundingClientRect();
      wide.scrollLeft = dot.left - wide.getBoundingClientRect().left - wide.clientWidth / 2;
    },
    layers(view) {
      const number = value => value.toFixed(1);
      const series = data.norms.map(([each, values]) => [each, values.map(layer => layer[chosen.at]), number]);
      lines(view, `Lengths of vectors at ${name(chosen.at)}`, series);
    },
    lens(view) {
      const column = data.lens[chosen.at], [ids, shares, next, rank] = column[chosen.layer];
      const following = chosen.at + 1 < data.tokens.length ? name(chosen.at + 1) : "";
      const text = following && `; the actual next token, ${following}, is number ${rank + 1} with ${percent(next)}`;
      const candidates = table(["candidate", "probability"], ids.map((id, place) => [data.names[id], shares[place]]));
      const path = view.lastElementChild ?? make("div", {});
      view.replaceChildren(
        make("p", {}, `After ${name(chosen.at)} and layer ${chosen.layer + 1}${text}:`), candidates, path);
      path.hidden = !following;
      const title = "Probability of the actual next token, after each layer";
      if (following) lines(path, title, [[following, column.map(cell => cell[2]), percent]]);
    },
    attention(view) {
      for (const row of all(".heads .row")) row.setAttribute("y", chosen.at);
      const text = ([token, share]) => `${data.names[token]} ${percent(share)}`;
      const rows = data.heads.map(([head, looks]) => [head, looks[chosen.at].map(text).join(", ")]);
      view.replaceChildren(table(["head", `tokens that ${name(chosen.at)} attends to most`], rows, "w"));
    },
    experts(view) {
      document.querySelector(".strip .column").setAttribute("x", chosen.at);
      const rows = data.experts.map(([layer, active]) => [`${layer + 1}`, active[chosen.at].join(" ")]);
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
        const reason = choice ? "the grammar left no choice"
          : at >= length ? "the answer ends"
          : at < data.prompt ? "the prompt continues, so nothing was drawn"
          : "the logits of this choice were not stored";
        view.replaceChildren(make("p", {}, `After ${name(chosen.at)}: ${reason}. ${choice?.drafted ?? ""}`));
        return;
      }
      const values = Object.fromEntries(sliders.map(each => [each.name, Number(each.value)]));
      const { shares: result, left } = recompute(choice.model, choice.others, data.order, values);
      const cell = (share, before) => (share > 0 ? percent(share) : before > 0 ? "cut" : "");
      const rest = shares => Math.max(1 - shares.reduce((sum, share) => sum + share, 0), 0);
      const rows = choice.shown.map((index, row) => [
        choice.texts[row] + (index === choice.chosen ? " ◀ chosen" : ""),
        ...choice.steps.map(([, , shares], step) => cell(shares[row], step ? choice.steps[step - 1][2][row] : 1)),
        result[index] || "",
      ]);
      const others = [...choice.steps.map(([, , shares]) => shares), choice.shown.map(index => result[index])].map(rest);
      rows.push(["all others", ...others.map(share => (share > 1e-5 ? percent(share) : ""))]);
      rows.push(["left", ...[...choice.steps.map(([, remaining]) => remaining), left].map(n => n.toLocaleString("en"))]);
      const likely = percent(result[choice.chosen]), headings = choice.steps.map(([each]) => each);
      const [number, each] = choice.others;
      const how = `The last column is computed in this page, by these four steps alone, from the ${choice.model.length} `
        + `likeliest candidates. The other ${number.toLocaleString("en")}, to which the model gave `
        + `${percent(number * each)} together, are taken as equal.`;
      const summary = `After ${name(chosen.at)} the model chose ${choice.text}. `
        + `${choice.drafted && choice.drafted + " "}With these settings of the sliders its probability is ${likely}:`;
      view.replaceChildren(
        make("p", {}, summary), table(["candidate", ...headings, "by the sliders"], rows),
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
  for (const each of all(".strip"))
    each.onclick = event => {
      const box = each.getBoundingClientRect();
      choose(Math.floor(((event.clientX - box.left) / box.width) * data.tokens.length));
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
