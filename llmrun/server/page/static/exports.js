// A chat as a file to save: as `llmrun sessions export` has it, or as the page shows it.

import { text } from "./api.js";
import { h } from "./dom.js";

const POLICY = "default-src 'none'; style-src 'unsafe-inline'"; // of an exported page: it runs and fetches nothing
const FORMS = { markdown: ["md", "text/markdown"], json: ["json", "application/json"], html: ["html", "text/html"] };

/** Save a chat, {id, name}, in one of the FORMS; `shown` is the element with its turns. */
export async function save({ id, name }, form, shown) {
  const [suffix, type] = FORMS[form];
  const content = form === "html" ? await page(shown) : await text(`/ui/chats/${id}/${form}`);
  const address = URL.createObjectURL(new Blob([content], { type }));
  h("a", { href: address, download: `${name}.${suffix}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** Return a page of its own with a copy of an element, the styles in it and nothing to press. */
async function page(element) {
  const html = (...parts) => h("div", {}, ...parts).getHTML();
  const head = [h("meta", { charset: "utf-8" }), h("meta", { "http-equiv": "Content-Security-Policy", content: POLICY }), h("meta", { name: "viewport", content: "width=device-width,initial-scale=1" }), h("title", {}, document.title)];
  const shown = element.cloneNode(true);
  for (const each of shown.querySelectorAll("button, .buttons, .icon, img, textarea")) each.remove();
  for (const each of shown.querySelectorAll("[tabindex]")) each.removeAttribute("tabindex");
  // As text: this page's policy is for the elements that it makes, and allows no styles in them.
  const styles = `${await text("/ui/files/page.css")}html,body{height:auto;background:var(--paper)}body>h1{padding:1rem max(1rem,calc(50% - var(--column)/2)) 0;font-size:1.3rem;white-space:normal}`;
  return `<!doctype html>\n<html lang="en"><head>${html(head)}<style>${styles}</style></head><body>${html(h("h1", {}, document.title), shown)}</body></html>\n`;
}
