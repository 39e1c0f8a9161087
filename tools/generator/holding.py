"""Statements about what holds things: containers, and the state of the model."""

from __future__ import annotations

from .scalars import small
from .statements import body, statement
from .writer import WIDTH, Dict, List, Tensor, Var, Writer

# Containers


@statement(weight=2)
def new_list(w: Writer) -> None:
    kind = w.type("f")
    first = w.statement_expression(kind)
    item, turns = w.fresh("i"), small(w)
    rows = [v for v in w.tensors("f", 1) if v.kind.dims[1:] == kind.dims]
    forms = ["[{a}]", "[{a}, {a}]", "list(({a},))"]
    if rows:
        forms.append(f"list({w.pick(rows).name})")
        forms.append(f"[*{w.pick(rows).name}.unbind()]")
    text = w.pick(forms).format(a=first)
    if w.chance(4):
        with w.local(Var(item, int)):
            text = f"[{w.write(kind)} for {item} in range({turns})] + [{first}]"
    w.line(f"{w.define(List(kind), 'l')} = {text}")


@statement(lambda w: w.of_class(List), weight=6, effect=True)
def change_list(w: Writer) -> None:
    var = w.pick(w.of_class(List))
    t = var.kind.of
    a = w.statement_expression(t)
    form = w.pick(
        (
            "{l}.append({a})", "{l}.append({a})", "{l}.insert(0, {a})", "{l}[0] = {a}",
            "{l} += [{a}]",
            "{l}.extend([{a}, {a}])", "{l}.reverse()", "{l}[-1] = {l}[0]", "{l} = {l}[-2:]",
            "{l} = [e * 2 for e in {l}]", "{l} = [e for e in {l} if e.sum() > 0] or [{a}]",
            "{l}[0].add_(1)",
            "{l} = sorted({l}, key=lambda e: e.sum().item())", "{l}.append({l}.pop(0))",
        )
    )  # fmt: skip
    w.line(form.format(l=var.name, a=a))


@statement(lambda w: w.of_class(List), weight=3)
def use_list(w: Writer) -> None:
    var = w.pick(w.of_class(List))
    t = var.kind.of
    if t.dims:
        text, kind = w.pick(
            (
                ("torch.cat({l})", Tensor(t.dtype, (w.fresh("S"), *t.dims[1:]))),
                ("torch.stack({l})", Tensor(t.dtype, (w.fresh("S"), *t.dims))),
                ("sum({l})", t), ("torch.stack({l}).sum(0)", t), ("max({l}, key=torch.sum)", t),
                ("torch.stack({l}, dim=1)", Tensor(t.dtype, (t.dims[0], w.fresh("S"),
                *t.dims[1:]))),
            )
        )  # fmt: skip
    else:
        text, kind = w.pick((("torch.stack({l})", Tensor(t.dtype, (w.fresh("S"),))),
                             ("sum({l})", t), ("max({l})", t), ("sorted({l})[0]", t)))  # fmt: skip
    if len(kind.dims) <= 3:
        w.line(f"{w.define(kind)} = {text.format(l=var.name)}")


@statement()
def new_dict(w: Writer) -> None:
    kind = w.type("f")
    key = w.write(int)
    text = w.pick(
        ("{{'a': {a}}}", "dict(a={a})", "{{'a': {a}, {k}: {a}}}", "{{'b': {a}, 'a': {a}}}")
    )
    text = text.format(a=w.statement_expression(kind), k=key)
    w.line(f"{w.define(Dict(kind), 'd')} = {text}")


@statement(lambda w: w.of_class(Dict), weight=3, effect=True)
def change_dict(w: Writer) -> None:
    var = w.pick(w.of_class(Dict))
    a = w.statement_expression(var.kind.of)
    key = w.statement_expression(int)
    form = w.pick(
        (
            "{d}['a'] = {a}", "{d}[{k}] = {a}", "{d}.setdefault({k}, {a})", "{d}.update(b={a})",
            "{d}['a'].add_(1)",
            "{d} = {{k: v * 2 for k, v in {d}.items()}}", "{d} = {{**{d}, 'c': {a}}}",
            "{d}.pop('b', None)",
            "{d}[str({k})] = {a}", "{d}[{k} > 1] = {a}",
        )
    )  # fmt: skip
    w.line(form.format(d=var.name, a=a, k=key))


# State


