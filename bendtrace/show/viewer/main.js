// What the reader does, and what follows from it.

const OPEN_AT_FIRST = 60; // nodes
const MOST_SHOWN = 400; // nodes that "expand" opens at most

const state = {
  rolled: true,
  numbers: false,
  colour: "kind",
  opened: new Set(), // ids of boxes that the reader opened
  passing: new Set(), // ids of boxes that are open while the run steps through them
  tree: null,
  drawing: null,
  elements: new Map(),
  wires: [],
  boxes: new Map(), // where each shown item is
  thing: null, // what is selected: an entry, a call or a step
  stepped: false, // whether what comes later in the run is faded
};

const graph = document.getElementById("graph");
const panel = document.getElementById("panel");
const note = document.getElementById("note");
const told = document.documentElement.dataset;

function rebuild() {
  state.tree = buildTree(state);
  stepping.gather(state.tree);
}

function refresh(anchor = null) {
  const before = anchor && state.boxes.get(anchor);
  const focused = focusedId();
  const start = performance.now();
  const opened = new Set([...state.opened, ...state.passing]);
  const drawing = layOut(state.tree, opened, measure);
  Object.assign(state, { drawing, ...paint(drawing, opened, state.colour) });
  state.boxes = new Map(drawing.boxes.map((box) => [box.item, box]));
  told.layoutMs = (performance.now() - start).toFixed(1);
  told.shown = drawing.boxes.length;
  const after = anchor && state.boxes.get(anchor);
  view.show(drawing, null);
  if (before && after) {
    const [[x, y], [nextX, nextY]] = [view.onScreen(before), view.onScreen(after)];
    view.pan(x - nextX, y - nextY);
  }
  mark();
  if (focused != null) focusAgain(focused);
}

// The box with the focus: all of them are drawn anew, and the keys have to go on from there.
const focusedId = () =>
  graph.contains(document.activeElement) ? document.activeElement.dataset.id : null;

function focusAgain(id) {
  const same = state.elements.get(shownOf(state.tree.byId.get(id)));
  (same ?? graph.querySelector('[tabindex="0"]'))?.focus({ preventScroll: true });
}

function itemOf(thing) {
  const { ofEntry, ofCall, ofStep } = state.tree;
  if (!thing) return null;
  if (thing.what === "entry") return ofEntry.get(thing.index) ?? null;
  return (thing.what === "module" ? ofCall : ofStep).get(thing.index) ?? null;
}

// The box that a thing without one of its own is looked up at: what used a parameter, what a
// module without ops gave.
function nearest(thing) {
  const item = itemOf(thing);
  if (item || !thing) return item;
  const near =
    thing.what === "module"
      ? (thing.outputs ?? [])
      : [...(thing.children ?? []), ...(thing.parents ?? [])];
  const users =
    thing.kind === "state"
      ? run.entries.filter((entry) =>
          entry.states?.some((index) => run.states[index].name === thing.label),
        )
      : [];
  for (const index of [...near, ...users.map((entry) => entry.index)]) {
    const found = state.tree.ofEntry.get(index);
    if (found) return found;
  }
  return thing.entry != null ? (state.tree.ofEntry.get(thing.entry) ?? null) : null;
}

const shownOf = (item) => item && shownFor(item, new Set([...state.opened, ...state.passing]));

// Show what is selected: its box, the lines from and to it, what is known of it.
function mark() {
  const shown = shownOf(nearest(state.thing));
  view.show(state.drawing, shown);
  for (const [item, element] of state.elements) {
    const isSelected = item === shown;
    element.classList.toggle("selected", isSelected);
    element.setAttribute("aria-selected", String(isSelected));
    element.setAttribute("tabindex", isSelected ? "0" : "-1");
    element.classList.toggle("later", state.stepped && isLater(item));
  }
  if (!shown) state.elements.values().next().value?.setAttribute("tabindex", "0");
  const inside = (item) =>
    item === shown || (shown?.isBox && [...item.ancestors()].includes(shown));
  for (const { element, wire } of state.wires) {
    element.classList.toggle(
      "later",
      state.stepped && wire.links.every((link) => isLater(link.to)),
    );
    const into = Boolean(shown) && wire.links.some((link) => inside(link.to));
    const out = Boolean(shown) && wire.links.some((link) => inside(link.from));
    element.classList.toggle("into", into && !out);
    element.classList.toggle("out", out && !into);
    element.classList.toggle("near", into && out);
  }
}

const isLater = (item) => firstPlace(item) > stepping.reached;

