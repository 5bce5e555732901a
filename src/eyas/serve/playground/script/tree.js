// Draws a draft tree: levels from left to right, the most likely child on its parent's line, the accepted path marked.

import { percent, svg, visible } from "./dom.js";

const ROW = 42;
const PILL = 36;
const MIN_COLUMN = 76;
const GAP = 18;
const ROOT = 18;

/**
 * The nodes of a drawing in reading order, with `column` and `row` set. `draft` is the server's JSON; `own`, if given,
 * is the target's own token, which comes after the last accepted node.
 */
export function layout(draft, own) {
  const nodes = draft.tokens.map((id, i) => {
    const above = draft.parents[i] < 0 ? 0 : draft.logprob[draft.parents[i]];
    const kind = draft.path.includes(i) ? "walked" : "left";
    return { id, piece: draft.pieces[i], path: Math.exp(draft.logprob[i]), share: Math.exp(draft.logprob[i] - above), kind, parent: draft.parents[i], children: [] };
  });
  const first = [];
  nodes.forEach((node) => (node.parent < 0 ? first : nodes[node.parent].children).push(node));
  if (own) {
    const end = draft.path.at(-1) ?? -1;
    (end < 0 ? first : nodes[end].children).push({ ...own, kind: "own", parent: end, children: [] });
  }
  // the accepted path first, then the most likely
  const rank = (node) => (node.kind === "left" ? node.share : node.kind === "own" ? 3 : 2);
  const order = [];
  let row = 0;
  const arrange = (siblings, column, parent) => {
    siblings.sort((a, b) => rank(b) - rank(a));
    siblings.forEach((node, i) => {
      if (i > 0) row += 1;
      Object.assign(node, { column, row, parent });
      order.push(node);
      arrange(node.children, column + 1, node);
    });
  };
  arrange(first, 0, null);
  return { nodes: order, rows: row + 1, columns: 1 + Math.max(...order.map((node) => node.column)) };
}

/** A description of a node, for the line below the tree and for screen readers. */
export function words(node) {
  const name = `“${visible(node.piece)}” (token ${node.id})`;
  if (node.kind === "own") return `${name}: the model's own token`;
  const fate = node.kind === "walked" ? "accepted" : "not taken";
  return `${name}: ${percent(node.share)} after its parent, ${percent(node.path)} for the whole path, ${fate}`;
}

/** Draw into `box`; `describe(node)` is called for the node pointed at or reached by the keyboard. */
export function drawTree(box, draft, own, describe) {
  const { nodes, rows, columns } = layout(draft, own);
  const column = Math.max(MIN_COLUMN, Math.min(132, (box.clientWidth - ROOT - 2) / columns));
  const width = ROOT + columns * column + 1; // and half a stroke
  const drawing = svg("svg", { class: "tree", role: "tree", "aria-label": "Draft tree", width, height: rows * ROW, viewBox: `0 0 ${width} ${rows * ROW}` });
  const left = (node) => ROOT + node.column * column + GAP;
  const middle = (node) => node.row * ROW + ROW / 2;
  const wires = svg("g", { "aria-hidden": "true" }, svg("circle", { class: "root", cx: 6, cy: ROW / 2, r: 5 }));
  for (const node of [...nodes].reverse()) {
    const from = node.parent ? [left(node.parent) + column - GAP, middle(node.parent)] : [11, ROW / 2];
    const to = [left(node), middle(node)];
    const bend = (from[0] + to[0]) / 2;
    wires.append(svg("path", { class: `wire ${node.kind}`, d: `M${from} C${bend},${from[1]} ${bend},${to[1]} ${to}` }));
  }
  drawing.append(wires);
  for (const node of nodes) {
    node.element = pill(node, left(node), middle(node) - PILL / 2, column - GAP);
    node.element.addEventListener("pointerenter", () => describe(node));
    node.element.addEventListener("focus", () => describe(node));
    node.element.addEventListener("click", () => reach(nodes, node));
    drawing.append(node.element);
  }
  nodes[0].element.setAttribute("tabindex", "0");
  drawing.addEventListener("keydown", (event) => step(event, nodes));
  box.replaceChildren(drawing);
  box.scrollTo(0, 0);
}

function pill(node, x, y, width) {
  const group = svg("g", { class: `node ${node.kind}`, role: "treeitem", tabindex: "-1", "aria-level": node.column + 1, "aria-label": words(node) });
  const letters = Math.max(2, Math.floor((width - 11) / 7.3));
  const name = visible(node.piece);
  group.append(
    svg("rect", { class: "body", x, y, width, height: PILL, rx: 7 }),
    svg("text", { class: "name", x: x + 6, y: y + 15 }, name.length > letters ? `${name.slice(0, letters - 1)}…` : name),
    svg("text", { class: "share", x: x + 6, y: y + 28 }, node.kind === "own" ? "own" : percent(node.share)),
  );
  if (node.kind !== "own") group.append(svg("rect", { class: "bar", x: x + 1, y: y + PILL - 4, width: (width - 2) * Math.min(1, node.share), height: 3, rx: 1.5 }));
  return group;
}

function reach(nodes, node) {
  for (const other of nodes) other.element.setAttribute("tabindex", other === node ? "0" : "-1");
  node.element.focus();
}

function step(event, nodes) {
  const at = nodes.findIndex((node) => node.element === document.activeElement);
  if (at < 0) return;
  const goal = {
    ArrowRight: () => nodes[at].children[0],
    ArrowLeft: () => nodes[at].parent,
    ArrowDown: () => nodes[at + 1],
    ArrowUp: () => nodes[at - 1],
    Home: () => nodes[0],
    End: () => nodes.at(-1),
  }[event.key];
  if (!goal) return;
  event.preventDefault();
  const node = goal();
  if (node) reach(nodes, node);
}
