"""What programs are exported from: views by an index, structures, and inputs of another kind."""

from __future__ import annotations

import re
import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.errors import ExportError, InputError
from bendtrace.export import exporting
from bendtrace.export.exporting import difference
from tests.documents import ROOT
from tests.shares import some
from tests.test_exported import assert_equal, exported


def clipped_row(x: Tensor, n: Tensor) -> Tensor:
    y = x.clone()
    y[n[0]].relu_()
    return y


def clipped_later(x: Tensor, n: Tensor) -> Tensor:
    y = x.clone()
    row = y[n[0]]
    y.relu_()
    return row


@pytest.mark.parametrize("model", [clipped_row, clipped_later])
def test_views_by_an_index_out_of_a_tensor_are_not_written_to(model: Any) -> None:
    with pytest.raises(ExportError, match="index out of a tensor picks"):
        exported(model, (torch.ones(3, 2), torch.tensor([1])))


def test_augmented_assignments_to_an_index_out_of_a_tensor() -> None:
    def model(x: Tensor, n: Tensor) -> Tensor:
        y = x.clone()
        y[n[0]] += 1
        row = y[n[0]]
        y[n[0]] *= row
        y[n[0].item(), 1] -= x[0, 0]
        return y

    made = exported(model, *((torch.randn(3, 2), torch.tensor([k])) for k in range(3)))
    for k in range(-3, 3):
        assert_equal(made, model, torch.randn(3, 2), torch.tensor([k]))


def test_of_a_distribution_the_parameters_are_returned() -> None:
    kinds = torch.distributions

    def model(x: Tensor) -> Any:
        return (kinds.Normal(x * 2 if x[0] > 0 else x, 1.0), [kinds.Bernoulli(logits=x)])

    x = torch.ones(2)
    made = exported(model, x, -x)
    assert made.notes == (
        "in place of a Normal it returns a dict", "in place of a Bernoulli it returns a dict"
    )  # fmt: skip
    normal, (bernoulli,) = made(x)
    assert (list(normal), list(bernoulli)) == (["loc", "scale"], ["logits"])
    assert torch.equal(normal["loc"], x * 2)
    assert difference(made(x), model(x)) is None
    assert difference(made(x), model(x * 3)) is not None
    with pytest.raises(ExportError, match="a Normal of 2 and a Laplace of 2"):
        exported(lambda x: kinds.Normal(x, 1) if x[0] > 0 else kinds.Laplace(x, 1), x, -x)
    for other in (
        lambda x: kinds.Independent(kinds.Normal(x, 1), 1), lambda x: kinds.LogNormal(x, 1),
        lambda x: kinds.RelaxedBernoulli(x[0], logits=x), lambda x: kinds.ContinuousBernoulli(x),
    ):  # fmt: skip
        with pytest.raises(ExportError, match=r"(Independent|LogNormal|Bernoulli): return tensors"):
            exported(other, x)


def test_sides_of_another_type_are_refused_and_signs_of_zero_kept() -> None:
    with pytest.raises(ExportError, match="a tuple of 2 and a list of 2"):
        exported(lambda x: (x, x) if x[0] > 0 else [x, x], torch.ones(2), -torch.ones(2))
    with pytest.raises(ExportError, match="one side continues with True, the other with 1"):
        exported(lambda x: (x, True) if x[0] > 0 else (x, 1), torch.ones(2), -torch.ones(2))

    def signed(x: Tensor) -> Any:
        return (x, 0.0) if x[0] > 0 else (x, -0.0)

    made = exported(signed, torch.ones(2), -torch.ones(2))
    assert str(made(-torch.ones(2))[1].item()) == "-0.0"


def with_options(x: Tensor, mask: Tensor | None = None, k: float = 1) -> Tensor:
    if mask is None:
        return x * k if x.dim() == 1 else x
    return x + 1


def test_what_is_no_tensor_has_to_be_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    x = torch.ones(3)
    made = bt.BendedModule(with_options).export((x, None, 0.0), to=path)
    loaded = torch.export.load(path).module()
    for program in (made, loaded):
        assert torch.equal(program(x * 2, None, 0.0), x * 0)
        for args in ((x, x, 0.0), (x, None, 0), (x, None, -0.0), (x.expand(2, 3), None, 0.0)):
            with pytest.raises(AssertionError, match="Guard failed"):
                program(*args)
    masked = exported(with_options, (x, x))
    with pytest.raises(AssertionError, match="Guard failed"):
        masked(x, None)


