// The chat: a conversation, the answer while it is streamed, stopping it, and answering again.

import { announce, byId, el, fitText, follow } from "./dom.js";
import { History, messages, newId } from "./history.js";
import { streamJson } from "./stream.js";
import { Turn } from "./turn.js";

const ANEW = 0.7; // the temperature of a second answer where the settings say 0, at which it would be the first one again
const EXAMPLES = [
  "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did she sell altogether?",
  'Complete this Python function:\n\ndef is_palindrome(text):\n    """Return True if text reads the same backwards."""',
  "What does this function do?\n\ndef f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)",
];

export class Chat {
  constructor(settings, rounds) {
    this.settings = settings;
    this.rounds = rounds;
    this.abort = null;
    this.box = byId("message");
    this.place = byId("turns");
    this.welcome = byId("welcome");
    this.follow = follow(byId("transcript"), this.place);
    this.fit = fitText(this.box);
    this.does = {
      look: (answer, round) => this.rounds.show(answer, round),
      again: (turn) => this.again(turn),
      more: (turn) => !this.busy && this.run(turn, turn.resume(), { continuing: true }),
      edit: (turn, text) => this.edit(turn, text),
      limit: () => this.settings.open("", "maxTokens"),
    };
    this.history = new History(settings, {
      open: (chat) => this.show(chat),
      gone: (id) => id === this.chat.id && this.clear(),
    });
    this.listen();
    for (const text of EXAMPLES) {
      const example = el("button", { type: "button", className: "example", textContent: text });
      example.addEventListener("click", () => this.send(text));
      byId("examples").append(el("li", {}, example));
    }
    this.show(this.history.last ?? fresh());
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.box.value);
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send(this.box.value);
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    byId("system-line").addEventListener("click", () => this.settings.open("", "system"));
    window.addEventListener("pagehide", () => this.busy && this.history.save(this.chat));
  }

  get busy() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.show(fresh());
    announce("New conversation");
    this.box.focus();
  }

  /** Show a conversation, and go on with it. */
  show(chat) {
    this.stop();
    this.rounds.clear();
    this.chat = { ...chat, turns: chat.turns.map((turn) => Turn.from(turn, this.does)) };
    this.history.last = chat.id;
    this.place.replaceChildren(...this.chat.turns.map((turn) => turn.element));
    this.dress();
    this.follow();
  }

  /** Show what depends on whether there is a conversation, and on the settings. */
  dress() {
    const begun = this.chat.turns.length > 0;
    this.welcome.hidden = begun;
    byId("clear").hidden = !begun;
    const system = this.settings.values.system.trim();
    byId("system-line").hidden = !system;
    byId("system-line").textContent = `System prompt: ${system}`;
  }

  /** Send a message and stream the answer below it. A failed turn stays visible but is not sent again. */
  async send(text) {
    if (this.busy || !text.trim()) return;
    this.box.value = "";
    this.fit();
    const turn = new Turn(text, this.does);
    this.chat.turns.push(turn);
    this.place.append(turn.element);
    this.dress();
    await this.run(turn, turn.begin());
  }

  /** Answer a message anew; if there was an answer, so that it may be another. */
  again(turn) {
    if (this.busy) return;
    if (turn.text) turn.attempt += 1;
    this.cut(turn);
    this.run(turn, turn.begin());
  }

  /** Answer a changed message, as if what came after had never been; false while another answer is being written. */
  edit(turn, text) {
    if (this.busy) return false;
    Object.assign(turn, { question: text, attempt: 0 });
    this.cut(turn);
    this.run(turn, turn.begin());
    return true;
  }

  /** Drop what came after a turn. */
  cut(turn) {
    const { turns } = this.chat;
    for (const later of turns.splice(turns.indexOf(turn) + 1)) later.element.remove();
    this.rounds.clear();
  }

  async run(turn, answer, changes = {}) {
    const { chat } = this;
    const earlier = messages(chat.turns.slice(0, chat.turns.indexOf(turn)));
    const sent = [...earlier, { role: "user", content: turn.question }];
    if (changes.continuing) sent.push({ role: "assistant", content: turn.text });
    const body = this.settings.body(sent, { ...this.sampling(turn), ...changes });
    turn.limit = body.max_tokens ?? null;
    turn.note = turn.attempt ? this.sampled(body) : "";
    const abort = new AbortController();
    this.working(abort);
    this.history.save(chat);
    this.follow();
    announce("Answering");
    let [ending, failure, usage] = ["", null, null];
    try {
      for await (const event of streamJson("v1/chat/completions", body, this.settings.key, abort.signal)) {
        usage = event.usage ?? usage;
        const choice = event.choices?.[0];
        if (!choice) continue;
        answer.add(choice);
        ending = choice.finish_reason ?? ending;
        this.rounds.grown(answer);
      }
    } catch (error) {
      if (error.name === "AbortError") ending = "stopped";
      else failure = error;
    }
    const full = ending === "length" && !(usage?.completion_tokens >= body.max_tokens); // also without a limit
    turn.finish(full ? "context" : ending, failure, usage);
    if (this.history.has(chat.id)) this.history.save(chat); // it may have been deleted meanwhile
    if (this.abort === abort) this.working(null);
    if (failure?.status === 401) this.settings.open(failure.message, "key");
    else if (!failure) announce(`Answer complete, ${turn.figures()}: ${turn.text}`);
  }

  /** The temperature and the seed of a turn's answer. */
  sampling({ attempt }) {
    const { temperature, seed } = this.settings.values;
    if (!attempt) return { temperature, seed };
    return { temperature: temperature || ANEW, seed: (seed + attempt) % Number.MAX_SAFE_INTEGER };
  }

  sampled({ temperature, seed }) {
    const why = this.settings.values.temperature === 0 ? ": at 0 the answer would be the same again" : "";
    return `temperature ${temperature}, seed ${seed}${why}`;
  }

  working(abort) {
    this.abort = abort;
    const focused = document.activeElement;
    byId("send").hidden = this.busy;
    byId("stop").hidden = !this.busy;
    this.place.classList.toggle("working", this.busy);
    if (focused === byId("send") && this.busy) byId("stop").focus();
    if (focused === byId("stop") && !this.busy) this.box.focus();
  }
}

const fresh = () => ({ id: newId(), turns: [] });
