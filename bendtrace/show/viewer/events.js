// The events of a run that was stepped through: what is seen before each, and how to change it.
// Null for other runs.

const events = (() => {
  const told = run.stepped;
  if (!told) return null;
  const { texts, frames } = told;

  const list = (rows, first, end, side) => {
    const made = rows.map((row, number) => ({ ...row, what: "event", index: first + number, side }));
    made.push({ ...end, what: "event", kind: "end", index: first + made.length, side });
    return made;
  };
  const main = list(told.events, 0, told.end, null);
  const count = main.length - 1;
  const sides = told.sides.map((side) => {
    const own = list(side.events, side.at + 1, side.end, side);
    return Object.assign(side, { stops: [...main.slice(0, side.at + 1), ...own], first: own[0] });
  });
  let current = null; // the side that is gone through; null for the run itself
  const stops = () => (current ? current.stops : main);

  // What the log knows of an event: the entry of its op, or the flow step of its question.
  const ofThing = new Map();
  const things = new Map();
  const byOp = new Map();
  for (const entry of run.entries) {
    if (entry.kind === "op" && !byOp.has(entry.op)) byOp.set(entry.op, entry);
  }
  for (const event of main) {
    const thing = event.kind === "op" ? byOp.get(event.op) : run.steps[event.step];
    if (!thing || ofThing.has(thing)) continue;
    things.set(event, thing);
    ofThing.set(thing, event);
  }
  for (const entry of run.entries) {
    const event = ofThing.get(entry.first);
    if (event && entry.kind === "op") ofThing.set(entry, event);
  }

  // Which event comes next when a thing is there.
  const places = new Map();
  let next = count;
  for (const entry of run.entries.toReversed()) {
    next = Math.min(next, ofThing.get(entry)?.index ?? next);
    places.set(entry, next);
  }
  for (const step of run.steps) {
    places.set(step, ofThing.get(step)?.index ?? places.get(run.entries[step.after + 1]) ?? count);
  }

  const eventOf = (thing) => (thing?.what === "event" ? thing : (ofThing.get(thing) ?? null));
  const nameOf = (event) => {
    if (event.kind === "end") return "the end";
    const name = event.name ?? event.kind;
    // A side shares its question with the run, but not the answer.
    const answer = current?.at === event.index ? current.answer : event.answer;
    return event.kind === "question" ? `${name}? ${answer}` : name;
  };
  const where = (event) => (event.source == null ? "" : text.place(run.sources[event.source]));
  const isChanged = (event) => event.given != null && current?.at !== event.index;
  const isSeen = (event) => event.kind === "end" || event.frames != null;

  // Where a thing is in what is gone through; null for what is no event.
  function find(thing) {
    const event = eventOf(thing);
    if (!event) return null;
    if (!stops().includes(event)) current = event.side;
    return event.index;
  }

  function link(event, go) {
    const label = `${event.index}  ${nameOf(event)}`;
    return html("button", { type: "button", class: "link", onclick: () => go(event) }, label);
  }

  function listed(some, go, here = null) {
    return html(
      "ul",
      { class: "links" },
      some.map((event) =>
        html(
          "li",
          event === here ? { class: "next", "aria-current": "step" } : {},
          link(event, go),
          html("span", { class: "faint" }, ` ${where(event)}${isChanged(event) ? " (changed)" : ""}`),
        ),
      ),
    );
  }

  function command(line) {
    const field = html("input", {
      type: "text",
      value: line,
      spellcheck: "false",
      "aria-label": "Python to run",
    });
    const copy = () => {
      field.select();
      say(document.execCommand("copy") ? "Copied." : "Press Ctrl and C to copy it.");
    };
    return html(
      "p",
      { class: "command" },
      field,
      html("button", { type: "button", onclick: copy }, "Copy"),
    );
  }

  // The variables of one function; what differs from the position before is marked.
  function variablesOf(frame, before) {
    const old = new Map(before?.variables ?? []);
    const rows = frame.variables.map(([name, value]) => [
      html("dt", {}, name),
      html(
        "dd",
        before && old.get(name) !== value ? { class: "changed", title: "changed" } : {},
        html("code", {}, texts[value]),
      ),
    ]);
    return html("dl", { class: "variables" }, rows);
  }

  function framesOf(event) {
    if (event.kind === "end") return [];
    if (!event.frames) {
      const line = event.go && html("code", {}, `${event.go}.variables`);
      return [
        html(
          "p",
          { class: "left" },
          `Left out: the variables of all positions take more than ${told.budget} characters. `,
          ...(line ? [line, " has them, and so does a page with a larger budget."] : []),
        ),
      ];
    }
    const before = (stops()[event.index - 1]?.frames ?? []).map((number) => frames[number]);
    return event.frames.map((number, depth) => {
      const frame = frames[number];
      const source = run.sources[frame.source];
      // Counted from the outermost, which stays when functions are entered and left.
      const old = before.at(depth - event.frames.length);
      const same = old && run.sources[old.source].function === source.function ? old : null;
      const summary = html("summary", {}, `${source.function} ${text.place(source)}`);
      const open = depth === 0 ? { open: "" } : {};
      return html("details", open, summary, variablesOf(frame, same));
    });
  }

  function sideParts(event, go) {
    const here = sides.filter((side) => side.at === event.index && !event.side);
    const rows = here.map((side) =>
      html(
        "li",
        {},
        html(
          "button",
          { type: "button", class: "link", onclick: () => go(side.first) },
          `answered ${side.answer}`,
        ),
        html("span", { class: "faint" }, ` ${text.some(side.events.length, "event")} after it, `),
        endOf(side.stops.at(-1)),
      ),
    );
    return rows.length ? section("Other side, run before", html("ul", { class: "links" }, rows)) : null;
  }

  function endOf(end) {
    return html("code", {}, end.error ?? end.output);
  }

  // What is known at the position before an event.
  function parts(event, go) {
    const all = stops();
    const { side, index } = event;
    const around = all.slice(Math.max(0, index - 3), index + 4);
    return [
      side &&
        html(
          "p",
          { class: "aside" },
          `In the run where ${main[side.at].name} was answered ${side.answer}. `,
          html(
            "button",
            { type: "button", class: "link", onclick: () => go(main[side.at]) },
            "Back to the question",
          ),
        ),
      section(`Position ${index} of ${all.length - 1}`, listed(around, go, event)),
      facts([
        ["answer", event.kind === "question" && !event.given ? event.answer : ""],
        ["given by hand", event.given ? html("code", {}, event.given) : ""],
        ["of itself", event.own],
        [
          event.given ? "computed" : "result",
          event.result != null ? html("code", {}, texts[event.result]) : "",
        ],
        ["raised", event.error ? html("code", {}, event.error) : ""],
        ["output", event.output ? html("code", {}, event.output) : ""],
      ]),
      section("Variables", framesOf(event)),
      sideParts(event, go),
      event.go && section("To go there, or to change it, in Python", command(event.go)),
      event.change && command(event.change),
    ];
  }

  // What is known of all of it, for where nothing is selected.
  function overview(go) {
    const changed = main.filter((event) => event.given);
    const left = [...main, ...sides.flatMap((side) => side.stops.slice(side.at + 1))];
    const missing = left.filter((event) => !isSeen(event)).length;
    return [
      missing &&
        html(
          "p",
          { class: "left" },
          `The variables of ${text.some(missing, "position")} were left out: the budget is ${told.budget} characters.`,
        ),
      section("Changes", changed.length && listed(changed, go)),
      ...sides.map((side) => sideParts(main[side.at], go)),
      section(text.some(count, "event"), listed(main.slice(0, MOST_LINKS), go)),
      count > MOST_LINKS && html("p", { class: "faint" }, `and ${main.length - MOST_LINKS} more`),
    ];
  }

  // The number of a line of source; a link, where the run has events, to the next of them.
  function lineLink(file, line, thing, go) {
    const isAt = (event) => {
      const source = event.source == null ? null : run.sources[event.source];
      return source && source.file === file && source.line === line;
    };
    const found = stops().filter(isAt);
    if (!found.length) return null;
    const at = eventOf(thing)?.index ?? -1;
    const next = found.find((event) => event.index > at) ?? found[0];
    return html(
      "button",
      {
        type: "button",
        class: "count link",
        title: `Go to position ${next.index}`,
        onclick: () => go(next),
      },
      String(line),
    );
  }

  return {
    parts,
    overview,
    lineLink,
    eventOf,
    nameOf,
    find,
    stops,
    // The entry or step of an event, or itself.
    shownAs: (event) => things.get(event) ?? event,
    known: main.map((event) => [event, `${event.index}  ${nameOf(event)}`, `position ${where(event)}`]),
    placeOf: (thing) => places.get(thing) ?? ofThing.get(thing)?.index ?? -1,
    // How far the run that is drawn is gone through.
    reached: (at) => (current ? Math.min(at, current.at) : at),
    isMain: () => current === null,
  };
})();
