// Where everything stands: each open box is drawn by itself, and then put as one node into the
// drawing of the box around it. A line into an open box passes a point on its border.

const PAD = 12;
const HEAD = 26; // height of an open box's title

// Returns {width, height, boxes, wires}: boxes are shown items with x, y (upper left), w and h;
// wires have points, what they connect, and whether they end in an arrow.
function layOut(tree, opened, measure) {
  const isOpen = (item) => item.isBox && (item.kind === "root" || opened.has(item.id));
  const shown = shownLinks(tree, opened);
  const within = new Map(); // open box -> its lines by the places that they connect
  const ports = new Map(); // open box -> its border points by key
  const loops = [];

  const lineIn = (box, from, to, link, isLast) => {
    if (!within.has(box)) within.set(box, new Map());
    const known = within.get(box);
    const key = `${from.key}>${to.key}`;
    if (!known.has(key)) known.set(key, { from, to, links: [], weak: true, isLast });
    const line = known.get(key);
    line.links.push(link);
    line.weak &&= link.kind !== "data";
  };
  const port = (box, side, key) => {
    if (!ports.has(box)) ports.set(box, new Map());
    const known = ports.get(box);
    const name = `${side}${key}`;
    if (!known.has(name)) known.set(name, { side, key: name, order: known.size });
    return { key: name, node: name, port: known.get(name) };
  };
  const through = (box, { port, key }) => ({
    key: `n${box.number}:${key}`,
    node: `n${box.number}`,
    through: port,
  });
  const whole = (item) => ({ key: `n${item.number}`, node: `n${item.number}` });

  for (const link of shown) {
    const { from, to } = link;
    if (from === to) {
      if (link.kind === "data") loops.push(link);
      continue;
    }
    const above = new Set(from.ancestors());
    const path = []; // open boxes around `to`, innermost first, up to the common one
    let common = to.parent;
    for (; !above.has(common); common = common.parent) path.push(common);
    let here = whole(from);
    for (let box = from.parent; box !== common; box = box.parent) {
      const out = port(box, "out", from.number);
      lineIn(box, here, out, link, false);
      here = through(box, out);
    }
    for (const box of path.toReversed()) {
      const into = port(box, "in", from.number);
      lineIn(box.parent, here, through(box, into), link, false);
      here = into;
    }
    lineIn(to.parent, here, whole(to), link, true);
  }

  const drawings = new Map();
  const draw = (box) => {
    const nodes = [];
    const at = new Map();
    for (const each of ports.get(box)?.values() ?? []) {
      at.set(each.key, nodes.length);
      nodes.push({ w: 8, h: 0, order: each.order, edge: each.side, port: each });
    }
    for (const item of box.children) {
      const size = isOpen(item) ? draw(item) : measure(item);
      at.set(`n${item.number}`, nodes.length);
      const pinned = item.kind === "input";
      nodes.push({ w: size.width, h: size.height, order: item.order, item, pinned });
    }
    const lines = [...(within.get(box)?.values() ?? [])].map((line) => ({
      ...line,
      from: at.get(line.from.node),
      to: at.get(line.to.node),
      fromAt: line.from.through?.offset ?? 0,
      toAt: line.to.through?.offset ?? 0,
    }));
    const size = drawInRows(nodes, lines);
    const hasLoop = loops.some((link) => link.from.parent === box);
    const isRoot = box.kind === "root";
    const [left, top] = isRoot ? [0, 0] : [PAD, HEAD + (ports.has(box) ? 0 : 8)];
    const bare = size.width + 2 * left + (hasLoop ? 16 : 0);
    const width = isRoot ? bare : Math.max(bare, measure(box, true).width);
    const shift = left + (width - bare) / 2;
    const height = top + size.height + (isRoot ? 0 : PAD);
    for (const node of nodes) {
      node.x += shift;
      node.y += top;
      if (node.port) node.port.offset = node.x - width / 2;
    }
    for (const line of lines) {
      for (const point of line.points) {
        point[0] += shift;
        point[1] += top;
      }
      // Points of entry and of leaving are on the border itself.
      if (nodes[line.from].edge) line.points[0][1] = 0;
      if (nodes[line.to].edge) line.points.at(-1)[1] = height;
    }
    const drawing = { width, height, nodes, lines };
    drawings.set(box, drawing);
    return drawing;
  };

  const all = draw(tree.root);
  const result = { width: all.width, height: all.height, boxes: [], wires: [] };
  const put = (drawing, x, y) => {
    for (const line of drawing.lines) {
      const points = line.points.map(([px, py]) => [px + x, py + y]);
      const { links, isBack, isLast } = line;
      result.wires.push({ points, links, isBack, isLast });
    }
    for (const node of drawing.nodes) {
      if (!node.item) continue;
      const [left, top] = [x + node.x - node.w / 2, y + node.y];
      const isFrame = isOpen(node.item);
      result.boxes.push({ item: node.item, x: left, y: top, w: node.w, h: node.h, isFrame });
      if (isFrame) put(drawings.get(node.item), left, top);
    }
  };
  put(all, 0, 0);

  const places = new Map(result.boxes.map((box) => [box.item, box]));
  for (const link of loops) {
    const { x, y, w, h } = places.get(link.from);
    const points = [
      [x + w, y + h * 0.7],
      [x + w + 16, y + h * 0.7],
      [x + w + 16, y + h * 0.3],
      [x + w, y + h * 0.3],
    ];
    result.wires.push({ points, links: [link], isBack: true, isLoop: true, isLast: true });
  }
  return result;
}

// The links between what is shown, each once.
function shownLinks(tree, opened) {
  const shown = new Map(tree.all.map((item) => [item, item.isBox ? null : shownFor(item, opened)]));
  const found = new Map();
  for (const link of tree.links) {
    const [from, to] = [shown.get(link.from), shown.get(link.to)];
    const inside = from === to && from !== link.from;
    if (inside) continue;
    const key = `${from.number},${to.number}`;
    const known = found.get(key);
    if (!known) found.set(key, { from, to, kind: link.kind });
    else if (link.kind === "data") known.kind = "data";
  }
  return [...found.values()];
}
