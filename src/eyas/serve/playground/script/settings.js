// The settings of requests, kept in the browser's storage; the API key only as long as the tab is open.

import { byId } from "./dom.js";

const DEFAULTS = { temperature: 0, topP: 1, seed: 0, maxTokens: null /* as many as fit into the context */, system: "", speculate: true };
const STORED = "eyas.settings";
const KEY = "eyas.key";

export class Settings {
  constructor() {
    this.values = { ...DEFAULTS, ...this.stored() };
    this.key = sessionStorage.getItem(KEY) ?? "";
    this.model = null;
    this.onChange = () => {};
    this.dialog = byId("settings");
    byId("open-settings").addEventListener("click", () => this.open());
    byId("settings-reset").addEventListener("click", () => this.fill(DEFAULTS, this.key));
    byId("settings-form").addEventListener("submit", () => this.take());
  }

  /** The stored settings that this page has, too: another version may have stored others. */
  stored() {
    try {
      const found = Object.entries(JSON.parse(localStorage.getItem(STORED)) ?? {});
      return Object.fromEntries(found.filter(([name]) => Object.hasOwn(DEFAULTS, name)));
    } catch {
      return {}; // not written by this page
    }
  }

  /** Show the form with a message above it, if there is one, and the focus in `field`. */
  open(message = "", field = "temperature") {
    if (!this.dialog.open) this.fill(this.values, this.key);
    const note = byId("settings-message");
    note.textContent = message;
    note.hidden = !message;
    if (!this.dialog.open) this.dialog.showModal();
    byId(`set-${field}`).focus();
  }

  fill(values, key) {
    for (const [name, value] of Object.entries(values)) {
      const input = byId(`set-${name}`);
      if (input.type === "checkbox") input.checked = value;
      else input.value = value;
    }
    byId("set-key").value = key;
  }

  take() {
    for (const name of Object.keys(DEFAULTS)) {
      const input = byId(`set-${name}`);
      if (input.type === "checkbox") this.values[name] = input.checked;
      else if (input.type === "number") this.values[name] = input.value === "" ? null : input.valueAsNumber;
      else this.values[name] = input.value;
    }
    this.key = byId("set-key").value.trim();
    localStorage.setItem(STORED, JSON.stringify(this.values));
    sessionStorage.setItem(KEY, this.key);
    this.onChange();
  }

  /** The body of a streamed chat request; `changes` override the settings, `continuing` goes on with the last message. */
  body(messages, changes = {}) {
    const { temperature, topP, seed, maxTokens, system, speculate, continuing } = { ...this.values, ...changes };
    return {
      model: this.model ?? undefined,
      messages: system.trim() ? [{ role: "system", content: system }, ...messages] : messages,
      ...(continuing ? { add_generation_prompt: false, continue_final_message: true } : {}),
      stream: true,
      stream_options: { include_usage: true },
      temperature,
      top_p: topP,
      seed,
      ...(maxTokens === null ? {} : { max_tokens: maxTokens }),
      eyas: { speculate, trace: true },
    };
  }
}
