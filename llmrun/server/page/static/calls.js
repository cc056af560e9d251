// What a model wants to call, for somebody who has to allow it: whole, and as it would run.

import { clean } from "./dom.js";

/** Return the arguments of a call, a name and a value each; code and other texts as their lines, and not as JSON. */
export function argumentsText(json) {
  let values = null;
  try {
    values = JSON.parse(json);
  } catch {
    // a model may write anything
  }
  if (values === null || typeof values !== "object" || Array.isArray(values)) return visible(json);
  return Object.entries(values).map(([name, value]) => `${visible(name).replaceAll("\n", " ")}: ${shown(value)}`).join("\n");
}

function shown(value) {
  const text = visible(typeof value === "string" ? value : JSON.stringify(value));
  return text.includes("\n") ? `\n${text.replace(/^/gm, "  ")}` : text;
}

/** Return a text as it is, or as JSON if a browser would not show all of it. */
function visible(text) {
  const escaped = (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return clean(text) === text ? text : JSON.stringify(text).replace(/[^\x20-\x7e]/g, escaped);
}
