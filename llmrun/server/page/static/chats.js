// The saved chats: grouped by day, searched, renamed and deleted.

import { get, post } from "./api.js";
import { button, byId, clean, h, iconButton } from "./dom.js";

const TYPING = 200; // ms without a key before a search
const DAY = 86_400_000;

/** Return the day of a time in words: today, a weekday of this week, or a month. */
export function dayOf(seconds, now = new Date()) {
  const then = new Date(seconds * 1000);
  const midnight = (date) => new Date(date.getFullYear(), date.getMonth(), date.getDate()).getTime();
  const days = Math.round((midnight(now) - midnight(then)) / DAY);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days < 7) return then.toLocaleDateString("en", { weekday: "long" });
  const year = then.getFullYear() === now.getFullYear() ? {} : { year: "numeric" };
  return then.toLocaleDateString("en", { month: "long", ...year });
}

/** The list. `open(id)` shows a chat; `changed(id)` is called after one was renamed, or deleted (null). */
export class ChatList {
  constructor({ open, changed, guarded }) {
    Object.assign(this, { open, changed, guarded, current: null, busy: new Set(), chats: [] });
    this.element = byId("chat-list");
    this.search = byId("search");
    this.search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => guarded(() => this.load()), TYPING);
    });
    this.search.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.search.value) return;
      event.stopPropagation();
      this.search.value = "";
      guarded(() => this.load());
    });
  }

  async load() {
    const text = this.search.value.trim();
    const { chats } = await (text ? post("/ui/search", { text }) : get("/ui/chats"));
    if (text !== this.search.value.trim()) return;
    this.chats = chats;
    this.draw(Boolean(text));
  }

  draw(isSearch) {
    const groups = new Map();
    for (const chat of this.chats) {
      const day = isSearch ? "Found" : dayOf(chat.updated);
      groups.set(day, [...(groups.get(day) ?? []), chat]);
    }
    const none = isSearch ? "No chat has these words." : "No chats yet.";
    const lists = [...groups].map(([day, chats]) => h("section", { "aria-label": day }, h("h2", {}, day), h("ul", {}, chats.map((chat) => this.row(chat)))));
    this.element.replaceChildren(...(lists.length ? lists : [h("p", { class: "hint" }, none)]));
    this.mark();
  }

  row(chat) {
    const title = clean(chat.title);
    const item = h("li", {});
    const show = () =>
      item.replaceChildren(
        button(title, () => this.open(chat.id), { class: "open", "data-chat": chat.id, title }),
        iconButton("edit", `Rename ${title}`, () => this.edit(item, chat, show), { class: "small", title: "Rename" }),
        iconButton("delete", `Delete ${title}`, () => this.ask(item, chat, show), { class: "small", title: "Delete" }),
        chat.excerpt ? h("p", { class: "hint" }, clean(chat.excerpt)) : "",
      );
    show();
    return item;
  }

  edit(item, chat, show) {
    const input = h("input", { "aria-label": "Name of the chat", maxlength: 80 });
    input.value = clean(chat.title);
    const rename = async () => {
      if (!input.value.trim() || input.value === chat.title) return void (show(), this.mark());
      const done = await this.guarded(() => post("/ui/rename", { chat: chat.id, name: input.value }));
      if (!done) return;
      await this.load();
      this.changed(chat.id);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") (event.preventDefault(), rename());
      if (event.key === "Escape") (event.stopPropagation(), show(), this.mark());
    });
    item.replaceChildren(input, button("Rename", rename, { class: "main" }));
    input.focus();
    input.select();
  }

  ask(item, chat, show) {
    const remove = async () => {
      if (!(await this.guarded(() => post("/ui/delete", { chat: chat.id })))) return void show();
      await this.load();
      if (chat.id === this.current) this.changed(null);
    };
    const keep = button("Keep", () => (show(), this.mark(), item.querySelector("button").focus()));
    item.onkeydown = (event) => {
      if (event.key !== "Escape" || !keep.isConnected) return;
      event.stopPropagation();
      keep.click();
    };
    item.replaceChildren(h("p", {}, "Delete “", h("b", {}, clean(chat.title)), "” with all its branches?"), h("div", { class: "buttons" }, button("Delete", remove, { class: "bad" }), keep));
    keep.focus();
  }

  /** Mark the chat that is shown, and those that are being answered. */
  mark(current = this.current, busy = this.busy) {
    Object.assign(this, { current, busy });
    for (const each of this.element.querySelectorAll("[data-chat]")) {
      each.ariaCurrent = Number(each.dataset.chat) === current ? "true" : null;
      each.ariaBusy = busy.has(Number(each.dataset.chat)) ? "true" : null;
    }
  }
}