function firstPlace(item) {
  const places = () =>
    item.isBox ? item.children.map(firstPlace) : item.things.map(stepping.placeOf);
  item.firstPlace ??= places().reduce((first, place) => Math.min(first, place), Infinity);
  return item.firstPlace;
}

// A link of the panel: to an event, or to something else.
function goOn(thing) {
  if (thing.what !== "event") {
    select(thing);
    return;
  }
  stepping.moveTo(thing);
  stepping.goTo(thing.index);
}

function fillPanel() {
  const focused = panel.contains(document.activeElement) ? document.activeElement : null;
  const label = focused?.getAttribute("aria-label");
  panel.replaceChildren(...panelFor(state.thing, itemOf(state.thing), goOn));
  panel.scrollTop = 0;
  // A control that is there again keeps the focus; else it stays in the panel.
  if (focused)
    ((label && panel.querySelector(`[aria-label="${label}"]`)) || panel).focus({
      preventScroll: true,
    });
}

// Select a thing and make it visible. `passing` opens what is needed only until the next step.
function select(thing, { passing = false, anchored = false, focus = false } = {}) {
  if (thing?.kind === "number" && !state.numbers) {
    say("Numbers are shown now.");
    setNumbers(true);
  }
  state.thing = thing;
  if (!passing) state.stepped = false;
  const item = nearest(thing);
  const closed = [];
  if (item) {
    for (const above of item.ancestors()) if (above.kind !== "root") closed.push(above.id);
  }
  const needed = closed.filter((id) => !state.opened.has(id));
  const had = state.passing;
  state.passing = new Set(passing ? needed : []);
  if (!passing) for (const id of needed) state.opened.add(id);
  const changed = needed.some((id) => !had.has(id)) || [...had].some((id) => !needed.includes(id));
  if (changed) refresh();
  else mark();
  if (!anchored) (changed ? view.centre : view.reveal)(shownOf(item));
  if (!passing) stepping.moveTo(thing);
  if (focus) state.elements.get(shownOf(item))?.focus({ preventScroll: true });
  fillPanel();
  remember();
}

// The address names what is selected, so that it can be passed on.
function remember() {
  const key = state.thing ? (state.thing.label ?? "") : "";
  const position = events?.isMain() ? events.eventOf(state.thing)?.index : null;
  const parts = [
    position != null ? `position=${position}` : key && `path=${encodeURIComponent(key)}`,
    state.rolled ? "" : "view=unrolled",
  ].filter(Boolean);
  try {
    history.replaceState(null, "", parts.length ? `#${parts.join("&")}` : "#");
  } catch {
    // A page without an address of its own, such as a notebook's frame, has none to change.
  }
}

function followAddress() {
  const parts = new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B"));
  const rolled = parts.get("view") !== "unrolled";
  if (rolled !== state.rolled) setRolled(rolled);
  const position = parts.get("position");
  if (events && /^\d+$/.test(position ?? "")) {
    stepping.goTo(Number(position));
    return;
  }
  const key = parts.get("path");
  if (key == null) return;
  const thing = find(key);
  if (thing) select(thing);
  else say(`There is no "${key}" in this run.`);
}

let silence = null;
function say(message) {
  note.textContent = message;
  clearTimeout(silence);
  silence = setTimeout(() => (note.textContent = ""), 5000);
}

function toggle(item) {
  if (!item?.isBox) return;
  const isOpen = state.opened.has(item.id) || state.passing.has(item.id);
  state.passing.delete(item.id);
  if (isOpen) state.opened.delete(item.id);
  else state.opened.add(item.id);
  refresh(item);
  state.elements.get(item)?.focus({ preventScroll: true });
}

// Open everything below, level by level, as far as it stays readable.
function expandBelow(item) {
  let shown = state.drawing.boxes.length;
  let level = [item];
  while (level.length) {
    const next = [];
    for (const each of level) {
      if (!each.isBox) continue;
      if (each.kind !== "root" && !state.opened.has(each.id)) {
        if (shown + each.children.length > MOST_SHOWN) {
          say(`Stopped at ${shown} nodes; open what you need from here.`);
          refresh(item);
          if (item.kind === "root") view.fit(0.7);
          return;
        }
        shown += each.children.length;
        state.opened.add(each.id);
      }
      next.push(...each.children);
    }
    level = next;
  }
  refresh(item);
  if (item.kind === "root") view.fit(0.7);
}