@statement(lambda w: w.in_method, weight=5, effect=True)
def state(w: Writer) -> None:
    vector = w.statement_expression(Tensor("f", (WIDTH,)))
    forms = [
        ("{count} += 1", "count"), ("{buf}.add_({v})", "buf"), ("{buf} = {v}", "buf"),
        ("{h} = {v}", "h"),
        ("{steps} += 1", "steps"), ("{h} = ({v}).detach()", "h"),
        ("{buf}.mul_(0.9).add_(({v}).detach())", "buf"),
        ("{count} = {n}", "count"), ("{scale} = {s}", "scale"), ("{steps} = {steps} + {n}",
        "steps"),
        ("{h} = {h} + {v}", "h"), ("{h}[0] = 1", "h"), ("{buf}[{n} % 4] += 1", "buf"),
        ("{log}.append({n})", "log"),
        ("{log}.append({v})", "log"), ("{table}[{n} % 3] = {v}", "table"), ("{log} = [{n}]", "log"),
        ("{h} = {buf}", "h"), ("{buf}.copy_({v})", "buf"), ("{table}['x'] = {n}", "table"),
        ("{pair} = ({n}, {pair}[0] + {s})", "pair"), ("{window}.append({n})", "window"),
        ("{window}.append(sum({window}) + {n})", "window"),
    ]  # fmt: skip
    form = w.pick(forms)[0]
    made = {
        "count": "0", "buf": 'register_buffer("buf", torch.zeros(4))', "h": "torch.zeros(4)",
        "scale": "0.75",
        "steps": 'register_buffer("steps", torch.tensor(0))', "log": "[]", "table": "{}",
        "pair": "(0, 0.5)", "window": "collections.deque([1, 2], maxlen=2)",
    }  # fmt: skip
    parts = {name: w.attribute(name, text) for name, text in made.items() if "{" + name in form}
    if "{n}" in form:
        parts["n"] = w.write(int)
    if "{s}" in form:
        parts["s"] = w.write(float)
    line = form.format(v=vector, **parts)
    if ".add_" in line or ".copy_" in line or "] +=" in line or "[0] = 1" in line:
        if w.below(4):
            with w.block("with torch.no_grad():"):
                w.line(line)
            return
    w.line(line)


@statement(lambda w: w.in_method, effect=True)
def setting(w: Writer) -> None:
    """Things of the model and its parts that are not tensors."""
    lin = w.attribute("lin", "nn.Linear(4, 4)")
    drop = w.attribute("drop", "nn.Dropout(0.5)")
    bn = w.attribute("bn", "nn.BatchNorm1d(4)")
    form = w.pick(
        ("{drop}.p = {s}", "{bn}.eval()", "{bn}.train({c})",
        "{lin}.calls = getattr({lin}, 'calls', 0) + 1",
         "self.mode = 'a' if {c} else 'b'", "self.seen = (*getattr(self, 'seen', ())[-2:], {n})",
         "self.pair = Pair({lin}.bias, {n})", "self.box = {{'t': {lin}.bias * 2, 'n': [{n}]}}",
         "self.__dict__.setdefault('extra', []).append({n})",
         "setattr(self, 'x' + str({n} % 2), {n})",
         "self.mode = getattr(self, 'mode', 'a') + 'b' if {c} else 'a'", "{bn}.momentum = 0.5",
         "{bn}.num_batches_tracked.add_(1)", "self.best = max(getattr(self, 'best', 0), {n})",
         "self.sizes = getattr(self, 'sizes', set()) | {{{n}}}")
    )  # fmt: skip
    w.line(
        form.format(
            lin=lin, drop=drop, bn=bn, s=w.pick(("0.25",
            "0.0")), c=w.write(bool) if "{c}" in form else "",
            n=w.write(int) if "{n}" in form else "",
        )
    )  # fmt: skip


@statement(weight=1)
def seeding(w: Writer) -> None:
    form = w.pick(("torch.manual_seed({n})", "{g} = torch.Generator().manual_seed(3)"))
    if "{g}" not in form:
        w.line(form.format(n=w.pick(("3", f"{w.write(int)} % 5"))))
        return
    name = w.fresh("g")
    w.line(form.format(g=name))
    kind = w.type("f")
    if kind.dims:
        text = f"torch.rand({w.shape(kind.dims)}, generator={name})"
        w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.in_method and w.tensors("f"), effect=True)
def remember(w: Writer) -> None:
    var = w.pick(w.tensors("f"))
    last = w.attribute("last", "None")
    with w.block(f"if {last} is not None and {last}.shape == {var.name}.shape:"):
        w.line(f"{var.name} = {var.name} + {last}")
        body(w)
    w.line(f"{last} = {var.name}{w.pick(('.detach()', '', '.detach().clone()'))}")


@statement()
def global_state(w: Writer) -> None:
    form = w.below(3)
    if form == 0:
        w.globals["SEEN"] = "[]"
        w.line(f"SEEN.append({w.statement_expression(int)})")
    elif form == 1:
        w.globals["TABLE"] = "torch.linspace(-1, 1, 4)"
        w.line("TABLE.mul_(0.5)")
    else:
        w.globals["OPTIONS"] = '{"power": 2}'
        w.line(f"{w.define(int, 'n')} = OPTIONS['power']")
