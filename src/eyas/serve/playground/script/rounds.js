// The panel next to the answers: the tokens and the draft tree of one round.

import { byId, el, plural, visible } from "./dom.js";
import { drawTree, words } from "./tree.js";

const HINT = "Point at a word of an answer, or reach it with the arrow keys: here is the tree that was drafted for it. One like this:";

// p(child | parent) 0.9, 0.8, 0.5 down the walked path
const EXAMPLE = {
  tokens: [1, 2, 3, 4, 5, 6],
  pieces: [" two", " and", " three", " of", " make", " plus"],
  parents: [-1, 0, 1, 0, 1, -1],
  logprob: [0.9, 0.72, 0.36, 0.09, 0.29, 0.08].map(Math.log),
  path: [0, 1],
};
const EXAMPLE_OWN = { id: 7, piece: " two" };

export class Rounds {
  constructor() {
    this.answer = null;
    this.index = 0;
    this.panel = byId("inspector");
    byId("round-previous").addEventListener("click", () => this.step(-1));
    byId("round-next").addEventListener("click", () => this.step(1));
    byId("round-close").addEventListener("click", () => this.close());
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.close();
    });
    window.addEventListener("resize", () => this.draw());
    this.clear();
  }

  show(answer, index) {
    if (answer === this.answer && index === this.index) return this.panel.classList.add("open");
    if (!answer.rounds[index]) return undefined;
    if (this.answer && this.answer !== answer) this.answer.mark(-1);
    const opens = !this.panel.classList.contains("open");
    this.answer = answer;
    this.index = index;
    answer.mark(index);
    this.panel.classList.add("open");
    this.draw();
    if (opens) this.reveal(); // the panel may have come to lie over it
    return undefined;
  }

  step(by) {
    this.show(this.answer, this.index + by);
    this.reveal();
  }

  /** Scroll the tokens of the round into view. */
  reveal() {
    const spans = this.answer.roundSpans(this.index);
    for (const span of [spans.at(-1), spans[0]]) span?.scrollIntoView({ block: "nearest" });
  }

  /** Close the panel where it covers the answers, and move the focus back to the token it was opened from. */
  close() {
    this.answer?.element.querySelector('.tok[tabindex="0"]')?.focus(); // focusing it shows its round
    this.panel.classList.remove("open");
  }

  /** Show the example again, when the answer is gone. */
  clear() {
    this.answer = null;
    this.panel.classList.remove("open");
    byId("round-title").textContent = "Draft tree";
    byId("round-summary").textContent = HINT;
    byId("round-text").hidden = true;
    this.buttons(0);
    this.draw();
  }

  /** Update the title when an answer has got more rounds. */
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
    const describe = (node) => (byId("round-node").textContent = words(node));
    const box = byId("round-tree");
    byId("round-node").textContent = "";
    if (!this.answer) {
      drawTree(box, EXAMPLE, EXAMPLE_OWN, describe);
      byId("round-node").textContent = "Filled: accepted. Outlined: guessed, not taken. Dashed: the token the model wrote itself.";
      return;
    }
    const round = this.answer.rounds[this.index];
    this.title();
    const text = byId("round-text");
    text.hidden = false;
    text.replaceChildren(...round.tokens.map((token) => el("span", { className: `chip ${token.drafted ? "drafted" : "own"}`, textContent: visible(token.piece) })));
    const tokens = plural(round.tokens.length, "token");
    if (!round.draft) {
      byId("round-summary").textContent = round.drafted
        ? `${tokens} in one pass, ${round.accepted} of them drafted. The trees of this answer went when the page was loaded again.`
        : `Nothing was drafted: one pass of the model, ${tokens}.`;
      box.replaceChildren();
      return;
    }
    const nodes = plural(round.draft.tokens.length, "guess", "guesses");
    byId("round-summary").textContent = `${nodes} checked in one pass, ${round.draft.path.length} accepted: ${tokens} at once.`;
    const own = round.tokens.find((token) => !token.drafted) ?? null;
    drawTree(box, round.draft, own && { id: own.id, piece: own.piece }, describe);
  }
}