def test_keys_have_to_come_in_the_same_order() -> None:
    def folded(x: Tensor, d: dict[str, Tensor], **more: Tensor) -> Tensor:
        for value in (*d.values(), *more.values()):
            x = x * 2 + value
        return x

    a, b = torch.ones(2), torch.zeros(2)
    made = exported(folded, ((a, {"a": a, "b": b}), {"e": a, "f": b}))
    assert torch.equal(made(b, {"a": a, "b": b}, e=a, f=b), folded(b, {"a": a, "b": b}, e=a, f=b))
    with pytest.raises(InputError, match="another structure"):
        made(b, {"b": b, "a": a}, e=a, f=b)
    with pytest.raises(InputError, match="another structure"):
        made(b, {"a": a, "b": b}, f=b, e=a)


# Inputs are as they were in the exported ones: one object, in memory, of a class, in training


def same_or_not(q: Tensor, k: Tensor) -> Tensor:
    return q * 100 if q is k else q + k


def test_which_inputs_are_one_object_belongs_to_a_program(tmp_path: Path) -> None:
    x, y = torch.ones(2), torch.ones(2) * 3
    one = exported(same_or_not, (x, x), to=tmp_path / "one.pt2")
    two = exported(same_or_not, (x, y))
    loaded = torch.export.load(tmp_path / "one.pt2").module()
    assert_equal(one, same_or_not, y, y)
    assert_equal(loaded, same_or_not, y, y)
    assert_equal(two, same_or_not, y, x)
    for program, args in ((one, (x, y)), (loaded, (x, x.clone())), (two, (x, x))):
        with pytest.raises(AssertionError, match=r"Guard failed: (k is q|q is not k)"):
            program(*args)
    with pytest.raises(ExportError, match="input 2 is not of the same kind"):
        exported(same_or_not, (x, y), (x, x))


def test_one_object_given_twice_to_a_model_that_does_not_ask() -> None:
    def model(q: Tensor, k: Tensor | None) -> Tensor:
        return q if k is None else q + k

    x = torch.ones(2)
    made = exported(model, (x, x), (x, x + 1))
    assert_equal(made, model, x, x * 2)
    assert_equal(made, model, x, x)


@pytest.mark.more
def test_self_attention_is_exported_as_such() -> None:
    model = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    made = exported(model, (x, x, x))
    y = torch.randn(4, 5, 8)
    assert_equal(made, model, y, y, y)
    with pytest.raises(AssertionError, match="Guard failed"):
        made(y, y.clone(), y)
    apart = exported(model, (x, x + 1, x + 2))
    assert_equal(apart, model, y, y + 1, y + 2)
    with pytest.raises(AssertionError, match=r"len\({id\(query\), id\(key\), id\(value\)}\) == 3"):
        apart(y, y, y)


def test_a_tensor_of_the_model_is_no_input() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ExportError, match="input of input 1 is a tensor of the model itself"):
        exported(model, model.weight)
    with pytest.raises(InputError, match="a tensor of the program itself"):
        exported(model, torch.ones(2, 2))(model.weight)


class Named(Tensor):
    pass


def test_classes_and_attributes_of_inputs() -> None:
    def model(x: Any) -> Any:
        return x * (2 if isinstance(x, torch.nn.Parameter) else 3) * getattr(x, "scale", 1)

    x = torch.ones(2)
    tagged, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    tagged.scale = 5  # type: ignore[attr-defined]
    with pytest.raises(ExportError, match="x of input 1 has the attribute scale"):
        exported(model, tagged)
    with pytest.raises(ExportError, match="x of input 2 is a Named: pass a plain tensor"):
        exported(model, x, x.as_subclass(Named))
    made, of_parameter = exported(model, x), exported(model, parameter)
    assert_equal(made, model, x * 2)
    assert_equal(of_parameter, model, parameter)
    for program, other in (
        (made, tagged), (made, parameter), (made, x.as_subclass(Named)), (of_parameter, x),
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="Guard failed"):
            program(other)


