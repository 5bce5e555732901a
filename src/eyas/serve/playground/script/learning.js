// What a server that learns has learned: accept length by minute, its generations, and every event. Nothing is changed here.

import { byId, el, svg } from "./dom.js";
import { getJson } from "./stream.js";

const INTERVAL = 5000;
const WIDTH = 600;
const HEIGHT = 160;

export class Learning {
  constructor(settings) {
    this.settings = settings;
    this.shown = false;
    this.turn = 0; // the number of the current polling; older ones end
  }

  /** Read in intervals for as long as the view is shown. */
  show(shown) {
    this.shown = shown;
    this.turn += 1;
    if (shown) this.poll(this.turn);
  }

  async poll(turn) {
    try {
      const found = document.hidden ? null : await getJson("learning", this.settings.key);
      if (turn !== this.turn) return;
      if (found) this.draw(found);
    } catch (error) {
      if (turn !== this.turn) return;
      byId("learning-note").textContent = error.message;
    }
    setTimeout(() => turn === this.turn && this.poll(turn), INTERVAL);
  }

  draw({ state, generations, events, curve }) {
    const trial = state.wanted === state.settled ? "" : `, generation ${state.wanted} is on trial`;
    byId("learning-note").textContent = `Generation ${state.settled} serves${trial}${state.pinned ? ", pinned" : ""}.`;
    byId("learning-curve").replaceChildren(...plotted(curve, events));
    byId("learning-generations").replaceChildren(...generations.map(rowOf));
    byId("learning-events").replaceChildren(...[...events].reverse().map(itemOf));
  }
}

/** The curve, its scale, and a line for each event that changed what is served. */
function plotted(curve, events) {
  if (curve.length < 2) return [svg("text", { x: 8, y: 20 }, "Two minutes of drafted rounds make a curve.")];
  const first = curve[0].time;
  const last = Math.max(curve.at(-1).time, first + 60);
  const lengths = curve.map((point) => point.accept_length);
  const most = Math.max(...lengths, 1.5);
  const x = (time) => ((WIDTH * (time - first)) / (last - first)).toFixed(1);
  const y = (length) => (HEIGHT - 4 - ((HEIGHT - 24) * (length - 1)) / (most - 1)).toFixed(1);
  const lines = events
    .filter((one) => ["trial", "settled", "reverted"].includes(one.event) && one.time >= first && one.time <= last)
    .map((one) => svg("line", { class: one.event, x1: x(one.time), x2: x(one.time), y1: 16, y2: HEIGHT }, svg("title", {}, titleOf(one))));
  const points = curve.map((point) => `${x(point.time)},${y(point.accept_length)}`).join(" ");
  const scale = `accept length 1 to ${most.toFixed(2)}, ${when(first)} to ${when(last)}`;
  return [...lines, svg("polyline", { points }), svg("text", { x: 2, y: 11 }, scale)];
}

function rowOf(card) {
  const { recent_incumbent: before, recent_candidate: after } = card.gate;
  const test = after === undefined ? "" : `${before.toFixed(2)} → ${after.toFixed(2)}`;
  const cells = [card.number, card.parent ?? "", when(card.made), card.traffic_rows, card.store_rows, card.steps, test];
  return el("tr", {}, ...cells.map((cell) => el("td", {}, String(cell))));
}

const itemOf = (one) => el("li", {}, el("time", {}, when(one.time)), ` ${titleOf(one)}`);

/** An event in words: its name, and whatever else is known of it. */
function titleOf({ time, event, ...rest }) {
  const facts = Object.entries(rest).map(([name, value]) => `${name} ${value}`);
  return [event, ...facts].join(", ");
}

const when = (seconds) => new Date(seconds * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
