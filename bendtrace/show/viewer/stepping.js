// Going through the run in order: values and decisions, one after the other.

const stepping = (() => {
  const slider = document.getElementById("position");
  const where = document.getElementById("where");
  const play = document.getElementById("play");
  let stops = [];
  let at = -1; // nothing has been stepped to; halves are right before a stop
  let go = () => {};
  let timer = null;

  const places = new Map();

  function gather(tree) {
    if (events) {
      follow();
      return;
    }
    const [current, half] = [stops[Math.ceil(at)], at - Math.ceil(at)];
    stops = [];
    let next = 0;
    const addSteps = (until) => {
      for (; next < run.steps.length && run.steps[next].after < until; next++) {
        if (tree.ofStep.has(next)) stops.push(run.steps[next]);
      }
    };
    for (const entry of run.entries) {
      addSteps(entry.index);
      if (tree.ofEntry.has(entry.index) && entry.first === entry) stops.push(entry);
    }
    addSteps(Infinity);
    places.clear();
    stops.forEach((stop, place) => places.set(stop, place));
    for (const entry of run.entries) {
      if (places.has(entry.first)) places.set(entry, places.get(entry.first));
    }
    at = places.has(current) ? places.get(current) + half : -1;
    slider.max = Math.max(0, stops.length - 1);
    tell();
  }

  // The positions of a run that was stepped through, or of another side of a question.
  function follow() {
    stops = events.stops();
    at = at === -1 ? 0 : Math.min(stops.length - 1, at);
    slider.max = stops.length - 1;
    tell();
  }

  function tell() {
    const place = Math.ceil(at);
    slider.value = Math.max(0, place);
    where.textContent = place < 0 ? `${stops.length} steps` : `${place + 1} of ${stops.length}`;
    if (events) where.textContent = `at ${Math.max(0, place)} of ${stops.length - 1}`;
    slider.setAttribute(
      "aria-valuetext",
      place < 0 ? "before the run" : `${where.textContent}: ${nameOf(stops[place])}`,
    );
    slider.closest("footer").classList.toggle("begun", place >= 0);
  }

  function to(place) {
    if (!stops.length) return;
    at = Math.max(0, Math.min(stops.length - 1, place));
    tell();
    go(stops[at]);
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    play.setAttribute("aria-pressed", "false");
    play.textContent = "Run";
  }

  function start() {
    if (at >= stops.length - 1) at = -1;
    play.setAttribute("aria-pressed", "true");
    play.textContent = "Stop";
    timer = setInterval(() => {
      to(Math.floor(at + 1));
      if (at >= stops.length - 1) stop();
    }, 450);
  }

  // A call stands right before what it does first; one that does nothing, after what it returns.
  function beforeModule(call) {
    const placeOf = (thing) => (events ? events.placeOf(thing) : (places.get(thing) ?? -1));
    const known = (things) => things.map(placeOf).filter((place) => place >= 0);
    const isInside = (index) =>
      index != null && (index === call.index || isInside(run.modules[index].parent));
    const inside = known([
      ...call.inside.map((index) => run.entries[index]),
      ...run.steps.filter((step) => isInside(step.call)),
    ]);
    if (inside.length) return Math.min(...inside) - 0.5;
    const returned = known((call.outputs ?? []).map((index) => run.entries[index]));
    return returned.length ? Math.max(...returned) : null;
  }

  const toggle = () => (timer ? stop() : start());
  const move = (distance) => {
    stop();
    to(distance < 0 ? Math.ceil(at + distance) : Math.floor(at + distance));
  };
  const by = {
    first: () => move(-Infinity),
    previous: () => move(-1),
    next: () => move(1),
    last: () => move(Infinity),
  };
  for (const [id, action] of Object.entries(by))
    document.getElementById(id).addEventListener("click", action);
  play.addEventListener("click", toggle);
  slider.addEventListener("input", () => {
    stop();
    to(Number(slider.value));
  });

  return {
    gather,
    toggle,
    move,
    goTo: to,
    connect: (goTo) => (go = goTo),
    // Selecting something by other means goes on from there.
    moveTo(thing) {
      const own = events ? events.find(thing) : places.get(thing);
      const place = own ?? (thing?.what === "module" ? beforeModule(thing) : null);
      if (place != null) at = place;
      if (events) follow();
      else tell();
    },
    reset() {
      stop();
      if (!events) at = -1;
      tell();
    },
    // Position in the run of each entry and step, for telling what is still to come.
    placeOf: (thing) => (events ? events.placeOf(thing) : (places.get(thing) ?? -1)),
    get reached() {
      return events ? events.reached(Math.ceil(at)) : Math.ceil(at);
    },
  };
})();
