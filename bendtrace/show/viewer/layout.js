// A layered drawing of one box's content: rows by longest path, little crossing, straight chains.

const GAP_ACROSS = 18;
const GAP_DOWN = 30;
const LANE = 10; // room that a passing line takes in a row

// nodes: {w, h, order, edge}, sorted by order, where `edge` is "in" or "out" for the points at which
// lines enter and leave the box. lines: {from, to, fromAt, toAt, weak}, between positions in
// `nodes`, with how far from a node's middle they meet it. Sets x (middle) and y (top) of nodes and
// `points` of lines; returns the size. Lines against the order of the run go round the right side.
function drawInRows(nodes, lines) {
  const forward = lines.filter((line) => !isBack(nodes, line));
  const back = lines.filter((line) => isBack(nodes, line));
  const rows = rowsOf(nodes, forward);
  const graph = withLanes(nodes, forward, rows);
  order(graph);
  placeAcross(graph);
  drawTogether(graph);
  straighten(graph, forward);
  const size = placeDown(graph, nodes, forward);
  for (const line of forward) line.points = pointsAlong(line, nodes, graph);
  size.width += roundTheSide(back, nodes, size.width);
  return size;
}

function isBack(nodes, line) {
  const [from, to] = [nodes[line.from], nodes[line.to]];
  return !from.edge && !to.edge && from.order >= to.order;
}

function rowsOf(nodes, lines) {
  const above = nodes.map(() => []);
  const below = nodes.map(() => []);
  for (const line of lines) {
    above[line.to].push(line.from);
    below[line.from].push(line.to);
  }
  const row = nodes.map(() => 0);
  // Points of entry come first, then everything in the order of the run: what is above is known.
  const inOrder = [...nodes.keys()].filter((n) => !nodes[n].edge);
  const first = nodes.some((node) => node.edge === "in") ? 1 : 0;
  inOrder.forEach((n, position) => {
    const before = position ? row[inOrder[position - 1]] : first;
    row[n] = above[n].length || below[n].length ? first : before;
    for (const m of above[n]) row[n] = Math.max(row[n], row[m] + 1);
  });
  // What comes from nowhere (constants, ranges) stands right above where it is used.
  const loose = nodes.map((node) => !node.edge && !node.pinned);
  for (const n of inOrder) loose[n] &&= above[n].every((m) => loose[m]);
  for (const n of inOrder.toReversed()) {
    const users = below[n].filter((m) => nodes[m].edge !== "out");
    if (loose[n] && users.length) row[n] = Math.min(...users.map((m) => row[m])) - 1;
  }
  const last = Math.max(first - 1, ...inOrder.map((n) => row[n])) + 1;
  nodes.forEach((node, n) => {
    if (node.edge === "out") row[n] = last;
  });
  return row;
}

// Give lines that pass rows a place in each of them; those from one point share it.
function withLanes(nodes, lines, row) {
  const all = nodes.map((node, n) => ({
    w: node.w,
    h: node.h,
    node,
    row: row[n],
    up: [],
    down: [],
    x: 0,
  }));
  const join = (a, b, aAt, bAt, strength) => {
    all[a].down.push({ n: b, at: aAt, there: bAt, strength });
    all[b].up.push({ n: a, at: bAt, there: aAt, strength });
  };
  const shared = new Map();
  for (const line of lines) {
    line.lanes = [];
    let last = line.from;
    let at = line.fromAt;
    for (let r = row[line.from] + 1; r < row[line.to]; r++) {
      const key = `${line.from},${line.fromAt},${line.weak},${r}`;
      if (!shared.has(key)) {
        shared.set(key, all.length);
        all.push({ w: LANE, h: 0, lane: true, row: r, up: [], down: [], x: 0 });
        join(last, all.length - 1, at, 0, line.lanes.length ? 2 : 0);
      }
      last = shared.get(key);
      line.lanes.push(last);
      at = 0;
    }
    const isEdge = nodes[line.from].edge || nodes[line.to].edge;
    join(last, line.to, at, line.toAt, line.lanes.length ? 0 : isEdge || line.weak ? 1 : 2);
  }
  const rows = [];
  all.forEach((each, n) => (rows[each.row] ??= []).push(n));
  for (let r = 0; r < rows.length; r++) rows[r] ??= [];
  return { all, rows };
}

