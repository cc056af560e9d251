// The page: which chat is shown, and the way of an answer from the question to the saved chat.

import { answer as streamed, blob, get, lines, post, runningAnswer } from "./api.js";
import { Attachments } from "./attachments.js";
import { showBranches } from "./branches.js";
import { ChatList } from "./chats.js";
import { showContext } from "./context.js";
import { Comparison } from "./compare.js";
import { showCatalogue } from "./catalogue.js";
import { byId, button, clean, h, icon, iconButton, number, recall, remember, short, size } from "./dom.js";
import { download, downloads, summary } from "./downloads.js";
import { save } from "./exports.js";
import { LiveMarkdown, render } from "./markdown.js";
import { showPhone } from "./phone.js";
import { Microphone } from "./microphone.js";
import { goToEnd, goToStart, place, scroller, turns } from "./scroll.js";
import { Settings } from "./settings.js";
import { TokenView, tokensOf } from "./tokens.js";
import { answerElement, answerParts, questionElement, resultElement, roundElement, shortName, showFigures } from "./turns.js";
import { watch } from "./watch.js";

const CANDIDATES = 10; // shown of each token
const FIGURES = 500; // ms between two figures of an answer that is decoded
const TOO_LONG = "context_length_exceeded";
const STOPPING = 2000; // ms until an answer that was stopped is not waited for any more
const WAIT = 150; // ms between two looks for the saved answer
const WIDE = matchMedia("(min-width: 60rem)");
const WIDEST = matchMedia("(min-width: 100rem)"); // has room for the settings beside a conversation
const EXAMPLES = [
  ["explain", "Explain", "Explain how a rainbow forms, so that a ten-year-old understands it."],
  ["edit", "Write", "Write a short, friendly letter that moves an appointment to next week."],
  ["compare", "Compare", "Compare trains and planes for a trip of 600 km. Make a table."],
  ["code", "Program", "Write a Python function that finds the duplicate files in a folder."],
];

const state = { chat: null, running: new Map(), tokens: recall("tokens") === "on", seen: new Map(), drawn: new Map(), columns: null, isStale: false, limits: new Map(), model: null, modalities: [], models: [] };
const field = byId("question");
const attached = new Attachments(byId("attached"), (kind) => (state.model === byId("model").value && !state.modalities.includes(kind) ? state.model : null), complain);
const microphone = new Microphone(byId("record"), (file) => attached.add([file]), complain);
const showMicrophone = () => microphone.show(state.model === byId("model").value && state.modalities.includes("audio"));
const exporters = h("p", { class: "buttons" }, Object.entries({ markdown: "Markdown", json: "JSON", html: "HTML" }).map(([form, name]) => button(name, () => guarded(() => save(state.chat, form, scroller)))));
const settings = new Settings(
  byId("settings"),
  {
    system: (system) => state.chat?.id && guarded(async () => show(await post("/ui/system", { chat: state.chat.id, system }))),
    window: (tokens) => guarded(async () => (await load(tokens), await showModels())),
    folder: readFolder,
    phone: () => guarded(showPhone),
    close: () => (toggle("settings", false), byId("toggle-settings").focus()),
  },
  exporters,
);

/** Return the answer that is on its way in a chat. */
const runningIn = (chat) => state.running.get(chat?.id) ?? null;
const running = () => runningIn(state.chat);

// ---- what is said ----

const say = (text) => (byId("status").textContent = text);

function complain(error) {
  byId("problem").replaceChildren(h("span", {}, clean(error.message)), iconButton("close", "Dismiss", () => byId("problem").replaceChildren()));
}

/** Do something, and show why it failed. */
async function guarded(work) {
  byId("problem").replaceChildren();
  try {
    return await work();
  } catch (error) {
    if (error.name !== "AbortError") complain(error);
    return null;
  }
}

// ---- the conversation ----

const lastOf = (chat) => chat?.entries.at(-1) ?? null;

