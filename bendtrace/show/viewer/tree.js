// Which passes are not rolled up: `of` gives what tells them apart, "" for those that are.
function keptApart() {
  const calls = new Map(); // call -> what happened in it, in order: {key, thing, isModule}
  const note = (call, key, thing) => {
    if (!calls.has(call)) calls.set(call, []);
    calls.get(call).push({ key, thing });
  };
  const begun = new Set();
  const begin = (index) => {
    if (index == null || begun.has(index)) return;
    begun.add(index);
    const call = run.modules[index];
    begin(call.parent);
    note(call.parent, `/${call.name}`, call);
  };
  let next = 0;
  for (const entry of run.entries) {
    for (; next < run.steps.length && run.steps[next].after < entry.index; next++) {
      const step = run.steps[next];
      if (step.step === "shape") continue;
      begin(step.call);
      note(step.call, `?${step.source}|${step.kind}`, step);
    }
    if (entry.kind === "state" || entry.first !== entry) continue;
    begin(entry.call);
    note(entry.call ?? null, `#${entry.name}`, entry);
  }

  const rolls = new Set(); // places that are passed at least once more with no other module between
  const turns = new Map(); // thing -> which pass of its place within the call around it
  for (const [call, events] of calls) {
    const outer = call == null ? "" : run.modules[call].name;
    const counts = new Map();
    for (const { key } of events) counts.set(key, (counts.get(key) ?? 0) + 1);
    const last = new Map(); // place -> {turn, others}: its last pass, other modules until then
    let others = 0;
    for (const { key, thing } of events) {
      const before = last.get(key);
      const place = `${outer}${key}`;
      if (before && before.others === others) rolls.add(place);
      const turn = (before?.turn ?? 0) + 1;
      turns.set(thing, { place, turn });
      if (thing.what === "module" && counts.get(key) === 1) others++;
      last.set(key, { turn, others });
    }
  }
  return {
    of(thing) {
      const found = turns.get(thing);
      return found && found.turn > 1 && !rolls.has(found.place) ? `@${found.turn}` : "";
    },
  };
}

// What leads where, between leaves of the tree: values, and the decisions that things ran under.
function linksBetween(tree, numbers) {
  const found = new Map();
  const add = (from, to, kind) => {
    if (!from || !to) return;
    const key = `${from.number},${to.number}`;
    const known = found.get(key);
    if (!known) found.set(key, { from, to, kind });
    else if (kind === "data") known.kind = kind;
  };

  for (const entry of run.entries) {
    const to = tree.ofEntry.get(entry.index);
    if (!to) continue;
    const seen = entry.parents.filter((parent) => tree.ofEntry.has(parent));
    for (const parent of seen) {
      add(tree.ofEntry.get(parent), to, run.entries[parent].kind === "number" ? "number" : "data");
    }
    // What hangs on hidden numbers only would seem to come from nowhere.
    if (!seen.length && !numbers) {
      for (const parent of entry.parents) {
        for (const origin of origins(parent)) add(tree.ofEntry.get(origin), to, "number");
      }
    }
  }
  run.steps.forEach((step, index) => {
    const at = tree.ofStep.get(index);
    if (!at) return;
    if (step.entry != null) {
      for (const origin of origins(step.entry)) add(tree.ofEntry.get(origin), at, "number");
    }
    const under = new Set(step.under);
    for (const inside of step.under) {
      const entry = run.entries[inside];
      if (entry.flow.at(-1) !== index) continue;
      if (!entry.parents.some((parent) => under.has(parent)))
        add(at, tree.ofEntry.get(inside), "control");
    }
  });
  for (const entry of run.entries) {
    for (let depth = 1; depth < entry.flow.length; depth++) {
      add(tree.ofStep.get(entry.flow[depth - 1]), tree.ofStep.get(entry.flow[depth]), "control");
    }
  }
  return [...found.values()];

  // The nearest entries above that are shown, itself included.
  function origins(index) {
    const result = new Set();
    const queue = [index];
    const met = new Set(queue);
    for (const each of queue) {
      if (tree.ofEntry.has(each)) {
        result.add(each);
        continue;
      }
      for (const parent of run.entries[each].parents) {
        if (!met.has(parent)) {
          met.add(parent);
          queue.push(parent);
        }
      }
    }
    return result;
  }
}

// The run as boxes in boxes: module calls, and in them ops and flow steps.
//
// Rolled, the passes of one place are one box; unrolled, each is its own. A module in which just
// one op ran is that op's box, with all its results. Where a box would hold too many, they stand in groups, each a stretch
// of the run.
//
// A place with another module after each of its passes, as the add in `for block in blocks:
// x = x + block(x)`, is no loop to look at: its passes stay apart also when rolled.

const MOST_IN_A_BOX = 40;
const GROUP = 20;
const MOST_ENDS = 8; // inputs, or outputs, that stand side by side

class Item {
  constructor(kind, id, parent, order) {
    this.kind = kind; // "root", "module", "op", "input", "output", "number", "step" or "group"
    this.id = id;
    this.parent = parent;
    this.order = order; // position in the run, by which siblings are sorted
    this.children = [];
    this.entries = []; // indices of what it stands for: several if rolled
    this.calls = [];
    this.steps = [];
    this.wrapped = []; // modules that hold nothing else, outermost first: lists of calls
  }

  get isBox() {
    return this.children.length > 0;
  }

  // What a click on it shows, for one of its passes.
  get things() {
    if (this.kind === "step") return this.steps.map((index) => run.steps[index]);
    if (this.kind === "module") return this.calls.map((index) => run.modules[index]);
    return this.entries.map((index) => run.entries[index]);
  }