// Sweep down and up, sorting each row by the mean position of its neighbours; keep the best.
function order({ all, rows }) {
  const place = all.map(() => 0);
  const settle = () => rows.forEach((row) => row.forEach((n, position) => (place[n] = position)));
  const sortKey = (n, side) => {
    const links = all[n][side];
    if (!links.length) return place[n];
    let sum = 0;
    for (const link of links) sum += place[link.n] + (link.there / (all[link.n].w + 1)) * 0.9;
    return sum / links.length + (all[n].lane ? 1e-3 : 0);
  };
  const crossings = () => {
    let count = 0;
    for (const row of rows) {
      const ends = row.flatMap((n) =>
        all[n].down
          .map((link) => place[link.n] + link.there / (all[link.n].w + 1))
          .sort((a, b) => a - b),
      );
      if (ends.length > 300) continue;
      for (let i = 0; i < ends.length; i++) {
        for (let j = i + 1; j < ends.length; j++) if (ends[j] < ends[i]) count++;
      }
    }
    return count;
  };

  settle();
  let best = rows.map((row) => [...row]);
  let fewest = crossings();
  for (let sweep = 0; sweep < 8 && fewest; sweep++) {
    const side = sweep % 2 ? "down" : "up";
    const walked = sweep % 2 ? rows.toReversed() : rows;
    for (const row of walked) {
      const keys = new Map(row.map((n) => [n, sortKey(n, side)]));
      row.sort((a, b) => keys.get(a) - keys.get(b));
      row.forEach((n, position) => (place[n] = position));
    }
    const count = crossings();
    if (count < fewest) {
      fewest = count;
      best = rows.map((row) => [...row]);
    }
  }
  best.forEach((row, r) => (rows[r] = row));
}

// Each node would stand in the middle of its strongest neighbours; rows keep their order and gaps.
function placeAcross({ all, rows }) {
  const wish = (n, side) => {
    const links = side ? all[n][side] : [...all[n].up, ...all[n].down];
    if (!links.length) return null;
    const strongest = Math.max(...links.map((link) => link.strength));
    let sum = 0;
    let count = 0;
    for (const link of links) {
      if (link.strength < strongest) continue;
      sum += all[link.n].x + link.there - link.at;
      count++;
    }
    return sum / count;
  };
  const SWEEPS = 18;
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const walked = sweep % 2 ? rows.toReversed() : rows;
    // At first by one side only, which straightens chains at once; in the end by both.
    const side = sweep > SWEEPS - 6 ? null : sweep % 2 ? "down" : "up";
    for (const row of walked) {
      const wishes = row.map((n) => (sweep ? wish(n, side) : 0) ?? all[n].x);
      spread(row, wishes, all);
    }
  }
}

// Move parts that nothing connects as near to the largest as rows allow.
function drawTogether({ all, rows }) {
  const parts = [];
  all.forEach((start, first) => {
    if (start.part) return;
    const part = [];
    const queue = [first];
    start.part = part;
    for (const n of queue) {
      part.push(n);
      for (const link of [...all[n].up, ...all[n].down]) {
        if (all[link.n].part) continue;
        all[link.n].part = part;
        queue.push(link.n);
      }
    }
    parts.push(part);
  });
  if (parts.length < 2) return;
  const low = (part) => Math.min(...part.map((n) => all[n].x - all[n].w / 2));
  const high = (part) => Math.max(...part.map((n) => all[n].x + all[n].w / 2));
  const [main, ...rest] = parts.sort((a, b) => b.length - a.length);
  const middle = (low(main) + high(main)) / 2;
  const distance = (part) => (low(part) + high(part)) / 2 - middle;
  const beside = neighbours(rows);
  for (const part of rest.sort((a, b) => Math.abs(distance(a)) - Math.abs(distance(b)))) {
    const isRight = distance(part) > 0;
    let room = Math.max(0, isRight ? low(part) - low(main) : high(main) - high(part));
    for (const n of part) {
      const m = beside.get(n)[isRight ? 0 : 1];
      if (m === undefined || all[m].part === part) continue;
      const clear = Math.abs(all[n].x - all[m].x) - (all[n].w + all[m].w) / 2 - gap(all[n], all[m]);
      room = Math.min(room, Math.max(0, clear));
    }
    for (const n of part) all[n].x += isRight ? -room : room;
  }
}

function neighbours(rows) {
  const beside = new Map();
  for (const row of rows) row.forEach((n, i) => beside.set(n, [row[i - 1], row[i + 1]]));
  return beside;
}

