"""Expressions of tensors, each for a wanted dtype and wanted sizes."""

from __future__ import annotations

from typing import Any

from .scalars import small
from .writer import WIDTH, Dict, Function, List, Maybe, Tensor, Var, Writer, gives

DTYPES = {"f": "torch.float32", "d": "torch.float64", "i": "torch.int64", "b": "torch.bool"}


def floating(w: Writer, t: Tensor) -> bool:
    return t.dtype in "fd"


def single(w: Writer, t: Tensor) -> bool:
    return t.dtype == "f"


def numeric(w: Writer, t: Tensor) -> bool:
    return t.dtype in "fdi"


def ranked(low: int, high: int = 9, dtypes: str = "fdib") -> Any:
    return lambda w, t: t.dtype in dtypes and low <= len(t.dims) <= high


def wide(w: Writer, t: Tensor) -> bool:
    return t.dtype == "f" and bool(t.dims) and t.dims[-1] == WIDTH


def wide_in_method(w: Writer, t: Tensor) -> bool:
    return w.in_method and wide(w, t)


def one_of(w: Writer, form: str, *alternatives: str, **parts: str) -> str:
    return w.pick((form, *alternatives)).format(**parts)


# Without other expressions inside


@gives(Tensor, lambda w, t: w.of_kind(t), nested=False, weight=20)
def variable(w: Writer, t: Tensor) -> str:
    return w.pick(w.of_kind(t))


@gives(Tensor, lambda w, t: not w.of_kind(t), nested=False, weight=3)
@gives(Tensor, nested=False)
def made(w: Writer, t: Tensor) -> str:
    shape = w.shape(t.dims)
    forms = {
        "f": (
            "torch.zeros({})", "torch.ones({})", "torch.rand({})", "torch.randn({})",
            "torch.full(({},), 0.5)", "torch.empty({}).fill_(0.25)", "torch.empty({}).uniform_()",
            "torch.zeros(size=({},))", "torch.zeros(torch.Size(({},)))",
        ),
        "d": ("torch.ones({}, dtype=torch.float64)", "torch.randn({}, dtype=torch.double)"),
        "i": (
            "torch.zeros({}, dtype=torch.long)", "torch.ones({}, dtype=torch.int64)",
            "torch.randint(0, 4, ({},))", "torch.full(({},), 2)",
        ),
        "b": ("torch.ones({}, dtype=torch.bool)", "torch.zeros({}, dtype=torch.bool)",
              "torch.rand({}).gt(0.5)", "torch.empty({}).bernoulli_(0.5).bool()"),
    }[t.dtype]  # fmt: skip
    form = w.pick(forms)
    if not t.dims:
        form = form.replace("({},)", "()").replace("torch.Size(())", "()")
    return form.format(shape)


@gives(Tensor, ranked(1, 9, "fi"), nested=False)
def made_by_size(w: Writer, t: Tensor) -> str:
    known = w.of_kind(t)
    one = w.pick(known) if known else made(w, t)
    old = w.pick(("torch.FloatTensor", "torch.Tensor") if t.dtype == "f" else ("torch.LongTensor",))
    sizes = (f"torch.Size(({w.shape(t.dims)},))", f"{one}.size()", f"{one}.shape")
    return one_of(w, "{old}({size}).fill_(2)", "{one}.new({size}).zero_()",
                  old=old, one=one, size=w.pick(sizes))  # fmt: skip


@gives(Tensor, ranked(1, 1, "i"), nested=False, weight=2)
def arange(w: Writer, t: Tensor) -> str:
    return f"torch.arange({w.size(t.dims[0])})"


@gives(Tensor, lambda w, t: t == Tensor("i", (3,)), nested=False)
def multinomial(w: Writer, t: Tensor) -> str:
    return "torch.multinomial(torch.ones(4), 3)"


@gives(Tensor, ranked(1, 1, "i"), nested=False)
def permutation(w: Writer, t: Tensor) -> str:
    return f"torch.randperm({w.size(t.dims[0])})"