function show(chat) {
  if (chat.id !== state.chat?.id) {
    state.drawn.clear();
    goToEnd();
  }
  state.chat = chat;
  state.isStale = false;
  const title = clean(chat.title || "New chat");
  byId("title").textContent = title;
  document.title = `${title} – llmrun`;
  settings.system.value = chat.system;
  settings.showFolder(chat.documents ?? "");
  settings.servers.show(chat.id);
  for (const each of exporters.children) each.disabled = !chat.id;
  byId("elsewhere").replaceChildren();
  history.replaceState(null, "", chat.id ? `#chat=${chat.id}` : location.pathname);
  draw();
  showBusy();
  showContextBar(lastOf(chat)?.stats);
  markCurrent();
  if (!state.running.size && isLoaded(byId("model").value)) fillTokens().catch(complain);
}

/** Draw the turns, those that have not changed as they are. */
function draw() {
  const { entries } = state.chat;
  const last = entries.at(-1);
  const drawn = entries.map((entry, at) => {
    const view = state.tokens && state.seen.get(entry.id)?.tokens;
    const key = JSON.stringify([entry.alternatives, entry.finish, Boolean(view), entry === last]);
    const old = state.drawn.get(entry.id);
    if (old?.key === key) return old;
    return { id: entry.id, key, element: entryElement(entry, entries[at - 1], entry === last) };
  });
  state.drawn = new Map(drawn.map((each) => [each.id, each]));
  if (state.columns && state.columns.question === entries.at(-2)?.id) drawn.splice(-1, 1, { element: state.columns.element });
  else state.columns = null;
  const live = running();
  if (live) place([...drawn.slice(0, 1 + entries.findIndex(({ id }) => id === live.question)).map((each) => each.element), live.element]);
  else if (drawn.length) place(drawn.map((each) => each.element));
  else {
    place([emptyElement()]);
    goToStart();
  }
}

/** Return what a chat without turns shows: which model answers, and examples of what it may be asked. */
function emptyElement() {
  const code = (command) => h("code", {}, command);
  if (state.unsaved) return h("div", { class: "empty" }, h("p", {}, `No chat can be saved or shown: ${clean(state.unsaved)}`));
  const model = state.models.find(({ name }) => name === byId("model").value);
  if (!model) return h("div", { class: "empty" }, icon("mark"), h("h2", {}, "Choose a model first"), h("p", {}, "There is no model on this disk yet. The list shows which ones this machine runs well."), button("Choose a model", openCatalogue, { class: "main" }));
  const facts = [model.n_bytes && size(model.n_bytes), model.n_ctx ? `in memory, context of ${number(model.n_ctx)} tokens` : model.is_loading ? "being loaded" : "loaded with the first question"];
  const example = ([name, title, text]) => h("button", { type: "button", class: "example", click: () => ((field.value = text), field.focus()) }, icon(name), h("b", {}, title), h("span", {}, text));
  return h(
    "div",
    { class: "empty" },
    icon("mark"),
    h("h2", {}, `Ask ${clean(model.name)}`),
    h("p", {}, facts.filter(Boolean).join(" · ")),
    h("div", { class: "examples" }, EXAMPLES.map(example)),
    h("p", { class: "hint" }, "Files can be dropped anywhere on this page. Chats stay on this machine, where ", code("llmrun sessions"), " finds them."),
  );
}

function entryElement(entry, question, isLast) {
  const go = (id) => guarded(async () => show(await post("/ui/go", { chat: state.chat.id, entry: id })));
  const chat = state.chat.id;
  if (entry.role === "user")
    return questionElement(entry, { go, edit: (text) => ask(text, entry.id), media: (at) => blob(`/ui/chats/${chat}/media/${entry.id}/${at}`), answer: isLast ? () => answer(entry.id) : null });
  const seen = state.seen.get(entry.id);
  const again = { chat: state.chat.id, answer: entry.id, model: modelOf(entry) };
  let view = null;
  if (state.tokens && seen?.tokens) {
    const why = (begins) => (!begins && entry.reasoning ? null : guarded(() => post("/ui/why", { ...again, begins })));
    view = new TokenView((kept, text) => answer(question.id, { begins: text, kept }), why);
    const rendered = h("div", {});
    render(rendered, entry.text);
    view.addRendered(seen.tokens, rendered);
  }
  const explain = (signal, tell) =>
    guarded(async () => {
      for await (const line of lines("/ui/explain", again, signal)) {
        if (line.address) return line.address;
        tell(line);
      }
      return null;
    });
  return answerElement(entry, { go, view, explain, limit: state.limits.get(entry.model), seconds: seen?.seconds, retry: () => answer(question.id), resume: entry.text && isLast && !entry.rounds.length ? () => answer(question.id, { begins: entry.text, kept: seen?.tokens }) : null });
}