function collapseBelow(item) {
  for (const each of descendants(item)) state.opened.delete(each.id);
  if (item.kind !== "root") state.opened.delete(item.id);
  state.passing.clear();
  refresh(item);
  if (item.kind === "root") view.fit(0.7);
}

const selectedBox = () => {
  const shown = shownOf(nearest(state.thing));
  return shown?.isBox ? shown : state.tree.root;
};

function setRolled(rolled) {
  state.rolled = rolled;
  document.getElementById("rolled").setAttribute("aria-pressed", String(rolled));
  restart();
}

function setNumbers(numbers) {
  state.numbers = numbers;
  document.getElementById("numbers").setAttribute("aria-pressed", String(numbers));
  const { opened, tree: before } = state;
  rebuild();
  // What was open stays so; boxes that were not there before open as at first.
  const isOpen = (id) => (before.byId.has(id) ? opened.has(id) : first.has(id));
  const first = openedAtFirst(state.tree.root, OPEN_AT_FIRST);
  state.opened = new Set([...state.tree.byId.keys()].filter(isOpen));
  refresh();
}

// Draw another tree of the same run, with the same thing selected.
function restart() {
  rebuild();
  state.passing.clear();
  state.opened = openedAtFirst(state.tree.root, OPEN_AT_FIRST);
  refresh();
  view.fit(0.7);
  if (state.thing) select(state.thing);
}

const itemAt = (event) =>
  state.tree.byId.get(event.target.closest?.("[data-id]")?.dataset.id) ?? null;

graph.addEventListener("click", (event) => {
  if (view.wasMoved()) return;
  const item = itemAt(event);
  if (item && event.target.closest(".sign")) {
    toggle(item);
    return;
  }
  if (!item) {
    clear();
    return;
  }
  const things = item.kind === "group" ? [] : item.things;
  const thing = things.includes(state.thing) ? state.thing : things[0];
  if (thing) select(thing, { anchored: true, focus: true });
  else toggle(item);
});
graph.addEventListener("dblclick", (event) => {
  const item = itemAt(event);
  if (item && !event.target.closest(".sign") && item.kind !== "group") toggle(item);
});

function clear() {
  stepping.reset();
  state.stepped = false;
  state.thing = null;
  state.passing.clear();
  refresh();
  fillPanel();
  remember();
}

// Along the values: to the first one it was computed from, or that was computed from it.
function follow(side) {
  const item = shownOf(nearest(state.thing));
  const near = state.tree.links.filter((link) => {
    const [here, there] = side === "up" ? [link.to, link.from] : [link.from, link.to];
    return shownOf(here) === item && shownOf(there) !== item;
  });
  const there = near
    .map((link) => (side === "up" ? link.from : link.to))
    .sort((a, b) => a.order - b.order);
  const next = side === "up" ? there.at(-1) : there[0];
  if (!item) select(state.tree.root.children[0]?.things[0] ?? run.entries[0], { focus: true });
  else if (next) {
    const shown = shownOf(next);
    select((shown.isBox && shown.kind === "module" ? shown : next).things[0], { focus: true });
  }
}

addEventListener("hashchange", followAddress);

document
  .getElementById("heads")
  .append(
    make(
      "marker",
      {
        id: "head",
        viewBox: "0 0 8 8",
        refX: 7,
        refY: 4,
        markerWidth: 7,
        markerHeight: 7,
        orient: "auto",
        markerUnits: "userSpaceOnUse",
      },
      make("path", { d: "M0,0.8L8,4L0,7.2Z" }),
    ),
  );

search.connect(
  (thing) => (thing.what === "event" ? goOn(thing) : select(thing, { focus: true })),
  (thing) => (state.rolled ? (itemOf(thing)?.id ?? null) : null),
);
stepping.connect((thing) => {
  state.stepped = true;
  select(events ? events.shownAs(thing) : thing, { passing: true });
});
for (const key of ["time", "bytes", "flops"]) {
  if (!run.entries.some((entry) => entry[key]))
    document.querySelector(`#colour option[value=${key}]`).remove();
}
if (!run.entries.some((entry) => entry.kind === "number"))
  document.getElementById("numbers").hidden = true;
if (!run.entries.some((entry) => entry.passes) && !run.modules.some((call) => call.passes)) {
  document.getElementById("rolled").hidden = true;
}

restart();
fillPanel();
if (events && !location.hash) stepping.goTo(run.stepped.position);
followAddress();
told.readyMs = performance.now().toFixed(1);
requestAnimationFrame(() => setTimeout(() => (told.paintedMs = performance.now().toFixed(1))));
