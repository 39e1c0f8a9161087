// Keys and buttons, and what they do.

const KEYS = {
  "/": () => search.focus(),
  ArrowRight: () => stepping.move(1),
  ArrowLeft: () => stepping.move(-1),
  ArrowDown: () => follow("down"),
  ArrowUp: () => follow("up"),
  Enter: () => toggle(shownOf(nearest(state.thing))),
  " ": () => toggle(shownOf(nearest(state.thing))),
  "+": () => view.zoom(1.25),
  "=": () => view.zoom(1.25),
  "-": () => view.zoom(0.8),
  0: () => view.fit(),
  e: () => expandBelow(selectedBox()),
  c: () => collapseBelow(selectedBox()),
  r: () => press("rolled"),
  n: () => press("numbers"),
  p: () => stepping.toggle(),
  "?": () => document.getElementById("keys").showModal(),
  Escape: () => clear(),
};
const MOVES = { ArrowRight: [-80, 0], ArrowLeft: [80, 0], ArrowDown: [0, -80], ArrowUp: [0, 80] };
const press = (id) => document.getElementById(id).hidden || document.getElementById(id).click();

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]"))
    return;
  const inControl = event.target.closest?.("input, select, textarea");
  const onButton = event.target.closest?.("button") && ["Enter", " "].includes(event.key);
  if (inControl || onButton) return;
  const focused = itemAt(event);
  if (event.shiftKey && MOVES[event.key]) view.pan(...MOVES[event.key]);
  else if (
    ["Enter", " "].includes(event.key) &&
    focused &&
    focused !== shownOf(nearest(state.thing))
  )
    toggle(focused);
  else if (KEYS[event.key]) KEYS[event.key]();
  else return;
  event.preventDefault();
});

document.getElementById("rolled").addEventListener("click", () => setRolled(!state.rolled));
document.getElementById("numbers").addEventListener("click", () => setNumbers(!state.numbers));
document.getElementById("expand").addEventListener("click", () => expandBelow(selectedBox()));
document.getElementById("collapse").addEventListener("click", () => collapseBelow(selectedBox()));
document.getElementById("fit").addEventListener("click", () => view.fit());
document.getElementById("larger").addEventListener("click", () => view.zoom(1.25));
document.getElementById("smaller").addEventListener("click", () => view.zoom(0.8));
document.getElementById("help").addEventListener("click", () => KEYS["?"]());
document.getElementById("colour").addEventListener("change", (event) => {
  state.colour = event.target.value;
  refresh();
});