@gives(Tensor, lambda w, t: w.in_method and t == Tensor("f", (WIDTH,)), nested=False, weight=6)
def held(w: Writer, t: Tensor) -> str:
    return w.pick(
        (
            w.attribute("w", "nn.Parameter(torch.randn(4))"),
            w.attribute("buf", 'register_buffer("buf", torch.zeros(4))'),
            w.attribute("lin", "nn.Linear(4, 4)") + ".bias",
            w.attribute("h", "torch.zeros(4)"),
        )
    )


@gives(
    Tensor, lambda w, t: w.in_method and t == Tensor("f", (WIDTH, WIDTH)), nested=False, weight=4
)
def held_matrix(w: Writer, t: Tensor) -> str:
    return w.attribute("lin", "nn.Linear(4, 4)") + ".weight"


@gives(Tensor, lambda w, t: w.in_method and t == Tensor("f", (WIDTH,)), nested=False)
def gradient(w: Writer, t: Tensor) -> str:
    name = w.attribute("lin", "nn.Linear(4, 4)") + ".bias"
    return f"({name} if {name}.grad is None else {name}.grad)"


@gives(Tensor, lambda w, t: w.in_method and t == Tensor("i", ()), nested=False, weight=4)
def held_steps(w: Writer, t: Tensor) -> str:
    return w.attribute("steps", 'register_buffer("steps", torch.tensor(0))')


@gives(Tensor, lambda w, t: t == Tensor("f", (WIDTH,)), nested=False)
def global_table(w: Writer, t: Tensor) -> str:
    w.globals["TABLE"] = "torch.linspace(-1, 1, 4)"
    return "TABLE"


@gives(Tensor, lambda w, t: any(v.kind.of == t for v in w.of_class(List)), nested=False, weight=5)
def from_list(w: Writer, t: Tensor) -> str:
    name = w.pick([v.name for v in w.of_class(List) if v.kind.of == t])
    return w.pick((f"{name}[-1]", f"{name}[0]", f"sum({name})", f"{name}[len({name}) // 2]"))


@gives(Tensor, lambda w, t: any(v.kind.of == t for v in w.of_class(Dict)), nested=False, weight=5)
def from_dict(w: Writer, t: Tensor) -> str:
    name = w.pick([v.name for v in w.of_class(Dict) if v.kind.of == t])
    return w.pick((f"{name}['a']", f"sum({name}.values())", f"list({name}.values())[-1]"))


@gives(Tensor, lambda w, t: any(v.kind.of == t for v in w.of_class(Maybe)), weight=3)
def from_maybe(w: Writer, t: Tensor) -> str:
    name = w.pick([v.name for v in w.of_class(Maybe) if v.kind.of == t])
    return f"({name} if {name} is not None else {w.write(t)})"


# Elementwise


@gives(Tensor, floating, weight=6)
def unary(w: Writer, t: Tensor) -> str:
    return one_of(
        w, "torch.relu({a})", "{a}.sigmoid()", "torch.tanh({a})", "(-{a})", "{a}.abs()",
        "torch.sin({a})", "{a}.clone()", "{a}.contiguous()", "F.relu({a})", "{a}.square()",
        "{a}.clamp(-1, 1)", "{a}.detach()", "F.gelu({a})", "{a}.floor()", "{a}.sign()",
        "{a}.clamp(min=0.0).sqrt()", "F.leaky_relu({a}, 0.2)", "{a}.round()", "torch.cos({a})",
        "{a}.detach().clone()", "F.hardtanh({a}, -1.0, 1.0, inplace=False)", "{a}.erf()",
        "torch.nan_to_num({a})", "{a}.float()" if t.dtype == "f" else "{a}.double()", "{a}[...]",
        "torch.zeros_like({a})", "torch.ones_like({a})", "torch.rand_like({a})",
        "{a}.exp().log1p()",
        "{a}.reciprocal().tanh()", "torch.empty_like({a}).copy_({a})",
        "{a}.masked_fill({a} < 0, 0.5)",
        a=w.write(t),
    )  # fmt: skip


