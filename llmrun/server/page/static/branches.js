// The branches of a chat in a dialog: each with the first turn that differs from the one shown.

import { button, byId, clean, h } from "./dom.js";

const LONGEST = 80; // characters of a turn

const shortened = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST)} …` : text);

/** Show branches; `go(name)` is called with the one chosen. */
export function showBranches(branches, go) {
  const dialog = byId("branches");
  const row = ({ name, head, turns, current, last, differs }) => {
    const choose = () => (dialog.close(), go(name || `#${head}`));
    const where = differs ? `, differs in turn ${differs[0]}: ` : current ? ", shown: " : ": ";
    return h(
      "li",
      {},
      button(clean(name || `#${head}`), choose, { disabled: current, "aria-current": current && "true" }),
      h("span", { class: "hint" }, `${turns} ${turns === 1 ? "turn" : "turns"}${where}${shortened(clean(differs?.[1] ?? last))}`),
    );
  };
  dialog.replaceChildren(
    h("h2", { id: "branches-title" }, "Branches"),
    h("ul", { class: "branches" }, branches.map(row)),
    h("div", { class: "buttons" }, button("Close", () => dialog.close(), { autofocus: true })),
  );
  dialog.showModal();
}
