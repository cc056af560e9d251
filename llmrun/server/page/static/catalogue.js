// The models in a dialog: those on this disk, those that llmrun knows by name, and the hub's, with what each needs here.

import { get, post } from "./api.js";
import { button, byId, clean, closer, h, number, short, size } from "./dom.js";
import { download, downloads, stop } from "./downloads.js";

const SLOW = 5; // tokens/s, below which an answer is slower than reading
const USUAL_CONTEXT = "4k"; // for which memory is estimated
let drawn = []; // [name, draw()] of the rows that are shown

document.addEventListener("download", ({ detail }) => drawn.forEach(([name, draw]) => name === detail && draw()));

/** Show the models. `here` are those on this disk, {name, n_bytes, n_ctx}; `use(name)` is called with the chosen one. */
export async function showCatalogue(here, chosen, use) {
  const dialog = byId("catalogue");
  const search = h("input", { type: "search", autofocus: true, placeholder: "Search these models and the hub", "aria-label": "Search the models" });
  const list = h("div", {});
  const told = h("p", { class: "hint", role: "status" }, "Looking at this machine …");
  const choose = (name) => (dialog.close(), use(name));
  let known = [];
  let hub = { words: "", models: [] };

  const matches = (model) => search.value.toLowerCase().split(/\s+/).every((word) => `${model.name} ${model.title ?? ""}`.toLowerCase().includes(word));
  const draw = () => {
    drawn = [];
    const onDisk = here.map((model) => ({ ...known.find(({ name }) => name === model.name), ...model, installed: true }));
    const others = known.filter((model) => model.kind === "chat" && !here.some(({ name }) => name === model.name));
    const found = [...onDisk, ...others].filter(matches);
    const rows = (models) => h("ul", { class: "catalogue" }, models.map((model) => row(model, chosen, choose)));
    const group = (title, models, note) => models.length > 0 && h("section", { "aria-label": title }, h("h3", {}, title, note && h("span", { class: "hint" }, note)), rows(models));
    const [installed, rest] = [found.filter((model) => model.installed), found.filter((model) => !model.installed)];
    const large = rest.filter(({ fits, purpose }) => !fits && !purpose);
    list.replaceChildren(
      ...[
        group("On this disk", installed),
        group("Recommended for this machine", rest.filter(({ purpose }) => purpose).sort((one, other) => one.n_bytes - other.n_bytes)),
        group("Also fits", rest.filter(({ fits, purpose }) => fits && !purpose)),
        large.length > 0 && h("details", { open: Boolean(search.value) }, h("summary", {}, `Too large for this machine: ${number(large.length)}`), rows(large)),
        hub.words === search.value.trim() && group("On the hub", hub.models, " · without the size: the quant that fits is taken"),
      ].filter(Boolean),
    );
    ask.hidden = !search.value.trim() || hub.words === search.value.trim();
    ask.textContent = `Search the hub for “${clean(search.value.trim())}”`;
  };
  const searchHub = async () => {
    const words = search.value.trim();
    told.textContent = "Searching the hub …";
    try {
      const { models } = await post("/ui/hub", { text: words });
      hub = { words, models: models.map((model) => ({ ...model, name: model.repository })) };
      told.textContent = models.length ? "" : "The hub has no GGUF repository with these words in its name.";
    } catch (error) {
      told.textContent = clean(error.message);
    }
    draw();
  };
  const ask = button("", searchHub, { hidden: true });
  search.addEventListener("input", draw);
  search.addEventListener("keydown", (event) => event.key === "Enter" && search.value.trim() && (event.preventDefault(), searchHub()));
  draw();
  dialog.replaceChildren(
    h("header", {}, h("h2", { id: "catalogue-title" }, "Models"), closer(dialog)),
    search,
    ask,
    told,
    list,
    h("p", { class: "hint" }, `~ is estimated from the size of the file. Memory is with a context window of ${USUAL_CONTEXT}.`),
  );
  dialog.showModal();
  try {
    known = (await get("/ui/catalogue")).models;
    told.textContent = "";
  } catch (error) {
    told.textContent = clean(error.message);
  }
  draw();
}

/** Return what a model needs and does here in a line. */
function factsOf(model) {
  const about = model.is_exact === false ? "~" : "";
  const rate = model.decode_rate && `${about || (model.is_rate_estimated ? "~" : "")}${short(model.decode_rate)} tokens/s here${model.decode_rate < SLOW ? ", slower than reading" : ""}`;
  const fits = model.fits === undefined ? "" : model.fits ? (model.fits_now ? "" : "needs more memory than is free now") : "too large for this machine";
  const downloaded = model.downloads !== undefined && [`${number(model.downloads)} downloads`, model.updated && `changed ${model.updated}`, model.gated && "terms to accept on the hub"];
  return [model.parameters, model.quant, model.n_bytes && size(model.n_bytes), model.memory_bytes && `${about}${size(model.memory_bytes)} memory`, rate, clean(model.licence ?? ""), fits, ...(downloaded || [])].filter(Boolean).join(" · ");
}

function row(model, chosen, use) {
  const name = clean(model.name);
  const action = h("span", { class: "action" });
  const told = h("p", { class: "hint", role: "status" });
  const badges = [model.purpose, model.n_ctx && "in memory"].filter(Boolean).map((words) => h("span", { class: "badge" }, words));
  const element = h("li", { "aria-current": model.name === chosen && "true" }, h("div", {}, h("b", {}, name), " ", badges, model.title && h("span", { class: "about" }, clean(model.title)), h("p", { class: "hint" }, factsOf(model)), told), action);
  let shown = null; // what the action is

  function draw() {
    const state = downloads.get(model.name);
    const isHere = model.installed || state?.isDone;
    const wanted = isHere ? "use" : state && !state.error ? "stop" : "download";
    told.textContent = wanted === "stop" || state?.error ? clean(state.error || state.text) : "";
    if (wanted === shown) return void (wanted === "stop" && (action.firstChild.value = state.share));
    shown = wanted;
    if (wanted === "use") action.replaceChildren(button(model.name === chosen ? "In use" : "Use", () => use(model.name), { class: model.name === chosen && "ghost", "aria-label": model.name === chosen ? `In use: ${name}` : `Use ${name}` }));
    else if (wanted === "stop") action.replaceChildren(h("progress", { max: 1, value: state.share, "aria-label": `Download of ${name}` }), button("Stop", () => stop(model.name).catch(() => null), { "aria-label": `Stop the download of ${name}` }));
    else action.replaceChildren(button("Download", () => download(model.name), { "aria-label": `Download ${name}${model.n_bytes ? `, ${size(model.n_bytes)}` : ""}` }));
  }

  drawn.push([model.name, draw]);
  draw();
  return element;
}
