// The server's load, read once a second while the page is visible.

import { byId, percent, plural } from "./dom.js";
import { getJson } from "./stream.js";

const INTERVAL = 1000;
const LONGEST = 16; // intervals between attempts to reach a server that is gone
const MEMORY = 40; // readings in the trend of tokens/s
const RECENT = 10; // readings with passes, over which accept length and trees are averaged: a single one may hold no draft

export class LoadGauges {
  /** `onStats(stats)` is called with every reading, `onFailure(error)` if there is none. */
  constructor(settings, { onStats, onFailure }) {
    this.settings = settings;
    this.onStats = onStats;
    this.onFailure = onFailure;
    this.last = null;
    this.speeds = [];
    this.recent = []; // {passes, accepted, nodes}
    this.failures = 0; // one after the other
    this.turn = 0; // the number of the current polling; older ones end
    document.addEventListener("visibilitychange", () => this.resume());
    this.resume();
  }

  /** Read now and then in intervals; not while the page is hidden. */
  resume() {
    this.turn += 1;
    this.last = null;
    this.failures = 0;
    if (!document.hidden) this.poll(this.turn);
  }

  async poll(turn) {
    let note = "";
    let again = true;
    try {
      const stats = await getJson("stats", this.settings.key);
      if (turn !== this.turn) return;
      this.failures = 0;
      if (stats.unavailable) {
        note = `Not ready: ${stats.unavailable}.`;
        this.blank();
      } else this.show(stats);
      this.onStats(stats);
    } catch (error) {
      if (turn !== this.turn) return;
      this.failures += 1;
      again = error.status !== 401; // read again once there is a key
      note = again ? error.message : "The gauges need the API key.";
      this.blank();
      this.onFailure(error);
    }
    byId("gauge-note").textContent = note;
    if (again) setTimeout(() => turn === this.turn && this.poll(turn), INTERVAL * Math.min(2 ** this.failures, LONGEST));
  }

  show(stats) {
    byId("gauge-running").textContent = stats.running;
    byId("gauge-waiting").textContent = stats.waiting;
    if (this.last) {
      const since = (name) => stats[name] - this.last[name];
      const speed = since("tokens_total") / Math.max(since("seconds"), 0.001);
      byId("gauge-speed").textContent = speed.toFixed(speed < 10 ? 1 : 0);
      this.trend(speed);
      this.drafts({ passes: since("row_rounds_total"), accepted: since("accepted_total"), nodes: since("nodes_total") });
    }
    const contexts = Object.entries(stats.by_context);
    byId("gauge-context-cell").hidden = contexts.length < 2;
    byId("gauge-context").textContent = contexts
      .map(([context, one]) => `${context}: ${(1 + one.accepted_total / one.row_rounds_total).toFixed(2)}`)
      .join(", ");
    const fill = byId("gauge-fill");
    fill.hidden = !stats.cache_limit;
    if (stats.cache_limit) fill.value = stats.cached_tokens / stats.cache_limit;
    byId("gauge-cache").textContent = stats.cache_limit ? percent(stats.cached_tokens / stats.cache_limit) : stats.cached_tokens;
    byId("gauge-tree-cell").hidden = !stats.speculating;
    this.last = stats;
  }

  /** Show what was drafted and accepted lately; what was last seen stays while nothing runs. */
  drafts(reading) {
    if (reading.passes <= 0) return;
    this.recent = [...this.recent, reading].slice(-RECENT);
    const total = (name) => this.recent.reduce((sum, one) => sum + one[name], 0);
    const nodes = total("nodes") / total("passes");
    byId("gauge-accept").textContent = (1 + total("accepted") / total("passes")).toFixed(2);
    byId("gauge-tree").textContent = nodes ? plural(Number(nodes.toFixed(nodes < 10 ? 1 : 0)), "node") : "none";
  }

  trend(speed) {
    this.speeds = [...this.speeds, speed].slice(-MEMORY);
    const most = Math.max(...this.speeds, 1);
    const points = this.speeds.map((value, i) => `${(60 * (i + MEMORY - this.speeds.length)) / (MEMORY - 1)},${19 - (18 * value) / most}`);
    byId("gauge-trend").firstElementChild.setAttribute("points", points.join(" "));
  }

  blank() {
    this.last = null;
    this.recent = [];
    for (const name of ["running", "waiting", "speed", "accept", "tree", "cache"]) byId(`gauge-${name}`).textContent = "–";
  }
}
