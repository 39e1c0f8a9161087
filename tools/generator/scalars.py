"""Expressions of Python numbers and conditions."""

from __future__ import annotations

from typing import Any

from .writer import Dict, List, Maybe, Tensor, Var, Writer, gives

# Integers


@gives(int, nested=False, weight=3)
def literal(w: Writer, _: Any) -> str:
    return str(w.pick((1, 2, 0, 3, 4)))


@gives(int, lambda w, _: w.of_kind(int), nested=False, weight=6)
def int_variable(w: Writer, _: Any) -> str:
    return w.pick(w.of_kind(int))


@gives(int, lambda w, _: w.tensors(rank=1), nested=False, weight=5)
def size(w: Writer, _: Any) -> str:
    var = w.pick(w.tensors(rank=1))
    axis = w.below(len(var.kind.dims))
    return w.pick(
        (
            f"{var.name}.shape[{axis}]",
            f"{var.name}.size({axis})",
            f"len({var.name})",
            f"{var.name}.numel()",
            f"{var.name}.shape[-1]",
            f"{var.name}.stride({axis})",
            f"sum({var.name}.shape)",
            f"{var.name}.shape.numel()",
            f"list({var.name}.shape)[{axis}]",
            f"max({var.name}.shape)",
        )
    )


@gives(int, lambda w, _: w.tensors(), nested=False)
def rank(w: Writer, _: Any) -> str:
    name = w.pick(w.tensors()).name
    return w.pick((f"{name}.dim()", f"{name}.ndim", f"len({name}.shape)"))


@gives(int, lambda w, _: w.of_class(List), nested=False, weight=2)
def length(w: Writer, _: Any) -> str:
    return f"len({w.pick(w.of_class(List)).name})"


@gives(int, lambda w, _: w.in_method, nested=False)
def counter(w: Writer, _: Any) -> str:
    return w.attribute("count", "0")


@gives(int, lambda w, _: w.tensors("fd"), nested=False, weight=6)
def counted(w: Writer, _: Any) -> str:
    name = w.pick(w.tensors("fd")).name
    return w.pick(
        (
            f"({name} > 0).sum().item()",
            f"int(({name} > 0).sum())",
            f"{name}.gt(0.5).sum().item()",
            f"int(({name}.sum() * 7).sin().abs().nan_to_num() * 4)",
            f"(({name} * 7).sin() > 0.5).sum().item()",
        )
    )


@gives(int)
def item(w: Writer, _: Any) -> str:
    tensor = w.write(Tensor("i", ()))
    return w.pick((f"{tensor}.item()", f"int({tensor})", f"{tensor}.tolist()"))


@gives(int, lambda w, _: [v for v in w.tensors("i") if len(v.kind.dims) == 1])
def listed(w: Writer, _: Any) -> str:
    name = w.pick([v for v in w.tensors("i") if len(v.kind.dims) == 1]).name
    return f"{w.pick(('sum', 'len'))}({name}.tolist())"


@gives(int, weight=5)
def int_arithmetic(w: Writer, _: Any) -> str:
    a = w.write(int)
    form = w.pick(
        (
            "({a} + {b})", "({a} - {b})", "({a} // 2)", "({a} % 3)", "({a} * 2)", "max({a}, {b})",
            "min({a}, {b})", "abs({a})", "(-{a})", "({a} & 1)", "divmod({a}, 2)[0]", "({a} ** 2)",
            "(1, 2, 3)[{a} % 3]", "len(str({a}))", "(({a} == {b}) + 1)", "({a} or {b})",
            "({a} and {b})", "int('123'[{a} % 3])", "{{0: 1, 1: 2}}.get({a}, 3)",
            "(({a} ^ {b}) % 5)", "(5, 3, 0, 2, 4, 1)[{a} % 6]", "[*range(7)][{a} % 9 - 4]",
            "({a} % 5 << 1)", "({a} >> 1)", "pow({a}, 2)", "({a} % 4).bit_length()", "hash({a})",
            "int(f'{{({a}):d}}')", "sum(range({a} % 4))", "len(range(0, {a} % 9, 2))",
        )
    )  # fmt: skip
    if "f'" in form and "'" in a:  # until Python 3.12 a quote ends it
        form = "int(str({a}))"
    return form.format(a=a, b=w.write(int) if "{b}" in form else "")


