// One turn of a conversation: what was said, the answer, its figures, and what can be done with both.

import { Answer } from "./answer.js";
import { button, copy, el, plural } from "./dom.js";

/** Why an answer isn't whole. */
const ENDINGS = {
  length: ({ limit }) => `Cut off at ${plural(limit, "token")}, the limit in the settings.`,
  context: () => "Cut off: the model's context is full. A new conversation has room again.",
  cancelled: () => "Canceled by the server.",
  deadline: () => "Cut off at the server's time limit.",
  error: () => "Ended by an error.",
  stopped: () => "Stopped.",
};
const CUT = ["length", "deadline", "cancelled", "stopped"]; // endings after which the answer can go on

export class Turn {
  /** `does` acts on the turn: `look(answer, round)`, `again(turn)`, `more(turn)`, `edit(turn, text)`, `limit()`. */
  constructor(question, does) {
    this.question = question;
    this.does = does;
    this.answer = null;
    this.ending = "";
    this.limit = null; // tokens that the answer may have, if that was limited
    this.attempt = 0; // how often it was answered before, which moves the seed
    this.note = ""; // how it was sampled, if not as the settings say
    this.said = el("div", { className: "said", textContent: question });
    this.ask = el("div", { className: "acts ask" });
    this.ask.append(
      button("Copy", (event) => copy(this.question, event.currentTarget), { ariaLabel: "Copy the message" }),
      button("Edit", () => this.edit(), { ariaLabel: "Edit the message", className: "quiet small at-rest" }),
    );
    this.reply = el("div", { className: "reply" });
    this.foot = el("div", { className: "turn-foot" });
    this.element = el("article", { className: "turn" }, this.said, this.ask, this.reply, this.foot);
  }

  get text() {
    return this.answer?.text ?? "";
  }

  /** A new, empty answer in place of the last one, if there was one. */
  begin() {
    this.foot.replaceChildren();
    this.reply.replaceChildren();
    this.ending = this.note = "";
    this.answer = new Answer(this.reply, this.does.look);
    this.answer.begin();
    return this.answer;
  }

  /** Go on with the answer that was cut. */
  resume() {
    this.foot.replaceChildren();
    this.answer.begin();
    return this.answer;
  }

  /** The stream has ended with a reason, or with a failure. */
  finish(ending, failure, usage) {
    this.ending = ending;
    this.answer.finish(usage);
    if (!this.text && failure) this.reply.replaceChildren();
    this.close(failure);
  }

  /** Write the figures, the buttons and what went wrong. */
  close(failure = null) {
    const copyAnswer = button("Copy", (event) => copy(this.text, event.currentTarget), { ariaLabel: "Copy the answer" });
    const again = button("Regenerate", () => this.does.again(this), { className: "quiet small last-only" });
    this.foot.replaceChildren();
    if (this.text || !failure) {
      if (Object.hasOwn(ENDINGS, this.ending)) this.foot.append(this.notice());
      this.foot.append(el("p", { className: "figures-line", textContent: this.figures() }), el("div", { className: "acts" }, copyAnswer, again));
    }
    if (failure) {
      const retry = button("Try again", () => this.does.again(this), { className: "quiet small last-only" });
      this.foot.append(el("div", { className: "problem", role: "alert" }, el("p", { textContent: failure.message }), retry));
    }
  }

  /** Why the answer isn't whole, and what can be done about it. */
  notice() {
    const acts = el("div", { className: "acts last-only" });
    if (CUT.includes(this.ending) && this.text) acts.append(button("Continue", () => this.does.more(this)));
    if (this.ending === "length") acts.append(button("Change the limit", () => this.does.limit()));
    return el("div", { className: "notice" }, el("p", { textContent: ENDINGS[this.ending](this) }), acts);
  }

  figures() {
    const { answer } = this;
    const count = answer.tokens.length;
    const parts = [plural(count, "token")];
    if (answer.seconds && count > 1) parts.push(`${(count / answer.seconds).toFixed(0)} tokens/s`);
    if (answer.speculated && answer.perPass()) parts.push(`${answer.perPass().toFixed(2)} tokens per pass`);
    return [...parts, this.note].filter(Boolean).join(" · ");
  }

  /** Turn the message into a form; sending it answers it anew and drops what came after. */
  edit() {
    const box = el("textarea", { className: "edit-box", value: this.question, rows: Math.min(12, this.question.split("\n").length + 1), ariaLabel: "Edited message" });
    const leave = () => {
      form.replaceWith(this.said);
      this.ask.hidden = false;
      this.ask.lastElementChild.focus();
    };
    const send = () => {
      if (!box.value.trim() || !this.does.edit(this, box.value)) return;
      this.said.textContent = this.question;
      form.replaceWith(this.said);
      this.ask.hidden = false;
    };
    const form = el("form", { className: "edit-form" }, box);
    form.append(
      el("p", { className: "note", textContent: "What came after it in this conversation is dropped." }),
      el("div", { className: "acts" }, el("button", { className: "main small", textContent: "Send" }), button("Cancel", leave)),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        leave();
      }
    });
    this.said.replaceWith(form);
    this.ask.hidden = true;
    box.focus();
  }

  toJSON() {
    const { question, answer, ending, limit, attempt, note } = this;
    const now = answer?.element.ariaBusy === "true" ? "stopped" : ending;
    return { question, answer: this.text ? answer : null, ending: now, limit, attempt, note };
  }

  /** The turn that `toJSON` gave. */
  static from({ question, answer, ending, limit = null, attempt, note = "" }, does) {
    const turn = new Turn(question, does);
    Object.assign(turn, { ending, limit, attempt, note });
    turn.answer = new Answer(turn.reply, does.look);
    if (answer) turn.answer.restore(answer);
    turn.close(answer ? null : { message: "This message has no answer." });
    return turn;
  }
}
