// Elements and texts. Everything that comes from a model, a file or a user goes in as text.

globalThis.Prism = { manual: true }; // read by the highlighter when it is loaded: it must not look for code by itself

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069\ufeff]/g;

export const byId = (id) => document.getElementById(id);

/** Remove control characters, and those that turn the direction of the text around them. */
export const clean = (text) => String(text).replace(/\r\n?/g, "\n").replace(HIDDEN, "");

/** Make an element: a property that is a function is a listener, null and false leave an attribute out. */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}

export const button = (text, click, properties) => h("button", { type: "button", click, ...properties }, text);

const SVG = "http://www.w3.org/2000/svg";

/** Return an icon of the page's own. */
export function icon(name) {
  const element = document.createElementNS(SVG, "svg");
  element.setAttribute("class", "icon");
  element.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#icon-${name}`);
  element.append(use);
  return element;
}

/** Return a button with an icon, whose name is read out and shown as its title. */
export const iconButton = (name, words, click, properties) => h("button", { type: "button", click, class: "ghost", title: words, "aria-label": words, ...properties }, icon(name));

/** Return the button that closes a dialog. */
export const closer = (dialog) => iconButton("close", "Close", () => dialog.close());

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** Bytes in decimal units, as all of llmrun shows them. */
export const size = (bytes) => (bytes >= 999.95e6 ? `${number(bytes / 1e9, 1)} GB` : bytes >= 999.95e3 ? `${number(bytes / 1e6, 1)} MB` : `${number(bytes / 1e3, 1)} kB`);

/** A share of 1, e.g. "12.3%", "<0.1%". */
export const percent = (share) => (share > 0 && share < 0.0005 ? "<0.1%" : `${number(share * 100, 1)}%`);

/** Three significant digits, as the terminal shows rates and times. */
export const short = (value) => number(value, value >= 100 ? 0 : value >= 10 ? 1 : 2);

/** A setting of this browser; where storage is off, nothing is kept. */
export function recall(name) {
  try {
    return localStorage.getItem(`llmrun.${name}`) ?? "";
  } catch {
    return "";
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`llmrun.${name}`, value);
  } catch {
    // private windows may have none
  }
}