/** Compute the tokens of the answers that are shown, the last one first, where they were not kept. */
async function fillTokens() {
  const { chat } = state;
  if (!state.tokens || !chat?.id || state.filling === chat.id) return;
  state.filling = chat.id;
  try {
    for (const entry of chat.entries.filter((each) => each.role === "assistant" && each.text && !each.reasoning && !each.rounds.length).reverse()) {
      if (state.running.size || state.chat !== chat || !state.tokens) return;
      if (state.seen.get(entry.id)?.tokens) continue;
      const { tokens } = await post("/ui/tokens", { chat: chat.id, answer: entry.id, model: modelOf(entry) });
      state.seen.set(entry.id, { ...state.seen.get(entry.id), tokens });
      if (state.chat === chat && !running()) draw();
    }
  } finally {
    state.filling = null;
  }
}

/** Return the model to compute an answer again with. */
function modelOf(entry) {
  const name = shortName(entry.model);
  return state.models.some((each) => each.name === name) ? name : byId("model").value;
}

/** Go back to before the last question, whose text is to be changed or asked again. */
async function undo() {
  if (running() || !state.chat.entries.length) return;
  const chat = await guarded(() => post("/ui/undo", { chat: state.chat.id }));
  if (!chat) return;
  show(chat);
  field.value ||= chat.undone;
  field.focus();
  say("The last question is undone");
}

/** Show beside an answer's decode rate what this machine allows its model; it is measured once for a model. */
async function showLimit() {
  const last = lastOf(state.chat);
  if (last?.role !== "assistant" || state.limits.has(last.model) || !last.stats.completion_tokens) return;
  const { decode } = await post("/ui/speed", { model: modelOf(last), tokens: last.stats.context_used });
  if (!decode) return;
  state.limits.set(last.model, decode);
  for (const entry of state.chat.entries) if (entry.model === last.model) showFigures(state.drawn.get(entry.id).element, entry, decode);
}

function openBranches() {
  if (running() || !state.chat.id) return;
  const go = (branch) => guarded(async () => (show(await post("/ui/go", { chat: state.chat.id, branch })), say(`On the branch ${branch}`)));
  guarded(async () => showBranches((await get(`/ui/chats/${state.chat.id}/branches`)).branches, go));
}

function openNew() {
  settings.servers.begin();
  show({ id: null, title: "", system: settings.system.value, entries: [] });
  field.focus();
}

/** Show a chat, and the answer that is on its way in it. */
const openChat = (id) =>
  guarded(async () => {
    const chat = await get(`/ui/chats/${id}`);
    show(chat);
    const last = lastOf(chat);
    if (chat.is_answering && last?.role === "user" && !running()) answer(last.id, { isRunning: true });
  });

const chats = new ChatList({
  guarded,
  open: (id) => {
    openChat(id);
    if (!WIDE.matches) toggle("chats", false);
  },
  changed: (id) => (id === null ? openNew() : id === state.chat?.id && openChat(id)),
});


async function listChats() {
  try {
    await chats.load();
    state.unsaved = "";
  } catch (error) {
    state.unsaved = error.message;
    throw error;
  }
}

/** Show what is saved now, after the page was hidden or the server gone. */
function refresh() {
  if (state.running.size || state.isAsking) return;
  guarded(async () => {
    await Promise.all([showModels(), listChats()]);
    if (state.chat.id) show(await get(`/ui/chats/${state.chat.id}`));
  });
}

const markCurrent = () => chats.mark(state.chat?.id ?? null, new Set(state.running.keys()));

// ---- questions and answers ----

