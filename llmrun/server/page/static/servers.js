// The MCP servers of the user's mcp.json, in the settings: each chat switches on its own, and each is started once.

import { get, post } from "./api.js";
import { clean, h, recall, remember } from "./dom.js";

export class Servers {
  constructor() {
    this.chat = null; // the id of the one that is shown; null until it is saved
    this.on = kept(); // names of servers by chat
    this.off = new Set(); // names of their tools that are switched off
    this.rows = [];
    this.told = h("p", { class: "hint" });
    this.list = h("div", {});
    this.element = h("div", { role: "group", "aria-label": "MCP servers", hidden: true }, h("h3", {}, "MCP servers"), this.list, this.told);
  }

  /** Show the servers of the file as it is now. */
  async load() {
    try {
      const { path, servers } = await get("/ui/servers");
      this.rows = servers.map((server) => Object.assign(this.rows.find(({ name }) => name === server.name) ?? this.row(server), { tools: server.tools })); // one may be starting
      const isHere = new Set(servers.filter(({ tools }) => tools).map(({ name }) => name));
      for (const names of this.on.values()) for (const name of names) if (!isHere.has(name)) names.delete(name);
      this.told.textContent = servers.length ? "Switching one on starts it on this machine, with your permissions. Each call is asked about." : `None yet: those that you list in ${clean(path)} can be switched on here.`;
      this.list.replaceChildren(...this.rows.map(({ element }) => element));
      this.show(this.chat);
    } catch (error) {
      this.list.replaceChildren();
      this.told.textContent = clean(error.message);
    }
    this.element.hidden = false;
  }

  row({ name, about }) {
    const box = h("input", { type: "checkbox", value: name, change: () => this.toggle(row) });
    const row = { name, box, each: h("div", { class: "each" }), told: h("p", { class: "hint", role: "status" }) };
    row.element = h("div", {}, h("label", { class: "check" }, box, ` ${clean(name)} `, h("span", { class: "hint" }, clean(about))), row.told, row.each);
    return row;
  }

  /** Switch a server on or off in the chat that is shown. */
  async toggle(row) {
    const names = this.of(this.chat);
    row.told.textContent = "";
    if (!row.box.checked) names.delete(row.name);
    else if (row.tools) names.add(row.name);
    else {
      row.box.disabled = true;
      row.told.textContent = "starting …";
      try {
        row.tools = (await post("/ui/servers/start", { server: row.name })).tools;
        names.add(row.name);
        row.told.textContent = "";
      } catch (error) {
        row.told.textContent = clean(error.message);
      }
      row.box.disabled = false;
    }
    this.keep();
    this.show(this.chat);
  }

  /** Let a reloaded page know what is switched on. */
  keep() {
    const chats = [...this.on].filter(([chat, names]) => chat !== null && names.size);
    remember("servers", JSON.stringify(chats.map(([chat, names]) => [chat, [...names]])));
  }

  /** Return the names of the servers that are switched on in a chat. */
  of(chat) {
    if (!this.on.has(chat)) this.on.set(chat, new Set());
    return this.on.get(chat);
  }

  /** Show what is switched on in a chat. */
  show(chat) {
    this.chat = chat;
    const names = this.of(chat);
    for (const { name, tools, box, each } of this.rows) {
      box.checked = names.has(name);
      const tool = (called) => h("label", { class: "check" }, h("input", { type: "checkbox", value: called, checked: !this.off.has(called), change: ({ target }) => (target.checked ? this.off.delete(called) : this.off.add(called)) }), ` ${clean(called)}`);
      each.replaceChildren(...(box.checked ? tools.map(tool) : []));
    }
  }

  /** Begin a chat, in which nothing is switched on. */
  begin() {
    this.on.delete(null);
  }

  /** Give the chat that was just saved what was switched on before. */
  saved(chat) {
    this.on.set(chat, this.of(null));
    this.on.delete(null);
    this.keep();
  }
}

/** Return what was switched on before the page was reloaded. */
function kept() {
  try {
    return new Map(JSON.parse(recall("servers") || "[]").map(([chat, names]) => [chat, new Set(names)]));
  } catch {
    return new Map(); // of another version
  }
}