  *ancestors() {
    for (let item = this.parent; item; item = item.parent) yield item;
  }

  *leaves() {
    if (!this.isBox) yield this;
    for (const child of this.children) yield* child.leaves();
  }
}

function buildTree({ rolled, numbers }) {
  const { entries, modules, steps } = run;
  const root = new Item("root", "", null, 0);
  const byId = new Map();
  const tree = { root, ofEntry: new Map(), ofCall: new Map(), ofStep: new Map(), byId };

  const item = (kind, id, parent, order) => {
    if (!byId.has(id)) {
      const made = new Item(kind, id, parent, order);
      byId.set(id, made);
      parent.children.push(made);
    }
    return byId.get(id);
  };

  const box = (index, order) => {
    if (index == null) return root;
    if (tree.ofCall.has(index)) return tree.ofCall.get(index);
    const call = modules[index];
    const parent = box(call.parent, order);
    const name = rolled ? call.name + apart.of(call) : call.label;
    const found = item("module", `${parent.id}/${name}`, parent, order);
    found.calls.push(index);
    tree.ofCall.set(index, found);
    return found;
  };

  const apart = rolled ? keptApart() : { of: () => "" };
  let next = 0;
  const addSteps = (until) => {
    for (; next < steps.length && steps[next].after < until; next++) {
      const step = steps[next];
      if (step.step === "shape") continue;
      const order = step.after + 0.5 + next / (2 * steps.length + 2);
      const parent = box(step.call, order);
      const where = `${step.source}|${step.kind}${apart.of(step)}`;
      const id = `${parent.id}?${rolled ? where : next}`;
      const found = item("step", id, parent, order);
      found.steps.push(next);
      tree.ofStep.set(next, found);
    }
  };

  for (const entry of entries) {
    addSteps(entry.index);
    if (isHidden(entry, numbers)) continue;
    const parent = box(entry.call, entry.index);
    const { first } = entry;
    const id = `${parent.id}#${rolled ? first.name + apart.of(first) : first.label}`;
    const found = item(entry.kind, id, parent, entry.index);
    found.entries.push(entry.index);
    tree.ofEntry.set(entry.index, found);
  }
  addSteps(Infinity);

  fold(root);
  group(root);
  tree.all = [...descendants(root)];
  tree.all.forEach((each, number) => (each.number = number));
  tree.links = linksBetween(tree, numbers);
  return tree;

  // Replace modules with a single op by the op.
  function fold(parent) {
    parent.children = parent.children.map((child) => {
      if (child.isBox) fold(child);
      const [only] = child.children;
      if (child.kind !== "module" || child.children.length > 1 || only.kind !== "op") return child;
      only.wrapped.unshift(child.calls);
      only.parent = parent;
      for (const call of child.calls) tree.ofCall.set(call, only);
      return only;
    });
  }

  function group(parent) {
    for (const child of parent.children) group(child);
    for (const kind of ["input", "output"]) {
      const ends = parent.children.filter((child) => child.kind === kind);
      if (ends.length <= MOST_ENDS || ends.length === parent.children.length) continue;
      const [made] = inGroups(ends, parent, 0, ends.length);
      made.holdsEnds = true;
      const place = parent.children.indexOf(ends[0]);
      parent.children = parent.children.filter((child) => child.kind !== kind);
      parent.children.splice(place, 0, made);
    }
    if (parent.children.length <= MOST_IN_A_BOX) return;
    // First what stands between modules, then whatever there is.
    const all = parent.children.length;
    parent.children = stretches(parent.children).flatMap((some) => {
      const isMost = some.length > 0.7 * all;
      return some.length < GROUP / 2
        ? some
        : inGroups(some, parent, 0, isMost ? GROUP : MOST_IN_A_BOX);
    });
    for (let level = 1; parent.children.length > MOST_IN_A_BOX; level++) {
      parent.children = inGroups(parent.children, parent, level, GROUP);
    }
  }

  function stretches(items) {
    const found = [];
    for (const item of items) {
      const isPlain = !item.isBox && !["input", "output"].includes(item.kind);
      if (isPlain && found.at(-1)?.isPlain) found.at(-1).push(item);
      else found.push(Object.assign([item], { isPlain }));
    }
    return found;
  }

  function inGroups(items, parent, level, most) {
    const size = Math.ceil(items.length / Math.ceil(items.length / most));
    const groups = [];
    for (let start = 0; start < items.length; start += size) {
      const some = items.slice(start, start + size);
      const made = new Item("group", `${some[0].id}~${level}`, parent, some[0].order);
      made.children = some;
      for (const child of some) child.parent = made;
      byId.set(made.id, made);
      groups.push(made);
    }
    return groups;
  }
}

function* descendants(item) {
  for (const child of item.children) {
    yield child;
    yield* descendants(child);
  }
}

// The box to show for a leaf: the outermost closed one around it, or itself.
function shownFor(item, opened) {
  let shown = item;
  for (const above of item.ancestors()) {
    if (above.kind !== "root" && !opened.has(above.id)) shown = above;
  }
  return shown;
}

// Open level by level as long as about `most` nodes are shown.
function openedAtFirst(root, most) {
  const opened = new Set();
  let level = root.children;
  let shown = level.length;
  while (level.length) {
    const boxes = level.filter((item) => item.isBox && !item.holdsEnds);
    const inside = boxes.flatMap((item) => item.children);
    shown += inside.length;
    if (!boxes.length || shown > most) return opened;
    for (const each of boxes) opened.add(each.id);
    level = inside;
  }
  return opened;
}