@gives(Tensor, numeric, weight=5)
def binary(w: Writer, t: Tensor) -> str:
    a, b = w.write(t), w.write(broadcast(w, t))
    forms = ["({a} + {b})", "({a} * {b})", "({a} - {b})", "torch.maximum({a}, {b})",
             "torch.add({b}, {a})", "torch.mul({a}, {b})", "({b} - {a})"]  # fmt: skip
    if t.dtype != "i":
        forms += ["({a} / ({b}.abs() + 1))", "torch.atan2({a}, {b})",
        "torch.lerp({a}, {b} * 1, 0.5)",
                  "torch.addcmul({a}, {b}, {b}, value=0.5)"]  # fmt: skip
    return w.pick(forms).format(a=a, b=b)


def broadcast(w: Writer, t: Tensor) -> Tensor:
    """A type of which tensors broadcast to `t`."""
    options = [t]
    if t.dims:
        options += [Tensor(t.dtype, t.dims[1:]), Tensor(t.dtype, (*t.dims[:-1], 1)), t, t]
    return w.pick(options)


@gives(Tensor, numeric, weight=4)
def with_number(w: Writer, t: Tensor) -> str:
    a = w.write(t)
    number = w.write(int if t.dtype == "i" else w.pick((float, int)))
    forms = ["({a} + {n})", "({a} * {n})", "({n} - {a})", "torch.add({a}, {n})"]
    if t.dtype != "i":
        forms += ["({a} / ({n} + 0.5))", "{a}.clamp(max={n})", "torch.sub({a}, {n}, alpha=2)",
                  "({n} / ({a} * {a} + 1))", "({a} % 2 + {n})"]  # fmt: skip
    else:
        forms += ["({a} // 2 + {n})", "({a} % 3 + {n})", "{a}.clamp(max={n})"]
    return w.pick(forms).format(a=a, n=number)


@gives(Tensor, numeric, weight=2)
def where(w: Writer, t: Tensor) -> str:
    mask = w.write(broadcast(w, Tensor("b", t.dims)))
    a = w.write(t)
    return w.pick(
        (f"torch.where({mask}, {a}, {w.write(t)})", f"{a}.masked_fill({mask}, 0)",
         f"torch.where({mask}, {a}, -{a})")
    )  # fmt: skip


@gives(Tensor, weight=2)
def chosen(w: Writer, t: Tensor) -> str:
    return f"({w.write(t)} if {w.write(bool)} else {w.write(t)})"


@gives(Tensor, floating)
def cast(w: Writer, t: Tensor) -> str:
    a = w.write(Tensor(w.pick([d for d in "dib" if d != t.dtype]), t.dims))
    return w.pick((f"{a}.to({DTYPES[t.dtype]})", f"{a}.type({DTYPES[t.dtype]})"))


@gives(Tensor, single)
def through_double(w: Writer, t: Tensor) -> str:
    return f"({w.write(t)}.double() * {w.write(float)}).float()"


# Sums, products


def inserted(w: Writer, t: Tensor, dtype: str | None = None) -> tuple[Tensor, int]:
    """A type with one dimension more, and which that is."""
    axis = w.below(len(t.dims) + 1)
    dims = (*t.dims[:axis], w.pick(w.sizes()), *t.dims[axis:])
    return Tensor(dtype or t.dtype, dims), axis


