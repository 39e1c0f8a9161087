"""What programs are exported from: views by an index, structures, and inputs of another kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.errors import ExportError, InputError
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
