// Finding things by name, path, module, function or source text.

const MOST_FOUND = 60;

const search = (() => {
  const field = document.getElementById("query");
  const list = document.getElementById("results");
  let found = [];
  let chosen = -1;
  let go = () => {};
  let sameBox = () => null;

  const sourceText = (thing) => {
    if (thing.source == null) return "";
    const source = run.sources[thing.source];
    return `${source.statement ?? ""} ${source.text ?? ""} ${text.place(source)}`;
  };
  // Names first: a match there counts more than one in what else is known.
  const known = [
    ...run.modules.map((call) => [call, call.label, `${call.type} ${sourceText(call)}`]),
    ...run.entries.map((entry) => {
      const states = (entry.states ?? []).map((index) => run.states[index].name).join(" ");
      return [
        entry,
        entry.label,
        `${entry.path ?? ""} ${entry.module ?? ""} ${entry.target ?? ""} ${entry.function ?? ""} ${states} ${sourceText(entry)}`,
      ];
    }),
    ...run.steps.map((step) => [
      step,
      step.text ?? step.kind,
      `${step.kind} ${step.module ?? ""} ${sourceText(step)}`,
    ]),
    ...(events?.known ?? []),
  ].map(([thing, name, more]) => ({
    thing,
    name,
    low: name.toLowerCase(),
    all: `${name} ${more}`.toLowerCase(),
  }));

  function matches(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return [];
    const whole = words.join(" ");
    const rank = ({ low, all }) => {
      if (!words.every((word) => all.includes(word))) return null;
      const base = low.replace(/:\d+$/, "");
      if (low === whole || base === whole) return 0;
      if (low.startsWith(whole)) return 1;
      if (low.includes(whole)) return 2;
      const parts = low.split(/[^\p{L}\p{N}]+/u);
      if (words.every((word) => parts.includes(word))) return 3;
      return words.every((word) => low.includes(word)) ? 4 : all.includes(whole) ? 5 : 6;
    };
    const ranked = [];
    for (const each of known) {
      const place = rank(each);
      if (place !== null) ranked.push([place, each]);
    }
    ranked.sort((a, b) => a[0] - b[0]);
    // Of several passes in one box, the first stands for all.
    const boxes = new Set();
    return ranked
      .map(([, each]) => each)
      .filter(({ thing, low }) => {
        const box = sameBox(thing);
        if (box === null || low === whole) return true;
        const key = `${thing.what} ${box}`;
        return !boxes.has(key) && boxes.add(key);
      });
  }

  function show() {
    const all = matches(field.value);
    found = all.slice(0, MOST_FOUND);
    list.replaceChildren(
      ...found.map(({ thing, name }, number) => {
        const kind =
          thing.what === "module" ? thing.type : thing.what === "event" ? "" : thing.kind;
        const below =
          thing.what === "entry" ? `${text.shape(thing.shape)} ${thing.module ?? ""}` : "";
        return html(
          "li",
          {
            id: `result-${number}`,
            role: "option",
            "aria-selected": "false",
            onpointerdown: (event) => event.preventDefault(),
            onclick: () => take(number),
          },
          html("span", {}, name),
          html("span", { class: "faint" }, ` ${kind} ${below}`),
        );
      }),
    );
    const rest = all.length - found.length;
    if (field.value.trim() && !found.length)
      list.append(html("li", { class: "faint" }, "Nothing found."));
    if (rest > 0) list.append(html("li", { class: "faint" }, `and ${rest} more`));
    open(Boolean(field.value.trim()));
    choose(found.length ? 0 : -1);
  }

  function open(isOpen) {
    list.hidden = !isOpen;
    field.setAttribute("aria-expanded", String(isOpen));
    if (!isOpen) field.removeAttribute("aria-activedescendant");
  }

  function choose(number) {
    list.children[chosen]?.setAttribute("aria-selected", "false");
    chosen = number;
    const option = found[number] && list.children[number];
    if (!option) return;
    option.setAttribute("aria-selected", "true");
    option.scrollIntoView({ block: "nearest" });
    field.setAttribute("aria-activedescendant", option.id);
  }

  function take(number) {
    if (!found[number]) return;
    const { thing } = found[number];
    open(false);
    go(thing);
  }

  field.addEventListener("input", show);
  field.addEventListener("focus", () => field.value.trim() && show());
  field.addEventListener("blur", () => open(false));
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    const last = found.length - 1;
    if (event.key === "ArrowDown") choose(Math.min(last, chosen + 1));
    else if (event.key === "ArrowUp") choose(Math.max(0, chosen - 1));
    else if (event.key === "Enter") take(chosen);
    else if (event.key === "Escape") {
      open(false);
      document.getElementById("graph").focus();
    } else return;
    event.preventDefault();
  });

  return {
    focus: () => field.select(),
    // `goTo` selects a thing; `boxOf` names the box that a thing is in, null where each is its own.
    connect(goTo, boxOf) {
      [go, sameBox] = [goTo, boxOf];
    },
  };
})();
