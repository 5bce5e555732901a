// The panel beside the answers: one round at a time, its tokens and its tree.

import { byId, el, plural, visible } from "./dom.js";
import { drawTree, words } from "./tree.js";

export class Rounds {
  constructor() {
    this.answer = null;
    this.index = 0;
    this.panel = byId("inspector");
    byId("round-previous").addEventListener("click", () => this.show(this.answer, this.index - 1));
    byId("round-next").addEventListener("click", () => this.show(this.answer, this.index + 1));
    byId("round-close").addEventListener("click", () => this.close());
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.close();
    });
    window.addEventListener("resize", () => this.answer && this.draw());
  }

  show(answer, index) {
    if (answer === this.answer && index === this.index) return this.panel.classList.add("open");
    if (!answer.rounds[index]) return undefined;
    if (this.answer && this.answer !== answer) this.answer.mark(-1);
    this.answer = answer;
    this.index = index;
    answer.mark(index);
    this.panel.classList.add("open");
    return this.draw();
  }

  /** Put the panel away where it covers something, and the keyboard back to the token it was opened from. */
  close() {
    this.panel.classList.remove("open");
    this.answer?.element.querySelector('[tabindex="0"]')?.focus();
  }

  /** Forget an answer that is gone. */
  clear() {
    this.answer = null;
    this.panel.classList.remove("open");
    byId("round-title").textContent = "Draft tree";
    byId("round-summary").textContent = "Point at a word of an answer, or reach it with the arrow keys: here is the tree that was drafted for it.";
    byId("round-text").hidden = true;
    byId("round-tree").replaceChildren();
    byId("round-node").textContent = "";
    this.buttons(0);
  }

  /** More rounds have come to the answer shown. */
  grown(answer) {
    if (answer === this.answer) this.title();
  }

  title() {
    byId("round-title").textContent = `Round ${this.index + 1} of ${this.answer.rounds.length}`;
    this.buttons(this.answer.rounds.length);
  }

  buttons(count) {
    byId("round-previous").disabled = this.index === 0 || !count;
    byId("round-next").disabled = this.index + 1 >= count;
  }

  draw() {
    const round = this.answer.rounds[this.index];
    this.title();
    const text = byId("round-text");
    text.hidden = false;
    text.replaceChildren(...round.tokens.map((token) => el("span", { className: `chip ${token.drafted ? "drafted" : "own"}`, textContent: visible(token.piece) })));
    byId("round-node").textContent = "";
    const tokens = plural(round.tokens.length, "token");
    if (!round.draft) {
      byId("round-summary").textContent = `Nothing was drafted: one pass of the model, ${tokens}.`;
      byId("round-tree").replaceChildren();
      return;
    }
    const nodes = plural(round.draft.tokens.length, "guess").replace("guesss", "guesses");
    byId("round-summary").textContent = `${nodes} checked in one pass, ${round.draft.path.length} accepted: ${tokens} at once.`;
    const own = round.tokens.find((token) => !token.drafted) ?? null;
    drawTree(byId("round-tree"), round.draft, own && { id: own.id, piece: own.piece }, (node) => (byId("round-node").textContent = words(node)));
  }
}
