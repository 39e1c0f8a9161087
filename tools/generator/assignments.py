"""Statements that assign, and that write in place."""

from __future__ import annotations

from .scalars import small
from .statements import statement
from .tensors import DTYPES, broadcast
from .writer import List, Tensor, Var, Writer

# Assignments


@statement(weight=6)
def define(w: Writer) -> None:
    kind = w.type()
    text = w.statement_expression(kind)
    w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.tensors(), weight=4, effect=True)
def assign(w: Writer) -> None:
    var = w.pick(w.tensors())
    w.line(f"{var.name} = {w.statement_expression(var.kind)}")


@statement(weight=3)
def define_number(w: Writer) -> None:
    kind = w.pick((int, float, bool))
    text = w.statement_expression(kind)
    if kind is int and text not in "01234":
        text = f"({text}) % 7"
    w.line(f"{w.define(kind, {int: 'n', float: 's', bool: 'c'}[kind])} = {text}")


@statement(lambda w: w.of_kind(int), weight=2, effect=True)
def count(w: Writer) -> None:
    name = w.pick(w.of_kind(int))
    if name[0] != "k":
        w.line(w.pick((f"{name} += 1", f"{name} -= 1", f"{name} = ({w.write(int)}) % 5")))


@statement(lambda w: w.tensors("f", rank=1), weight=3)
def slice_(w: Writer) -> None:
    """A part of a tensor, of a size of its own."""
    var = w.pick(w.tensors("f", rank=1))
    bound = small(w)
    text = w.pick(
        (
            f"{var.name}[:{bound}]", f"{var.name}[{bound}:]", f"{var.name}[::2]",
            f"{var.name}[-{bound}:]",
            f"{var.name}[slice(0, {bound})]",
            f"{var.name}.narrow(0, 0, min({bound}, len({var.name})))",
            f"{var.name}[: {var.name}.shape[0] // 2]", f"{var.name}[1:]",
            f"{var.name}[torch.arange(min({bound}, len({var.name})))]",
            f"{var.name}.chunk(2)[0]", f"{var.name}.repeat_interleave(2, 0)",
            f"torch.cat([{var.name}, {var.name}])", f"{var.name}.tensor_split(2)[-1]",
            f"F.pad({var.name}, {(0, 0) * (len(var.kind.dims) - 1) + (1, 0)})",
            f"{var.name}.split(2)[-1]", f"{var.name}.unfold(0, 1, 1)[..., 0]",
        )
    )  # fmt: skip
    kind = Tensor("f", (w.fresh("S"), *var.kind.dims[1:]))
    w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.tensors("f", rank=1), weight=2)
def select(w: Writer) -> None:
    """Those rows for which something holds."""
    var = w.pick(w.tensors("f", rank=1))
    mask = w.statement_expression(Tensor("b", var.kind.dims[:1]))
    kind = Tensor("f", (w.fresh("S"), *var.kind.dims[1:]))
    text = w.pick((f"{var.name}[{mask}]", f"{var.name}[({mask}).nonzero().squeeze(1)]",
                   f"{var.name}[torch.where({mask})]"))  # fmt: skip
    w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.tensors("f"))
def flattened(w: Writer) -> None:
    var = w.pick(w.tensors("f"))
    kind = Tensor("f", (w.fresh("S"),))
    text = w.pick(
        (f"{var.name}.reshape(-1)", f"{var.name}[{var.name} > 0]", f"{var.name}.flatten()",
         f"{var.name}.masked_select({var.name} < 0.5)", f"{var.name}.unique()",
         f"{var.name}.view(-1)",
         f"torch.tensor({var.name}.reshape(-1).tolist())")
    )  # fmt: skip
    w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.tensors("f", rank=1), weight=2)
def unpack(w: Writer) -> None:
    var = w.pick(w.tensors("f", rank=1))
    rest = var.kind.dims[1:]
    a, b = w.fresh("v"), w.fresh("v")
    form = w.below(4)
    if form == 0:
        w.line(f"{a}, {b} = {w.statement_expression(Tensor('f', (2, *rest)))}")
        kinds = Tensor("f", rest), Tensor("f", rest)
    elif form == 1:
        w.line(f"{a}, {b} = {var.name}.{w.pick(('max', 'sort', 'cummax'))}(0)")
        own = rest if ".max(" in w.lines[-1] else var.kind.dims
        kinds = Tensor("f", own), Tensor("i", own)
    elif form == 2:
        w.line(f"{a}, {b} = {w.write(var.kind)}, {w.write(Tensor('i', ()))}")
        kinds = var.kind, Tensor("i", ())
    else:
        w.line(f"{a}, *{b} = {var.name}")
        w.scope += [Var(a, Tensor("f", rest)), Var(b, List(Tensor("f", rest)))]
        return
    w.scope += [Var(a, kinds[0]), Var(b, kinds[1])]


@statement(lambda w: len(w.tensors("f", rank=1)) > 0)
def top(w: Writer) -> None:
    var = w.pick(w.tensors("f", rank=1))
    a, b = w.fresh("v"), w.fresh("v")
    count = w.fresh("S")
    dims = (*var.kind.dims[:-1], count)
    w.line(f"{a}, {b} = {var.name}.topk(min({small(w)}, {var.name}.shape[-1]))")
    w.scope += [Var(a, Tensor("f", dims)), Var(b, Tensor("i", dims))]


