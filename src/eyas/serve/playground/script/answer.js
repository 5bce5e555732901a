// An answer while it is generated: a span for each token, marked as drafted or the model's own. All rounds are kept.

import { el } from "./dom.js";

export class Answer {
  /** Appended to `parent`; `look(answer, round)` is called when a round is pointed at or reached by the keyboard. */
  constructor(parent, look) {
    this.look = look;
    this.rounds = []; // {tokens: [{id, piece, drafted, span}], accepted, draft, seconds}
    this.began = performance.now();
    this.text = "";
    this.fences = 0;
    this.element = el("div", { className: "answer", role: "group", ariaLabel: "Answer: arrow keys step through it" });
    this.element.setAttribute("aria-busy", "true");
    this.element.addEventListener("pointermove", (event) => {
      // text that scrolls under a resting mouse fires the event, too
      if (event.pointerType === "mouse" && (event.movementX || event.movementY)) this.point(event.target);
    });
    this.element.addEventListener("click", (event) => this.reach(event.target));
    this.element.addEventListener("focusin", (event) => this.point(event.target));
    this.element.addEventListener("keydown", (event) => this.key(event));
    parent.append(this.element);
  }

  /** Add one streamed choice: a round of tokens, or only text if the server sends no trace. */
  add(choice) {
    const trace = choice.eyas;
    if (!trace?.token_ids?.length) {
      if (!trace && choice.delta?.content) this.push([{ id: null, piece: choice.delta.content, drafted: false }], 0, null);
      return;
    }
    const tokens = trace.token_ids.map((id, i) => ({ id, piece: trace.pieces[i], drafted: i < trace.accepted }));
    this.push(tokens, trace.accepted, trace.draft ?? null);
  }

  push(tokens, accepted, draft) {
    const index = this.rounds.length;
    for (const token of tokens) {
      token.span = this.span(token, index);
      this.element.append(token.span);
    }
    if (draft) this.element.classList.add("speculated");
    this.rounds.push({ tokens, accepted, draft, seconds: (performance.now() - this.began) / 1000 });
  }

  span(token, round) {
    const before = this.fences;
    this.text += token.piece;
    if (token.piece.includes("`")) this.fences = countFences(this.text);
    const code = before % 2 === 1 || this.fences > before;
    const span = el("span", { className: `tok ${token.drafted ? "drafted" : "own"}${code ? " code" : ""}`, textContent: token.piece });
    span.dataset.round = round;
    span.tabIndex = token.piece && !this.element.querySelector('[tabindex="0"]') ? 0 : -1;
    return span;
  }

  finish() {
    this.element.setAttribute("aria-busy", "false");
  }

  get tokens() {
    return this.rounds.flatMap((round) => round.tokens);
  }

  get seconds() {
    return this.rounds.length ? this.rounds.at(-1).seconds : 0;
  }

  /** Mean tokens of a round; null if nothing was drafted in any. */
  get acceptLength() {
    return this.rounds.some((round) => round.draft) ? this.tokens.length / this.rounds.length : null;
  }

  /** Highlight the tokens of a round and no others. */
  mark(round) {
    for (const span of this.element.querySelectorAll(".shown")) span.classList.remove("shown");
    for (const token of this.rounds[round]?.tokens ?? []) token.span.classList.add("shown");
  }

  /** Show only what had come after so many seconds; everything for Infinity. */
  rewind(seconds) {
    for (const round of this.rounds) {
      for (const { span } of round.tokens) span.classList.toggle("unseen", round.seconds > seconds);
    }
    return this.rounds.filter((round) => round.seconds <= seconds);
  }

  point(target) {
    if (target.dataset?.round) this.look(this, Number(target.dataset.round));
  }

  reach(target) {
    if (target.dataset?.round) this.focus(target);
  }

  /** Move the focus to a token, which becomes the answer's only tab stop. */
  focus(span) {
    for (const other of this.element.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    span.tabIndex = 0;
    span.focus();
  }

  key(event) {
    const spans = this.tokens.map((token) => token.span).filter((span) => span.textContent);
    const at = spans.indexOf(document.activeElement);
    if (at < 0) return;
    const round = Number(spans[at].dataset.round);
    const goal = {
      ArrowRight: () => spans[at + 1],
      ArrowLeft: () => spans[at - 1],
      ArrowDown: () => spans.find((span) => Number(span.dataset.round) > round),
      ArrowUp: () => spans.find((span) => Number(span.dataset.round) === Number(spans[at - 1]?.dataset.round)),
      Home: () => spans[0],
      End: () => spans.at(-1),
    }[event.key];
    if (!goal) return;
    event.preventDefault();
    const span = goal();
    if (span) this.focus(span);
  }
}

/** The number of code fences in a text, opening and closing ones. */
function countFences(text) {
  return (text.match(/^ {0,3}```/gm) ?? []).length;
}
