// What is known of the selected thing, as text with links.

function html(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== ""));
  return element;
}

const MOST_LINKS = 40;

// `go` selects a thing, `item` is the box that stands for it, null if there is none.
function panelFor(thing, item, go) {
  const parts = { entry: entryParts, module: moduleParts, step: stepParts, event: eventParts };
  const body = thing ? parts[thing.what](thing, go) : overviewParts(go);
  const event = events?.eventOf(thing);
  const position = event ? events.parts(event, go) : [];
  return [passChooser(thing, item, go), ...position, ...body].flat().filter(Boolean);
}

const link = (thing, go, label = nameOf(thing)) =>
  html("button", { type: "button", class: "link", onclick: () => go(thing) }, label);

function nameOf(thing) {
  if (thing.what === "event") return events.nameOf(thing);
  return thing.what === "step" ? `${thing.kind} ${thing.text}` : thing.label;
}

function heading(title, kind, below) {
  return html(
    "div",
    { class: "heading" },
    html("p", { class: "kind" }, kind),
    html("h2", {}, title),
    below && html("p", { class: "path" }, below),
  );
}

// Rows of a table of facts; those without a value are left out.
function facts(rows) {
  const kept = rows.filter(
    ([, value]) => value != null && value !== "" && !(Array.isArray(value) && !value.length),
  );
  if (!kept.length) return null;
  return html(
    "dl",
    {},
    kept.map(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]),
  );
}

function section(title, ...content) {
  const kept = content.flat().filter(Boolean);
  return kept.length ? html("section", {}, html("h3", {}, title), kept) : null;
}

function links(things, go, more = () => "") {
  if (!things.length) return null;
  const shown = things.slice(0, MOST_LINKS);
  const rest = things.length - shown.length;
  return html(
    "ul",
    { class: "links" },
    shown.map((thing) =>
      html("li", {}, link(thing, go), html("span", { class: "faint" }, more(thing))),
    ),
    rest > 0 ? html("li", { class: "faint" }, `and ${rest} more`) : null,
  );
}

const shapeOf = (entry) => (entry.shape ? ` ${text.shape(entry.shape)}` : ` ${entry.value ?? ""}`);
const byIndex = (indices) => indices.map((index) => run.entries[index]);
const callsOf = (indices) => indices.map((index) => run.modules[index]);

// Which pass of a rolled box is shown, and the way to the others.
function passChooser(thing, item, go) {
  const things = item?.things ?? [];
  if (things.length < 2) return null;
  const at = things.indexOf(thing);
  const show = (number) => go(things[Math.max(0, Math.min(things.length - 1, number))]);
  const what =
    things[0].what === "step" ? "decision" : passesOf(item) < things.length ? "result" : "pass";
  const field = html("input", {
    type: "number",
    min: 1,
    max: things.length,
    value: at + 1,
    "aria-label": `Number of the ${what}`,
    onchange: (event) => show(Number(event.target.value) - 1),
  });
  return html(
    "p",
    { class: "passes" },
    html(
      "button",
      { type: "button", "aria-label": `Previous ${what}`, onclick: () => show(at - 1) },
      "<",
    ),
    `${what} `,
    field,
    ` of ${things.length}`,
    html(
      "button",
      { type: "button", "aria-label": `Next ${what}`, onclick: () => show(at + 1) },
      ">",
    ),
  );
}

function entryParts(entry, go) {
  const calls = [];
  for (let call = entry.call; call != null; call = run.modules[call].parent) calls.unshift(call);
  const kind = entry.ordinal == null ? entry.kind : `${entry.kind} ${entry.ordinal}`;
  const pass = entry.passes ? `, pass ${entry.number} of ${entry.passes}` : "";
  return [
    heading(entry.label, kind + pass, entry.path),
    facts([
      ["value", entry.value],
      ["shape", entry.shape && text.shape(entry.shape)],
      ["dtype", entry.dtype],
      ["device", entry.device],
      ["size", text.bytes(entry.bytes)],
      ["function", entry.target ?? entry.function],
      ["part", entry.element],
      ["arguments", entry.arguments && html("code", {}, entry.arguments)],
      ["grad_fn", entry.grad],
      ["in place", entry.inplace && "yes"],
      ["time", text.seconds(entry.time)],
      ["FLOPs", entry.flops ? text.count(entry.flops) : ""],
    ]),
    sourceSection(entry, go),
    section("Computed from", links(byIndex(entry.parents), go, shapeOf)),
    section(
      "Used by",
      links(byIndex(entry.children), go, shapeOf),
      links(
        entry.steps.map((index) => run.steps[index]),
        go,
        (step) => ` ${text.taken(step)}`,
      ),
    ),
    section("Parameters", parameterTable(entry.states)),
    section(
      "Ran under",
      links(
        entry.flow.map((index) => run.steps[index]),
        go,
        (step) => ` ${text.taken(step)}`,
      ),
    ),
    section(
      "In modules",
      links(callsOf(calls), go, (call) => ` ${call.type}`),
    ),
    section(
      "Output of",
      links(callsOf(entry.gives ?? []), go, (call) => ` ${call.type}`),
    ),
    contentsSection("Saved activation", entry.saved),
    entry.unsaved && section("Saved activation", html("p", {}, entry.unsaved)),
    contentsSection("Gradient", entry.gradient),
  ];
}