async function ask(text, beside = null) {
  if (!text.trim() || state.isAsking) return;
  if (!byId("model").value) return void openCatalogue(); // the question stays in its field
  state.isAsking = true; // until the question is saved
  try {
    await microphone.finish();
    await attached.ready;
    if (running()) return void queue(text);
    if (state.isStale && !(await guarded(async () => (show(await get(`/ui/chats/${state.chat.id}`)), true)))) return;
    const { chat } = state;
    const saved = await postQuestion(chat, text, beside, beside ? {} : attached.fields);
    if (!saved) return;
    if (!beside) clearQuestion(text);
    if (state.chat === chat || isShown(saved)) {
      goToEnd();
      show(saved);
    } // else another chat was opened meanwhile
    (Number(settings.answers.value) > 1 ? compare : answer)(lastOf(saved).id, { chat: saved });
  } finally {
    state.isAsking = false;
  }
}

function clearQuestion(text) {
  if (field.value === text) field.value = "";
  attached.clear();
}

async function postQuestion(chat, text, beside, files) {
  const body = { chat: chat.id, text, beside, after: lastOf(chat)?.id ?? null, system: settings.system.value, documents: settings.documents.value.trim(), ...files };
  const saved = await guarded(() => post("/ui/ask", body));
  if (saved && !chat.id) settings.servers.saved(saved.id);
  listChats();
  return saved;
}

/** Keep a question until the answer that is on its way in this chat has ended. */
function queue(text) {
  running().queued.push({ text, files: attached.fields });
  clearQuestion(text);
  showQueue();
  say("The question is asked after this answer");
}

function showQueue() {
  const queued = running()?.queued ?? [];
  const row = (each) => {
    const takeBack = () => {
      queued.splice(queued.indexOf(each), 1);
      showQueue();
      field.value ||= each.text;
      field.focus();
    };
    return h("li", {}, `Next: ${clean(each.text)} `, iconButton("close", `Take back ${clean(each.text)}`, takeBack));
  };
  byId("queued").replaceChildren(...queued.map(row));
}

/** Let passages of a folder's documents go along with the questions of this chat; `tell` shows how far it is read. */
async function readFolder(folder, tell) {
  const { chat } = state;
  const isDone = await guarded(async () => {
    for await (const line of lines("/ui/folder", { chat: chat.id, folder })) {
      if (isShown(chat)) tell(line);
    }
    chat.documents = folder;
    return true;
  });
  if (!isDone && isShown(chat)) settings.showFolder(chat.documents ?? "");
}

/** Answer a question several times at once, in columns. */
async function compare(question, { chat }) {
  const values = { model: byId("model").value, ...settings.values };
  const goOn = (id) => {
    if (running()) return;
    state.columns = null;
    guarded(async () => show(await post("/ui/go", { chat: state.chat.id, entry: id })));
  };
  const sides = settings.sides(values).map((side) => ({ ...side, tools: false }));
  const live = Object.assign(new Comparison(chat.id, question, sides, goOn), { queued: [] });
  const known = knownIds(chat);
  state.running.set(chat.id, live);
  draw();
  showBusy();
  say(`Answering ${sides.length} times`);
  await guarded(() => live.run());
  say("All answers have ended");
  let ended = null;
  await guarded(async () => {
    ended = await whenSaved(chat.id);
    const { answers } = await get(`/ui/chats/${chat.id}/answers/${question}`);
    live.name(answers.filter(({ id }) => !known.has(id)), lastOf(ended).id);
  });
  state.running.delete(chat.id);
  if (isShown(chat)) state.columns = ended && lastOf(ended).role === "assistant" ? live : null;
  if (isShown(chat) && ended) show(ended);
  showBusy();
  showModels().catch(complain);
  await askNext(ended, live);
}