@gives(Tensor, ranked(0, 2, "fdi"), weight=3)
def reduced(w: Writer, t: Tensor) -> str:
    kind, axis = inserted(w, t)
    forms = ["{a}.sum({k})", "{a}.sum(dim={k})", "torch.sum({a}, {k})",
    "{a}.cumsum({k}).select({k}, -1)",
             "{a}.amax({k})", "{a}.max({k}).values", "{a}.min(dim={k})[0]",
             "torch.max({a}, {k})[0]",
             "{a}.sum(axis={k}, keepdim=True).squeeze({k})"]  # fmt: skip
    if t.dtype != "i":
        forms += [
            "{a}.mean({k})",
            "{a}.std({k}, correction=0)",
            "{a}.logsumexp({k})",
            "{a}.norm(dim={k})",
        ]
    if not t.dims:
        forms += ["{a}.sum()", "{a}.max()", "torch.sum({a})"]
    return w.pick(forms).format(a=w.write(kind), k=axis)


@gives(Tensor, ranked(1, 3, "f"), weight=2)
def along_an_axis(w: Writer, t: Tensor) -> str:
    axis = w.below(len(t.dims))
    return one_of(
        w, "{a}.softmax({k})", "F.softmax({a}, dim={k})", "{a}.cumsum({k})", "{a}.flip({k})",
        "torch.roll({a}, 1, {k})", "{a}.sort({k}).values", "F.normalize({a}, dim={k})",
        "{a} - {a}.mean({k}, keepdim=True)", "{a}.log_softmax(dim={k})", "{a}.cummax({k})[0]",
        "torch.sort({a}, dim={k}, descending=True)[0]", "{a}.roll({a}.shape[{k}] // 2, {k})",
        a=w.write(t), k=str(axis),
    ).join("()")  # fmt: skip


@gives(Tensor, ranked(2, 3, "f"), weight=2)
def matmul(w: Writer, t: Tensor) -> str:
    inner = w.pick(w.sizes())
    a, b = w.write(Tensor("f", (*t.dims[:-1], inner))), w.write(Tensor("f", (inner, t.dims[-1])))
    return w.pick((f"({a} @ {b})", f"torch.matmul({a}, {b})", f"{a}.matmul({b})"))


@gives(Tensor, ranked(1, 1, "f"))
def matrix_vector(w: Writer, t: Tensor) -> str:
    inner = w.pick(w.sizes())
    return f"({w.write(Tensor('f', (t.dims[0], inner)))} @ {w.write(Tensor('f', (inner,)))})"


@gives(Tensor, ranked(2, 2, "f"))
def outer(w: Writer, t: Tensor) -> str:
    a, b = (w.write(Tensor("f", (d,))) for d in t.dims)
    return w.pick((f"torch.outer({a}, {b})", f"torch.einsum('i,j->ij', {a}, {b})",
                   f"({a}[:, None] * {b})", f"({a}.unsqueeze(1) + {b}[None])"))  # fmt: skip


# Indexing and sizes


@gives(Tensor, ranked(0, 2), weight=4)
def element(w: Writer, t: Tensor) -> str:
    kind, axis = inserted(w, t)
    a = w.write(kind)
    index = w.pick(("0", "-1", ""))
    if not index:
        index = f"{w.write(int)} % {w.size(kind.dims[axis])}"
    forms = [f"{a}.select({axis}, {index})", f"{a}[{':, ' * axis}{index}]"]
    if axis == 0:
        forms.append(f"{a}[{index}]")
    if axis == len(t.dims):
        forms.append(f"{a}[..., {index}]")
    return w.pick(forms)


@gives(Tensor, ranked(1, 3), weight=2)
def gathered(w: Writer, t: Tensor) -> str:
    source = w.pick(w.sizes())
    a = w.write(Tensor(t.dtype, (source, *t.dims[1:])))
    index = f"({w.write(Tensor('i', t.dims[:1]))} % {w.size(source)})"
    forms = [
        f"{a}[{index}]",
        f"{a}.index_select(0, {index})",
        f"torch.index_select({a}, 0, {index})",
    ]
    if len(t.dims) == 1:
        forms += [f"{a}.gather(0, {index})", f"torch.take({a}, {index})", f"{a}[{index}.tolist()]"]
    return w.pick(forms)


