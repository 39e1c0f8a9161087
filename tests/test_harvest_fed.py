"""Harvested activations as trainers of sparse autoencoders read them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.harvesting import ActivationBuffer, Harvest, save_for_sae_lens

LENGTHS = (3, 4)


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        return x.exp() if x.sum() > 600 else x


def harvested(
    folder: Path, lengths: tuple[int, ...] = (3, 3), where: str = "mul", **options: Any
) -> Harvest:
    """Samples whose vectors differ in each number, with a mask and tokens."""
    batches = [
        {
            "x": torch.arange(4.0 * length).reshape(2, length, 2) + 100 * number,
            "mask": torch.tensor([[1] * length, [1] * (length - 1) + [0]]),
            "tokens": torch.arange(2 * length).reshape(2, length) + 50 * number,
            "label": torch.tensor([number, number]),
        }
        for number, length in enumerate(lengths)
    ]
    bended = bt.BendedModule(Reads())
    return bt.harvest(
        bended, batches, where=where, out=folder, progress=False,
        call=lambda model, batch: model(batch["x"]),
        keep={name: name for name in ("mask", "tokens", "label")}, **options,
    )  # fmt: skip


def rows_of(batches: Any) -> list[list[float]]:
    return sorted(row for batch in batches for row in batch.tolist())


def every(found: Harvest, masked: bool = False) -> list[list[float]]:
    return sorted(
        vector
        for row, mask in zip(found["mul"], found.kept["mask"], strict=True)
        for vector in (row[mask != 0] if masked else row).tolist()
    )


@pytest.mark.parametrize("lengths", [(3, 3), (3, 4, 3)])
@pytest.mark.parametrize("rows", [1, 2, 100])
def test_each_vector_comes_once_in_an_epoch(
    lengths: tuple[int, ...], rows: int, tmp_path: Path
) -> None:
    found = harvested(tmp_path / "a", lengths)
    batches = list(ActivationBuffer(found["mul"], 5, rows=rows, epochs=1))
    assert rows_of(batches) == every(found)
    assert [len(batch) for batch in batches[:-1]] == [5] * (len(batches) - 1)
    assert 0 < len(batches[-1]) <= 5
    twice = list(ActivationBuffer(found["mul"], 5, rows=rows, epochs=2))
    assert rows_of(twice) == sorted(every(found) * 2)


def test_the_order_is_that_of_the_seed(tmp_path: Path) -> None:
    found = harvested(tmp_path / "a", (3, 3, 3))
    first, same, other = (
        torch.cat(list(ActivationBuffer(found["mul"], 4, epochs=1, seed=seed)))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not torch.equal(first, found["mul"].tensor().flatten(0, 1))


def test_a_mask_leaves_vectors_out(tmp_path: Path) -> None:
    found = harvested(tmp_path / "a", (3, 4))
    buffer = ActivationBuffer(found["mul"], 2, mask=found.kept["mask"], epochs=1)
    assert rows_of(buffer) == every(found, masked=True)
    assert len(every(found, masked=True)) < len(every(found))


def test_samples_that_did_not_reach_the_node_have_no_vectors(tmp_path: Path) -> None:
    found = harvested(tmp_path / "a", (3, 3, 3), where="exp", allow_none=True)
    assert found["exp"].positions.tolist() == [2, 3, 4, 5]
    mask = found.kept["mask"]
    buffer = ActivationBuffer(found["exp"], 2, mask=mask, epochs=1)
    wanted = [row[mask[2 + n] != 0] for n, row in enumerate(found["exp"])]
    assert rows_of(buffer) == sorted(torch.cat(wanted).tolist())


def test_without_epochs_it_never_ends_and_all_batches_are_full(tmp_path: Path) -> None:
    found = harvested(tmp_path / "a")
    buffer = ActivationBuffer(found["mul"], 5, dtype=torch.float64)
    batches = list(islice(buffer, 12))  # 12 vectors an epoch
    assert {tuple(batch.shape) for batch in batches} == {(5, 2)}
    assert batches[0].dtype == torch.float64
    assert rows_of(batches) == sorted(every(found) * 5)
    assert iter(buffer) is buffer
    assert buffer.config["node"] == "mul"
    assert buffer.config["out_batch_size"] == 5


def test_what_a_buffer_cannot_read_is_an_error(tmp_path: Path) -> None:
    found = harvested(tmp_path / "a")
    for wrong in ({"batch_size": 0}, {"rows": 0}, {"epochs": 0}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))}= has to be"):
            ActivationBuffer(found["mul"], **{"batch_size": 2} | wrong)
    with pytest.raises(InputError, match="a column of a harvest with rows is needed, not 'mul'"):
        ActivationBuffer("mul", 2)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="are not vectors of floating point"):
        next(ActivationBuffer(found.kept["tokens"], 2))
    with pytest.raises(InputError, match=r"'kept/label' has shape \(\) where 'mul' has \(3, 2\)"):
        next(ActivationBuffer(found["mul"], 2, mask=found.kept["label"]))
    data = {"x": torch.ones(2, 3, 2), "none": torch.zeros(2, 3)}
    empty = bt.harvest(
        torch.exp, [data], where="exp", out=tmp_path / "b", progress=False, keep=["none"],
        call=lambda model, batch: model(batch["x"]),
    )  # fmt: skip
    with pytest.raises(InputError, match="leaves no vectors"):
        next(ActivationBuffer(empty["exp"], 2, mask=empty.kept["none"]))


def test_rows_of_batches_have_no_mask_of_samples(tmp_path: Path) -> None:
    data = {"x": torch.ones(2, 3, 2), "mask": torch.ones(2, 3)}
    found = bt.harvest(
        torch.exp, [data, data], where="exp", out=tmp_path / "a", progress=False, keep=["mask"],
        batch_axis={"exp": None}, call=lambda model, batch: model(batch["x"]),
    )  # fmt: skip
    assert len(rows_of(ActivationBuffer(found["exp"], 4, epochs=1))) == 12
    with pytest.raises(InputError, match="'kept/mask' has no row for some samples of 'exp'"):
        ActivationBuffer(found["exp"], 2, mask=found.kept["mask"])


def test_the_data_set_of_sae_lens(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra sae")
    found = harvested(tmp_path / "a")
    out = tmp_path / "made"
    save_for_sae_lens(found["mul"], out, hook_name="hook_mul", tokens=found.kept["tokens"])
    made = datasets.load_from_disk(str(out))
    # What SAE-Lens checks, and how it reads.
    assert made.features["hook_mul"].shape == (3, 2)
    made.set_format(type="torch", columns=["hook_mul", "token_ids"], dtype=torch.float32)
    assert torch.equal(made[0:4]["hook_mul"], found["mul"].tensor())
    assert made[0:4]["token_ids"].tolist() == found.kept["tokens"].tensor().tolist()
    with pytest.raises(InputError, match="is not empty"):
        save_for_sae_lens(found["mul"], out, hook_name="h")
    half = harvested(tmp_path / "b", reduce="last")
    save_for_sae_lens(half["mul"], tmp_path / "half", hook_name="h", dtype=torch.float16)
    made = datasets.load_from_disk(str(tmp_path / "half"))
    assert (made.column_names, made.features["h"].shape) == (["h"], (1, 2))
    assert made.features["h"].dtype == "float16"


def test_what_has_no_form_for_sae_lens_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the extra sae")
    found, out = harvested(tmp_path / "a"), tmp_path / "made"
    with pytest.raises(InputError, match="bfloat16 cannot be written: pass dtype"):
        save_for_sae_lens(found["mul"], out, hook_name="h", dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"'kept/label' need the shape \(3,\) of a context, not"):
        save_for_sae_lens(found["mul"], out, hook_name="h", tokens=found.kept["label"])
    with pytest.raises(InputError, match="'mul' have shape None: one shape"):
        save_for_sae_lens(harvested(tmp_path / "b", (3, 4))["mul"], out, hook_name="h")
    assert not out.exists()


def test_without_datasets_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs datasets: pip install datasets$"):
        save_for_sae_lens(harvested(tmp_path / "a")["mul"], tmp_path / "b", hook_name="h")
