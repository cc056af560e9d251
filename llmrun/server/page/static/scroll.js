// The turns of a conversation and the view on them, which follows the end until the user scrolls up.

import { byId } from "./dom.js";

const NEAR = 80; // pixels from the end that count as the end
export const scroller = byId("scroller");
export const turns = byId("turns");
const toEnd = byId("to-end");
let isAtEnd = true;
let top = 0;

/** Show the end, also of what is placed next. */
export function goToEnd() {
  isAtEnd = true;
  scroller.scrollTop = scroller.scrollHeight;
}

/** Show the beginning, whatever is placed next. */
export function goToStart() {
  isAtEnd = false;
  scroller.scrollTop = 0;
}

/** Show elements; those that are shown stay, and so does the view, unless it follows the end. */
export function place(elements) {
  const { scrollTop } = scroller;
  const stay = new Set(elements);
  for (const each of [...turns.children]) if (!stay.has(each)) each.remove();
  let next = turns.firstChild;
  for (const each of elements) {
    if (each === next) next = next.nextSibling;
    else turns.insertBefore(each, next);
  }
  scroller.scrollTop = isAtEnd ? scroller.scrollHeight : scrollTop;
}

/** Return whether the end is in view, and offer the way to it where it is not. */
function isNear() {
  toEnd.hidden = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR;
  return toEnd.hidden;
}

toEnd.addEventListener("click", () => (goToEnd(), byId("question").focus()));
scroller.addEventListener("scroll", () => {
  if (scroller.scrollTop === top) return; // there and back, as when the beginning is shown
  isAtEnd = isNear() || (isAtEnd && scroller.scrollTop >= top);
  top = scroller.scrollTop;
});
const grown = new ResizeObserver(() => (isAtEnd && goToEnd(), isNear()));
for (const each of [scroller, turns]) grown.observe(each);