def frames(wave: Tensor) -> Tensor:
    step = wave.stride(0)
    return wave.as_strided((1 + (wave.shape[0] - 4) // 2, 4), (2 * step, step)).sum(-1)


def times_stride(x: Tensor) -> Tensor:
    return x * x.stride(1)


def of_offset(x: Tensor) -> Tensor:
    return x[1:] * x[1:].storage_offset()


def of_contiguous(x: Tensor) -> Tensor:
    return x * 2 if x.is_contiguous() else x


def of_conjugate(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()) * (2 if x.is_conj() else 1)


STEREO = torch.arange(16.0).reshape(8, 2)
COMPLEX = torch.ones(2, dtype=torch.complex64)
LAID_OUT = {  # a model, an input, one like it, and one in another place
    frames: (STEREO[:, 0].clone(), torch.randn(9), STEREO[:, 0]),
    times_stride: (torch.ones(2, 3), torch.ones(4, 5), torch.ones(3, 2).t()),
    of_offset: (torch.ones(4), torch.randn(6), torch.ones(9)[2:]),
    of_contiguous: (torch.ones(2, 3), torch.ones(4, 5), torch.ones(3, 2).t()),
    of_conjugate: (COMPLEX, COMPLEX * 3, COMPLEX.conj()),
}


@pytest.mark.parametrize("model", LAID_OUT, ids=lambda model: model.__name__)
def test_where_inputs_lie_in_memory_is_a_condition_if_it_is_asked(model: Any) -> None:
    x, alike, other = LAID_OUT[model]
    made = exported(model, x)
    assert_equal(made, model, alike)
    with pytest.raises(AssertionError, match="Guard failed"):
        made(other)
    # From the other one, the first is refused.
    made = exported(model, other)
    assert_equal(made, model, other)
    with pytest.raises(AssertionError, match="Guard failed"):
        made(x)


def test_where_inputs_lie_in_memory_does_not_matter_otherwise() -> None:
    def model(x: Tensor) -> Tensor:
        return x.sum(0) if x.sum() > 0 else x.relu().mean(1)

    made = exported(model, torch.ones(2, 3), -torch.ones(2, 3))
    for other in (
        torch.randn(5, 4).t(),
        torch.randn(6, 8)[1::2, ::2],
        torch.randn(2, 1).expand(2, 3),
    ):
        assert_equal(made, model, other)
        assert_equal(made, model, -other)


def test_devices_are_a_condition_if_they_are_asked() -> None:
    made = exported(lambda x: x + 1 if x.is_cpu else x, torch.ones(2))
    assert any("device" in one for one in made.program._guards_code)
    made = exported(lambda x: x + 1, torch.ones(2))
    assert not any("device" in one for one in made.program._guards_code)


@pytest.mark.parametrize("name", ["is_shared", "is_inference", "requires_grad", "_version"])
def test_what_no_program_knows_of_a_tensor_is_refused_by_line(name: str) -> None:
    def model(x: Tensor) -> Tensor:
        asked = getattr(x, name)
        return x * (asked() if callable(asked) else asked)

    words = rf"test_exported_kinds.py:\d+: (it asks for {name}|{name} of a tensor is asked for)"
    with pytest.raises(ExportError, match=words):
        exported(model, torch.ones(2))


def test_a_model_is_as_it_was_after_an_export() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.raises(ExportError, match="num_batches_tracked"):
        exported(model, torch.randn(8, 3, generator=torch.Generator()))
    with pytest.raises(ExportError, match="rand may draw"):
        exported(lambda x: x + torch.rand(3), torch.ones(3))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())

    class Counts(torch.nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    counts = Counts()
    with pytest.raises(ExportError, match=r"sets self\.calls"):
        exported(counts, torch.ones(3))
    assert counts.calls == 0


# Sizes of 0 and 1


@pytest.mark.parametrize("order", [1, -1])
def test_a_batch_of_one_leaves_the_size_open(order: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()).eval()
    assert_equal(exported(model, torch.randn(1, 3)), model, torch.randn(2, 3))
    shapes = [(1, 1, 3), (2, 1, 3)][::order]
    made = exported(model, *map(torch.randn, shapes))
    assert_equal(made, model, torch.randn(4, 5, 3))
    assert "fixed" not in str(made)


def test_a_size_of_one_that_matters_is_reported_as_fixed() -> None:
    def model(x: Tensor) -> Tensor:
        return x + torch.ones(4, 1)

    made = exported(model, torch.randn(1, 3))
    assert "fixed at 1, as a size of 1 means another operation: x.size(0)" in str(made)
    assert_equal(made, model, torch.randn(1, 5))
    for shape in ((4, 3), (1, 1)):  # of which the second is broadcast as well
        with pytest.raises(AssertionError, match="Guard failed"):
            made(torch.randn(shape))


def by_size(x: Tensor) -> Tensor:
    return x[0] if x.shape[0] == 1 else x.sum(0)


def by_rows(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 0 else x - 1


def by_elements(x: Tensor) -> Tensor:
    return x + 1 if x.flatten().shape[0] > 3 else x


@pytest.mark.parametrize(
    ("model", "refused"),
    [(by_size, (1, 3)), (by_rows, (0, 3)), (by_elements, (1, 3)), (by_elements, (0, 3))],
)
def test_sizes_of_zero_and_one_take_no_side_that_larger_ones_took(
    model: Any, refused: tuple[int, int]
) -> None:
    made = exported(model, torch.randn(4, 3))
    assert_equal(made, model, torch.randn(2, 3))
    with pytest.raises(AssertionError, match="Guard failed"):
        made(torch.randn(refused))


def test_no_rows_are_open_if_an_input_had_none() -> None:
    def model(x: Tensor) -> Tensor:
        return x.relu().sum(0)

    with pytest.raises(AssertionError, match=r"Guard failed: x.size\(\)\[0\] > 0"):
        exported(model, torch.ones(2, 3))(torch.ones(0, 3))
    made = exported(model, torch.ones(2, 3), torch.ones(0, 3))
    for rows in range(4):
        assert_equal(made, model, torch.ones(rows, 3))


# Names


@pytest.mark.parametrize(
    "name",
    ["torch", "self", "cond", "read", "require", "has_dtype", "while_loop", "device", "_i0", "_v1"],
)
def test_arguments_called_as_the_generated_code_calls_its_own(name: str) -> None:
    scope: dict[str, Any] = {}
    source = f"def model({name}, x):\n    return {name} * 2 + x if {name}.sum() > 0 else {name} - x"
    exec(source, scope)
    x = torch.ones(3)
    made = exported(scope["model"], (x, x), (-x, x))
    assert_equal(made, scope["model"], x * 3, x)


def test_arguments_that_a_program_cannot_call_so() -> None:
    def model(rest_0: Tensor, *rest: Tensor, **more: Tensor) -> Tensor:
        return rest_0 + sum(rest) + sum(more.values())

    x = torch.ones(3)
    with pytest.raises(ExportError, match="two arguments of the program would be called rest_0"):
        exported(model, (x, x))
    for name in ("a b", "class", "torch"):
        with pytest.raises(ExportError, match=f"no argument of a program can be called '{name}'"):
            exported(model, ((x,), {name: x}))


@pytest.mark.parametrize("name", ["constant_0", "lifted_tensor_0", "true_graph_0", "_guards_fn"])
def test_parameters_called_as_torch_calls_its_own(name: str, tmp_path: Path) -> None:
    constant = torch.full((3,), 0.1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, torch.nn.Parameter(torch.ones(3)))

        def forward(self, x: Tensor) -> Tensor:
            y = x * getattr(self, name) if x.sum() > 0 else x - getattr(self, name)
            return y + constant

    model, x = Model(), torch.ones(3)
    made = exported(model, x, -x, to=tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for program in (made, loaded):
        assert_equal(program, model, x * 3)
        assert_equal(program, model, x * -3)
    own = name if name == "constant_0" else f"own_{name}"
    assert own in made.program.state_dict
    assert (own == name) or f"{name} is called {own} in the program" in str(made)


# What torch can trace, but not save, or not with open sizes


def constant_in_branch(x: Tensor) -> Tensor:
    return x + torch.tensor([3.0, 1, 2]) if x.sum() > 0 else x * torch.tensor(2.0, dtype=x.dtype)


def constant_in_loop(x: Tensor) -> Tensor:
    scales = torch.tensor([0.5, 0.5, 0.4])
    while x.norm() > 1:
        scales[0] += 0.01
        x = x * torch.tensor([0.5, 0.5, 0.4]) * scales.clamp(max=1)
        scales = torch.tensor([0.5, 0.5, 0.4])
    return x


@pytest.mark.parametrize("model", [constant_in_branch, constant_in_loop])
def test_tensors_made_of_numbers_in_branches_and_loops_are_saved(
    model: Any, tmp_path: Path
) -> None:
    x = torch.ones(3)
    made = exported(model, x * 9, -x, x / 9, to=tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for program in (made, loaded):
        for scale in (-3.0, 0.1, 50.0):
            assert_equal(program, model, x * scale)


@pytest.mark.more
@pytest.mark.parametrize(
    "layer",
    [torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.AvgPool2d(2)],  # both are linear
)
def test_sizes_that_a_layer_computes_before_a_branch(layer: torch.nn.Module) -> None:
    def model(x: Tensor) -> Tensor:
        y = layer(x)
        return y.relu() if y.mean() > 0 else y * 2

    x = torch.randn(2, 3, 8, 8)
    made = exported(model, x, -x, torch.cat([x, x]))
    assert made.unseen == ()
    for other in (x * 3, -x * 3, torch.randn(5, 3, 8, 8)):
        assert_equal(made, model, other)
    if "are fixed" in str(made):
        with pytest.raises(AssertionError, match="Guard failed"):
            made(torch.randn(2, 3, 9, 9))


class Word(StrEnum):
    A = "a"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.float32, "given of input 1 is a dtype, but a program takes tensors, plain numbers"),
        ([1j], r"given\[0\] of input 1 is a complex, but a program takes"),
        (np.float64(2), "given of input 1 is a float64, but a program takes"),
        (float("nan"), "given of input 1 is nan, which no call could equal"),
        (torch.Size([2]), "input 1 holds a torch.Size: pass it as a tuple"),
        ({"it's": 1}, r"the key \"it's\", which the code of a program cannot hold"),
        ({Word.A: 1}, r"the key <Word.A: 'a'>, which the code"),
    ],
    ids=str,
)
def test_arguments_that_no_program_can_take_are_named(given: Any, words: str) -> None:
    with pytest.raises(ExportError, match=words):
        exported(lambda x, given: x + 1, (torch.ones(2), given))


def test_an_input_without_values_is_named() -> None:
    with pytest.raises(ExportError, match="input 1 holds no value"):
        exported(lambda parts: torch.zeros(1), ([],))


def test_outputs_without_values_are_refused() -> None:
    with pytest.raises(ExportError, match="returns a tensor of the meta device"):
        exported(lambda x: (x, torch.ones(2, device="meta")), torch.ones(2))


def a_text(x: Tensor) -> Tensor:
    return x + 1 if f"{x.sum():.1f}" == "4.0" else x


def an_array(x: Tensor) -> Tensor:
    return x.sum() * torch.from_numpy(np.arange(3))


def halved(x: Tensor, step: float = 8.0) -> Tensor:
    while (x * step).norm() > 1:
        step *= 0.5
    return x * step


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (a_text, "Python makes a text of a tensor, and an exported program has no texts"),
        (an_array, "from_numpy is called with an array of numpy: call it with tensors"),
        (halved, "Python computes another number in each round"),
        (torch.nn.BatchNorm1d(3), "a normalisation updates its running statistics: call eval()"),
    ],
)
def test_what_a_program_cannot_do_is_said_in_words(model: Any, words: str) -> None:
    given = (torch.ones(2, 3), 8.0) if model is halved else torch.ones(2, 3)
    with pytest.raises(ExportError, match=re.escape(words)):
        exported(model, given)


