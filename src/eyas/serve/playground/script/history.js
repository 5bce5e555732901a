// Conversations in the browser's storage, each under a key of its own, so that tabs don't overwrite each other's.

import { announce, button, byId, el, saveFile } from "./dom.js";

const PREFIX = "eyas.chat.";
const CURRENT = "eyas.current"; // of the tab: what it shows again after a reload

/** A conversation's first words. */
export const title = (chat) => chat.turns[0]?.question.trim().split("\n")[0].slice(0, 80) || "Empty";

/** A conversation as the API's messages. */
export function messages(turns) {
  return turns.flatMap((turn) => {
    const text = turn.answer?.text ?? (turn.answer?.rounds ?? []).flatMap((round) => round.pieces).join("");
    return text ? [{ role: "user", content: turn.question }, { role: "assistant", content: text }] : [];
  });
}

export class History {
  /** `settings` give what exports say; `open(chat)` shows a stored conversation, `gone(id)` says that one was deleted. */
  constructor(settings, { open, gone }) {
    this.settings = settings;
    this.open = open;
    this.gone = gone;
    this.dialog = byId("history");
    byId("open-history").addEventListener("click", () => this.show());
    byId("history-close").addEventListener("click", () => this.dialog.close());
    byId("history-clear").addEventListener("click", () => {
      if (!confirm("Delete all conversations?")) return;
      for (const chat of this.all()) this.remove(chat.id);
      this.list();
    });
  }

  /** All conversations, the last one first. */
  all() {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    return keys.map((key) => this.read(key)).filter(Boolean).sort((a, b) => b.changed - a.changed);
  }

  read(key) {
    try {
      const chat = JSON.parse(localStorage.getItem(key));
      return chat?.id && Array.isArray(chat.turns) ? chat : null;
    } catch {
      return null; // not written by this page
    }
  }

  /** Keep a conversation; where the storage is full, the oldest ones make room. */
  save(chat) {
    const stored = this.read(PREFIX + chat.id);
    if (stored && stored.changed !== chat.changed) { // it went on in another tab, too: from here on they are two
      const shown = sessionStorage.getItem(CURRENT) === chat.id;
      chat.id = newId();
      if (shown) this.last = chat.id;
    }
    chat.changed = Date.now();
    const text = JSON.stringify(chat);
    const others = this.all().filter((other) => other.id !== chat.id);
    while (true) {
      try {
        localStorage.setItem(PREFIX + chat.id, text);
        return;
      } catch {
        const oldest = others.pop();
        if (!oldest) return announce("This conversation is too long to be kept in the browser.");
        localStorage.removeItem(PREFIX + oldest.id);
      }
    }
  }

  has(id) {
    return localStorage.getItem(PREFIX + id) !== null;
  }

  remove(id) {
    localStorage.removeItem(PREFIX + id);
    this.gone(id);
  }

  /** The conversation that this tab showed when it was loaded before. */
  get last() {
    const id = sessionStorage.getItem(CURRENT);
    return id ? this.read(PREFIX + id) : null;
  }

  set last(id) {
    sessionStorage.setItem(CURRENT, id);
  }

  show() {
    this.list();
    this.dialog.showModal();
  }

  list() {
    const all = this.all();
    byId("history-empty").hidden = all.length > 0;
    byId("history-clear").hidden = !all.length;
    byId("history-list").replaceChildren(...all.map((chat) => this.row(chat)));
  }

  row(chat) {
    const name = title(chat);
    const when = new Date(chat.changed).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const entry = button("", () => {
      this.dialog.close();
      this.open(chat);
    }, { className: "entry" });
    entry.append(el("strong", { textContent: name }), el("span", { className: "note", textContent: when }));
    const acts = el("div", { className: "acts" });
    acts.append(
      button("Markdown", () => saveFile(`${fileName(name)}.md`, this.markdown(chat), "text/markdown"), { ariaLabel: `Save “${name}” as Markdown` }),
      button("JSON", () => saveFile(`${fileName(name)}.json`, this.json(chat), "application/json"), { ariaLabel: `Save “${name}” as JSON` }),
      button("Delete", () => {
        this.remove(chat.id);
        this.list();
      }, { ariaLabel: `Delete “${name}”` }),
    );
    return el("li", {}, entry, acts);
  }

  /** The conversation for people to read. */
  markdown(chat) {
    const system = this.settings.values.system.trim();
    const parts = messages(chat.turns).map(({ role, content }) => `## ${role === "user" ? "User" : "Assistant"}\n\n${content}`);
    if (system) parts.unshift(`## System\n\n${system}`);
    return `# ${title(chat)}\n\nModel: ${this.settings.model ?? "unknown"}\n\n${parts.join("\n\n")}\n`;
  }

  /** The conversation as the body of a request, which any client could send. */
  json(chat) {
    const { stream, stream_options, eyas, ...body } = this.settings.body(messages(chat.turns));
    return `${JSON.stringify(body, null, 2)}\n`;
  }
}

export function newId() {
  return `${Date.now().toString(36)}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
}

const fileName = (name) => name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "conversation";
