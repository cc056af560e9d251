// Requests to the server that gave this page, with its key if it has one, and the events of an answer.

import { byId, h } from "./dom.js";

const KEY = "llmrun.key"; // kept until the tab is closed
let asking = null;
let isGone = false; // the server, at the last request

/** Take the key out of the address, where a code that was photographed has it: it must not stay there. */
function takeKey() {
  const given = new URLSearchParams(location.hash.slice(1));
  const key = given.get("key");
  if (!key) return false;
  sessionStorage.setItem(KEY, key);
  given.delete("key");
  history.replaceState(null, "", given.size ? `#${given}` : location.pathname);
  return true;
}

takeKey();
addEventListener("hashchange", () => takeKey() && location.reload());

/** Ask for the key of the server, once for all requests that wait. `refused` is the one that was not right. */
function askForKey(refused) {
  asking ??= new Promise((done) => {
    const dialog = byId("key");
    const input = h("input", { type: "password", id: "key-input", autocomplete: "off", required: true });
    const submit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, input.value.trim());
      dialog.close();
    };
    dialog.replaceChildren(
      h("form", { submit }, h("h2", { id: "key-title" }, "This server asks for a key"), h("label", { for: "key-input" }, "Key, one line of its --key-file; a phone photographs its code again. It is kept until this tab is closed"), input, refused && h("p", { role: "alert" }, "The server refused that key."), h("div", { class: "buttons" }, h("button", { class: "main" }, "Use it"))),
    );
    dialog.onclose = () => {
      asking = null;
      done();
    };
    dialog.showModal();
  });
  return asking;
}

async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    isGone = true;
    throw new Error("The server can't be reached. Is llmrun serve still running?");
  }
  if (isGone) document.dispatchEvent(new Event("reached"));
  isGone = false;
  if (response.ok) return response;
  if (response.status === 401) {
    if (sessionStorage.getItem(KEY) === key) await askForKey(key);
    if (sessionStorage.getItem(KEY) !== key) return request(path, options);
  }
  const body = await response.json().catch(() => null);
  throw Object.assign(new Error(body?.error?.message ?? `The server answered ${response.status}.`), { code: body?.error?.code });
}

const posting = (body, signal) => ({
  method: "POST",
  headers: { "content-type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

export const blob = async (path) => (await request(path)).blob();
export const text = async (path) => (await request(path)).text();
export const get = async (path) => (await request(path)).json();
export const post = async (path, body, signal) => (await request(path, posting(body, signal))).json();

/** Yield the objects of a response in lines of JSON; throw what one of them has as its error. */
export async function* lines(path, body, signal) {
  const reader = (await request(path, posting(body, signal))).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
    const found = (rest + value).split("\n");
    rest = found.pop();
    for (const line of found.filter(Boolean).map((each) => JSON.parse(each))) {
      if (line.error) throw new Error(line.error);
      yield line;
    }
  }
}

/** Yield the server-sent events of a new answer as [name, data], those that arrived together in one list. */
export async function* answer(body, signal) {
  yield* eventsOf(await request("/ui/answer", posting(body, signal)));
}

/** Yield the events of an answer that is on its way, from its beginning. */
export async function* runningAnswer(chat, signal) {
  yield* eventsOf(await request(`/ui/answer/${chat}`, { signal }));
}

async function* eventsOf(response) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read().catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Error("The connection broke before the answer ended.");
    });
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    yield blocks.filter((block) => block.startsWith("event: ")).map((block) => {
      const end = block.indexOf("\n");
      return [block.slice(7, end), JSON.parse(block.slice(end + 7))];
    });
  }
}