@gives(int)
def drawn_int(w: Writer, _: Any) -> str:
    form = w.pick(
        (
            "random.randint(0, 2)", "random.randrange(3)", "np.random.randint(3)",
            "random.choice([1, 2])", "random.getrandbits(1)", "int(random.random() * 2)",
            "random.sample(range(3), 2)[0]",
        )
    )  # fmt: skip
    if w.in_method and w.pick((True, False)):
        rng = w.attribute("rng", "np.random.default_rng(1)")
        return f"int({rng}.integers(3))"
    return form


@gives(float)
def drawn_float(w: Writer, _: Any) -> str:
    if w.in_method and w.pick((True, False)):
        rng = w.attribute("rng", "np.random.default_rng(1)")
        return f"{rng}.{w.pick(('random()', 'uniform(0, 2)', 'normal()'))}"
    return w.pick(("random.random()", "random.uniform(0, 2)", "np.random.rand()"))


@gives(bool)
def drawn_bool(w: Writer, _: Any) -> str:
    return f"({w.write(float)} < random.random())"


@gives(int)
def from_float(w: Writer, _: Any) -> str:
    text = w.write(float)
    bounded = f"max(-5.0, min({text}, 5.0))"
    return w.pick(("int({})", "math.floor({})", "math.ceil({})", "round({})")).format(bounded)


@gives(int, weight=2)
def chosen_int(w: Writer, _: Any) -> str:
    return f"({w.write(int)} if {w.write(bool)} else {w.write(int)})"


@gives(int)
def counted_up(w: Writer, _: Any) -> str:
    name = w.fresh("i")
    turns = small(w)
    with w.local(_int(name)):
        return f"sum({w.write(int)} for {name} in range({turns}))"


def small(w: Writer) -> str:
    """An integer from 0 to 3."""
    text = w.write(int)
    if text in "0123":
        return text
    return w.pick((f"({text} % 4)", f"max(0, min({text}, 3))", f"(abs({text}) % 3)"))


# Floats


@gives(float, nested=False, weight=2)
def float_literal(w: Writer, _: Any) -> str:
    return w.pick(("0.5", "2.0", "-1.0", "0.1", "1.5"))


@gives(float, lambda w, _: w.of_kind(float), nested=False, weight=4)
def float_variable(w: Writer, _: Any) -> str:
    return w.pick(w.of_kind(float))


@gives(float, lambda w, _: w.in_method, nested=False)
def float_attribute(w: Writer, _: Any) -> str:
    return w.attribute("scale", "0.75")


@gives(float, lambda w, _: w.tensors("fd"), nested=False, weight=3)
def summarised(w: Writer, _: Any) -> str:
    name = w.pick(w.tensors("fd")).name
    return w.pick(
        (f"{name}.sum().item()", f"float({name}.mean())", f"{name}.norm().item()",
         f"{name}.detach().sum().tolist()")
    )  # fmt: skip


@gives(float)
def float_item(w: Writer, _: Any) -> str:
    tensor = w.write(Tensor("f", ()))
    return w.pick((f"{tensor}.item()", f"float({tensor})", f"{tensor}.tolist()"))


