// The chat: messages, the answer while it is streamed, stopping it, and errors.

import { Answer } from "./answer.js";
import { announce, byId, el, plural } from "./dom.js";
import { streamJson } from "./stream.js";

const EXAMPLES = [
  "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did she sell altogether?",
  'Complete this Python function:\n\ndef is_palindrome(text):\n    """Return True if text reads the same backwards."""',
  "What does this function do?\n\ndef f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)",
];

const ENDINGS = {
  length: "cut off at the token limit",
  cancelled: "cancelled by the server",
  deadline: "cut off at the server's time limit",
  error: "ended by an error",
};

export class Chat {
  constructor(settings, rounds) {
    this.settings = settings;
    this.rounds = rounds;
    this.messages = [];
    this.abort = null;
    this.box = byId("message");
    this.transcript = byId("transcript");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.box.value);
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send(this.box.value);
    });
    this.box.addEventListener("input", () => this.fit());
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    for (const text of EXAMPLES) {
      const button = el("button", { type: "button", className: "example", textContent: text });
      button.addEventListener("click", () => this.send(text));
      byId("examples").append(el("li", {}, button));
    }
  }

  get busy() {
    return this.abort !== null;
  }

  fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight, 200)}px`;
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.rounds.clear();
    this.transcript.replaceChildren(byId("welcome") ?? this.welcome);
    byId("clear").hidden = true;
    announce("New conversation");
    this.box.focus();
  }

  /** Send a message and stream the answer below it. A failed turn stays visible but is not sent again. */
  async send(text) {
    if (this.busy || !text.trim()) return;
    this.welcome ??= byId("welcome");
    this.welcome.remove();
    this.box.value = "";
    this.fit();
    byId("clear").hidden = false;
    const turn = el("article", { className: "turn" }, el("div", { className: "said", textContent: text }));
    this.transcript.append(turn);
    await this.answer(turn, text);
  }

  async answer(turn, text) {
    const messages = [...this.messages, { role: "user", content: text }];
    const history = this.messages;
    const answer = new Answer(turn, (shown, index) => this.rounds.show(shown, index));
    this.working(new AbortController());
    this.follow(true);
    announce("Answering");
    let ending = "";
    let failure = null;
    try {
      const events = streamJson("v1/chat/completions", this.settings.body(messages), this.settings.key, this.abort.signal);
      for await (const event of events) {
        const choice = event.choices?.[0];
        if (!choice) continue;
        answer.add(choice);
        if (choice.finish_reason) ending = ENDINGS[choice.finish_reason] ?? "";
        this.rounds.grown(answer);
        this.follow();
      }
    } catch (error) {
      if (error.name === "AbortError") ending = "stopped";
      else failure = error;
    }
    this.working(null);
    answer.finish();
    if (history === this.messages && answer.text) this.messages = [...messages, { role: "assistant", content: answer.text }];
    if (answer.text || !failure) turn.append(el("p", { className: "figures-line", textContent: figures(answer, ending) }));
    if (failure) this.fail(turn, text, answer, failure);
    else announce(`Answer complete${ending ? `, ${ending}` : ""}: ${answer.text}`);
    this.follow();
  }

  fail(turn, text, answer, error) {
    const again = el("button", { type: "button", className: "quiet small", textContent: "Try again" });
    const problem = el("div", { className: "problem", role: "alert" }, el("p", { textContent: error.message }), again);
    again.addEventListener("click", () => {
      if (this.busy) return;
      if (this.messages.at(-1)?.content === answer.text && answer.text) this.messages = this.messages.slice(0, -2);
      turn.replaceChildren(turn.firstChild);
      this.answer(turn, text);
    });
    if (!answer.text) answer.element.remove();
    turn.append(problem);
    if (error.status === 401) this.settings.open(error.message, "key");
  }

  working(abort) {
    this.abort = abort;
    const focused = document.activeElement;
    byId("send").hidden = this.busy;
    byId("stop").hidden = !this.busy;
    if (focused === byId("send") && this.busy) byId("stop").focus();
    if (focused === byId("stop") && !this.busy) this.box.focus();
  }

  /** Keep the end visible, unless the reader has scrolled away from it. */
  follow(always = false) {
    const view = this.transcript;
    if (always || view.scrollHeight - view.scrollTop - view.clientHeight < 120) view.scrollTop = view.scrollHeight;
  }
}

function figures(answer, ending) {
  const count = answer.tokens.length;
  const parts = [plural(count, "token")];
  if (answer.seconds && count > 1) parts.push(`${(count / answer.seconds).toFixed(0)} tokens/s`);
  if (answer.acceptLength) parts.push(`${answer.acceptLength.toFixed(2)} tokens a pass`);
  return [...parts, ending].filter(Boolean).join(" · ");
}