@gives(Tensor, ranked(2, 3), weight=2)
def transposed(w: Writer, t: Tensor) -> str:
    a = w.write(Tensor(t.dtype, (*t.dims[:-2], t.dims[-1], t.dims[-2])))
    forms = [f"{a}.transpose(-1, -2)", f"{a}.mT", f"{a}.swapaxes(-2, -1)"]
    if len(t.dims) == 2:
        forms += [f"{a}.t()", f"{a}.T", f"{a}.permute(1, 0)"]
    return w.pick(forms)


@gives(Tensor, ranked(1, 3), weight=2)
def reshaped(w: Writer, t: Tensor) -> str:
    """Flattened, and brought back to its shape."""
    a = w.write(t)
    flat = w.pick((".reshape(-1)", ".flatten()", f".reshape(-1, {w.size(t.dims[-1])})"))
    if t.dtype in "fd":
        flat += w.pick(("", ".relu()", ".tanh()"))
    back = w.pick((".view({})", ".reshape({})", ".view(({}))", ".reshape({}, -1)"))
    dims = t.dims[:-1] if back.endswith("-1)") else t.dims
    if not dims:
        return f"{a}{flat}.view(-1)"
    return f"{a}{flat}{back.format(w.shape(dims) + (',' if '((' in back else ''))}"


@gives(Tensor, ranked(1, 3), weight=2)
def expanded(w: Writer, t: Tensor) -> str:
    a = w.write(Tensor(t.dtype, t.dims[1:]))
    head = w.size(t.dims[0])
    forms = [f"{a}.expand({w.shape(t.dims)})",
    f"{a}.unsqueeze(0).repeat({head}{', 1' * (len(t.dims) - 1)})",
             f"torch.stack([{a}] * {head})"]  # fmt: skip
    return w.pick(forms)


@gives(Tensor, ranked(0, 2))
def squeezed(w: Writer, t: Tensor) -> str:
    return f"{w.write(Tensor(t.dtype, (1, *t.dims)))}.squeeze(0)"


@gives(Tensor, lambda w, t: t.dims and t.dims[0] == 2, weight=3)
def stacked(w: Writer, t: Tensor) -> str:
    kind = Tensor(t.dtype, t.dims[1:])
    return f"torch.stack([{w.write(kind)}, {w.write(kind)}])"


@gives(Tensor, ranked(1, 3))
def catenated(w: Writer, t: Tensor) -> str:
    a, b = w.write(t), w.write(t)
    head = w.size(t.dims[0])
    return w.pick((f"torch.cat([{a}, {b}])[:{head}]", f"torch.cat(({a}, {b}), dim=0)[-{head}:]",
                   f"torch.cat([{a}, {b}]).chunk(2)[1]", f"torch.stack([{a}, {b}]).sum(0)"
                   if t.dtype != "b" else f"torch.stack([{a}, {b}]).any(0)",
                   f"torch.cat([{a}, {b}]).split({head})[0]"))  # fmt: skip


@gives(Tensor, ranked(1, 3), weight=2)
def by_rows(w: Writer, t: Tensor) -> str:
    row = Tensor(t.dtype, t.dims[1:])
    source = Tensor(w.pick(("f", t.dtype)), w.pick((t.dims, t.dims[:1])))
    a = w.write(source)
    name = w.fresh("r")
    with w.local(Var(name, Tensor(source.dtype, source.dims[1:]))):
        body = w.write(row)
    return f"torch.stack([{body} for {name} in {a}])"


@gives(Tensor, numeric, weight=2)
def summed(w: Writer, t: Tensor) -> str:
    name = w.fresh("i")
    turns = small(w)
    start = w.write(t)
    with w.local(Var(name, int)):
        body = w.write(t)
    condition = f" if {w.write(bool)}" if w.chance(3) else ""
    return f"sum(({body} for {name} in range({turns}){condition}), {start})"


# Integers and conditions