@gives(float, weight=3)
def float_arithmetic(w: Writer, _: Any) -> str:
    a = w.write(w.pick((float, int)))
    form = w.pick(
        (
            "({a} * 0.5)", "({a} / 2)", "({a} + {b})", "({a} - {b})", "float({a})", "(-{a} * 1.0)",
            "max({a}, {b})", "min({a}, {b})", "abs({a} / 3)", "round({a} / 3, 2)",
            "math.tanh({a})", "math.sqrt(abs({a}))", "({a} / 4) % 1.0", "({a} // 0.75)",
            "math.fabs({a})", "sum([{a}, {b}])", "math.log1p(abs({a}))", "float(str({a}))",
        )
    )  # fmt: skip
    return "float(" + form.format(a=a, b=w.write(float) if "{b}" in form else "") + ")"


@gives(float)
def chosen_float(w: Writer, _: Any) -> str:
    return f"({w.write(float)} if {w.write(bool)} else {w.write(float)})"


# Conditions


@gives(bool, lambda w, _: w.of_kind(bool), nested=False, weight=3)
def flag(w: Writer, _: Any) -> str:
    return w.pick(w.of_kind(bool))


@gives(bool, nested=False)
def surrounding(w: Writer, _: Any) -> str:
    options = ["torch.is_grad_enabled()", "True", "False"]
    return w.pick(["self.training", *options] if w.in_method else options)


@gives(bool, lambda w, _: w.tensors("fd"), nested=False, weight=12)
def coin(w: Writer, _: Any) -> str:
    """A condition that is as often true as not, whatever was done to a tensor."""
    name = w.pick(w.tensors("fd")).name
    return w.pick(
        (
            f"(({name}.sum() * 7).sin() > 0)", f"(({name} * 9).sin().sum() > 0)",
            f"(({name}.detach() * 5).cos() > 0).any()", f"(({name} * 5).cos() > 0.5).all().item()",
            f"(math.sin(min({name}.sum().item(), 99.0) * 9) > 0)",
        )
    )  # fmt: skip


@gives(bool, lambda w, _: w.tensors("fd"), nested=False, weight=5)
def tensor_test(w: Writer, _: Any) -> str:
    name = w.pick(w.tensors("fd")).name
    return w.pick(
        (
            f"({name}.sum() > 0)", f"({name} > 0).any()", f"({name} > 0.5).all()",
            f"bool({name}.mean() < 0.25)", f"{name}.isnan().any()", f"({name}.norm() > 1.5)",
            f"(not ({name} < 0).any())", f"({name}.sum().item() > 0.5)",
            f"(0 < {name}.mean() <= 1)", f"torch.isfinite({name}).all()",
            f"({name}.detach() > 1).any().item()",
        )
    )  # fmt: skip


@gives(bool, lambda w, _: w.tensors(), nested=False, weight=2)
def metadata(w: Writer, _: Any) -> str:
    names = [var.name for var in w.tensors()]
    name = w.pick(names)
    return w.pick(
        (
            f"{name}.requires_grad", f"{name}.is_contiguous()", f"({name}.dtype == torch.float32)",
            f"({name}.shape == {w.pick(names)}.shape)", f"{name}.is_floating_point()",
            f"({name}.ndim > 1)", f"({name} is {w.pick(names)})", f"isinstance({name}.dim(), int)",
            f"({name}.grad_fn is None)", f"{name}.is_leaf", f"({name}.size() == (2, 4))",
            f"({name}.shape[-1:] == (4,))", f"({name}.numel() > 0)", f"{name}.dtype.is_complex",
            f"({name}.stride() == {w.pick(names)}.stride())", f"({name}.storage_offset() == 0)",
            f"torch.is_tensor({name})", f"({name}.grad is None)", f"({name}._base is None)",
            f"{name}.retains_grad", f"({name}._backward_hooks is None)",
        )
    )  # fmt: skip


@gives(bool, lambda w, _: w.tensors(), nested=False)
def identity(w: Writer, _: Any) -> str:
    """Whether two tensors are one."""
    names = [var.name for var in w.tensors()]
    name, other = w.pick(names), w.pick(names)
    forms = (
        f"({name} in {{{other}}})", f"(len({{{name}, {other}}}) > 1)",
        f"({{{name}: True}}.get({other}, False))", f"(id({name}) == id({other}))",
        f"operator.is_({name}, {other})", f"({name} in {{{other}.contiguous()}})",
    )  # fmt: skip
    return w.pick(forms)