@statement(lambda w: w.tensors("f", rank=1))
def sizes(w: Writer) -> None:
    """Sizes that are taken apart and put together."""
    var = w.pick(w.tensors("f", rank=1))
    a, b = w.fresh("n"), w.fresh("n")
    rest = ", ".join([a, *(f"*{b}" for _ in var.kind.dims[1:2])])
    w.line(
        f"{rest}{',' if rest == a else ''} = {w.pick((f'{var.name}.shape', f'{var.name}.size()'))}"
    )
    w.scope.append(Var(a, int))
    if len(var.kind.dims) > 1:
        kind = Tensor("f", (w.fresh("S"), var.kind.dims[0]))
        text = w.pick((f"torch.zeros(math.prod({b}), {a})", f"{var.name}.reshape({a}, -1).t()",
                       f"{var.name}.reshape({a}, math.prod({b})).mT * 2"))  # fmt: skip
        w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: w.tensors("f"))
def to_dtype(w: Writer) -> None:
    var = w.pick(w.tensors("f"))
    kind = Tensor(w.pick("di"), var.kind.dims)
    w.line(f"{w.define(kind)} = {var.name}.nan_to_num().clamp(-3, 3).to({DTYPES[kind.dtype]})")


# Writing in place


def wrote(w: Writer) -> list[Var]:
    return [var for var in w.tensors("fi") if var.writable]


@statement(wrote, weight=5, effect=True)
def in_place(w: Writer) -> None:
    var = w.pick(wrote(w))
    t = var.kind
    forms = ["{v} += {b}", "{v}.add_({b})", "{v} *= {n}", "{v}.copy_({b})", "{v}.zero_()",
    "{v}.sub_({n})",
             "torch.add({v}, {n}, out={v})", "{v}[...] = {b}", "{v}.mul_({n})",
             "{v} -= {b}"]  # fmt: skip
    if t.dtype == "f":
        forms += ["{v}.relu_()", "{v}.clamp_(-1, 1)", "{v}.masked_fill_({v} > 1, 0.5)",
        "F.relu({v}, inplace=True)",
                  "{v}.uniform_()", "{v}.normal_(0, 0.5)", "{v}.bernoulli_(0.5)",
                  "{v}.mul_(0.5).add_({b})",
                  "{v}.data.mul_(0.5)", "{v}.detach().add_(1)", "nn.init.constant_({v}, 0.5)",
                  "{v}.fill_({n})", "{v}.tanh_()"]  # fmt: skip
    form = w.pick(forms)
    parts = {"v": var.name}
    if "{b}" in form:
        parts["b"] = w.statement_expression(broadcast(w, t))
    if "{n}" in form:
        parts["n"] = w.statement_expression(int if t.dtype == "i" else w.pick((float, int)))
    if "out=" in form:
        w.line("with torch.no_grad():")
        form = "    " + form
    w.line(form.format(**parts))


@statement(lambda w: [v for v in wrote(w) if v.kind.dims], weight=5, effect=True)
def in_place_part(w: Writer) -> None:
    var = w.pick([v for v in wrote(w) if v.kind.dims])
    t = var.kind
    row = Tensor(t.dtype, t.dims[1:])
    index = w.pick(("0", "-1", ""))
    if not index:
        index = f"{w.statement_expression(int)} % {w.size(t.dims[0])}"
    forms = ["{v}[{i}] = {r}", "{v}[{i}] += {r}", "{v}[{i}].mul_(2)", "{v}[{i}].zero_()",
    "{v}[1:] = 1", "{v}[:1] += {r}",
             "{v}[{m}] = 0", "{v}.index_fill_(0, torch.tensor([0]), 1)", "{v}[::2].add_(1)",
             "{v}.select(0, {i}).copy_({r})", "{v}.transpose(0, -1).add_(1)",
             "{v}.view(-1)[{i}] = 2",
             "{v}.index_add_(0, torch.zeros({s}, dtype=torch.long), {w})",
             "{v}[torch.arange({s} // 2)] *= 2",
             "{v}[..., {i0}] = 1", "del {v}[{i}]"]  # fmt: skip
    form = w.pick(forms[:-1])
    parts = {"v": var.name, "i": index, "s": w.size(t.dims[0]), "i0": "0"}
    if "{r}" in form:
        parts["r"] = w.statement_expression(row)
    if "{w}" in form:
        parts["w"] = w.statement_expression(t)
    if "{m}" in form:
        parts["m"] = w.statement_expression(Tensor("b", w.pick((t.dims, t.dims[:1]))))
    w.line(form.format(**parts))


@statement(lambda w: [v for v in wrote(w) if v.kind.dims], weight=3)
def view(w: Writer) -> None:
    """Another name for a part of a tensor, to be written to later on."""
    var = w.pick([v for v in wrote(w) if v.kind.dims])
    dims = var.kind.dims
    forms = [("{v}[0]", dims[1:]), ("{v}.select(0, -1)", dims[1:]), ("{v}[None]", (1, *dims)),
             ("{v}.transpose(0, -1)", (dims[-1], *dims[1:-1], dims[0]) if len(dims) > 1 else dims),
             ("{v}.view_as({v})", dims), ("{v}[...]", dims), ("{v}.unbind(0)[-1]", dims[1:]),
             ("{v}.detach()", dims), ("{v}.unsqueeze(-1)", (*dims, 1)), ("{v}.diagonal()" , None),
             ("{v}.expand_as({v})", dims), ("{v}.view(-1)[0]", ()),
             ("{v}.contiguous()", dims), ("{v}.to({v}.dtype)", dims), ("{v}.cpu()", dims),
             ("torch.as_tensor({v})", dims)]  # fmt: skip
    text, result = w.pick([form for form in forms if form[1] is not None])
    w.line(f"{w.define(Tensor(var.kind.dtype, result))} = {text.format(v=var.name)}")
