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