/** Answer a question; `begins` is text that the answer is to begin with, `kept` its tokens. */
async function answer(question, { begins = "", kept = [], isRunning = false, chat = state.chat, queued = [] } = {}) {
  if (runningIn(chat)) return;
  const live = new LiveAnswer(chat, question, begins, kept, isRunning, queued);
  if (state.overflow?.chat === chat.id) live.body.overflow = state.overflow.policy;
  state.running.set(chat.id, live);
  if (isShown(chat)) {
    state.columns = null;
    goToEnd();
    draw();
  }
  showBusy();
  await guarded(() => live.run());
  if (live.isTooLong && isShown(chat)) offerRoom(question);
  if (live.hasStarted || !live.hasFailed) say(live.isStopped ? "Stopped" : "The answer has ended");
  const ended = await saved(live).catch((error) => {
    state.isStale ||= isShown(chat); // the server has ended, and what it saved of the answer is not shown
    complain(error);
  });
  state.running.delete(chat.id);
  showBusy();
  askNext(ended, live);
  showLimit().catch(() => null);
  if (live.notes.length) complain({ message: live.notes.join(" ") });
  showModels().catch(complain);
}

/** Offer what the terminal does where a conversation does not fit into the context window; it holds for the chat. */
function offerRoom(question) {
  const drop = (policy) => () => {
    byId("problem").replaceChildren();
    state.overflow = { chat: state.chat.id, policy };
    answer(question);
  };
  byId("problem").firstElementChild?.after(h("span", { class: "buttons" }, button("Without the oldest turns", drop("roll")), button("Without turns in the middle", drop("middle")), button("With a summary of the oldest turns", drop("summarize"))));
}

const isShown = (chat) => state.chat?.id === chat.id;

/** Ask the first question that waits for the end of an answer; after a stop or an error the user gets them back. */
async function askNext(chat, { queued, isStopped, hasFailed }) {
  if (!queued.length) return;
  const [next, ...others] = queued;
  const isGivenUp = !chat || isStopped || hasFailed;
  const saved = isGivenUp ? null : await postQuestion(chat, next.text, null, next.files);
  if (saved) {
    if (isShown(saved)) show(saved);
    return void answer(lastOf(saved).id, { chat: saved, queued: others });
  }
  field.value = [...queued.map((each) => each.text), field.value].filter(Boolean).join("\n\n");
}

const knownIds = (chat) => new Set(chat.entries.flatMap((entry) => entry.alternatives));

/** Return the chat as soon as its answers are in it. */
async function whenSaved(id) {
  let chat = await get(`/ui/chats/${id}`);
  while (chat.is_answering) {
    await new Promise((done) => setTimeout(done, WAIT));
    chat = await get(`/ui/chats/${id}`);
  }
  return chat;
}

/** Show the chat again as soon as the answer is in it, and return it. */
async function saved(live) {
  const chat = await whenSaved(live.chat.id);
  const last = lastOf(chat);
  if (last?.role === "assistant" && !live.known.has(last.id)) {
    const tokens = live.tokens.length ? tokensOf(live.tokens, last.text) : null;
    state.seen.set(last.id, { tokens, seconds: live.reasoningSeconds });
  }
  state.running.delete(chat.id);
  if (isShown(chat)) show(chat);
  return chat;
}

class LiveAnswer {
  constructor(chat, question, begins, kept, isRunning, queued) {
    Object.assign(this, { chat, question, queued });
    this.isRunning = isRunning; // it was begun by this page before a reload, or by another window
    this.body = { chat: chat.id, question, begins, model: byId("model").value, ...settings.values, servers: [...settings.servers.of(chat.id)] };
    if (state.tokens && (kept.length || !begins)) this.body.candidates = CANDIDATES; // not without those of the beginning
    this.stopper = new AbortController();
    this.tokens = [...kept];
    this.notes = [];
    this.known = knownIds(chat);
    this.hasStarted = this.hasFailed = this.isStopped = false;
    this.reasoningSeconds = 0;
    this.pieces = 0;
    this.began = performance.now();
    this.first = this.shown = 0;
    this.computed = 0; // tokens of the prompt
    this.parts = answerParts(this.body.model);
    this.element = this.parts.element;
    this.prefill = h("progress", { max: 1, "aria-label": "Prompt computed", hidden: true });
    this.told = h("span", {}, "…");
    this.waiting = h("p", { class: "hint waiting" }, this.told, this.prefill);
    this.parts.below.append(this.waiting);
    this.text = new LiveMarkdown(this.parts.text);
    this.beginText(kept, begins);
  }

