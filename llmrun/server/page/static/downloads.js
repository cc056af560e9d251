// Downloads of models, which go on in the server when their dialog or the page is closed.

import { lines, post } from "./api.js";
import { clean, size } from "./dom.js";

/** Name of a model -> { text, share, error, isDone } of its download; a "download" event of the document tells of a change. */
export const downloads = new Map();

/** Begin a download, or show the one that goes on. */
export async function download(name) {
  const state = { text: "beginning", share: 0, error: "", isDone: false };
  const tell = () => document.dispatchEvent(new CustomEvent("download", { detail: name }));
  downloads.set(name, state);
  tell();
  try {
    for await (const { status, total, completed } of lines("/ui/download", { model: name })) {
      if (total) state.share = completed / total;
      state.text = total ? `${size(completed)} of ${size(total)}` : clean(status);
      state.isDone = status === "success";
      if (!state.isDone) tell();
    }
    if (!state.isDone) downloads.delete(name); // it was stopped
  } catch (error) {
    state.error = error.message;
  }
  tell();
}

/** Stop a download; it goes on where it was when it is begun again. */
export const stop = (name) => post("/ui/download/stop", { model: name });

/** Return the downloads on their way in a few words, "" for none. */
export function summary() {
  const running = [...downloads].filter(([, { isDone, error }]) => !isDone && !error);
  if (running.length > 1) return `Downloading ${running.length} models`;
  return running.map(([name, { share }]) => `Downloading ${clean(name)}, ${Math.floor(share * 100)} %`).join("");
}
