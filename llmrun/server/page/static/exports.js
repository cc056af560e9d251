// A chat as a file to save: as `llmrun sessions export` has it, or as the page shows it.

import { text } from "./api.js";
import { h } from "./dom.js";

const POLICY = "default-src 'none'; style-src 'unsafe-inline'"; // of an exported page: it runs and fetches nothing
const FORMS = { markdown: ["md", "text/markdown"], json: ["json", "application/json"], html: ["html", "text/html"] };

/** Save a chat in one of the FORMS; `shown` is the element with its turns. */
export async function save(chat, form, shown) {
  const [suffix, type] = FORMS[form];
  const content = form === "html" ? await page(shown) : await text(`/ui/chats/${chat}/${form}`);
  const address = URL.createObjectURL(new Blob([content], { type }));
  h("a", { href: address, download: `chat-${chat}.${suffix}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** Return a page of its own with a copy of an element, the styles in it and nothing to press. */
async function page(element) {
  const made = document.implementation.createHTMLDocument(document.title);
  const meta = (properties) => made.importNode(h("meta", properties));
  made.head.prepend(meta({ charset: "utf-8" }), meta({ "http-equiv": "Content-Security-Policy", content: POLICY }));
  made.head.append(meta({ name: "viewport", content: "width=device-width,initial-scale=1" }));
  made.head.append(Object.assign(made.createElement("style"), { textContent: `${await text("/ui/files/page.css")}html,body{height:auto}` }));
  const shown = made.importNode(element, true);
  for (const each of shown.querySelectorAll("button, .buttons, textarea")) each.remove();
  for (const each of shown.querySelectorAll("[tabindex]")) each.removeAttribute("tabindex");
  made.body.append(Object.assign(made.createElement("h1"), { textContent: document.title }), shown);
  return `<!doctype html>\n<html lang="en">${made.documentElement.getHTML()}</html>\n`;
}
