// Helpers for DOM elements. Text is only ever set as text, so that nothing a model writes can become markup.

export const byId = (id) => document.getElementById(id);

/** An HTML element; `properties` are its DOM properties (`className`, `ariaLabel`, ...), children are nodes or text. */
export function el(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

/** An SVG element with attributes. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A token's text with spaces and control characters made visible. */
export function visible(piece) {
  if (piece === "") return "∅";
  return piece.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length)).replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll("\r", "␍");
}

/** Announce a text to screen readers. */
export function announce(text) {
  byId("announce").textContent = text;
}

export const percent = (share) => (share >= 0.0995 ? `${Math.round(share * 100)}%` : `${(share * 100).toFixed(1)}%`);

export const plural = (count, word, many = `${word}s`) => `${count} ${count === 1 ? word : many}`;
