// The race: the same request decoded plainly and speculatively, timed and compared token by token.

import { Answer } from "./answer.js";
import { announce, byId, el, fitText, follow, plural } from "./dom.js";
import { streamJson } from "./stream.js";

const MAX_TOKENS = 256; // tokens of an answer, unless the settings have a limit: a race that ends tells more
const LANES = { plain: false, speculative: true };

export class Race {
  constructor(settings, rounds) {
    this.settings = settings;
    this.rounds = rounds;
    this.abort = null;
    this.drafter = true;
    this.warning = null; // why times can't be trusted now, as the server's last reading says
    this.answers = {};
    this.replaying = 0; // the number of the current replay; a newer one, or a race, ends it
    byId("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run(byId("race-prompt").value);
    });
    byId("race-prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.run(event.target.value);
    });
    byId("race-stop").addEventListener("click", () => this.stop());
    byId("race-replay").addEventListener("click", () => this.replay());
    fitText(byId("race-prompt"));
    this.ends = {}; // lane -> what scrolls to its end
    for (const lane of Object.keys(LANES)) {
      this.ends[lane] = follow(byId(`lane-${lane}`).parentElement, byId(`lane-${lane}`));
      this.figures(lane, null, 0);
    }
  }

  get busy() {
    return this.abort !== null;
  }

  stop() {
    this.abort?.abort();
  }

  async run(prompt) {
    if (this.busy || !prompt.trim()) return;
    const result = byId("race-result");
    if (!this.drafter) return this.problem("The server runs without a drafter: there is nothing to race against.");
    result.replaceChildren();
    this.rounds.clear();
    this.working(new AbortController());
    const messages = [{ role: "user", content: prompt }];
    this.answers = {};
    this.limit = this.settings.values.maxTokens ?? MAX_TOKENS;
    this.cut = false; // whether an answer isn't whole
    this.replaying += 1;
    byId("race-replay").hidden = true;
    for (const lane of Object.keys(LANES)) byId(`lane-${lane}`).replaceChildren();
    for (const lane of Object.keys(LANES)) this.figures(lane, null, 0);
    announce("The race has begun");
    try {
      // the prompt is computed once beforehand, so that both lanes find it cached
      for await (const _ of this.ask(messages, { speculate: true, maxTokens: 1 }));
      for (const [lane, speculate] of Object.entries(LANES)) this.answers[lane] = await this.lap(lane, messages, speculate);
      this.verdict(this.answers.plain, this.answers.speculative);
      byId("race-replay").hidden = false;
    } catch (error) {
      if (error.name === "AbortError") this.say("Stopped.");
      else this.problem(error.message, error.status);
    }
    this.working(null);
    return undefined;
  }

  ask(messages, changes) {
    return streamJson("v1/chat/completions", this.settings.body(messages, changes), this.settings.key, this.abort.signal);
  }

  async lap(lane, messages, speculate) {
    const answer = new Answer(byId(`lane-${lane}`), (shown, index) => this.rounds.show(shown, index));
    answer.begin();
    this.ends[lane]();
    const timer = setInterval(() => this.figures(lane, answer, (performance.now() - answer.began) / 1000), 100);
    let usage = null;
    try {
      for await (const event of this.ask(messages, { speculate, maxTokens: this.limit })) {
        usage = event.usage ?? usage;
        if (event.choices?.[0]) answer.add(event.choices[0]);
        this.cut ||= event.choices?.[0]?.finish_reason === "length";
        this.rounds.grown(answer);
      }
    } finally {
      clearInterval(timer);
      answer.finish(usage);
      this.figures(lane, answer, answer.seconds);
    }
    return answer;
  }

  /** Write the figures above a lane: those of an answer (null before the start), or of its first rounds. */
  figures(lane, answer, seconds, rounds = answer?.rounds) {
    const count = (rounds ?? []).reduce((total, round) => total + round.tokens.length, 0);
    const shown = {
      "Tokens/s": count && seconds ? (count / seconds).toFixed(1) : "–",
      Elapsed: rounds ? `${seconds.toFixed(1)} s` : "–",
      Tokens: rounds ? String(count) : "–",
      "Per pass": answer?.perPass(rounds)?.toFixed(2) ?? "–",
    };
    byId(`lane-${lane}-figures`).replaceChildren(
      ...Object.entries(shown).map(([name, value]) => el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value }))),
    );
  }

  /** Show both lanes again at once, at the speeds they had. */
  replay() {
    const began = performance.now();
    const number = ++this.replaying;
    const end = Math.max(...Object.values(this.answers).map((answer) => answer.seconds));
    const frame = () => {
      if (number !== this.replaying) return;
      const now = (performance.now() - began) / 1000;
      for (const [lane, answer] of Object.entries(this.answers)) {
        const seconds = Math.min(now, answer.seconds);
        this.figures(lane, answer, seconds, answer.rewind(seconds));
      }
      if (now < end) requestAnimationFrame(frame);
    };
    frame();
  }

  /** Show the speedup, and whether both answers are the same. */
  verdict(plain, speculative) {
    const [ours, theirs] = [speculative.tokens, plain.tokens];
    const differing = ours.findIndex((token, i) => token.id !== theirs[i]?.id || token.piece !== theirs[i]?.piece);
    const at = differing >= 0 ? differing : ours.length < theirs.length ? ours.length : -1;
    const ratio = (ours.length * plain.seconds) / (theirs.length * speculative.seconds || 1);
    const sameness = at < 0 ? `Identical: all ${ours.length} tokens.` : `Different from token ${at + 1} on.`;
    if (at >= 0) [speculative, plain].forEach((answer) => answer.spans(at).forEach((span) => span.classList.add("differs")));
    const speed = `${ratio.toFixed(2)}× ${ratio >= 1 ? "as fast" : "the speed"}`;
    byId("race-result").replaceChildren(
      el("strong", { className: "speedup", textContent: speed }),
      el("span", { className: at < 0 ? "same" : "problem-text", textContent: sameness }),
      ...(this.cut ? [el("span", { textContent: `Cut off at ${plural(this.limit, "token")}.` })] : []),
      ...this.doubts(ratio, speculative.perPass() ?? 1),
    );
  }

  /** What speaks against the speedup: a busy machine, or more speed than tokens per pass can give. */
  doubts(ratio, perPass) {
    const found = this.warning ? [`Beware: ${this.warning}.`] : [];
    if (ratio > 1.05 * perPass) {
      const figures = `${ratio.toFixed(2)}× at ${perPass.toFixed(2)} tokens per pass`;
      found.push(`Beware: ${figures} can't be, so something slowed the plain lane down. Race again.`);
    }
    return found.map((text) => el("span", { className: "problem-text", textContent: text }));
  }

  say(text) {
    byId("race-result").replaceChildren(el("span", { textContent: text }));
  }

  problem(text, status = 0) {
    byId("race-result").replaceChildren(el("div", { className: "problem", role: "alert", textContent: text }));
    if (status === 401) this.settings.open(text, "key");
  }

  working(abort) {
    this.abort = abort;
    const focused = document.activeElement;
    byId("race-start").hidden = this.busy;
    byId("race-stop").hidden = !this.busy;
    if (focused === byId("race-start") && this.busy) byId("race-stop").focus();
    if (focused === byId("race-stop") && !this.busy) byId("race-start").focus();
  }
}
