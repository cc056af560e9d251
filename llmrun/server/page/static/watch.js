// Tell the user when the chat shown goes on in another window or in a terminal.

import { get } from "./api.js";

const EVERY = 2000; // ms between two looks at the chat

/** Call `told(words)` when the chat of `shown()`, {id, last}, changed elsewhere or is answered there; "" when it is not. */
export function watch(shown, told) {
  let said = "";
  const look = async () => {
    const chat = document.hidden ? null : shown();
    let words = "";
    if (chat) {
      const now = await get(`/ui/chats/${chat.id}/head`).catch(() => null);
      const still = shown();
      if (!now || still?.id !== chat.id || still.last !== chat.last) return;
      if (now.is_answering) words = "This chat is being answered in another window.";
      else if (now.last !== chat.last) words = "This chat has gone on in another window.";
    }
    if (words !== said) told((said = words));
  };
  setInterval(look, EVERY);
}
