// An answer while it is generated: its tokens, each drafted or the model's own, in rounds that are all kept.

import { el } from "./dom.js";
import { blocks, dressCode, elements, wrap } from "./markdown.js";

export class Answer {
  /** Appended to `parent`; `look(answer, round)` is called when a round is pointed at or reached by the keyboard. */
  constructor(parent, look) {
    this.look = look;
    this.tokens = []; // {id, piece, drafted, round, start}
    this.rounds = []; // {tokens, accepted, drafted, draft, seconds}
    this.text = "";
    this.marked = -1;
    this.passes = 0; // the target's, without those that read the prompt
    this.walked = 0; // draft tokens that they accepted
    this.counted = 0; // the rounds in these two
    this.seconds = 0;
    this.element = el("div", { className: "answer", role: "group", ariaLabel: "Answer: arrow keys step through it" });
    this.element.addEventListener("pointermove", (event) => {
      // text that scrolls under a resting mouse fires the event, too
      if (event.pointerType === "mouse" && (event.movementX || event.movementY)) this.point(event.target);
    });
    this.element.addEventListener("click", (event) => this.reach(event.target));
    this.element.addEventListener("focusin", (event) => this.point(event.target));
    this.element.addEventListener("keydown", (event) => this.key(event));
    this.view = new Rendered(this);
    parent.append(this.element);
  }

  /** A stream begins, the first or one that goes on with the answer. */
  begin() {
    this.began = performance.now() - 1000 * this.seconds;
    this.element.setAttribute("aria-busy", "true");
  }

  /** Add one streamed choice: a round of tokens, or only text if the server sends no trace. */
  add(choice) {
    const trace = choice.eyas;
    this.seconds = (performance.now() - this.began) / 1000;
    if (trace?.token_ids?.length) {
      const tokens = trace.token_ids.map((id, i) => ({ id, piece: trace.pieces[i] }));
      this.push(tokens, trace.accepted, trace.draft ?? null);
    } else if (!trace && choice.delta?.content) this.push([{ id: null, piece: choice.delta.content }], 0, null);
  }

  push(given, accepted, draft, drafted = draft !== null) {
    const tokens = given.map(({ id, piece }, i) => {
      const token = { id, piece, drafted: i < accepted, round: this.rounds.length, start: this.text.length };
      this.text += piece.replaceAll("\r", ""); // as Markdown's parser reads it
      return token;
    });
    this.tokens.push(...tokens);
    this.rounds.push({ tokens, accepted, drafted, draft, seconds: this.seconds });
    this.view.grown();
  }

  /** A stream has ended; `usage` is the server's account of it, if it came to that. */
  finish(usage) {
    const rounds = this.rounds.slice(this.counted);
    const passes = usage?.eyas ? usage.eyas.target_passes : Math.max(rounds.length - 1, 0); // the first is the prompt's
    this.passes += passes;
    this.walked += usage?.eyas ? (usage.eyas.accept_length - 1) * passes : sum(rounds);
    this.counted = this.rounds.length;
    this.element.setAttribute("aria-busy", "false");
    this.view.finish();
  }

  get speculated() {
    return this.rounds.some((round) => round.drafted);
  }

  /** Mean tokens of a pass, as the server's log counts: of the whole answer, or of some first rounds. Null if unknown. */
  perPass(rounds = this.rounds) {
    if (rounds.length === this.counted) return this.passes ? 1 + this.walked / this.passes : null;
    return rounds.length > 1 ? 1 + sum(rounds) / (rounds.length - 1) : null;
  }

  /** What is kept of it when the page is closed: all but the draft trees. */
  toJSON() {
    const rounds = this.rounds.map(({ tokens, accepted, drafted }) => ({
      ids: tokens.map((token) => token.id), pieces: tokens.map((token) => token.piece), accepted, drafted,
    }));
    return { rounds, passes: this.passes, walked: this.walked, seconds: this.seconds };
  }

  /** Take what `toJSON` gave. */
  restore({ rounds, passes, walked, seconds }) {
    Object.assign(this, { passes, walked, seconds, counted: rounds.length });
    for (const { ids, pieces, accepted, drafted } of rounds) {
      this.push(ids.map((id, i) => ({ id, piece: pieces[i] })), accepted, null, drafted);
    }
    this.view.finish();
  }

  /** A span for a text of a token. */
  span(index, text) {
    const token = this.tokens[index];
    const shown = token.round === this.marked ? " shown" : "";
    const span = el("span", { className: `tok${token.drafted ? " drafted" : ""}${shown}`, textContent: text, tabIndex: -1 });
    Object.assign(span.dataset, { token: index, round: token.round });
    return span;
  }