function parameterTable(states) {
  if (!states) return null;
  const row = (use) =>
    html(
      "li",
      {},
      html("code", {}, use.name ?? ""),
      " ",
      text.shape(use.shape ?? []),
      " ",
      html(
        "span",
        { class: "faint" },
        [text.count(use.count), use.parameter ? (use.trainable ? "" : "frozen") : "buffer"]
          .filter(Boolean)
          .join(", "),
      ),
    );
  return html(
    "ul",
    { class: "links" },
    states.map((index) => row(run.states[index])),
  );
}

function moduleParts(call, go) {
  const inside = byIndex(call.inside);
  const sum = (key) => inside.reduce((total, entry) => total + (entry[key] ?? 0), 0);
  const ops = inside.filter((entry) => entry.kind === "op");
  const inner = run.modules.filter((other) => other.parent === call.index);
  const pass = call.passes ? `call ${call.number} of ${call.passes}` : "module";
  return [
    heading(call.label, pass, call.type),
    facts([
      ["own parameters", text.count(call.parameters)],
      ["mode", call.training ? "training" : "evaluation"],
      ["ops inside", ops.length],
      ["values inside", text.bytes(sum("bytes"))],
      ["time", sum("time") ? text.seconds(sum("time")) : ""],
      ["FLOPs", sum("flops") ? text.count(sum("flops")) : ""],
    ]),
    sourceSection(call, go),
    section("Inputs", links(byIndex(call.inputs ?? []), go, shapeOf)),
    section("Outputs", links(byIndex(call.outputs ?? []), go, shapeOf)),
    section(
      "Ran under",
      links(
        (call.flow ?? []).map((index) => run.steps[index]),
        go,
        (step) => ` ${text.taken(step)}`,
      ),
    ),
    section(
      "Called by",
      call.parent != null && links([run.modules[call.parent]], go, (outer) => ` ${outer.type}`),
    ),
    section(
      "Calls",
      links(inner, go, (other) => ` ${other.type}`),
    ),
    section("Ops", links(ops, go, shapeOf)),
  ];
}

function stepParts(step, go) {
  return [
    heading(
      step.text || step.kind,
      `${step.kind} \u2192 ${text.taken(step)}`,
      step.module ? `in ${step.module}` : "",
    ),
    facts([
      ["value", step.value],
      ["iterations", step.iterations != null ? text.taken(step) : ""],
      ["in iteration", (step.iteration ?? []).join(", ")],
    ]),
    sourceSection(step, go),
    section("Decided by", step.entry != null && links([run.entries[step.entry]], go, shapeOf)),
    section("Ran because of it", links(byIndex(step.under), go, shapeOf)),
  ];
}

// An event of which the log knows nothing more.
function eventParts(event, go) {
  const name = events.nameOf(event);
  return [heading(name, event.kind === "end" ? "" : event.kind), sourceSection(event, go)];
}

function sourceSection(thing, go) {
  if (thing.source == null) return null;
  const source = run.sources[thing.source];
  const file = run.files[source.file];
  const numbers = Object.keys(file.lines)
    .map(Number)
    .filter((line) => Math.abs(line - source.line) <= 4)
    .sort((a, b) => a - b);
  const shown = numbers.includes(source.line)
    ? numbers.map((line) => [line, file.lines[line]])
    : [[source.line, source.statement ?? source.text ?? ""]];
  const indent = Math.min(
    ...shown
      .filter(([, code]) => code.trim())
      .map(([, code]) => code.length - code.trimStart().length),
  );
  const code = html(
    "pre",
    { class: "source", tabindex: 0 },
    shown.map(([line, content]) => {
      const isHere = line === source.line;
      const pieces = isHere ? marked(content.slice(indent), source.text) : [content.slice(indent)];
      return html(
        "span",
        { class: isHere ? "line here" : "line" },
        events?.lineLink(source.file, line, thing, go) ??
          html("span", { class: "count" }, String(line)),
        ...pieces,
        "\n",
      );
    }),
  );
  const where = `${file.path}:${source.line}`;
  const within = source.function ? ` in ${source.function}` : "";
  return section(
    "Source",
    code,
    html("p", { class: "path", title: where }, `${text.place(source)}${within}`),
  );
}

