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