@gives(bool, lambda w, _: w.in_method, nested=False, weight=2)
def has_gradient(w: Writer, _: Any) -> str:
    return f"({_parameter(w)}.grad is {w.pick(('None', 'not None'))})"


@gives(float, lambda w, _: w.in_method, nested=False)
def gradient_norm(w: Writer, _: Any) -> str:
    name = _parameter(w)
    return f"(0.5 if {name}.grad is None else float({name}.grad.norm()))"


def _parameter(w: Writer) -> str:
    linear = w.attribute("lin", "nn.Linear(4, 4)")
    return w.pick(
        (f"{linear}.weight", f"{linear}.bias", w.attribute("w", "nn.Parameter(torch.randn(4))"))
    )


@gives(bool, lambda w, _: w.of_class(List), nested=False, weight=2)
def list_test(w: Writer, _: Any) -> str:
    name = w.pick(w.of_class(List)).name
    return w.pick((f"(len({name}) > 1)", f"bool({name})", f"(not {name})"))


@gives(bool, lambda w, _: w.of_class(Dict), nested=False)
def dict_test(w: Writer, _: Any) -> str:
    name = w.pick(w.of_class(Dict)).name
    return w.pick((f"('a' in {name})", f"(len({name}) > 2)", f"({name}.get(1) is None)"))


@gives(bool, lambda w, _: w.of_class(Maybe), nested=False, weight=3)
def given(w: Writer, _: Any) -> str:
    name = w.pick(w.of_class(Maybe)).name
    return w.pick((f"({name} is None)", f"({name} is not None)"))


@gives(bool, weight=5)
def int_comparison(w: Writer, _: Any) -> str:
    form = w.pick(
        (
            "({a} > {b})", "({a} == {b})", "({a} != {b})", "({a} < {b} <= 4)", "(0 <= {a} < {b})",
            "({a} in (1, 3))", "({a} % 2 == 0)", "isinstance({a}, int)", "bool({a})",
            "({a} not in {{2, {b}}})", "({a} >= {b} > 0)", "(str({a}) == '3')", "({a} is not None)",
        )
    )  # fmt: skip
    return form.format(a=w.write(int), b=w.write(int) if "{b}" in form else "")


@gives(bool, weight=3)
def float_comparison(w: Writer, _: Any) -> str:
    return f"({w.write(float)} {w.pick(('>', '<=', '<', '!='))} {w.write(float)})"


@gives(bool, weight=3)
def tensor_comparison(w: Writer, _: Any) -> str:
    a = w.write(Tensor("f", ()))
    b = w.write(w.pick((float, int, Tensor("f", ()))))
    return f"({a} {w.pick(('>', '<='))} {b})"


@gives(bool)
def tensor_truth(w: Writer, _: Any) -> str:
    return f"bool({w.write(Tensor('b', ()))})"


@gives(bool)
def equal(w: Writer, _: Any) -> str:
    kind = w.type("f", 2)
    name = w.pick(("torch.equal", "torch.allclose"))
    return f"{name}({w.write(kind)}, {w.write(kind)})"


@gives(bool, weight=3)
def connective(w: Writer, _: Any) -> str:
    a = w.write(bool)
    form = w.pick(("(not {a})", "({a} and {b})", "({a} or {b})", "({a} != {b})"))
    return form.format(a=a, b=w.write(bool) if "{b}" in form else "")


@gives(bool)
def quantified(w: Writer, _: Any) -> str:
    name = w.fresh("i")
    turns = small(w)
    with w.local(_int(name)):
        return f"{w.pick(('any', 'all'))}({w.write(bool)} for {name} in range({turns}))"


def _int(name: str) -> Var:
    return Var(name, int)