// Mark an expression where it stands in its line, if that is clear.
function marked(line, expression) {
  const start = expression ? line.indexOf(expression) : -1;
  if (start < 0 || line.indexOf(expression, start + 1) >= 0) return [line];
  return [
    line.slice(0, start),
    html("mark", {}, expression),
    line.slice(start + expression.length),
  ];
}

function contentsSection(title, saved) {
  if (!saved) return null;
  const missing = [
    ["nan", saved.nan],
    ["inf", saved.inf],
    ["zero", saved.zeros],
  ].filter(([, count]) => count);
  return section(
    title,
    facts([
      ["saved as", saved.shape ? `${saved.dtype} ${text.shape(saved.shape)}` : saved.type],
      ["range", saved.min && `${saved.min} to ${saved.max}`],
      ["mean", saved.mean && `${saved.mean} (deviation ${saved.std})`],
      ["of which", missing.map(([name, count]) => `${count} ${name}`).join(", ")],
      ["first", saved.first && html("code", {}, saved.first.join("  "))],
      ["content", saved.text && html("code", {}, saved.text)],
    ]),
    saved.bins && histogram(saved),
  );
}

function histogram({ bins, min, max }) {
  const most = Math.max(...bins);
  const bars = bins.map((count, i) =>
    make("rect", {
      x: i * 10,
      width: 9,
      y: 40 - (40 * count) / most,
      height: (40 * count) / most,
    }),
  );
  const label = `Histogram from ${min} to ${max}`;
  return make(
    "svg",
    {
      class: "histogram",
      viewBox: `0 0 ${bins.length * 10} 40`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
    },
    ...bars,
  );
}

function overviewParts(go) {
  const of = (kind) => run.entries.filter((entry) => entry.kind === kind);
  const ops = of("op");
  const used = new Set(ops.flatMap((entry) => entry.states ?? []));
  const parameters = [...used].map((index) => run.states[index]).filter((use) => use.parameter);
  const sum = (things, key) => things.reduce((total, thing) => total + (thing[key] ?? 0), 0);
  const largest = (key) =>
    ops
      .filter((entry) => entry[key])
      .sort((a, b) => b[key] - a[key])
      .slice(0, 5);
  const decisions = run.steps.filter((step) => step.step !== "shape");
  return [
    heading(run.name, "run", "Click a node to see what is known of it."),
    ...(events?.overview(go) ?? []),
    facts([
      ["ops", ops.length],
      ["calls of modules", run.modules.length],
      [
        "values",
        text.bytes(
          sum(
            run.entries.filter((entry) => entry.kind !== "state"),
            "bytes",
          ),
        ),
      ],
      ["saved", run.entries.filter((entry) => entry.saved).length || ""],
      ["parameters used", text.count(sum(parameters, "count"))],
      ["FLOPs", sum(ops, "flops") ? text.count(sum(ops, "flops")) : ""],
      ["time", text.seconds(run.time)],
      ["seed", run.seed],
    ]),
    section("Inputs", links(of("input"), go, shapeOf)),
    section("Outputs", links(of("output"), go, shapeOf)),
    section(
      "Decisions",
      links(decisions, go, (step) => ` ${text.taken(step)}`),
    ),
    section(
      "Slowest",
      links(largest("time"), go, (entry) => ` ${text.seconds(entry.time)}`),
    ),
    section(
      "Largest",
      links(largest("bytes"), go, (entry) => ` ${text.bytes(entry.bytes)}`),
    ),
    section("Colours", legend()),
  ];
}

function legend() {
  const nodes = [
    ["input", "input"],
    ["output", "output"],
    ["op", "op"],
    ["weighted", "op with parameters"],
    ["module", "module"],
    ["step", "decision"],
    ["number", "number"],
  ];
  const lines = [
    ["data", "value"],
    ["data back", "value, into the next pass"],
    ["number", "size or number"],
    ["control", "ran because of"],
  ];
  const drawn = (...shapes) =>
    make("svg", { viewBox: "0 0 30 14", "aria-hidden": "true" }, ...shapes);
  const node = (kind) =>
    drawn(
      make(
        "g",
        { class: `node ${kind}` },
        kind === "step"
          ? make("path", { class: "shape", d: "M1,7L7,1H23L29,7L23,13H7Z" })
          : make("rect", { class: "shape", x: 1, y: 1, width: 28, height: 12, rx: 4 }),
      ),
    );
  const wire = (kind) => drawn(make("path", { class: `wire ${kind}`, d: "M0,7H30" }));
  return html(
    "ul",
    { class: "legend" },
    nodes.map(([kind, name]) => html("li", {}, node(kind), name)),
    lines.map(([kind, name]) => html("li", {}, wire(kind), name)),
  );
}