@gives(Tensor, ranked(0, 2, "i"), weight=3)
def found(w: Writer, t: Tensor) -> str:
    kind, axis = inserted(w, t, "f")
    return one_of(
        w, "{a}.argmax({k})", "({a} > 0).sum({k})", "{a}.sort({k}).indices.select({k}, 0)",
        "{a}.max({k})[1]", a=w.write(kind), k=str(axis),
    )  # fmt: skip


@gives(Tensor, ranked(0, 3, "i"), weight=2)
def to_integer(w: Writer, t: Tensor) -> str:
    return one_of(
        w, "{a}.clamp(-4, 4).nan_to_num().long()", "({a} > 0).long()",
        "({a} < 0.5).to(torch.int64)",
        a=w.write(Tensor("f", t.dims)),
    )  # fmt: skip


@gives(Tensor, lambda w, t: t == Tensor("i", ()), weight=2)
def from_number(w: Writer, t: Tensor) -> str:
    return f"torch.tensor({w.write(int)})"


@gives(Tensor, lambda w, t: t == Tensor("f", ()), weight=2)
def from_float(w: Writer, t: Tensor) -> str:
    return w.pick((f"torch.tensor({w.write(float)})", f"torch.full((), {w.write(float)})"))


@gives(Tensor, ranked(0, 3, "b"), weight=8)
def compared(w: Writer, t: Tensor) -> str:
    source = Tensor(w.pick("ffi"), t.dims)
    sign = w.pick((">", "<=", "==", "!="))
    b = w.write(w.pick((int, broadcast(w, source))))
    return f"({w.write(source)} {sign} {b})"


@gives(Tensor, ranked(0, 3, "b"), weight=4)
def combined(w: Writer, t: Tensor) -> str:
    a = w.write(t)
    form = w.pick(("(~{a})", "({a} & {b})", "({a} | {b})", "torch.logical_xor({a}, {b})"))
    return form.format(a=a, b=w.write(broadcast(w, t)) if "{b}" in form else "")


@gives(Tensor, ranked(0, 2, "b"), weight=3)
def quantified(w: Writer, t: Tensor) -> str:
    kind, axis = inserted(w, t)
    return f"{w.write(kind)}.{w.pick(('any', 'all'))}({axis})"


# Modules and functions


@gives(Tensor, wide_in_method, weight=5)
def linear(w: Writer, t: Tensor) -> str:
    a = w.write(t)
    lin = w.attribute("lin", "nn.Linear(4, 4)")
    norm = w.attribute("norm", "nn.LayerNorm(4)") if w.chance(3) else lin
    return w.pick((f"{lin}({a})", f"{norm}({a})", f"F.linear({a}, {lin}.weight)"))


@gives(Tensor, lambda w, t: wide_in_method(w, t) and len(t.dims) == 2, weight=5)
def batch_module(w: Writer, t: Tensor) -> str:
    a = w.write(t)
    if w.chance(2):
        return f"{w.attribute('cell', 'nn.GRUCell(4, 4)')}({a}, {w.write(t)})"
    if w.chance(4):
        return f"{w.attribute('gru', 'nn.GRU(4, 4, batch_first=True)')}({a})[0]"
    return f"{w.attribute('bn', 'nn.BatchNorm1d(4)')}({a})"


@gives(Tensor, lambda w, t: w.in_method and single(w, t), weight=3)
def dropped(w: Writer, t: Tensor) -> str:
    a = w.write(t)
    if w.chance(2):
        return f"F.dropout({a}, 0.3, training=bool({w.write(bool)}))"
    return f"{w.attribute('drop', 'nn.Dropout(0.5)')}({a})"


@gives(Tensor, wide_in_method, weight=2)
def embedded(w: Writer, t: Tensor) -> str:
    return f"{w.attribute('emb', 'nn.Embedding(5, 4)')}({w.write(Tensor('i', t.dims[:-1]))} % 5)"