// Lines that pass rows go straight as far as what stands beside them allows.
function straighten({ all, rows }, lines) {
  const longest = new Map(); // by their first lane, which others may share
  for (const line of lines) {
    const known = longest.get(line.lanes[0]);
    if (!known || known.lanes.length < line.lanes.length) longest.set(line.lanes[0], line);
  }
  const beside = neighbours(rows);
  const room = (n) => {
    const [left, right] = beside.get(n).map((m) => all[m]);
    const half = all[n].w / 2;
    return [
      left ? left.x + left.w / 2 + gap(left, all[n]) + half : -Infinity,
      right ? right.x - right.w / 2 - gap(all[n], right) - half : Infinity,
    ];
  };
  const into = (x, [low, high]) => Math.max(low, Math.min(high, x));
  for (const line of [...lines, ...lines]) {
    const { lanes } = line;
    if (longest.get(lanes[0]) !== line) continue;
    let x = all[line.from].x + line.fromAt;
    const end = all[line.to].x + line.toAt;
    for (let start = 0; start < lanes.length;) {
      let [low, high] = room(lanes[start]);
      let stop = start + 1;
      for (; stop < lanes.length; stop++) {
        const next = room(lanes[stop]);
        if (Math.max(low, next[0]) > Math.min(high, next[1])) break;
        [low, high] = [Math.max(low, next[0]), Math.min(high, next[1])];
      }
      x = into(stop === lanes.length && start ? end : x, [low, high]);
      if (stop === lanes.length && low <= end && end <= high) x = end;
      for (; start < stop; start++) all[lanes[start]].x = x;
    }
  }
}

// Put a row as near to its wishes as its order and gaps allow: the least squares solution, found
// by pooling neighbours that would overlap.
function spread(row, wishes, all) {
  const pools = [];
  let before = 0;
  row.forEach((n, i) => {
    if (i) before += (all[row[i - 1]].w + all[n].w) / 2 + gap(all[row[i - 1]], all[n]);
    const weight = all[n].lane || all[n].node?.edge ? 0.02 : 1;
    pools.push({ sum: (wishes[i] - before) * weight, weight, members: [[n, before]] });
    while (pools.length > 1) {
      const [left, right] = pools.slice(-2);
      if (left.sum / left.weight <= right.sum / right.weight) break;
      left.sum += right.sum;
      left.weight += right.weight;
      left.members.push(...right.members);
      pools.pop();
    }
  });
  for (const pool of pools) {
    for (const [n, offset] of pool.members) all[n].x = pool.sum / pool.weight + offset;
  }
}

const gap = (a, b) => (a.h && b.h ? GAP_ACROSS : GAP_ACROSS * 0.6);

function placeDown({ all, rows }, nodes, lines) {
  const left = Math.min(...all.map((each) => each.x - each.w / 2));
  for (const each of all) each.x -= left;
  let y = 0;
  rows.forEach((row, r) => {
    const height = Math.max(0, ...row.map((n) => all[n].h));
    for (const n of row) {
      all[n].top = y;
      all[n].bottom = y + height;
      all[n].y = y + (height - all[n].h) / 2;
    }
    const farthest = Math.max(
      0,
      ...row.flatMap((n) => all[n].down.map((link) => Math.abs(all[link.n].x - all[n].x))),
    );
    const isEdge = (each) => each?.length && each.every((n) => all[n].node?.edge);
    const straight = isEdge(row) || isEdge(rows[r + 1]);
    y += height + (straight ? 12 : GAP_DOWN) + Math.min(30, farthest / 14);
    if (r === rows.length - 1) y = all[row[0]]?.bottom ?? y;
  });
  nodes.forEach((node, n) => Object.assign(node, { x: all[n].x, y: all[n].y }));
  return { width: Math.max(...all.map((each) => each.x + each.w / 2)), height: y };
}

// Pairs of points between which a line is straight; between the pairs it bends.
function pointsAlong(line, nodes, { all }) {
  const [from, to] = [nodes[line.from], nodes[line.to]];
  const start = from.x + line.fromAt;
  const end = to.x + line.toAt;
  const points = [
    [start, from.y + from.h],
    [start, all[line.from].bottom],
  ];
  for (const n of line.lanes) points.push([all[n].x, all[n].top], [all[n].x, all[n].bottom]);
  points.push([end, all[line.to].top], [end, to.y]);
  return points;
}

// Lines that lead back: down, round the right side of everything, and in again from above.
function roundTheSide(lines, nodes, width) {
  lines.sort((a, b) => nodes[b.to].order - nodes[a.to].order);
  lines.forEach((line, i) => {
    const [from, to] = [nodes[line.from], nodes[line.to]];
    const lane = width + 14 + i * LANE;
    const start = from.x + line.fromAt;
    const end = to.x + line.toAt;
    const [low, high] = [from.y + from.h, to.y];
    line.isBack = true;
    line.points = [
      [start, low],
      [lane, low - 4],
      [lane, high + 4],
      [end, high],
    ];
  });
  return lines.length ? 14 + lines.length * LANE : 0;
}

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