def test_an_operator_that_fake_tensors_do_not_go_through_leaves_torch_as_it_was() -> None:
    """Its kernel raises while torch has switched off its own dispatch (torch 2.13)."""
    with torch.library._scoped_library("bendtrace_test_export", "DEF") as library:
        library.define("by_values(Tensor x) -> Tensor")
        library.impl(
            "by_values",
            lambda x: x * 2 if float(x.sum()) > 0 else x,
            "CompositeExplicitAutograd",
        )
        by_values = torch.ops.bendtrace_test_export.by_values
        with pytest.raises(ExportError, match=r"`by_values\(x\)` at .*: .*register_fake"):
            exported(lambda x: by_values(x) + 1, torch.ones(2))
    assert_equal(exported(torch.sin, torch.ones(2)), torch.sin, torch.ones(3))


def test_a_text_that_a_model_returns_is_in_no_file(tmp_path: Path) -> None:
    def model(x: Tensor) -> Any:
        return (x * 2, None, "text") if x.sum() > 0 else (x, None, "text")

    x = torch.ones(3)
    assert exported(model, x, -x)(x)[1:] == (None, "text")
    with pytest.raises(ExportError, match="the model returns the text 'text', which no file"):
        exported(model, x, -x, to=tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_the_model_handles_is_named_by_what_raises_it() -> None:
    def model(x: Tensor) -> Tensor:
        try:
            return torch.linalg.cholesky(x + torch.eye(x.shape[0]) * 0)
        except torch.linalg.LinAlgError:
            return x * 0

    with pytest.raises(ExportError, match=r"cholesky.* raises an error that the model handles"):
        exported(model, torch.eye(2), torch.ones(2, 2))


# Numbers among the arguments


def test_numbers_that_differ_between_inputs_are_refused_with_a_remedy() -> None:
    def model(x: Tensor, t: Any) -> Tensor:
        return (x / t).softmax(-1)

    x = torch.randn(4)
    with pytest.raises(
        ExportError, match=r"t is 1\.0 in input 1 and 0\.5 in input 2.*torch\.tensor"
    ):
        exported(model, (x, 1.0), (x, 0.5))
    made = exported(model, (x, 1.0))
    with pytest.raises(InputError, match=r"an argument is 0\.5, but .* exported with 1\.0"):
        made(x, 0.5)
    assert_equal(exported(model, (x, torch.tensor(1.0))), model, x, torch.tensor(0.5))


# Sizes that values decide


def overlap(one: Tensor, others: Tensor) -> Tensor:
    low, high = torch.maximum(one[0], others[:, 0]), torch.minimum(one[1], others[:, 1])
    return (high - low).clamp(min=0) / (others[:, 1] - others[:, 0])


def shrinking(spans: Tensor, scores: Tensor) -> Tensor:
    order, kept = scores.argsort(descending=True), torch.zeros_like(scores, dtype=torch.bool)
    while order.numel() > 0:
        kept[order[0]] = True
        rest = order[1:]
        order = rest[overlap(spans[order[0]], spans[rest]) <= 0.5]
    return kept


def by_rounds(spans: Tensor, scores: Tensor) -> Tensor:
    order, kept = scores.argsort(descending=True), []
    while order.numel() > 0:
        kept.append(order[0])
        if order.numel() == 1:
            break
        rest = order[1:]
        order = rest[overlap(spans[order[0]], spans[rest]) <= 0.5]
    return torch.stack(kept)


def by_length(spans: Tensor, scores: Tensor) -> tuple[Tensor, int]:
    """Pick numbers, by `len`; and return what is left, and how much."""
    order, kept = scores.argsort(descending=True), []
    size = order.size(0)
    while len(order) > 0 and scores[order[0]] > 0.2:
        kept.append(order[0].item())
        order = order[1:][overlap(spans[kept[-1]], spans[order[1:]]) <= 0.5]
        size = order.size(0)
    return torch.tensor(kept), size


def together(spans: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Shrink two tensors that were picked from before; the rounds end by a value or a size."""
    spans, scores = spans[scores > 0.1], scores[scores > 0.1]
    total = torch.zeros(())
    while scores.numel() > 1:
        best = scores.argmax()
        total = total + scores[best]
        if total > 2:
            break
        left = overlap(spans[best], spans) <= 0.5
        spans, scores = spans[left], scores[left]
    return total, scores


def without_masks(spans: Tensor, scores: Tensor) -> Tensor:
    scores = torch.cat([scores, torch.zeros(1)]).sort(descending=True).values
    while scores[0] > 0.5:
        scores = scores[1:]
    return scores


def spans_of(seed: int, count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(count, 1, generator=generator) * 4
    return torch.cat([starts, starts + 1], 1), torch.rand(count, generator=generator)


SHRINKING = [shrinking, by_rounds, by_length, together, without_masks]


@pytest.mark.more
@pytest.mark.parametrize(
    "model", some(SHRINKING, chosen=[shrinking, together]), ids=lambda model: model.__name__
)
def test_loops_whose_tensors_shrink(model: Any, tmp_path: Path) -> None:
    """In lists, each round is a side; a call that goes further raises its question."""
    known = 4 if model in (shrinking, together) else 20
    made = exported(model, *map(spans_of, range(known)), to=tmp_path / "model.pt2")
    messages = [one.message for one in made.unseen]
    equal, refused = 0, ""
    for seed in range(60):
        given = spans_of(seed, 5 if known == 20 else 3 + seed % 9)
        try:
            found = made(*given)
        except RuntimeError as error:
            refused = str(error)
        else:
            assert difference(found, model(*given)) is None
            equal += 1
        assert not refused or any(message in refused for message in messages), refused
    assert equal == 60 or (equal > 20 and known == 20)


def by_row(x: Tensor, weights: Tensor) -> Tensor:
    """Experts that have tokens, one after the other, as transformers has them."""
    chosen = x.argmax(-1)
    out = torch.zeros_like(x)
    for number in torch.bincount(chosen, minlength=3).nonzero():
        tokens = torch.where(chosen == number[0])[0]
        out.index_add_(0, tokens, x[tokens] * weights[number[0]])
    return out


def by_rows_written_later(x: Tensor, weights: Tensor) -> Tensor:
    kept = x[x[:, 0] > 0].clone()
    rows, total = list(kept), weights[0]
    kept += 1
    for row in rows:
        total = total + row
    return total


@pytest.mark.more
@pytest.mark.parametrize("model", [by_row, by_rows_written_later])
def test_rows_of_which_values_decide_how_many_there_are(model: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[Tensor, Tensor]:
        weights = torch.randn(3, 3, generator=generator)
        return torch.randn(count, 3, generator=generator), weights

    path = tmp_path / "model.pt2"
    bt.BendedModule(model).export(*(some(3) for _ in range(20)), to=path)
    program = torch.export.load(path).module()
    for count in [3] * 8 if model is by_rows_written_later else (3, 4, 7, 9):
        call = some(count)
        assert difference(program(*call), model(*call)) is None


def test_how_many_rows_there_are_is_asserted_before_they_are_used() -> None:
    def model(x: Tensor, weights: Tensor) -> Tensor:
        total = weights[0]
        for number in x[:, 0].unique():
            total = total + x[x[:, 0] == number].max(0).values
        return total

    weights = torch.zeros(1, 2)
    inputs = [torch.tensor(rows) for rows in ([[1, 2], [3, 4]], [[1, 2], [1, 4]])]
    made = exported(model, *((x, weights) for x in inputs))
    with pytest.raises(RuntimeError, match=r"x\[:, 0\].unique\(\)` at .* was always 2 or 1 for"):
        made(torch.tensor([[1, 2], [3, 4], [5, 6]]), weights)


def test_rows_and_views_of_tensors_that_values_size_are_not_written_to() -> None:
    def rows(x: Tensor) -> Tensor:
        kept = x[x > 0].clone()
        for row in kept:
            row += 1
        return kept

    def view(x: Tensor) -> Tensor:
        kept = x[x > 0].clone()
        first = kept[:1]
        if len(kept) == 2:
            kept += 1
        return first

    inputs = torch.tensor([1.0, 2, -3]), torch.tensor([1.0, -2, 3])
    for model, words in ((rows, "index out of a tensor picks"), (view, "shares memory with")):
        with pytest.raises(ExportError, match=rf"`.* \+= 1` at .*{words}"):
            exported(model, *inputs)


def test_loops_whose_tensors_get_longer_are_refused_by_line() -> None:
    def model(scores: Tensor) -> Tensor:
        kept = scores[:0]
        while scores.max() > 0.5:
            kept = torch.cat([kept, scores.max()[None]])
            scores = scores.masked_fill(scores == scores.max(), 0.0)
        return kept

    line = r"`torch.cat\(\[kept, .*\]\)` at .*: this gets longer in each round.*write into it"
    with pytest.raises(ExportError, match=line):
        exported(model, *(spans_of(seed)[1] for seed in range(6)))


@pytest.mark.parametrize(
    "key", [slice(1, None), torch.tensor([0, 2]), torch.ones(3, dtype=torch.bool)], ids=str
)
def test_numbers_assigned_in_a_branch_are_saved(key: Any, tmp_path: Path) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 0
        if x.sum() > 0:
            y[key] = 2.5
        return y

    made = exported(model, torch.ones(3), -torch.ones(3), to=tmp_path / "model.pt2")
    assert_equal(made, model, torch.ones(3) * 2)


def test_a_number_that_is_infinite_is_computed_with() -> None:
    made = exported(lambda x, base: x * 2 if base**2 > 5 else x, (torch.ones(1), float("inf")))
    assert torch.equal(made(torch.ones(1), float("inf")), torch.full((1,), 2.0))


def test_whether_a_tensor_contains_a_number_is_a_question() -> None:
    def model(x: Tensor) -> Tensor:
        return x + 1 if 3 in x else x * 2

    made = exported(model, torch.tensor([1, 3]), torch.tensor([1, 2]))
    for x in (torch.tensor([3]), torch.tensor([4, 5])):
        assert_equal(made, model, x)


def test_rows_are_exchanged_by_a_list_of_numbers() -> None:
    def model(a: Tensor) -> Tensor:
        a = a.clone()
        for k in range(2):
            pivot = k + a[k:, k].abs().argmax().item()
            a[[k, pivot]] = a[[pivot, k]]
            a[k + 1 :] -= a[k + 1 :, k : k + 1] / a[k, k] * a[k]
        return a

    made = exported(model, torch.randn(3, 3))
    for _ in range(5):
        assert_equal(made, model, torch.randn(3, 3))


def test_a_list_of_numbers_is_an_index() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        places = [x.argmax().item(), x.argmin().item(), 0]
        return x[places], torch.tensor([*places, x[0].item()]), torch.tensor([x.sum(), x[1], 1.0])

    made = exported(model, torch.tensor([1.0, 2.0, 3.0]))
    assert_equal(made, model, torch.tensor([5.0, 7.0, 6.0, -1.0]))


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_hides_behind_torchs_layers_is_refused_with_a_remedy() -> None:
    x, nn = torch.randn(2, 5, 8), torch.nn
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    encoder = nn.TransformerEncoder(layer, 1).eval()
    with pytest.raises(ExportError, match="construct it with enable_nested_tensor=False"):
        exported(encoder, {"src": x, "src_key_padding_mask": mask})
    padded = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    made = exported(padded, {"src": x, "src_key_padding_mask": mask})
    with torch.no_grad():
        expected = padded(x, src_key_padding_mask=~mask.flip(0))
        assert difference(made(src=x, src_key_padding_mask=~mask.flip(0)), expected) is None
    gru = nn.GRU(8, 6, batch_first=True).eval()

    def packed(x: Tensor) -> Tensor:
        lengths = torch.tensor([3, 5])
        given = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(gru(given)[0], batch_first=True)[0]

    with pytest.raises(ExportError, match=r"`gru\(given\)` at .*no RNN over a packed sequence"):
        exported(packed, x)
    assert_equal(exported(gru, x), gru, torch.randn(3, 5, 8))


# Files


def test_the_rounding_errors_of_the_model_itself_are_accepted_in_files() -> None:
    """Also near 0, where they come from values around 1,000; a tolerance can be set."""

    def model(x: Tensor) -> Tensor:
        return (x * 1000).sum(-1) - (x * 1000).flip(-1).sum(-1)

    x = torch.rand(4, 300, generator=torch.Generator().manual_seed(0))

    class Run:
        result = model(x)

    def check(off: float, tolerance: float = 1e-5, model: Any = model) -> None:
        calls: Any = [((x,), {})]
        exporting.compare_program(lambda x: Run.result + off, calls, [Run], tolerance, model=model)  # type: ignore[list-item]

    check(0.01)
    for options in ({"model": None}, {"off": 10.0}):
        with pytest.raises(ExportError, match=r"is off by .*\(tolerance=1e-05 is accepted\)"):
            check(**{"off": 0.01, **options})
    check(10.0, tolerance=20.0)
    with pytest.raises(InputError, match="tolerance has to be a number from 0 on, not 'much'"):
        exported(model, x, tolerance="much")


FULL = """
import resource, sys, torch, bendtrace as bt
x = torch.ones(3)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    bt.BendedModule(lambda x: x * 2 if x.sum() > 0 else x).export(x, -x, to=sys.argv[1])
except bt.errors.ExportError as error:
    print(error)
"""


@pytest.mark.more
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit for the size of files")
def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """torch's own writer would end the process."""
    command = [sys.executable, "-c", FULL, str(tmp_path / "model.pt2")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "model.pt2' cannot be written: [Errno 27] File too large" in done.stdout
    assert list(tmp_path.iterdir()) == []
