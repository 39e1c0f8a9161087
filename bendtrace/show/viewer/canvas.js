// The picture: what is shown of the tree, as SVG.

const FONT = 'system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const WIDEST = 230; // of a text, in pixels
const NODE_PAD = 10;

function make(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const widthOf = (() => {
  const context = document.createElement("canvas").getContext("2d");
  context.font = `600 12px ${FONT}`; // as titles are; other texts are narrower
  const known = new Map();
  return (string) => {
    if (!known.has(string)) known.set(string, context.measureText(string).width);
    return known.get(string);
  };
})();

// Cut to a width: names in the middle, since their ends tell them apart.
function fitted(string, most = WIDEST) {
  if (widthOf(string) <= most) return string;
  let keep = Math.floor((string.length * most) / widthOf(string));
  for (; keep > 4; keep--) {
    const cut = `${string.slice(0, Math.ceil(keep * 0.6))}\u2026${string.slice(-Math.floor(keep * 0.4))}`;
    if (widthOf(cut) <= most) return cut;
  }
  return string.slice(0, 4);
}

// The name of a module within what it stands in: `0.attn` within `h`.
function nameWithin(name, parent) {
  const outer = parent?.kind === "module" ? run.modules[parent.calls[0]].name : "";
  return outer && name.startsWith(`${outer}.`) ? name.slice(outer.length + 1) : name;
}

// What a node says: a title, a line below it, and a badge for several passes.
function captions(item) {
  item.captions ??= captionsOf(item);
  return item.captions;
}

function captionsOf(item) {
  const [first] = item.things;
  const passes = passesOf(item);
  const badge = passes > 1 && item.kind !== "step" ? `\u00d7${passes}` : "";
  if (item.kind === "group") {
    const leaves = [...item.leaves()].length;
    const end = (each, place) =>
      each.kind === "group" ? end(each.children.at(place), place) : each;
    const ends = [0, -1].map((place) => captions(end(item, place)).title);
    return { title: ends.join(" \u2026 "), below: text.some(leaves, "node"), badge: "" };
  }
  if (item.kind === "module") {
    let parent = item.parent;
    while (parent.kind === "group") parent = parent.parent;
    const count = [...item.leaves()].length;
    const pass = !badge && first.passes ? `:${first.number}` : "";
    const title = nameWithin(first.name, parent) + pass;
    return { title, below: `${first.type} \u00b7 ${text.some(count, "node")}`, badge };
  }
  if (item.kind === "step") {
    return { title: first.text || first.kind, below: sidesTaken(item), badge };
  }
  const title = passes > 1 ? first.name : first.label;
  if (item.kind === "number") return { title: `${title} = ${valuesOf(item)}`, below: "", badge };
  const results = item.things.length / passes;
  const shape =
    (first.shape ? text.shape(first.shape) : (first.value ?? "")) +
    (results > 1 ? `, \u2026 ${Math.round(results)} results` : "");
  if (!item.wrapped.length) return { title, below: shape, badge };
  const inner = item.wrapped.at(-1).map((index) => run.modules[index])[0];
  const pass = !badge && inner.passes ? `:${inner.number}` : "";
  return { title: nameWithin(inner.name, item.parent) + pass, below: `${title} ${shape}`, badge };
}

// How often it ran; an op may give several results each time.
const passesOf = (item) =>
  item.kind === "op"
    ? item.things.filter((entry) => entry.first === entry).length
    : item.things.length;

function valuesOf(item) {
  const values = new Set(item.things.map((entry) => entry.value));
  const [only] = values;
  return values.size > 1 ? `${only}, \u2026` : only;
}

// "if \u2192 True", "while \u2192 True \u00d72, False"
function sidesTaken(item) {
  const counts = new Map();
  for (const step of item.things) {
    const side = text.taken(step);
    counts.set(side, (counts.get(side) ?? 0) + 1);
  }
  const sides = [...counts].map(([side, count]) => (count > 1 ? `${side} \u00d7${count}` : side));
  const told = sides.length > 3 ? [...sides.slice(0, 2), `${sides.length - 2} more`] : sides;
  return `${item.things[0].kind} \u2192 ${told.join(", ")}`;
}

function measure(item, isFrame = false) {
  const { title, below, badge } = captions(item);
  const extra = badge ? widthOf(badge) + 12 : 0;
  const sign = item.isBox ? 22 : 0;
  if (isFrame) {
    return { width: widthOf(fitted(frameTitle(item), 420)) + extra + 30 + 2 * NODE_PAD };
  }
  const wide = Math.max(widthOf(fitted(title)) + extra, widthOf(fitted(below)) * 0.88) + sign;
  if (item.kind === "step") return { width: wide + 56, height: 44 };
  return { width: Math.max(56, wide + 2 * NODE_PAD), height: below ? 40 : 26 };
}

function frameTitle(item) {
  const { title } = captions(item);
  return item.kind === "module" ? `${title}  ${item.things[0].type}` : title;
}

// How much of the colour scale a node gets, from what its values took together.
function weights(boxes, measured) {
  if (measured === "kind") return new Map();
  const sum = (item) => {
    const entries = item.isBox ? [...item.leaves()].flatMap((leaf) => leaf.entries) : item.entries;
    return entries.reduce((total, index) => total + (run.entries[index][measured] ?? 0), 0);
  };
  const found = new Map(
    boxes.filter((box) => !box.isFrame).map((box) => [box.item, sum(box.item)]),
  );
  const most = Math.max(...found.values(), Number.MIN_VALUE);
  for (const [item, value] of found) found.set(item, value / most);
  return found;
}

const PLAIN = new Set(["input", "output", "number", "step"]);

function familyOf(item) {
  if (item.isBox) return item.kind;
  if (PLAIN.has(item.kind)) return item.kind;
  return run.entries[item.entries[0]].states ? "weighted" : "op";
}

// Draws everything anew. Returns elements by item, and those of wires with what they connect.
function paint(drawing, opened, measured) {
  const layers = ["frames", "wires", "nodes"].map((id) => document.getElementById(id));
  const shades = weights(drawing.boxes, measured);
  const elements = new Map();
  const wires = [];
  const [frames, lines, nodes] = layers.map(() => document.createDocumentFragment());
  for (const wire of drawing.wires) {
    const element = wireElement(wire);
    wires.push({ element, wire });
    lines.append(element);
  }
  for (const box of drawing.boxes) {
    const element = box.isFrame ? frameElement(box) : nodeElement(box, shades.get(box.item));
    describe(element, box, opened);
    elements.set(box.item, element);
    (box.isFrame ? frames : nodes).append(element);
  }
  layers[0].replaceChildren(frames);
  layers[1].replaceChildren(lines);
  layers[2].replaceChildren(nodes);
  return { elements, wires };
}

function describe(element, { item, isFrame }, opened) {
  const { title, below, badge } = captions(item);
  const [first] = item.things;
  let level = 0;
  for (const above of item.ancestors()) level += above ? 1 : 0;
  element.classList.add(isFrame ? "frame" : "node", familyOf(item));
  element.dataset.id = item.id;
  element.dataset.kind = item.kind;
  element.dataset.name = first ? (first.label ?? first.text) : title;
  element.setAttribute("role", "treeitem");
  element.setAttribute("tabindex", "-1");
  element.setAttribute("aria-level", level);
  element.setAttribute("aria-selected", "false");
  element.setAttribute("aria-label", [item.kind, title, badge, below].filter(Boolean).join(", "));
  if (item.isBox) element.setAttribute("aria-expanded", opened.has(item.id));
  element.prepend(make("title", {}, fullTitle(item)));
}

function fullTitle(item) {
  const [first] = item.things;
  const { title, below } = captions(item);
  if (!first) return title;
  const place = first.source == null ? "" : text.place(run.sources[first.source]);
  return [first.label ?? first.text, below, first.path, place].filter(Boolean).join("\n");
}

function nodeElement({ item, x, y, w, h }, shade) {
  const { title, below, badge } = captions(item);
  const group = make("g", { transform: `translate(${round(x)},${round(y)})` });
  const isStep = item.kind === "step";
  if (badge)
    group.append(make("rect", { class: "behind", x: 4, y: 4, width: w, height: h, rx: 6 }));
  const tip = h / 2;
  const outline = isStep
    ? make("path", {
        class: "shape",
        d: `M0,${tip}L${tip},0H${w - tip}L${w},${tip}L${w - tip},${h}H${tip}Z`,
      })
    : make("rect", {
        class: "shape",
        width: w,
        height: h,
        rx: { op: 6, module: 6, group: 6 }[item.kind] ?? h / 2,
      });
  if (shade !== undefined) {
    group.classList.add("shaded");
    outline.style.fill = `color-mix(in oklab, var(--hot) ${Math.round(75 * Math.sqrt(shade))}%, var(--card))`;
  }
  const middle = (w - (item.isBox ? 22 : 0)) / 2;
  const heading = make(
    "text",
    { class: "title", x: middle, y: below ? h / 2 - 3 : h / 2 + 4 },
    fitted(title),
  );
  if (badge) heading.append(make("tspan", { class: "badge", dx: 5 }, badge));
  group.append(outline, heading);
  if (below)
    group.append(make("text", { class: "below", x: middle, y: h / 2 + 13 }, fitted(below)));
  if (item.isBox) group.append(signElement(w - 16, h / 2, false));
  if (isSaved(item)) group.append(make("circle", { class: "saved", cx: w - 5, cy: 5, r: 2.2 }));
  return group;
}

const isSaved = (item) => !item.isBox && item.entries.some((index) => run.entries[index].saved);

function frameElement({ item, x, y, w, h }) {
  const { badge } = captions(item);
  const group = make("g", { transform: `translate(${round(x)},${round(y)})` });
  if (badge)
    group.append(make("rect", { class: "behind", x: 4, y: 4, width: w, height: h, rx: 8 }));
  const name = make("text", { class: "title", x: 10, y: 17 }, fitted(captions(item).title, 300));
  if (item.kind === "module")
    name.append(make("tspan", { class: "faint", dx: 6 }, fitted(item.things[0].type, 160)));
  if (badge) name.append(make("tspan", { class: "badge", dx: 6 }, badge));
  group.append(
    make("rect", { class: "shape", width: w, height: h, rx: 8 }),
    name,
    signElement(w - 15, 14, true),
  );
  return group;
}

function signElement(x, y, isOpen) {
  const arms = isOpen ? "M-4,0H4" : "M-4,0H4M0,-4V4";
  return make(
    "g",
    { class: "sign", transform: `translate(${round(x)},${round(y)})` },
    make("rect", { x: -12, y: -12, width: 24, height: 24, class: "target" }),
    make("circle", { r: 8 }),
    make("path", { d: arms }),
  );
}

const round = (number) => Math.round(number * 10) / 10;

function wireElement({ points, links, isBack, isLoop, isLast }) {
  const kinds = new Set(links.map((link) => link.kind));
  const kind = kinds.has("data") ? "data" : kinds.has("number") ? "number" : "control";
  const head = isLast ? { "marker-end": "url(#head)" } : {};
  const classes = ["wire", kind, isBack ? "back" : ""].filter(Boolean).join(" ");
  const d = isLoop ? bent(points) : isBack ? around(points) : curve(points);
  return make("path", { class: classes, d, ...head });
}

// Straight down between the two points of a pair, and an S from each pair to the next.
function curve(points) {
  let d = `M${at(points[0])}`;
  for (let i = 1; i < points.length; i++) {
    const [[x, y], [nextX, nextY]] = [points[i - 1], points[i]];
    // An arrow has no direction at the end of a line of no length.
    if (Math.abs(x - nextX) < 0.5 && Math.abs(y - nextY) < 0.5) continue;
    if (Math.abs(x - nextX) < 0.5) {
      d += `V${round(nextY)}`;
    } else {
      const middle = (y + nextY) / 2;
      d += `C${at([x, middle])} ${at([nextX, middle])} ${at([nextX, nextY])}`;
    }
  }
  return d;
}

const at = ([x, y]) => `${round(x)},${round(y)}`;

function bent([a, b, c, d]) {
  return `M${at(a)}C${at(b)} ${at(c)} ${at(d)}`;
}

function around([start, low, high, end]) {
  const [x, lane] = [start[0], low[0]];
  return (
    `M${at(start)}C${at([x, start[1] + 18])} ${at([lane, start[1] + 18])} ${at(low)}` +
    `V${round(high[1])}C${at([lane, end[1] - 18])} ${at([end[0], end[1] - 18])} ${at(end)}`
  );
}
