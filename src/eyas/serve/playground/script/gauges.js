// The server's load, read once a second while the page is visible.

import { byId, percent, plural } from "./dom.js";
import { getJson } from "./stream.js";

const INTERVAL = 1000;
const MEMORY = 40;

export class LoadGauges {
  /** `onStats(stats)` is called with every reading. */
  constructor(settings, onStats) {
    this.settings = settings;
    this.onStats = onStats;
    this.last = null;
    this.speeds = [];
    this.turn = 0; // the number of the current polling; older ones end
    document.addEventListener("visibilitychange", () => this.resume());
    this.resume();
  }

  /** Read now and then in intervals; not while the page is hidden. */
  resume() {
    this.turn += 1;
    this.last = null;
    if (!document.hidden) this.poll(this.turn);
  }

  async poll(turn) {
    let note = "";
    let again = true;
    try {
      const stats = await getJson("stats", this.settings.key);
      if (turn !== this.turn) return;
      this.show(stats);
      this.onStats(stats);
    } catch (error) {
      if (turn !== this.turn) return;
      again = error.status !== 401; // read again once there is a key
      note = again ? error.message : "The gauges need the API key.";
      this.blank();
    }
    byId("gauge-note").textContent = note;
    if (again) setTimeout(() => turn === this.turn && this.poll(turn), INTERVAL);
  }

  show(stats) {
    byId("gauge-running").textContent = stats.running;
    byId("gauge-waiting").textContent = stats.waiting;
    if (this.last) {
      const since = (name) => stats[name] - this.last[name];
      const speed = since("tokens_total") / Math.max(since("seconds"), 0.001);
      byId("gauge-speed").textContent = speed.toFixed(speed < 10 ? 1 : 0);
      this.trend(speed);
      const passes = since("row_rounds_total");
      if (passes > 0) byId("gauge-accept").textContent = (1 + since("accepted_total") / passes).toFixed(2);
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
    byId("gauge-tree-cell").hidden = !stats.tree;
    if (stats.tree) {
      byId("gauge-tree").textContent = stats.tree.budget ? plural(stats.tree.budget, "node") : "off";
      byId("gauge-tree-cell").title = `${plural(stats.tree.depth, "level")} deep, shared by all that run`;
    }
    this.last = stats;
  }

  trend(speed) {
    this.speeds = [...this.speeds, speed].slice(-MEMORY);
    const most = Math.max(...this.speeds, 1);
    const points = this.speeds.map((value, i) => `${(60 * (i + MEMORY - this.speeds.length)) / (MEMORY - 1)},${19 - (18 * value) / most}`);
    byId("gauge-trend").firstElementChild.setAttribute("points", points.join(" "));
  }

  blank() {
    this.last = null;
    for (const name of ["running", "waiting", "speed", "accept", "cache"]) byId(`gauge-${name}`).textContent = "–";
  }
}
