// The page: creates its parts and connects them.

import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { LoadGauges } from "./gauges.js";
import { Learning } from "./learning.js";
import { Look } from "./look.js";
import { Race } from "./race.js";
import { Rounds } from "./rounds.js";
import { Settings } from "./settings.js";
import { getJson } from "./stream.js";

new Look();
const settings = new Settings();
const rounds = new Rounds();
const chat = new Chat(settings, rounds);
const race = new Race(settings, rounds);
const learning = new Learning(settings);
const tabs = [byId("tab-chat"), byId("tab-race"), byId("tab-learning")];
let connected = false;
let keyRefused = null; // the key, perhaps "", for which the user was asked to give another
const gauges = new LoadGauges(settings, {
  onStats(stats) {
    if (stats.unavailable) return lost("not ready");
    race.drafter = stats.speculating;
    race.warning = stats.busy;
    byId("set-speculate").disabled = !stats.speculating;
    byId("legend").hidden = !stats.speculating;
    byId("tab-learning").hidden = !stats.learning;
    if (!stats.learning && !byId("learning").hidden) choose(tabs[0]);
    return connected ? undefined : connect();
  },
  onFailure: failed,
});

/** The name in a model's id, which may be the path of its folder. */
function modelName(id) {
  const cached = id.match(/models--([^/]+)\/snapshots\//); // a folder of the Hub's cache
  if (cached) return cached[1].replaceAll("--", "/");
  if (/^[\w.-]+\/[\w.-]+$/.test(id) && !id.startsWith(".")) return id; // a name on the Hub
  return id.split("/").filter(Boolean).at(-1) ?? id;
}

/** Find out which model is served, first of all and whenever the server was away: it may be another one then. */
async function connect() {
  connected = true;
  try {
    const models = await getJson("v1/models", settings.key);
    settings.model = models.data[0].id;
    byId("model").textContent = modelName(settings.model);
    document.title = `${byId("model").textContent} · eyas`;
    byId("model").title = settings.model;
  } catch (error) {
    failed(error);
  }
}

function lost(why) {
  connected = false;
  byId("model").textContent = why;
}

/** The server didn't answer. If it wants another API key, the user is asked for it once. */
function failed(error) {
  const keyWanted = error.status === 401;
  lost(keyWanted ? "API key needed" : "not connected");
  if (!keyWanted || keyRefused === settings.key) return;
  keyRefused = settings.key;
  settings.open(error.message, "key");
}

settings.onChange = () => {
  keyRefused = null;
  gauges.resume();
  chat.dress();
};

function choose(tab) {
  for (const other of tabs) {
    const chosen = other === tab;
    other.setAttribute("aria-selected", String(chosen));
    other.tabIndex = chosen ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !chosen;
  }
  learning.show(tab === byId("tab-learning"));
}

for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const there = tabs.filter((one) => !one.hidden);
    const other = there.at((there.indexOf(tab) + (event.key === "ArrowRight" ? 1 : -1)) % there.length);
    choose(other);
    other.focus();
  });
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  chat.stop();
  race.stop();
});

if (matchMedia("(hover: hover)").matches) byId("message").focus();
