// Loads the page from a server and uses it, in Node: its scripts are linked as modules and run on a DOM without layout.

import assert from "node:assert/strict";
import vm from "node:vm";

import { NodeFilter, parseHTML } from "./linkedom/worker.js";

const [url, count] = process.argv.slice(2); // the server, and how many tokens its usual answer has
const said = []; // messages on the console

const get = async (path, base = url) => {
  const response = await fetch(new URL(path, base));
  assert.ok(response.ok, `${path}: ${response.status}`);
  return response.text();
};

/** What a browser has and linkedom has not. */
function browser(window) {
  const storage = () => {
    const kept = new Map();
    const methods = {
      getItem: (key) => kept.get(key) ?? null,
      setItem: (key, value) => kept.set(key, String(value)),
      removeItem: (key) => kept.delete(key),
    };
    return new Proxy(methods, { ownKeys: () => [...kept.keys()], getOwnPropertyDescriptor: () => ({ enumerable: true, configurable: true }) });
  };
  Object.assign(window.HTMLElement.prototype, {
    scrollTo() {},
    scrollIntoView() {},
    showModal() {
      this.open = true;
    },
  });
  const { document } = window;
  Object.defineProperty(document, "activeElement", { value: document.body });
  const { fetch } = globalThis;
  Object.assign(globalThis, {
    window,
    document,
    NodeFilter,
    localStorage: storage(),
    sessionStorage: storage(),
    matchMedia: () => ({ matches: false }),
    getSelection: () => "",
    requestAnimationFrame: (act) => setTimeout(act, 16),
    ResizeObserver: class {
      observe() {}
    },
    fetch: (path, options) => fetch(new URL(path, url), options),
  });
  // without layout and sanitizer: what comes out of Markdown is trusted here, and is checked in a browser
  globalThis.DOMPurify = {
    addHook() {},
    sanitize(markup) {
      const template = document.createElement("template");
      template.innerHTML = markup;
      return template.content;
    },
  };
  for (const level of ["log", "info", "warn", "error"]) console[level] = (...words) => said.push(`${level}: ${words.join(" ")}`);
  return document;
}

/** Link and run a module and all that it imports. */
async function run(start) {
  const modules = new Map();
  const load = (address) => {
    if (!modules.has(address)) modules.set(address, get(address).then((text) => new vm.SourceTextModule(text, { identifier: address })));
    return modules.get(address);
  };
  const main = await load(start);
  await main.link((name, parent) => load(new URL(name, parent.identifier).href));
  await main.evaluate();
}

async function until(what, condition) {
  const end = Date.now() + 20_000;
  while (!condition()) {
    assert.ok(Date.now() < end, `never came true: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

const { window } = parseHTML(await get("/"));
const document = browser(window);
const one = (selector) => document.querySelector(selector);
const all = (selector) => [...document.querySelectorAll(selector)];
const text = (selector) => all(selector).map((element) => element.textContent).join("\n");
const fire = (element, type, more = {}) => element.dispatchEvent(Object.assign(new window.Event(type, { bubbles: true, cancelable: true }), more));
const click = (selector) => fire(one(selector), "click");
const press = (name) => fire(all("#turns button").findLast((button) => button.textContent === name), "click");
const say = (words, box = "message", form = "composer") => {
  one(`#${box}`).value = words;
  fire(one(`#${form}`), "submit");
};

for (const script of all("script:not([type])")) {
  const code = await get(script.getAttribute("src"));
  if (!script.getAttribute("src").includes("purify")) vm.runInThisContext(code);
}
await run(new URL(one('script[type="module"]').getAttribute("src"), url).href);

await until("the model's name is shown", () => text("#model") === "fake-model");
await until("the gauges are read", () => text("#gauge-running") === "0");

say("first");
await until("an answer has figures", () => text(".figures-line").startsWith(`${count} tokens`));
assert.ok(all(".answer .tok.drafted").length > 0);
assert.equal(text(".answer .code-head span"), "py");
fire(one(".answer .tok"), "focusin");
assert.match(text("#round-title"), /^Round 1 of \d+$/);
assert.ok(all("#round-tree .node").length > 1);

press("Regenerate");
await until("another answer is written", () => text(".figures-line").includes("temperature 0.7, seed 1"));

say("endless");
await until("an answer streams", () => all(".turn").length === 2 && all(".turn")[1].querySelectorAll(".tok").length > 8);
click("#stop");
await until("it is stopped", () => text(".notice").includes("Stopped."));
press("Continue");
await until("it goes on", () => all(".figures-line").length === 2 && all(".notice").length === 0);

press("Edit");
one(".edit-box").value = "changed";
fire(one(".edit-form"), "submit");
await until("the changed message is answered", () => text(".said").endsWith("changed") && all(".figures-line").length === 2);

click("#clear");
assert.equal(all(".turn").length, 0);
click("#open-history");
assert.equal(all("#history-list li").length, 1);

click("#tab-race");
assert.equal(one("#chat").hidden, true);
say("markdown", "race-prompt", "race-form");
await until("the race has a result", () => text("#race-result").includes("Identical: all"));
assert.equal(text("#lane-plain h1"), "Sums");
assert.equal(text("#lane-plain .answer"), text("#lane-speculative .answer"));
say("endless", "race-prompt", "race-form");
await until("a lane runs", () => all("#lane-plain .tok").length > 4);
fire(document, "keydown", { key: "Escape" });
await until("the race is stopped", () => text("#race-result") === "Stopped.");

assert.deepEqual(said, []);
process.exit(0); // the gauges would be read for ever
