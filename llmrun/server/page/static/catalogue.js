// The models that llmrun knows by name, in a dialog: size, speed on this machine, and a download with its progress.

import { get, lines } from "./api.js";
import { button, byId, clean, h, short, size } from "./dom.js";

const SLOW = 5; // tokens/s, below which an answer is slower than reading

/** Show the models; `use(name)` is called with one that is here. */
export async function showCatalogue(use) {
  const dialog = byId("catalogue");
  const search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search the models" });
  const list = h("ul", { class: "catalogue" });
  const { models } = await get("/ui/catalogue");
  const stopper = new AbortController();
  const choose = (name) => (dialog.close(), use(name));
  const rows = models.filter(({ kind }) => kind === "chat").map((model) => ({ text: `${model.name} ${model.title}`.toLowerCase(), element: row(model, choose, stopper.signal) }));
  const draw = () => list.replaceChildren(...rows.filter(({ text }) => text.includes(search.value.trim().toLowerCase())).map(({ element }) => element));
  search.addEventListener("input", draw);
  draw();
  dialog.replaceChildren(
    h("h2", { id: "catalogue-title" }, "Models"),
    search,
    list,
    h("p", { class: "hint" }, "~ is estimated from the size of the file. Others: ", h("code", {}, "llmrun search"), " and ", h("code", {}, "llmrun pull"), " in a terminal."),
    h("div", { class: "buttons" }, button("Close", () => dialog.close())),
  );
  dialog.onclose = () => stopper.abort(); // a download goes on where it was when it is begun again
  dialog.showModal();
}

function row(model, use, signal) {
  const about = model.is_exact && !model.is_rate_estimated ? "" : "~";
  const speed = model.decode_rate ? `${about}${short(model.decode_rate)} tokens/s here${model.decode_rate < SLOW ? ", slower than reading" : ""}` : "";
  const fits = model.fits ? (model.fits_now ? "" : "needs more memory than is free now") : "too large for this machine";
  const facts = [model.parameters, model.quant, `${size(model.n_bytes)}`, speed, fits].filter(Boolean).join(" · ");
  const action = h("span", {});
  const here = () => action.replaceChildren(button("Use", () => use(model.name), { class: "main", "aria-label": `Use ${model.name}` }));
  const offer = () => action.replaceChildren(button("Download", download, { "aria-label": `Download ${model.name}, ${size(model.n_bytes)}` }));
  const told = h("p", { class: "hint", role: "status" });

  async function download() {
    const bar = h("progress", { max: 1, "aria-label": `Download of ${model.name}` });
    action.replaceChildren(bar);
    try {
      for await (const { status, total, completed, error } of lines("/ui/download", { model: model.name }, signal)) {
        if (error) throw new Error(error.message ?? error);
        if (total) Object.assign(bar, { value: completed / total });
        told.textContent = total ? `${size(completed)} of ${size(total)}` : clean(status);
      }
      told.textContent = "";
      here();
    } catch (error) {
      told.textContent = error.name === "AbortError" ? "" : clean(error.message);
      offer();
    }
  }

  (model.is_here ? here : offer)();
  return h("li", {}, h("div", {}, h("b", {}, clean(model.name)), h("p", { class: "hint" }, clean(facts)), told), action);
}
