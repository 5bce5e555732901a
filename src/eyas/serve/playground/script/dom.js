// Helpers for DOM elements. Text is only ever set as text; what becomes markup goes through markdown.js.

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

/** A quiet button that runs `act` when it is pressed. */
export function button(text, act, properties = {}) {
  const made = el("button", { type: "button", className: "quiet small", textContent: text, ...properties });
  made.addEventListener("click", act);
  return made;
}

/** Put a text on the clipboard, and say so on the button that was pressed. */
export async function copy(text, pressed) {
  const written = await writeClipboard(text);
  const before = pressed.dataset.name ?? pressed.textContent;
  pressed.dataset.name = before;
  pressed.textContent = written ? "Copied" : "Not copied";
  setTimeout(() => (pressed.textContent = before), 1500);
  announce(pressed.textContent);
}

async function writeClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // plain HTTP from another machine has no clipboard API, or the user refused
    const box = el("textarea", { value: text, className: "hidden" });
    const focused = document.activeElement;
    document.body.append(box);
    box.select();
    const written = document.execCommand("copy");
    box.remove();
    focused?.focus();
    return written;
  }
}

/** Let a text area be as high as its text, up to its `max-height`, also while it is typed. Returns what fits it again. */
export function fitText(box) {
  const fit = () => {
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight + box.offsetHeight - box.clientHeight}px`;
  };
  box.addEventListener("input", fit);
  return fit;
}

/** Keep the end of `view` visible as `content` in it grows, unless the reader has scrolled away. Returns what goes to the end. */
export function follow(view, content) {
  let following = true;
  const keep = () => {
    if (following) view.scrollTop = view.scrollHeight;
  };
  view.addEventListener("scroll", () => {
    following = view.scrollHeight - view.scrollTop - view.clientHeight < 60;
  });
  new ResizeObserver(keep).observe(content);
  return () => {
    following = true;
    keep();
  };
}

/** Let the browser save a text as a file. */
export function saveFile(name, text, type) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Announce a text to screen readers. */
export function announce(text) {
  byId("announce").textContent = text;
}

export const percent = (share) => (share >= 0.0995 ? `${Math.round(share * 100)}%` : `${(share * 100).toFixed(1)}%`);

export const plural = (count, word, many = `${word}s`) => `${count} ${count === 1 ? word : many}`;
