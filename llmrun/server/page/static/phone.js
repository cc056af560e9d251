// The dialog that lets the user's phone open this page: a code to photograph, with the address and its key.

import { get, post } from "./api.js";
import { button, byId, closer, h } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const ABOUT = "A code opens this page on a phone in the same network, with all your chats. Whoever has it can read them and use your models and tools, until you press Stop or llmrun ends. The connection is not encrypted: use it in a network that you trust.";
const IS_HERE = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname); // not on the phone itself

/** Return the squares of a code, dark on light in each theme. */
function drawn(rows) {
  const element = (name, properties) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
    return made;
  };
  const squares = rows.flatMap((row, y) => [...row].map((each, x) => (each === "1" ? `M${x} ${y}h1v1h-1z` : "")));
  const svg = element("svg", { class: "code-image", viewBox: `0 0 ${rows.length} ${rows.length}`, role: "img", "aria-label": "Code with the address below", "shape-rendering": "crispEdges" });
  svg.append(element("rect", { width: rows.length, height: rows.length, fill: "#fff" }), element("path", { d: squares.join(""), fill: "#000" }));
  return svg;
}

export async function showPhone() {
  const dialog = byId("phone");
  const told = h("p", { role: "alert" });
  const body = h("div", {});
  const change = async (on) => {
    told.textContent = "";
    try {
      show(await post("/ui/phone", { on }));
    } catch (error) {
      told.textContent = error.message;
    }
  };
  const show = ({ address, code }) => {
    const buttons = !address ? button("Show the code", () => change(true), { class: "main" }) : IS_HERE && button("Stop", () => change(false));
    body.replaceChildren(
      ...(address ? [drawn(code), h("p", { class: "hint" }, h("code", {}, address)), h("p", { class: "hint" }, "A firewall of this machine may have to let this port in.")] : []),
      h("p", { class: "hint" }, ABOUT),
      h("div", { class: "buttons" }, buttons),
    );
    body.querySelector("button")?.focus();
  };
  show(await get("/ui/phone"));
  dialog.replaceChildren(h("header", {}, h("h2", { id: "phone-title" }, "Use on your phone"), closer(dialog)), body, told);
  dialog.showModal();
}