  beginText(kept, begins) {
    this.text.clear();
    if (!this.body.candidates) return void (begins && this.text.add(begins));
    this.view = new TokenView(() => {});
    this.view.add(kept);
    this.parts.text.append(this.view.element);
  }

  async run() {
    const clock = setInterval(() => this.pieces || this.showSpeed(), 250);
    try {
      for await (const events of (this.isRunning ? runningAnswer(this.body.chat, this.stopper.signal) : streamed(this.body, this.stopper.signal))) {
        for (const [name, data] of events) this.take(name, data);
        if (performance.now() - this.shown >= FIGURES) this.showSpeed();
      }
    } catch (error) {
      this.hasFailed = true;
      this.isTooLong = error.code === TOO_LONG;
      if (error.name !== "AbortError") throw error;
    } finally {
      clearInterval(clock);
      if (!this.view) this.text.end();
    }
  }

  take(name, data) {
    if (name === "started") {
      this.hasStarted = true;
      this.prompt = data;
      say("Answering");
    } else if (name === "prefill") {
      this.computed = data.computed_tokens;
      Object.assign(this.prefill, { hidden: false, value: this.computed / Math.max(this.prompt.prompt_tokens - this.prompt.cached_tokens, 1) });
    } else if (name === "reasoning") {
      this.count();
      this.parts.folded.hidden = false;
      this.parts.reasoning.append(clean(data.text));
    } else if (name === "text") {
      this.count();
      if (!this.parts.folded.hidden && !this.reasoningSeconds) this.reasoningSeconds = (performance.now() - this.first) / 1000;
      if (data.tokens) this.tokens.push(...data.tokens);
      if (this.view) this.view.add(data.tokens ?? []);
      else this.text.add(data.text);
    } else if (name === "calls") {
      this.beginText([], "");
      const decide = (call, decision) => guarded(() => post("/ui/decide", { call, decision }));
      this.parts.rounds.append(roundElement(data, decide));
      const asked = data.calls.filter((call) => call.asks);
      if (asked.length) say(`The model wants to call ${asked.map((call) => clean(call.name)).join(", ")}`);
      if (isShown(this.chat)) this.parts.rounds.querySelector("button")?.focus();
    } else if (name === "result") {
      this.parts.rounds.querySelector(`[data-call="${CSS.escape(data.id)}"]`)?.append(resultElement(data.text));
    } else if (name === "note") {
      this.notes.push(`${data.text}.`);
    } else if (name === "finished") {
      if (isShown(this.chat)) showContextBar(data);
    } else if (name === "failed") {
      this.hasFailed = true;
      throw Object.assign(new Error(data.message), { code: data.code });
    }
    if (this.pieces <= 1) this.showSpeed();
  }

  count() {
    this.pieces += 1;
    this.waiting.remove();
    this.first ||= performance.now();
    this.last = performance.now();
  }

  /** Say how fast it goes: pieces of text are nearly tokens; the exact figures, and the time to the first token, come with the end. */
  showSpeed() {
    const waited = short((performance.now() - this.began) / 1000);
    let text = "";
    if (!this.hasStarted) text = `${isLoaded(this.body.model) ? "waiting" : `loading ${clean(this.body.model)}`} … ${waited} s`;
    else if (!this.pieces) text = `prefill ${number(this.computed)} of ${number(this.prompt.prompt_tokens - this.prompt.cached_tokens)} tokens, ${number(this.prompt.cached_tokens)} reused … ${waited} s`;
    else {
      const hasRate = this.pieces > 1 && this.last > this.first && !this.isRunning; // what came before a reload comes at once
      const rate = hasRate && `decode ~${short(((this.pieces - 1) * 1000) / (this.last - this.first))} tokens/s`;
      text = [rate, `${number(this.prompt.cached_tokens)} of ${number(this.prompt.prompt_tokens)} prompt tokens reused`].filter(Boolean).join(" · ");
    }
    this.told.textContent = text;
    if (isShown(this.chat)) byId("speed").textContent = text;
    this.shown = performance.now();
  }

