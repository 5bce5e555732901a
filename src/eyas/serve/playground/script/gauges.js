// The server's load, asked for once a second while the page is in sight.

import { byId, percent } from "./dom.js";
import { getJson } from "./stream.js";

const INTERVAL = 1000;
const MEMORY = 40;

export class LoadGauges {
  /** `told(stats)` is called with every reading. */
  constructor(settings, told) {
    this.settings = settings;
    this.told = told;
    this.last = null;
    this.speeds = [];
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.resume());
    this.resume();
  }

  /** Ask now and go on asking; nothing while the page is hidden. */
  resume() {
    clearTimeout(this.timer);
    this.last = null;
    if (!document.hidden) this.poll();
  }

  async poll() {
    try {
      const stats = await getJson("/stats", this.settings.key);
      this.show(stats);
      this.told(stats);
      byId("gauge-note").textContent = "";
    } catch (error) {
      if (error.status === 401) return this.blank("The gauges need the API key."); // asked again when it is there
      this.blank(error.message);
    }
    if (!document.hidden) this.timer = setTimeout(() => this.poll(), INTERVAL);
    return undefined;
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
    const fill = byId("gauge-fill");
    fill.hidden = !stats.cache_limit;
    if (stats.cache_limit) fill.value = stats.cached_tokens / stats.cache_limit;
    byId("gauge-cache").textContent = stats.cache_limit ? percent(stats.cached_tokens / stats.cache_limit) : stats.cached_tokens;
    this.last = stats;
  }

  trend(speed) {
    this.speeds = [...this.speeds, speed].slice(-MEMORY);
    const most = Math.max(...this.speeds, 1);
    const points = this.speeds.map((value, i) => `${(60 * (i + MEMORY - this.speeds.length)) / (MEMORY - 1)},${19 - (18 * value) / most}`);
    byId("gauge-trend").firstElementChild.setAttribute("points", points.join(" "));
  }

  blank(note) {
    this.last = null;
    byId("gauge-note").textContent = note;
    for (const name of ["running", "waiting", "speed", "accept", "cache"]) byId(`gauge-${name}`).textContent = "–";
  }
}
