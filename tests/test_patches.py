"""Patches by themselves: what they make of a value, and what they leave alone."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError, PatchError
from bendtrace.insert.interjection import Inputs, NodePass
from bendtrace.insert.patch_kinds import (
    AddPatch,
    CustomPatch,
    Patch,
    ProbePatch,
    RecordPatch,
    ReplacePatch,
    ZeroPatch,
)
from tests.promise import bits

AT = NodePass("mlp.relu")
NOTHING = Inputs(())


def patched(patch: Patch[Any], value: Any, at: NodePass = AT) -> Any:
    return patch.after(at, NOTHING, value)


def written(value: Tensor, index: Any, new: Any) -> Tensor:
    """What one would write by hand."""
    made = value.clone()
    made[index] = new
    return made


INDICES: dict[str, Any] = {
    "one row": 1,
    "last column": (..., -1),
    "range": slice(1, 3),
    "every other": (slice(None), slice(None, None, 2)),
    "two dimensions": (slice(None), slice(1, 3), 2),
    "listed rows": [0, 2],
    "listed pairs": ([0, 2], [1, 3]),
    "tuple in a tuple": ((0, 2), slice(1, 3)),
    "index tensor": torch.tensor([2, 0]),
    "mask": torch.arange(60).reshape(3, 4, 5) % 7 == 0,
    "mask of rows": torch.tensor([True, False, True]),
    "numpy": (slice(None), np.array([0, 2])),
    "new axis": (None, 0),
    "range object": range(2),
    "all": (),
    "ellipsis": ...,
}


@pytest.mark.parametrize("name", INDICES)
def test_a_slice_is_what_stands_in_brackets(name: str) -> None:
    index = INDICES[name]
    key = list(index) if isinstance(index, range) else index
    x = torch.randn(3, 4, 5)
    before = x.clone()
    new = torch.randn_like(x[key])
    assert bits(patched(ZeroPatch(slice=index), x)) == bits(written(x, key, 0))
    assert bits(patched(ReplacePatch(value=new, slice=index), x)) == bits(written(x, key, new))
    assert bits(patched(AddPatch(value=new, slice=index), x)) == bits(written(x, key, x[key] + new))
    halved = CustomPatch(custom_op=lambda part: part / 2, slice=index)
    assert bits(patched(halved, x)) == bits(written(x, key, x[key] / 2))
    assert bits(x) == bits(before)


def test_a_list_of_more_than_numbers_counts_as_a_tuple() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(patched(ZeroPatch(slice=[1, ...]), x), written(x, (1, ...), 0))
    given = patched(ZeroPatch(slice=[(0, 2), slice(1, 3)]), x)
    assert torch.equal(given, written(x, ((0, 2), slice(1, 3)), 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_zeros_are_of_the_dtype_and_shape_that_was_there(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3).to(dtype)
    assert bits(patched(ZeroPatch(), x)) == bits(torch.zeros(2, 3).to(dtype))
    assert patched(ZeroPatch(), torch.tensor(1).to(dtype)).shape == ()


def test_nan_is_zeroed_too() -> None:
    assert torch.equal(patched(ZeroPatch(), torch.full((2,), float("nan"))), torch.zeros(2))


def test_sums_are_rounded_to_the_dtype_that_was_there() -> None:
    x = torch.randn(3).half()
    other = torch.randn(3)
    assert bits(patched(AddPatch(value=other), x)) == bits(x.clone().add_(other))
    assert patched(AddPatch(value=0.5), x).dtype is torch.float16


def test_gradients_reach_the_value_of_a_patch_and_what_led_to_the_node() -> None:
    for index in (None, 1, (slice(None), 2), [0, 2]):
        for make, edit in (
            (AddPatch, lambda part, value: part + value),
            (ReplacePatch, lambda part, value: value),
        ):
            leaf = torch.randn(3, 4, requires_grad=True)
            key = ... if index is None else index
            value = nn.Parameter(torch.randn_like(leaf[key]))
            x = leaf * 2
            given = torch.autograd.grad(patched(make(value=value, slice=index), x).pow(3).sum(),
                                        [leaf, value])  # fmt: skip
            by_hand = written(x := leaf * 2, key, edit(x[key], value))
            assert bits(given) == bits(torch.autograd.grad(by_hand.pow(3).sum(), [leaf, value]))


def test_what_led_to_a_zeroed_value_gets_gradients_of_zero_not_none() -> None:
    leaf = torch.randn(3, requires_grad=True)
    patched(ZeroPatch(), leaf * 2).sum().backward()
    assert torch.equal(leaf.grad, torch.zeros(3))


def test_a_value_broadcasts_as_in_an_assignment() -> None:
    x = torch.randn(2, 3)
    row = torch.randn(3)
    for value in (row, row[None], row[None, None], torch.tensor(2.0), torch.randn(2, 1)):
        assert bits(patched(ReplacePatch(value=value), x)) == bits(written(x, ..., value))
        assert bits(patched(AddPatch(value=value), x)) == bits(x.clone().add_(value.squeeze(0)))


@pytest.mark.parametrize("make", [AddPatch, ReplacePatch])
def test_a_value_of_the_wrong_shape_is_refused_with_node_and_shapes(make: Any) -> None:
    message = (
        rf"^{make.__name__} at 'mlp.relu': the value has to be Tensor\(2, 3\), or broadcast to "
        r"that, but is Tensor\(2, 4\)$"
    )
    with pytest.raises(PatchError, match=message) as caught:
        patched(make(value=torch.ones(2, 4)), torch.ones(2, 3))
    error = caught.value
    assert (error.path, error.expected, error.got) == ("mlp.relu", "Tensor(2, 3)", "Tensor(2, 4)")
    assert isinstance(error, bt.errors.InputError)
    with pytest.raises(PatchError, match=r"has to be Tensor\(3\)"):  # it must not grow the value
        patched(make(value=torch.ones(2, 3)), torch.ones(3))
    with pytest.raises(PatchError, match=r"has to be Tensor\(2\), .* is Tensor\(3\)"):
        patched(make(value=torch.ones(3), slice=(slice(None), 0)), torch.ones(2, 3))


def test_a_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(PatchError, match=r"ZeroPatch at 'mlp.relu': Tensor\(2, 3\) has no part "
                       r"\[:, 7\]: index 7 is out of bounds"):  # fmt: skip
        patched(ZeroPatch(slice=(slice(None), 7)), torch.ones(2, 3))
    with pytest.raises(PatchError, match=r"too many indices"):
        patched(AddPatch(value=1, slice=(0, 0, 0)), torch.ones(2, 3))


def test_the_pass_is_named_from_the_second_one_on() -> None:
    with pytest.raises(PatchError, match=r"ReplacePatch at 'loop:3\|sub_0'"):
        patched(ReplacePatch(value=torch.ones(4)), torch.ones(3), NodePass("loop|sub_0", 2))


def test_a_value_that_the_dtype_cannot_hold_is_refused() -> None:
    ids = torch.arange(3)
    for patch in (
        ReplacePatch(value=0.5), AddPatch(value=0.5), ReplacePatch(value=torch.ones(3)),
        ReplacePatch(value=float("nan")), ReplacePatch(value=2**70), ReplacePatch(value=1j),
    ):  # fmt: skip
        with pytest.raises(PatchError, match=r"the node holds torch.int64, which cannot hold"):
            patched(patch, ids)
    with pytest.raises(PatchError, match=r"holds torch.bool"):
        patched(ReplacePatch(value=2), ids > 1)
    assert torch.equal(patched(ReplacePatch(value=2.0), ids), torch.full((3,), 2))
    assert torch.equal(patched(ReplacePatch(value=1), ids > 1), torch.ones(3).bool())


def test_numbers_are_patched_as_numbers_of_their_type() -> None:
    assert bits(patched(ZeroPatch(), 2.5)) == bits(0.0)
    assert bits(patched(ZeroPatch(), True)) == bits(False)
    assert bits(patched(AddPatch(value=1), 2.5)) == bits(3.5)
    assert bits(patched(ReplacePatch(value=1), 2.5)) == bits(1.0)
    assert bits(patched(ReplacePatch(value=4.0), 2)) == bits(4)
    assert bits(patched(CustomPatch(custom_op=lambda n: n * 2), 2)) == bits(4)
    probe = ProbePatch()
    patched(probe, 7)
    assert probe.activation == 7
    with pytest.raises(PatchError, match=r"the node holds int, which cannot hold 2.5"):
        patched(AddPatch(value=0.5), 2)
    with pytest.raises(
        PatchError, match=r"the value is the number 2, .* Tensor\(1\) cannot replace"
    ):
        patched(ReplacePatch(value=torch.ones(1)), 2)
    with pytest.raises(PatchError, match=r"only tensors can be sliced, and the value is 2"):
        patched(ZeroPatch(slice=0), 2)


def test_containers_have_to_be_dug_into() -> None:
    with pytest.raises(PatchError, match=r"\(tuple\), neither a tensor nor a number: give the "
                       "path of a part"):  # fmt: skip
        patched(ZeroPatch(), (torch.ones(1),))


def test_a_probe_is_a_snapshot() -> None:
    x = torch.randn(3, requires_grad=True) * 1
    probe, record = ProbePatch(), RecordPatch()
    assert probe.activation is None
    for patch in (probe, record, record):
        assert patched(patch, x) is x
    expected = bits(x.detach().clone())
    x.detach().zero_()
    assert bits(probe.activation) == expected
    assert [bits(value) for value in record.activations] == [expected] * 2


def test_a_probe_can_keep_its_graph() -> None:
    leaf = torch.randn(3, requires_grad=True)
    probe, record = ProbePatch(detach=False), RecordPatch(detach=False)
    x = leaf * 2
    patched(probe, x), patched(record, x)
    probe.activation.sum().backward(retain_graph=True)
    record.activations[0].sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 4.0))


def test_a_record_goes_on_with_the_list_it_was_given() -> None:
    record = RecordPatch(activations=[1])
    patched(record, 2)
    assert record.activations == [1, 2]
    assert RecordPatch().activations == []


def test_a_custom_patch_may_change_its_value_in_place() -> None:
    def double(x: Tensor) -> Tensor:
        x *= 2
        return x

    x = torch.ones(3)
    assert torch.equal(patched(CustomPatch(custom_op=double), x), torch.full((3,), 2.0))
    given = patched(CustomPatch(custom_op=double, slice=0), x)
    assert given.tolist() == [2, 1, 1]
    assert x.tolist() == [1, 1, 1]


def test_a_custom_patch_that_gives_nothing_keeps_the_value() -> None:
    x = torch.ones(3)
    assert patched(CustomPatch(custom_op=lambda x: None), x) is None
    assert torch.equal(patched(CustomPatch(custom_op=lambda x: None, slice=0), x), x)


@pytest.mark.parametrize("index", [None, 0])
def test_a_change_in_place_that_is_not_given_back_is_refused(index: Any) -> None:
    def forgets(x: Tensor) -> None:
        x.zero_()

    with pytest.raises(PatchError, match=r"CustomPatch at 'mlp.relu': .* place and returned noth"):
        patched(CustomPatch(custom_op=forgets, slice=index), torch.ones(3))


def test_writing_into_the_models_own_value_is_refused() -> None:
    patch = CustomPatch(custom_op=lambda x: x.zero_(), requires_clone=False)
    with pytest.raises(PatchError, match=r"changed the model's own value in place"):
        patched(patch, torch.ones(3))


def test_what_a_model_does_to_the_new_value_does_not_reach_the_patch() -> None:
    kept = torch.ones(3)
    for patch in (ReplacePatch(value=kept), CustomPatch(custom_op=lambda x: kept)):
        patched(patch, torch.zeros(3)).add_(1)
        assert kept.tolist() == [1, 1, 1]
    by_hand = CustomPatch(custom_op=lambda x: kept, requires_clone=False)
    assert patched(by_hand, torch.zeros(3)) is kept


def test_a_custom_patch_may_give_another_shape_except_for_a_part() -> None:
    first = CustomPatch(custom_op=lambda x: x[:1])
    assert patched(first, torch.ones(3)).shape == (1,)
    part = CustomPatch(custom_op=lambda x: x[:2], slice=slice(None))
    with pytest.raises(PatchError, match=r"has to be Tensor\(3\), .* is Tensor\(2\)"):
        patched(part, torch.ones(3))
    with pytest.raises(PatchError, match=r"op returned 'no' \(str\) for a part of a tensor"):
        patched(CustomPatch(custom_op=lambda x: "no", slice=0), torch.ones(3))


def test_a_part_may_be_changed_in_place_even_without_a_copy_of_the_whole() -> None:
    x = torch.ones(3)
    patch = CustomPatch(custom_op=lambda part: part.mul_(2), slice=slice(1, None))
    for patch.requires_clone in (True, False):
        assert patched(patch, x).tolist() == [1, 2, 2]
        assert x.tolist() == [1, 1, 1]


def test_an_error_of_a_patch_within_a_patch_keeps_its_place() -> None:
    inner = ReplacePatch(value=torch.ones(7))
    outer = CustomPatch(custom_op=lambda x: patched(inner, x, NodePass("inside")))
    with pytest.raises(PatchError, match=r"^ReplacePatch at 'inside': ") as caught:
        patched(outer, torch.ones(3))
    assert caught.value.path == "inside"


def test_an_error_in_a_custom_patch_comes_out_as_it_is() -> None:
    def fails(x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        patched(CustomPatch(custom_op=fails), torch.ones(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AddPatch(value="1"), r"value has to be a tensor or a number, not '1' \(str\)"),
        (lambda: ReplacePatch(value=[1, 2]), r"not \[1, 2\] \(list\)"),
        (lambda: ReplacePatch(value=None), r"not None \(NoneType\)"),
        (lambda: ZeroPatch(slice="0"), "slice='0': '0' is not a valid index of"),
        (lambda: ZeroPatch(slice=(0, 1.5)), "1.5 is not a valid index of"),
        (lambda: ZeroPatch(slice=torch.ones(2)), "a tensor of torch.float32 is not a valid index"),
        (lambda: CustomPatch(custom_op=3), r"custom_op has to be a function of the value, not 3"),
    ],
)
def test_bad_arguments_are_refused_when_the_patch_is_made(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_patch_of_ones_own_is_a_dataclass_with_an_op() -> None:
    @dataclass(kw_only=True)
    class Scale(Patch[Tensor]):
        by: float

        def op(self, original_output: Tensor) -> Tensor:
            original_output *= self.by
            return original_output

    x = torch.ones(2)
    assert torch.equal(patched(Scale(by=3.0), x), torch.full((2,), 3.0))
    assert x.tolist() == [1, 1]


def test_an_op_of_ones_own_gets_a_copy_whatever_its_parent_does() -> None:
    class Noisy(AddPatch):
        def op(self, original_output: Any) -> Any:
            return super().op(original_output.mul_(0))

    class Changing(ProbePatch):
        def op(self, original_output: Any) -> Any:
            return super().op(original_output) * 2

    x = torch.ones(2)
    assert patched(Noisy(value=1), x).tolist() == [1, 1]
    assert patched(Changing(), x).tolist() == [2, 2]
    assert not Changing.observes
    assert not Noisy.self_contained
    assert AddPatch.self_contained
    assert x.tolist() == [1, 1]


def test_patches_say_what_they_do() -> None:
    assert repr(ZeroPatch()) == "ZeroPatch()"
    assert repr(AddPatch(value=torch.ones(9, 9), slice=(0, ...))) == (
        "AddPatch(value=Tensor(9, 9), slice=(0, Ellipsis))"
    )
    assert repr(ReplacePatch(value=2)) == "ReplacePatch(value=2)"
    probe = ProbePatch()
    patched(probe, torch.ones(2, 3))
    assert repr(probe) == "ProbePatch(activation=Tensor(2, 3))"
    assert repr(CustomPatch(custom_op=written)) == "CustomPatch(custom_op=written)"


def test_patches_are_known_by_identity_and_can_be_copied_and_stored() -> None:
    one, other = AddPatch(value=torch.ones(2)), AddPatch(value=torch.ones(2))
    assert one != other
    assert len({one, other}) == 2
    for made in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(made.value, one.value)


def test_it_works_where_there_is_no_autograd() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        probe = ProbePatch()
        patched(probe, x)
        assert patched(CustomPatch(custom_op=lambda x: x * 2), x).tolist() == [2, 2, 2]
        assert patched(ZeroPatch(slice=0), x).tolist() == [0, 1, 1]
    y = torch.randn(3, requires_grad=True)
    patched(ReplacePatch(value=probe.activation), y).sum().backward()


def test_structured_values_are_copied_with_what_holds_them() -> None:
    class Held:
        """Such as a cache, which is meant itself."""

    held, a = Held(), torch.ones(2)
    value = {"a": a, "held": held, "more": [(a,)]}
    probe = ProbePatch()
    patched(probe, value)
    a.add_(1)
    assert probe.activation["a"].tolist() == [1, 1]
    assert probe.activation["more"][0][0].tolist() == [1, 1]
    assert probe.activation["held"] is held
    assert value["a"] is a