@gives(Tensor, wide_in_method)
def by_choice(w: Writer, t: Tensor) -> str:
    """A module that is looked up when it is called."""
    made = "nn.ModuleDict({'a': nn.Linear(4, 4), 'b': nn.Tanh()})"
    a = w.write(t)
    if w.chance(2):
        return f"{w.attribute('choice', made)}['a' if {w.write(bool)} else 'b']({a})"
    layers = w.attribute("layers", "nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])")
    return w.pick(
        (f"{layers}[{w.write(int)} % 3]({a})", f"nn.Sequential(*{layers}[:{small(w)}])({a})")
    )


@gives(Tensor, wide_in_method)
def in_sequence(w: Writer, t: Tensor) -> str:
    made = "nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.2))"
    return f"{w.attribute('seq', made)}({w.write(t)})"


@gives(Tensor, wide_in_method, weight=2)
def in_checkpoint(w: Writer, t: Tensor) -> str:
    """In a block that the backward pass does again."""
    a = w.write(t)
    if w.chance(3):
        made = "nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.2))"
        return f"checkpoint({w.attribute('seq', made)}, {a}, use_reentrant=False)"
    name = w.fresh("q")
    with w.local(Var(name, t)):
        body = w.write(t)
    return f"checkpoint(lambda {name}: {body}, {a}, use_reentrant=False)"


@gives(Tensor, numeric, weight=2)
def through_python(w: Writer, t: Tensor) -> str:
    """By way of some feature of Python."""
    name = w.fresh("q")
    with w.local(Var(name, t)):
        body = w.write(t)
    return one_of(
        w, "(lambda {q}: {b})({a})", "[{b} for {q} in [{a}]][0]",
        "next(map(lambda {q}: {b}, [{a}]))", "in_float64(lambda {q}: {b}, {a})",
        "functools.partial(torch.add, {a})(1)", "functools.reduce(torch.add, [{a}, {a}])",
        "getattr({a}, 'neg')()", "torch.add(*[{a}, {a}])", "torch.mul({a}, **dict(other=2))",
        "{{0: {a}, 1: -{a}}}[{n}]", "({a}, -{a})[{c}]", "dict(a={a}).get('b', {a})",
        "copy.copy([{a}])[0]",
        "operator.neg({a})", "list(zip([{a}], [1]))[0][0]", "dict(enumerate([{a}]))[0]",
        "max([{a}], key=id)",
        "Pair({a}, {n}).first", "next(iter({{'k': {a}}}.values()))", "copy.deepcopy({a}.detach())",
        "{a}.new_zeros({a}.shape)", "{a}.new_full({a}.size(), 2)",
        "{a}.apply_(abs) if False else {a}",
        q=name, a=w.write(t), b=body, n=f"({w.write(int)} & 1)", c=f"bool({w.write(bool)})",
    ).join("()")  # fmt: skip


@gives(Tensor, single)
def with_own_gradient(w: Writer, t: Tensor) -> str:
    a = w.write(t)
    name = w.fresh("q")
    return w.pick(
        (
            f"(lambda {name}: torch.autograd.grad({name}.square().sum(), {name})[0])"
            f"({a}.detach().requires_grad_())",
            f"{a}.detach().requires_grad_().square().detach_()",
            f"checkpoint(torch.sin, {a}, use_reentrant=False)",
            f"Doubled.apply({a})",
        )
    )  # fmt: skip


@gives(Tensor, lambda w, t: any(v.kind.result == t for v in w.of_class(Function)), weight=14)
def called(w: Writer, t: Tensor) -> str:
    callee = w.pick([v for v in w.of_class(Function) if v.kind.result == t])
    arguments = [w.write(kind) for kind in callee.kind.parameters]
    extra = w.pick(("", "n", "flag"))
    if extra == "n":
        arguments.append(f"n={w.write(int)}")
    elif extra == "flag":
        arguments.append(f"flag={w.write(bool)}")
    return f"{callee.name}({', '.join(arguments)})"


@gives(Tensor, lambda w, t: t.dtype == "f" and w.in_method)
def from_pair(w: Writer, t: Tensor) -> str:
    return f"torch.broadcast_tensors({w.write(t)}, torch.zeros(()))[0]"
