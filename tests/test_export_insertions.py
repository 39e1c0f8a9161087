"""What is inserted leaves with the model: programs with bends, patches, steering and functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.export import OnnxProgram

bends, patches, workflows = bt.bends, bt.patches, bt.workflows
VECTOR = torch.tensor([0.5, -1.0, 2.0, 0.25])
BIAS = nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        y.add_(0.5)
        z = self.b(y)
        return z.tanh() if z.sum() > 0 else z * 2


class Around(bt.Interjection):
    wants_inputs = True

    def before(self, at: Any, inputs: bt.Inputs) -> bt.Inputs:
        return bt.Inputs((inputs[0] + 1,), inputs.kwargs)

    def after(self, at: Any, inputs: bt.Inputs, output: Tensor) -> Tensor:
        return output + inputs[0]


class Wrapped(bt.Interjection):
    def instead(self, at: Any, call: Callable[..., Any], inputs: bt.Inputs) -> Any:
        return call(*inputs) * 2 + call(inputs[0] * VECTOR)


def _hook(bended: Any, kind: str) -> Any:
    function = {"forward_hook": lambda module, given, out: (out[0] * 2,)}.get(
        kind, lambda module, given: (given[0] * 2,)
    )
    getattr(bended.hooks, f"register_{kind}")(function, a=bended.a)
    return contextlib.nullcontext()


def _twice(bended: Any) -> Any:
    """Insert one function twice at one node: at each call it goes on in another way."""
    for _ in range(2):
        bended.interject("relu", lambda y: y + 1 if y.sum() > 9 else y)
    return bended.interject("b", lambda y: y * 2 if y.sum() > 0 else y - 1)


Insert = Callable[[Any], Any]


def _patched(patch: Any) -> Insert:
    return lambda bended: bended.patch({"relu": patch})


def _bent(bend: Any, where: str = "relu", **more: Any) -> Insert:
    return lambda bended: bended.bend(bend, where, **more)


def _steered(**more: Any) -> Insert:
    return lambda bended: workflows.steer(bended, {"relu": VECTOR}, **more)


def _ablated(*how: Any, **more: Any) -> Insert:
    return lambda bended: workflows.ablate(bended, "relu", *how, **more)


_REFERENCE = torch.linspace(-1, 2, 12).reshape(3, 4)
KINDS: dict[str, tuple[Insert, int]] = {  # with how many tensors each brings
    "zero": (_patched(patches.ZeroPatch(slice=(slice(None), 0))), 0),
    "add": (_patched(patches.AddPatch(VECTOR)), 1),
    "replace": (_patched(patches.ReplacePatch(VECTOR, slice=(slice(None),))), 1),
    "custom": (_patched(patches.CustomPatch(lambda value: value.flip(0))), 0),
    "bias": (_bent(bends.Bias(1.0)), 0),
    "scale": (_bent(bends.Scale(bends.BendingParameter("gain", 2.0))), 0),
    "affine": (_bent(bends.Affine(bias=1.0, scale=3.0)), 0),
    "chain": (_bent(bends.Scale(2.0) >> bends.Bias(1.0)), 0),
    "lambda": (_bent(bends.Lambda(lambda value: value.clamp(0, 1))), 0),
    "mask": (_bent(bends.Mask(0.5, seed=3, dim=-1)), 1),
    "ordered mask": (_bent(bends.OrderedMask(0.5)), 1),
    "threshold": (_bent(bends.ThresholdActivation(0.5, dim=-1)), 0),
    "permute": (_bent(bends.Permute(-1, seed=1)), 1),
    "threshold permute": (_bent(bends.ThresholdPermute(0.5, dim=-1, seed=1)), 1),
    "interpolation": (_bent(bends.InterpolateActivation(torch.tensor([0.25, 0.75]))), 1),
    "steady noise": (_bent(bends.Normal(0.1, seed=4, fresh=False)), 1),
    "weight": (_bent(bends.Mask(0.5, seed=1), "a.weight", weights=True), 1),
    "steer": (_steered(scale=2.0), 1),
    "steer, normalised": (_steered(normalise="value"), 1),
    "ablate to zero": (_ablated(), 0),
    "ablate to the mean": (_ablated("mean"), 0),
    "ablate to a mean": (_ablated("mean", reference=_REFERENCE), 1),
    "ablate to samples": (_ablated("resample"), 1),
    "ablate to other samples": (_ablated("resample", reference=_REFERENCE), 2),
    "ablate to a value": (_ablated(VECTOR), 1),
    "function": (lambda bended: bended.interject("relu", lambda value: value * VECTOR), 1),
    "function with the pass": (
        lambda bended: bended.interject("relu", lambda value, at: value + 1 + at.number), 0,
    ),
    "module": (lambda bended: bended.interject("a", BIAS), 2),
    "branch": (lambda bended: bended.interject("a", lambda v: -v if v.max() > 1 else v), 0),
    "input": (lambda bended: bended.interject("a.input", lambda value: value * 2), 0),
    "parameter": (lambda bended: bended.interject("a.weight", lambda value: value * 2), 0),
    "in place": (lambda bended: bended.interject("add_", lambda value: value * 2), 0),
    "around": (lambda bended: bended.interject("a", Around()), 0),
    "instead of a function": (lambda bended: bended.interject("relu", Wrapped()), 1),
    "instead of a module": (lambda bended: bended.interject("b", Wrapped()), 1),
    "forward hook": (lambda bended: _hook(bended, "forward_hook"), 0),
    "pre-hook": (lambda bended: _hook(bended, "forward_pre_hook"), 0),
    "several": (_twice, 0),
}  # fmt: skip


def _inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4) * scale for scale in (0.3, 1, 2, 3, 4, 5)]


def _made() -> Any:
    torch.manual_seed(1)
    return bt.BendedModule(Net().eval())


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_contains_what_is_inserted(kind: str) -> None:
    """Each kind of insertion that the library brings; its tensors are constants or inputs."""
    insert, count = KINDS[kind]
    bended, inputs = _made(), _inputs()
    bended(inputs[0])
    plain = [bended(x) for x in inputs]
    with insert(bended):
        exported = bended.export(*inputs)
        given = bended.export(*inputs, insertions="inputs")
        expected = [bended(x) for x in inputs]
    assert exported.compared == len(inputs)
    assert not exported.insertions
    assert len(given.insertions) == count
    for x, out in zip(inputs, expected, strict=True):
        assert torch.equal(exported(x), out)
        assert torch.equal(given(x), out)
    assert not all(map(torch.equal, plain, expected))
    held = exported.program.state_dict.keys() - bended.model.state_dict().keys()
    assert held == set(given.insertions)


@pytest.mark.parametrize(
    ("ending", "insertions"),
    [("pt2", "constants"), ("pt2", "inputs"), ("onnx", "inputs"), ("aoti.pt2", "inputs")],
)
def test_files_contain_what_is_inserted(ending: str, insertions: str, tmp_path: Path) -> None:
    """Several kinds at once, at a model that has never been called, in all targets."""
    bended, inputs = _made(), _inputs()
    file = tmp_path / f"m.{ending}"

    def flipped(y: Tensor) -> Tensor:
        return y + VECTOR if y.max() > 0.5 else y - 1

    with (
        bended.patch({"relu": patches.AddPatch(VECTOR)}),
        bended.interject("b", flipped),
        bended.bend(bends.Mask(0.5, seed=3, dim=-1), "a$"),
    ):
        exported = bended.export(*inputs, to=file, insertions=insertions)
        expected = [bended(x) for x in inputs]
    names = ["mask_at_a_numbers_a", "addpatch_at_relu_value"]
    assert list(exported.insertions) == (names if insertions == "inputs" else [])
    program: Callable[..., Any]
    if ending == "onnx":
        program = OnnxProgram(file)
        names = [one.name for one in program.session.get_inputs()]
        assert names == ["x", *exported.insertions]
    elif ending == "pt2":
        program = torch.export.load(file).module()
    else:
        program = torch._inductor.aoti_load_package(str(file))
    for x, out in zip(inputs, expected, strict=True):
        with torch.no_grad():
            made = program(x, **exported.insertions)
        torch.testing.assert_close(made[0] if isinstance(made, (list, tuple)) else made, out)


def test_calls_pass_other_tensors_for_those_of_insertions() -> None:
    bended, inputs = _made(), _inputs()
    with workflows.steer(bended, VECTOR, "b"):
        exported = bended.export(*inputs, insertions="inputs")
    (name,) = exported.insertions
    with workflows.steer(bended, VECTOR * 3, "b"):
        assert torch.equal(exported(inputs[0], **{name: VECTOR * 3}), bended(inputs[0]))


def test_only_some_passes_of_a_loop() -> None:
    def model(x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = torch.mul(x, 0.5)
        return x

    inputs = [torch.ones(3) * n for n in (0.1, 1.0, 3.0, 9.0, 20.0)]
    bended = bt.BendedModule(model)
    bended(inputs[-1])
    with bended.interject("mul", lambda y: y - 0.1 if y.max() > 0.5 else y, passes=1):
        exported = bended.export(*inputs)
        expected = [bended(x) for x in inputs]
    assert all(map(torch.equal, map(exported, inputs), expected))


def test_what_no_input_reaches_is_noted() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(x) if x.sum() > 0 else torch.tanh(x)

    bended = bt.BendedModule(model)
    bended(-torch.ones(2))
    handle = bended.interject("tanh", torch.neg)
    notes = bended.export(torch.ones(2)).notes
    assert "no input reached neg at 'tanh': the program does not contain it" in notes
    handle.remove()


class Counting(bt.Interjection):
    count = 0

    def after(self, at: Any, inputs: bt.Inputs, output: Tensor) -> Tensor:
        self.count += 1
        return output * self.count


class Listening(bt.Interjection):
    def backward(self, at: Any, grad_input: Any, grad_output: Any) -> None:
        return None


SEEN: list[Any] = []


def _stores(value: Tensor) -> Tensor:
    SEEN.append(1)
    return value


def _prints(value: Tensor) -> Tensor:
    print("here")
    return value


def _draws(value: Tensor) -> Tensor:
    return value + torch.rand(4)


def _leaves(value: Tensor) -> Tensor:
    return value + torch.from_numpy(value.numpy())


REFUSED: dict[str, tuple[Insert, str]] = {
    "observer": (_patched(patches.ProbePatch()), "ProbePatch at 'relu' only looks at"),
    "capture": (_bent(bends.Capture()), "Capture at /relu/ only looks at"),
    "gradients": (lambda bended: bended.interject("a", Listening()), "Listening at 'a' only looks"),
    "steps": (_steered(steps=[0]), "steps at is_root only looks at"),
    "fresh noise": (_bent(bends.Normal(0.1)), "Normal at /relu/ can only run live: .*Generator"),
    "callback": (
        lambda bended: bended.interject("a", _stores),
        rf"_stores at 'a' \(.*{__file__}:{_stores.__code__.co_firstlineno}\) sets SEEN, but",
    ),
    "attribute": (
        lambda bended: bended.interject("a", Counting()),
        rf"Counting at 'a' \(.*{__file__}:\d+\) sets count, but",
    ),
    "print": (
        lambda bended: bended.interject("a", _prints),
        rf"`print\(\"here\"\)` at .*{__file__}:\d+: in _prints at 'a' .*, print is not torch's",
    ),
    "random numbers": (
        lambda bended: bended.interject("a", _draws),
        rf"`torch.rand\(4\)` at .*{__file__}:\d+: in _draws at 'a' .*, rand may draw",
    ),
    "numpy": (
        lambda bended: bended.interject("a", _leaves),
        rf"`value.numpy\(\)` at .*{__file__}:\d+: in _leaves at 'a' .*, numpy is not torch's",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_function_of_tensors_is_refused(kind: str) -> None:
    insert, message = REFUSED[kind]
    bended = _made()
    bended(_inputs()[0])
    with pytest.raises(bt.errors.ExportError, match=message.replace(__file__, Path(__file__).name)):
        with insert(bended):
            bended.export(*_inputs())


def test_insertions_are_inputs_or_constants() -> None:
    with pytest.raises(bt.errors.InputError, match="'constants' or 'inputs', not 'both'"):
        _made().export(torch.ones(2, 4), insertions="both")