  /** Stop it; what came of it is saved. Aborting alone would let it go on. */
  stop() {
    this.isStopped = true;
    post("/ui/stop", { chat: this.body.chat }).catch(complain);
    setTimeout(() => this.stopper.abort(), STOPPING);
  }
}

function showBusy() {
  const live = running();
  byId("stop").hidden = !live;
  byId("send-words").textContent = live ? "Queue" : "Send";
  byId("send").title = live ? "Ask this after the answer (Enter)" : "Send (Enter)";
  byId("undo").disabled = Boolean(live) || !state.chat?.entries.length;
  byId("go").disabled = Boolean(live) || !state.chat?.id;
  markCurrent();
  turns.ariaBusy = live ? "true" : "false";
  if (live) live.showSpeed?.();
  else byId("speed").textContent = "\u00a0";
  showQueue();
}

function showContextBar(stats) {
  const used = stats?.context_used ?? 0;
  byId("context").hidden = !used || !stats.n_ctx;
  if (byId("context").hidden) return;
  Object.assign(byId("context-bar"), { max: stats.n_ctx, high: stats.n_ctx * 0.9, value: used });
  byId("context-text").textContent = `context ${number(used)} of ${number(stats.n_ctx)}`;
}

// ---- models ----

const isLoaded = (name) => state.models.some((each) => each.name === name && each.n_ctx);

/** Show the models of this disk; `name` is the one to use and load, if it is there. */
async function showModels(name = "") {
  const wanted = name || byId("model").value || recall("model");
  const { models, downloads: running } = await get("/ui/models");
  state.models = models;
  const here = models.map((each) => each.name);
  byId("model").value = here.find((each) => each === wanted) ?? here.find((each) => wanted && each.startsWith(`${wanted}:`)) ?? here[0] ?? "";
  byId("model-name").textContent = clean(byId("model").value || "Choose a model");
  settings.showModels(here);
  showMicrophone();
  byId("send").disabled = !models.length;
  for (const each of running) if (!downloads.has(each)) download(each);
  const chosen = byId("model").value;
  const isNew = state.applied !== chosen;
  state.applied = chosen;
  if (name) remember("model", chosen);
  if (name || (isLoaded(chosen) && state.model !== chosen)) await load();
  else if (chosen && isNew) settings.showModel(await post("/ui/applies", { model: chosen }));
  if (isNew && models.some((each) => each.name === chosen && each.is_loading)) guarded(waitForModel);
}

/** Show how long the server takes to load the model that it began with, and what it uses. */
async function waitForModel() {
  await load();
  await showModelsAgain();
}

/** Show the models as they are now, also in an empty chat. */
async function showModelsAgain() {
  await showModels();
  if (state.chat?.entries.length === 0) draw();
}

/** Use a model from now on. */
const useModel = (name) =>
  guarded(async () => {
    await showModels(name);
    await showModelsAgain(); // others may have been unloaded
  });

async function showPresets() {
  const { presets } = await get("/ui/presets");
  settings.showPresets(presets, (name) => {
    if (name !== byId("model").value && state.models.some((each) => each.name === name)) useModel(name);
  });
}

/** Load the chosen model, if given with another context window, and show what it would use. */
async function load(ctx) {
  const name = byId("model").value;
  const began = performance.now();
  const told = byId("loading");
  const clock = setInterval(() => (told.textContent = `loading … ${number((performance.now() - began) / 1000)} s`), 500);
  try {
    const loaded = await post("/ui/load", { model: name, ctx });
    if (name !== byId("model").value) return; // another one was chosen meanwhile
    settings.showModel(loaded);
    Object.assign(state, { model: name, modalities: loaded.modalities });
    attached.show();
    showMicrophone();
  } finally {
    clearInterval(clock);
    told.textContent = "";
  }
}

const openCatalogue = () => guarded(() => showCatalogue(state.models, byId("model").value, useModel));

