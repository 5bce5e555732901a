// Markdown as elements, for texts that nobody vouches for.
//
// A model's answer may hold anything. marked makes markup of its Markdown, with raw HTML and images turned into text and
// links; DOMPurify then lets only the elements and attributes through that Markdown needs; and the page's policy allows
// no one but DOMPurify to make elements of a text.

import { button, copy, el } from "./dom.js";

const { DOMPurify, hljs, marked } = globalThis;

const ALLOWED = {
  ALLOWED_TAGS: "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul".split(" "),
  ALLOWED_ATTR: ["align", "class", "data-language", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i, // no address of this server, and no script
  ADD_URI_SAFE_ATTR: ["align", "data-language", "start"], // these hold no addresses
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const NEAR = 400; // how far ahead in the source a shown character may stand: longer than most addresses of links

const escaped = (text) => text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);

const reader = new marked.Marked({
  gfm: true,
  breaks: true, // small models end lines, not paragraphs
  renderer: {
    html: ({ text }) => escaped(text),
    image({ href, text }) {
      return this.link({ href, title: null, tokens: [{ type: "text", raw: text, text: text || "image" }] });
    },
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    code({ text, lang }) {
      const language = lang?.match(/^\S+/)?.[0] ?? "";
      const known = hljs.getLanguage(language);
      const code = known ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escaped(text);
      return `<pre data-language="${escaped(language)}"><code>${code}</code></pre>\n`;
    },
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer nofollow");
});

/** The blocks of a Markdown text: `{source, tokens}`, whose sources joined are the text. Empty lines go with a block. */
export function blocks(text) {
  let tokens;
  try {
    tokens = reader.lexer(text);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return [{ source: text, tokens: null }]; // nested too deeply for the parser's stack
  }
  const whole = tokens.reduce((sum, token) => sum + token.raw.length, 0) === text.length;
  if (!whole) return [{ source: text, tokens }];
  const found = [];
  for (const token of tokens) {
    if (token.type === "space" && found.length) found.at(-1).source += token.raw;
    else found.push({ source: token.raw, tokens: [token] });
  }
  return found;
}

/** The elements of a block. */
export function elements(block) {
  try {
    if (block.tokens) return DOMPurify.sanitize(reader.parser(block.tokens), ALLOWED);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
  }
  const plain = document.createDocumentFragment();
  plain.append(el("p", { className: "plain", textContent: block.source }));
  return plain;
}

/**
 * Put the shown text of a block into spans. Rendering takes marks away but keeps the order of what it shows: each shown
 * character belongs to the next of its kind in the source. `spanOf(place, text)` makes the span of a text whose first
 * character stands at `place`; `next(place)` is where another span begins.
 */
export function wrap(root, source, next, spanOf) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  let at = 0;
  for (const node of nodes) {
    if (!node.data.trim() && !node.parentElement?.closest("p, pre, li, td, th, h1, h2, h3, h4, h5, h6")) continue;
    const spans = [];
    let begun = 0;
    let place = at;
    let end = -1;
    for (let i = 0; i < node.data.length; i += 1) {
      const found = find(source, node.data[i], at);
      if (found >= 0) at = found + 1;
      const here = found >= 0 ? found : Math.max(at - 1, 0);
      if (here >= end) {
        if (i > begun) spans.push(spanOf(place, node.data.slice(begun, i)));
        [begun, place, end] = [i, here, next(here)];
      }
    }
    if (node.data.length > begun) spans.push(spanOf(place, node.data.slice(begun)));
    node.replaceWith(...spans);
  }
}

/** Where the source has a character from `at` on; -1 if not nearby, or for a space if words come before it. */
function find(source, letter, at) {
  const space = /\s/.test(letter);
  for (let i = at; i < Math.min(source.length, at + NEAR); i += 1) {
    if (source[i] === letter) return i;
    if (space && /[\p{L}\p{N}]/u.test(source[i])) return -1;
  }
  return -1;
}

/** Give blocks of code in `root` their language's name and a button that copies them. */
export function dressCode(root) {
  for (const pre of root.querySelectorAll("pre")) {
    const text = pre.textContent;
    const head = el("div", { className: "code-head" }, el("span", { textContent: pre.dataset.language }));
    head.append(button("Copy", (event) => copy(text, event.currentTarget), { ariaLabel: "Copy the code" }));
    pre.before(head);
  }
}
