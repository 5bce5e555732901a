// An answer as it grows: one span a token, drafted ones told from the model's own, every round kept for a later look.

import { el } from "./dom.js";

export class Answer {
  /** Goes into `parent`; `look(answer, round)` is called when a round is pointed at or reached by the keyboard. */
  constructor(parent, look) {
    this.look = look;
    this.rounds = []; // {tokens: [{id, piece, drafted, span}], accepted, draft, seconds}
    this.began = performance.now();
    this.text = "";
    this.fences = 0;
    this.element = el("div", { className: "answer", role: "group", ariaLabel: "Answer: arrow keys step through it" });
    this.element.setAttribute("aria-busy", "true");
    this.element.addEventListener("pointermove", (event) => {
      // a text that scrolls under a mouse at rest moves too, but not by the hand
      if (event.pointerType === "mouse" && (event.movementX || event.movementY)) this.point(event.target);
    });
    this.element.addEventListener("click", (event) => this.reach(event.target));
    this.element.addEventListener("focusin", (event) => this.point(event.target));
    this.element.addEventListener("keydown", (event) => this.key(event));
    parent.append(this.element);
  }

  /** Take one streamed choice: a round of tokens, or text alone from a server that tells no more. */
  add(choice) {
    const told = choice.eyas;
    if (!told?.token_ids?.length) {
      if (!told && choice.delta?.content) this.push([{ id: null, piece: choice.delta.content, drafted: false }], 0, null);
      return;
    }
    const tokens = told.token_ids.map((id, i) => ({ id, piece: told.pieces[i], drafted: i < told.accepted }));
    this.push(tokens, told.accepted, told.draft ?? null);
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

  /** Tokens a round; null where nothing was ever drafted. */
  get acceptLength() {
    return this.rounds.some((round) => round.draft) ? this.tokens.length / this.rounds.length : null;
  }

  /** Mark the spans of a round, and no others. */
  mark(round) {
    for (const span of this.element.querySelectorAll(".shown")) span.classList.remove("shown");
    for (const token of this.rounds[round]?.tokens ?? []) token.span.classList.add("shown");
  }

  /** Show only what was there after so many seconds; everything again for Infinity. */
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

  /** One tab stop an answer: the token last reached. */
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

/** How many code fences a text has opened or closed. */
function countFences(text) {
  return (text.match(/^ {0,3}```/gm) ?? []).length;
}