/** Show how far downloads are, also while the dialog is closed. */
function showDownload({ detail }) {
  const words = summary();
  byId("downloads").hidden = !words;
  byId("downloads").textContent = words;
  const { isDone, error } = downloads.get(detail) ?? {};
  if (error && !byId("catalogue").open) complain({ message: error });
  if (!isDone) return;
  say(`${clean(detail)} is here`);
  guarded(showModelsAgain);
}

// ---- keys and buttons ----

function toggle(id, isOpen = byId(id).hidden) {
  byId(id).hidden = !isOpen;
  if (id === "settings" && isOpen) settings.servers.load();
  if (id === "settings" && WIDEST.matches) remember("settings", isOpen ? "open" : "closed");
  byId(`toggle-${id}`).ariaExpanded = String(isOpen);
  if (isOpen && !WIDE.matches) byId(id).querySelector("button, textarea")?.focus();
}

/** Put the last question into the empty field; return whether there is one. */
function recallQuestion() {
  const last = state.chat?.entries.findLast((entry) => entry.role === "user");
  if (!last) return false;
  field.value = last.text;
  field.setSelectionRange(last.text.length, last.text.length);
  return true;
}

function showTokenSwitch() {
  byId("toggle-tokens").ariaPressed = String(state.tokens);
}

/** Say that the chat goes on elsewhere; it is shown as it is now when the user wants it. */
function tell(words) {
  if (words && state.isStale) return void openChat(state.chat.id);
  const reload = button("Show it as it is now", () => openChat(state.chat.id));
  byId("elsewhere").replaceChildren(...(words ? [h("span", {}, words), reload] : []));
}

function listen() {
  watch(() => (running() || !state.chat?.id ? null : { id: state.chat.id, last: lastOf(state.chat)?.id ?? null }), tell);
  WIDE.addEventListener("change", () => toggle("chats", WIDE.matches));
  for (const id of ["chats", "settings"]) byId(`toggle-${id}`).addEventListener("click", () => toggle(id));
  byId("new").addEventListener("click", () => (openNew(), WIDE.matches || toggle("chats", false)));
  byId("stop").addEventListener("click", () => (running()?.stop(), field.focus()));
  byId("form").addEventListener("submit", (event) => (event.preventDefault(), ask(field.value)));
  for (const id of ["model", "downloads"]) byId(id).addEventListener("click", openCatalogue);
  document.addEventListener("download", showDownload);
  byId("toggle-tokens").addEventListener("click", () => {
    state.tokens = !state.tokens;
    remember("tokens", state.tokens ? "on" : "");
    showTokenSwitch();
    if (!running()) draw();
    if (!state.running.size) guarded(fillTokens);
    say(state.tokens ? "Answers are shown with their tokens" : "Tokens are hidden");
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "ArrowUp" && !field.value && recallQuestion()) return void event.preventDefault();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask(field.value);
  });
  attached.listen(byId("attach"), field);
  byId("undo").addEventListener("click", undo);
  byId("go").addEventListener("click", openBranches);
  byId("context").addEventListener("click", () => running() || guarded(async () => {
    const found = await post("/ui/context", { chat: state.chat.id, model: byId("model").value });
    showContextBar({ context_used: found.total, n_ctx: found.n_ctx }); // bar and dialog say the same
    showContext(found);
  }));
  document.addEventListener("keydown", (event) => {
    const act = event.altKey && !document.querySelector("dialog[open]") && { KeyU: undo, KeyB: openBranches }[event.code];
    if (act) (event.preventDefault(), act());
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (running()) running().stop();
    else if (!WIDE.matches) for (const id of ["chats", "settings"]) toggle(id, false);
  });
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  document.addEventListener("reached", refresh);
}

async function begin() {
  listen();
  showTokenSwitch();
  toggle("chats", WIDE.matches);
  if (WIDEST.matches) toggle("settings", recall("settings") !== "closed");
  const asked = new URLSearchParams(location.hash.slice(1));
  const id = Number(asked.get("chat"));
  await guarded(async () => Promise.all([showModels(), listChats().catch(() => {}), showPresets()])); // the empty chat says why
  if (id) await openChat(id);
  if (!state.chat) openNew();
  if (asked.has("preset")) settings.choose(asked.get("preset"));
  document.body.dataset.ready = "yes";
}

begin();
