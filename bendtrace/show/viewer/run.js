// The run, as the page's data has it, with the links that the file leaves out.

const run = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { entries, modules, steps } = data;

  entries.forEach((entry, index) => {
    entry.what = "entry";
    entry.index = index;
    entry.parents ??= [];
    entry.flow ??= [];
    entry.children = [];
    entry.steps = []; // numbers of the flow steps that consumed it
  });
  for (const entry of entries) {
    for (const parent of entry.parents) entries[parent].children.push(entry.index);
  }
  modules.forEach((call, index) => {
    call.what = "module";
    call.index = index;
    call.parent ??= null;
    call.inside = []; // entries computed in it, and in what it calls
  });
  // Results of one op: the first of them names their place.
  const firsts = new Map();
  for (const entry of entries) {
    if (entry.kind === "op" && !firsts.has(entry.op)) firsts.set(entry.op, entry);
    entry.first = entry.kind === "op" ? firsts.get(entry.op) : entry;
  }
  for (const entry of entries) {
    for (let call = entry.call; call != null; call = modules[call].parent) {
      modules[call].inside.push(entry.index);
    }
  }
  steps.forEach((step, index) => {
    step.what = "step";
    step.index = index;
    step.under = []; // entries that ran because of it
    if (step.entry != null) entries[step.entry].steps.push(index);
  });
  for (const entry of entries) {
    for (const step of entry.flow) steps[step].under.push(entry.index);
  }
  placeSteps(data);
  return data;
})();

// Where in the run each flow step was taken: right before the first entry that ran under it, or
// else right after the value that it consumed; never before the step before it.
function placeSteps({ entries, modules, steps }) {
  let reached = 0;
  for (const step of steps) {
    if (step.entry != null) reached = Math.max(reached, step.entry);
    step.after = reached;
    if (step.under.length && step.under[0] > reached) step.after = reached = step.under[0] - 1;
    step.call = callOf(step);
  }

  // The call whose code took it. Only the module is known; which call, the entries around tell.
  function callOf(step) {
    if (!step.module) return null;
    const near = [step.under[0], step.entry, step.after, step.after + 1];
    for (const index of near) {
      let call = entries[index]?.call;
      while (call != null && modules[call].name !== step.module) call = modules[call].parent;
      if (call != null) return call;
    }
    const calls = modules.filter((call) => call.name === step.module);
    const last = calls.findLast((call) => call.inside[0] <= step.after) ?? calls[0];
    return last ? last.index : null;
  }
}

const isHidden = (entry, numbers) =>
  entry.kind === "state" || (entry.kind === "number" && !numbers);

// Everything that a name of the deep link, or a link of the panel, can mean; the first one wins.
function find(key) {
  const is = (test) => run.entries.find(test);
  const number = /^-?\d+$/.test(key) ? Number(key) : null;
  const layers = number == null ? [] : run.entries.filter((entry) => entry.ordinal != null);
  return (
    is((entry) => entry.label === key) ??
    run.modules.find((call) => call.label === key || call.name === key) ??
    is((entry) => entry.path === key || entry.name === key || entry.short === key) ??
    is((entry) => entry.path?.replace(/:\d+$/, "") === key) ??
    is((entry) => entry.node === key || `${entry.short}:${entry.number ?? 1}` === key) ??
    layers.at(number ?? 0) ??
    null
  );
}

const text = {
  shape: (shape) => (shape == null ? "" : shape.length ? shape.join("\u00d7") : "scalar"),

  bytes(count) {
    if (count == null) return "";
    const units = ["B", "KB", "MB", "GB", "TB"];
    const power = Math.min(4, count < 1024 ? 0 : Math.floor(Math.log2(count) / 10));
    return `${text.short(count / 1024 ** power)} ${units[power]}`;
  },

  seconds(time) {
    if (time == null) return "";
    if (time >= 1) return `${text.short(time)} s`;
    return time >= 1e-3 ? `${text.short(time * 1e3)} ms` : `${text.short(time * 1e6)} \u00b5s`;
  },

  count(number) {
    if (number == null) return "";
    for (const [size, unit] of [
      [1e12, "T"],
      [1e9, "G"],
      [1e6, "M"],
      [1e4, "k"],
    ]) {
      if (number >= size) return `${text.short(number / (unit === "k" ? 1e3 : size))}${unit}`;
    }
    return String(number);
  },

  short: (number) => String(Number(number.toPrecision(3))),
  some: (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`,
  file: (path) => path.split(/[\\/]/).at(-1),

  place(source) {
    return `${text.file(run.files[source.file].path)}:${source.line}`;
  },

  // "True", "3 iterations": what a flow step came to.
  taken(step) {
    if (step.iterations == null) return step.value;
    const of = step.bound != null && step.bound !== step.iterations ? ` of ${step.bound}` : "";
    return `${step.iterations}${of} iteration${step.iterations === 1 && !of ? "" : "s"}`;
  },
};