  /** The spans of a token; none if it holds nothing but marks of Markdown. */
  spans(index) {
    return [...this.element.querySelectorAll(`.tok[data-token="${index}"]`)];
  }

  /** Highlight the tokens of a round and no others. */
  mark(round) {
    this.marked = round;
    for (const span of this.element.querySelectorAll(".shown")) span.classList.remove("shown");
    for (const span of this.roundSpans(round)) span.classList.add("shown");
  }

  roundSpans(round) {
    return [...this.element.querySelectorAll(`.tok[data-round="${round}"]`)];
  }

  /** Show only what had come after so many seconds; everything for Infinity. */
  rewind(seconds) {
    for (const span of this.element.querySelectorAll(".tok")) {
      span.classList.toggle("unseen", this.rounds[span.dataset.round].seconds > seconds);
    }
    for (const box of this.element.querySelectorAll(".block, .block li")) { // bullets and heads of code, too
      box.classList.toggle("unseen", box.querySelector(".tok.unseen") !== null && box.querySelector(".tok:not(.unseen)") === null);
    }
    return this.rounds.filter((round) => round.seconds <= seconds);
  }

  point(target) {
    if (target.dataset?.round) this.look(this, Number(target.dataset.round));
  }

  reach(target) {
    if (target.dataset?.round && !getSelection().toString()) this.focus(target);
  }

  /** Move the focus to a token, which becomes the answer's only tab stop among them. */
  focus(span) {
    for (const other of this.element.querySelectorAll('.tok[tabindex="0"]')) other.tabIndex = -1;
    span.tabIndex = 0;
    span.focus();
  }

  /** Let one token be reached by Tab. */
  tabStop() {
    if (this.element.querySelector('.tok[tabindex="0"]')) return;
    const first = [...this.element.querySelectorAll(".tok")].find((span) => span.textContent.trim());
    if (first) first.tabIndex = 0;
  }

  key(event) {
    const spans = [...this.element.querySelectorAll(".tok")].filter((span) => span.textContent);
    const at = spans.indexOf(document.activeElement);
    if (at < 0) return;
    const round = (span) => Number(span?.dataset.round);
    const goal = {
      ArrowRight: () => spans[at + 1],
      ArrowLeft: () => spans[at - 1],
      ArrowDown: () => spans.find((span) => round(span) > round(spans[at])),
      ArrowUp: () => spans.find((span) => round(span) === round(spans[at - 1])),
      Home: () => spans[0],
      End: () => spans.at(-1),
    }[event.key];
    if (!goal) return;
    event.preventDefault();
    const span = goal();
    if (span) this.focus(span);
  }
}

const sum = (rounds) => rounds.reduce((total, round) => total + round.accepted, 0);

/** The answer's Markdown, with its tokens marked in it. Only blocks that have changed are made anew. */
class Rendered {
  constructor(answer) {
    this.answer = answer;
    this.blocks = []; // {source, start, box}
    this.timer = null;
    this.cost = 0; // milliseconds that the last rendering took
  }

  /** Render soon; long answers are rendered more rarely, so that the page stays at hand. */
  grown() {
    this.timer ??= setTimeout(() => this.render(), Math.max(16, 4 * this.cost));
  }

  finish() {
    this.blocks.forEach((block) => (block.source = null)); // a reference may have come after what refers to it
    this.render();
  }

  render() {
    const began = performance.now();
    clearTimeout(this.timer);
    this.timer = null;
    const { element } = this.answer;
    const focused = document.activeElement.closest(".tok");
    const token = element.contains(focused) ? focused.dataset.token : null;
    const wanted = blocks(this.answer.text);
    let start = 0;
    wanted.forEach((block, i) => {
      const old = this.blocks[i];
      if (old?.source !== block.source || old.start !== start) {
        const box = this.box(block, start);
        if (old) old.box.replaceWith(box);
        else element.append(box);
        this.blocks[i] = { source: block.source, start, box };
      }
      start += block.source.length;
    });
    for (const extra of this.blocks.splice(wanted.length)) extra.box.remove();
    if (token !== null && !element.contains(document.activeElement)) {
      const again = this.answer.spans(token)[0];
      if (again) this.answer.focus(again);
    }
    this.answer.tabStop();
    this.cost = performance.now() - began;
  }

  box(block, start) {
    const { tokens } = this.answer;
    const box = el("div", { className: "block" }, elements(block));
    const next = (place) => (tokens[this.at(start + place) + 1]?.start ?? Infinity) - start;
    wrap(box, block.source, next, (place, text) => this.answer.span(this.at(start + place), text));
    dressCode(box);
    return box;
  }

  /** The index of the token that holds a place in the text. */
  at(place) {
    const { tokens } = this.answer;
    let [low, high] = [0, tokens.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (tokens[middle].start <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  }
}
