// What fills the context window: each message, what the chat template adds, and what is free.

import { button, byId, clean, h, number, percent } from "./dom.js";

export function showContext({ messages, total, n_ctx: size }) {
  const dialog = byId("window");
  const template = Math.max(0, total - messages.reduce((sum, each) => sum + each.tokens, 0));
  const rows = [...messages, { role: "template", text: "what the chat template adds", tokens: template }, { role: "free", text: "", tokens: Math.max(0, size - total) }];
  const row = ({ role, text, tokens }) => {
    const bar = h("span", { class: "bar" });
    bar.style.setProperty("--share", `${(tokens / size) * 100}%`);
    return h("tr", {}, h("th", { scope: "row" }, role), h("td", { class: "excerpt" }, clean(text)), h("td", { class: "align-right" }, number(tokens)), h("td", {}, h("span", { class: "share" }, bar, percent(tokens / size))));
  };
  dialog.replaceChildren(
    h("h2", { id: "window-title" }, `Context window: ${number(total)} of ${number(size)} tokens`),
    h("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Context window" }, h("table", {}, h("tbody", {}, rows.map(row)))),
    h("div", { class: "buttons" }, button("Close", () => dialog.close(), { autofocus: true })),
  );
  dialog.showModal();
}
