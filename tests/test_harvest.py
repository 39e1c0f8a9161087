"""Harvesting: what is in the files is what a loop with native hooks finds by hand."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import bendtrace as bt
from bendtrace.errors import HarvestError, InputError, NodePathError
from bendtrace.harvesting import Harvest
from bendtrace.log.saved_tensors import LOCK, DirectoryLock
from bendtrace.storage import LoadError, SaveError
from tests.promise import bits

ROOT = Path(__file__).parent.parent


class Branching(nn.Module):
    """A layer, a branch on the values of the batch, and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.loud = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        if x.sum() > 0:
            h = torch.tanh(self.loud(h))
        while h.norm() > 1:
            h = h / 2
        return h


def branching() -> Branching:
    torch.manual_seed(1)
    return Branching()


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(3, 2),
    ).eval()  # fmt: skip


def samples(count: int, *shape: int, seed: int = 5) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def go(model: Any, loader: Any, where: Any, out: Path, **options: Any) -> Harvest:
    return bt.harvest(model, loader, where=where, out=out, progress=False, **options)


def hooked(model: nn.Module, batches: Any, names: list[str]) -> dict[str, list[Tensor]]:
    """What native hooks see, batch by batch."""
    found: dict[str, list[Tensor]] = {name: [] for name in names}

    def noting(name: str) -> Any:
        return lambda module, inputs, output: found[name].append(output.clone())

    handles = [model.get_submodule(n).register_forward_hook(noting(n)) for n in names]
    with torch.no_grad():
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    for handle in handles:
        handle.remove()
    return found


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


class Listed(Dataset[Any]):
    """Items of a data set that notes which were loaded."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        self.loaded.append(index)
        return self.items[index]


# Values


def test_a_cnn_gives_what_native_hooks_see(tmp_path: Path) -> None:
    model, data = cnn(), samples(50, 1, 6, 6)
    wanted = hooked(model, data.split(8), ["0", "2", "5"])
    before = bits(dict(model.state_dict()))
    found = go(model, data.split(8), ["0", "2", "5"], tmp_path / "out", shard_samples=20)
    for name, parts in wanted.items():
        assert torch.equal(found[name].tensor(), torch.cat(parts))
        assert torch.equal(torch.stack(list(found[name])), torch.cat(parts))
    assert (found.ids, len(found), found.is_complete) == (list(range(50)), 50, True)
    assert [len(shard.batches) for shard in found.shards] == [3, 3, 1]
    assert bits(dict(model.state_dict())) == before
    assert not any(module._forward_hooks for module in model.modules())


def test_files_can_be_read_with_safetensors_alone(tmp_path: Path) -> None:
    model, data = cnn(), samples(20, 1, 6, 6)
    found = go(model, data.split(4), ["5", "2"], tmp_path, shard_samples=8, dtype=torch.float16)
    shards = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    wanted = hooked(model, data.split(4), ["5", "2"])
    for name in ("5", "2"):
        assert torch.equal(
            torch.cat([shard[f"sub_{name}"] for shard in shards]), torch.cat(wanted[name]).half()
        )
    assert torch.cat([shard["index/id"] for shard in shards]).tolist() == list(range(20))
    assert torch.cat([shard["index/batch"] for shard in shards]).tolist() == [
        n for n in range(5) for _ in range(4)
    ]
    assert found["5"].dtype == torch.float16


@pytest.mark.more
def test_a_transformer_with_dict_batches(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    model = BertModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    batches = []
    for length in (5, 7, 5):
        tokens = torch.randint(1, 30, (4, length), generator=generator)
        mask = torch.ones_like(tokens)
        mask[0, 3:] = 0
        batches.append({"input_ids": tokens, "attention_mask": mask})
    name = "encoder.layer.1.output"
    wanted = hooked(model, batches, [name])[name]

    def last_token(value: Tensor, batch: Any) -> Tensor:
        return value[torch.arange(len(value)), batch["attention_mask"].sum(1) - 1]

    found = go(model, batches, name, tmp_path / "a")
    node = found.nodes[0]
    assert [tuple(row.shape) for row in found[node]] == [(n, 8) for n in (5, 7, 5) for _ in "1234"]
    for row, by_hand in zip(found[node], [row for part in wanted for row in part], strict=True):
        assert torch.equal(row, by_hand)
    last = go(model, batches, name, tmp_path / "b", reduce=last_token)
    by_hand = [
        part[torch.arange(4), batch["attention_mask"].sum(1) - 1]
        for part, batch in zip(wanted, batches, strict=True)
    ]
    assert torch.equal(last[node].tensor(), torch.cat(by_hand))
    mean = go(model, batches, [name], tmp_path / "c", reduce={name: "mean"})
    assert torch.equal(mean[node].tensor(), torch.cat([part.mean(1) for part in wanted]))


@pytest.mark.more
def test_generate_is_called_by_a_function_and_passes_are_counted_on(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    data = [torch.randint(1, 20, (2, 3)) for _ in range(2)]

    def write(model: Any, batch: Tensor) -> None:
        model.generate(
            input_ids=batch, attention_mask=torch.ones_like(batch), max_new_tokens=3,
            min_new_tokens=3, do_sample=False, pad_token_id=0,
        )  # fmt: skip

    seen: list[Tensor] = []
    handle = model.transformer.ln_f.register_forward_hook(
        lambda module, inputs, output: seen.append(output[:, -1].clone())
    )
    for batch in data:
        write(model, batch)
    handle.remove()
    found = go(
        model, data, "transformer.ln_f", tmp_path, call=write, reduce=lambda value: value[:, -1]
    )
    for number in range(3):
        name = "transformer.ln_f" if not number else f"transformer.ln_f:{number + 1}"
        assert torch.equal(found[name].tensor(), torch.cat(seen[number::3]))


def test_reductions_keep_samples_and_features(tmp_path: Path) -> None:
    model, data = cnn(), samples(6, 1, 6, 6)
    maps = hooked(model, [data], ["0"])["0"][0]
    wanted = {"mean": maps.mean((2, 3)), "max": maps.amax((2, 3)), "last": maps[:, :, -1, -1]}
    for name, value in wanted.items():
        found = go(model, [data], "0", tmp_path / name, reduce=name, feature_axis=1)
        assert torch.equal(found["0"].tensor(), value)


def test_a_batch_axis_elsewhere_comes_first_in_the_files(tmp_path: Path) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(x.transpose(0, 1))

    data = samples(6, 4)
    found = go(model, data.split(3), "relu", tmp_path, batch_axis={"relu": 1})
    assert torch.equal(found["relu"].tensor(), data.relu())


def test_values_without_samples_are_stored_once_for_each_batch(tmp_path: Path) -> None:
    def model(x: Tensor) -> Tensor:
        return x * torch.softmax(x.sum(0), 0) * x.mean().item()

    data = samples(7, 3)
    where = ["softmax", "mul", "item"]
    axes = {"softmax": None, "item": None}
    found = go(model, data.split(3), where, tmp_path, batch_axis=axes)
    wanted = torch.stack([part.sum(0).softmax(0) for part in data.split(3)])
    assert torch.equal(found["softmax"].tensor(), wanted)
    assert found["softmax"].positions.tolist() == [0, 1, 2]
    assert not found["softmax"].per_sample
    means = [part.mean().item() for part in data.split(3)]
    assert found["item"].tensor().tolist() == pytest.approx(means, rel=0, abs=0)
    assert found["mul"].shape == (7, 3)
    with pytest.raises(InputError, match="a row for each batch"):
        found.dataset("softmax")
    assert set(found.dataset()[0]) == {"id", "mul"}


def test_a_value_that_is_no_row_for_each_sample_is_refused(tmp_path: Path) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.relu(x.sum(0))

    with pytest.raises(
        bt.errors.InputError, match=r"'relu' returned a tensor of shape \(3,\) for a batch of"
    ):
        go(model, samples(4, 3).split(2), "relu", tmp_path / "a")
    lstm = nn.LSTM(3, 2, batch_first=True)
    with pytest.raises(InputError, match=r"gave tuple.*name a part"):
        go(lstm, [samples(4, 5, 3)], "output", tmp_path / "b")
    with pytest.raises(InputError, match="one for the whole batch"):
        go(lambda x: x * x.sum().item(), [samples(4, 3)], "item", tmp_path / "c")


def test_a_part_of_a_container(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(3, 2, batch_first=True))
    data = samples(4, 5, 3)
    with torch.no_grad():
        wanted = model(data)[0]
    part = go(model, [data], "sub_0.output|sub_0", tmp_path / "a")
    assert torch.equal(part[part.nodes[0]].tensor(), wanted)
    picked = go(model, [data], "0", tmp_path / "b", reduce=lambda given: given[0])
    assert torch.equal(picked["0"].tensor(), wanted)


def test_what_is_inserted_and_written_in_place_is_seen(tmp_path: Path) -> None:
    def model(x: Tensor) -> Tensor:
        h = torch.exp(x)
        h.mul_(2)
        return h

    data = samples(4, 3)
    bended = bt.BendedModule(model)
    handle = bended.interject("exp", lambda value: value + 1)
    found = go(bended, data.split(2), ["exp", "mul_"], tmp_path)
    assert torch.equal(found["exp"].tensor(), data.exp() + 1)
    assert torch.equal(found["mul_"].tensor(), (data.exp() + 1) * 2)
    assert bended.insertions == (handle,)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64]
)
def test_every_type_comes_back_as_it_was(dtype: torch.dtype, tmp_path: Path) -> None:
    data = (samples(6, 3) * 3).to(dtype)
    for form in ("safetensors", "zarr"):
        found = go(lambda x: x.flip(1), data.split(2), "flip", tmp_path / form, format=form)
        assert bits(found["flip"].tensor()) == bits(data.flip(1))
        found.verify()


@pytest.mark.parametrize(
    ("version", "said"),
    [(None, "format='zarr' needs zarr"), ("3.0.7", "zarr 3.0.7 can delete data")],
)
def test_a_zarr_that_is_missing_or_deletes_data_is_refused(
    version: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zarr = None if version is None else SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "zarr", zarr)
    with pytest.raises(InputError, match=rf"^{said}: pip install 'zarr>=3\.0\.8'$"):
        go(torch.tanh, [samples(4, 3)], "tanh", tmp_path / "h", format="zarr")
    assert not (tmp_path / "h").exists()


def test_a_number_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    data = torch.tensor([[1.0], [70000.0]])
    with pytest.raises(InputError, match=r"70000, which does not fit in torch.float16"):
        go(torch.abs, data.split(1), "abs", tmp_path, dtype=torch.float16)
    kept = go(torch.abs, [data / 0], "abs", tmp_path / "b", dtype=torch.float16)
    assert kept["abs"].tensor().isinf().all()  # which it was before


def test_a_type_that_changes_is_an_error(tmp_path: Path) -> None:
    data = [torch.ones(2, 1), torch.ones(2, 1).double()]
    with pytest.raises(
        bt.errors.InputError, match=r"returned torch\.float32 before, and torch\.float64 now"
    ):
        go(torch.abs, data, "abs", tmp_path / "a", shard_samples=2)
    assert len(go(torch.abs, data, "abs", tmp_path / "b", dtype=torch.float32)) == 4


# Passes


def halved(x: Tensor) -> Tensor:
    while x.norm() > 1:
        x = torch.div(x, 2)
    return torch.relu(x)


def passes_by_hand(data: Tensor) -> list[list[Tensor]]:
    found = []
    for part in data.split(1):
        own = []
        while part.norm() > 1:
            part = part / 2
            own.append(part)
        found.append(own)
    return found


LOUD = torch.tensor([[0.5, 0.1], [3.0, 1.0], [9.0, 1.0], [0.2, 0.3], [20.0, 3.0]])


def test_passes_have_names_of_their_own(tmp_path: Path) -> None:
    wanted = passes_by_hand(LOUD)
    most = max(map(len, wanted))
    found = go(halved, LOUD.split(1), ["div", "relu"], tmp_path, shard_samples=2, allow_none=True)
    assert set(found.nodes) == {"relu", "div", *(f"div:{n}" for n in range(2, most + 1))}
    for number in range(most):
        column = found["div" if not number else f"div:{number + 1}"]
        have = [at for at, own in enumerate(wanted) if len(own) > number]
        assert column.positions.tolist() == have
        assert torch.equal(column.tensor(), torch.cat([wanted[at][number] for at in have]))
    assert found["div:1"] is found["div"]
    table = found.to_pandas()
    assert table["div:2"].tolist() == [len(own) > 1 for own in wanted]


def test_the_last_pass_keeps_the_name_of_the_node(tmp_path: Path) -> None:
    wanted = [own[-1] for own in passes_by_hand(LOUD) if own]
    found = go(halved, LOUD.split(1), "div", tmp_path, passes=-1, allow_none=True)
    assert found.nodes == ("div",)
    assert torch.equal(found["div"].tensor(), torch.cat(wanted))
    first = go(halved, LOUD.split(1), "div", tmp_path / "b", passes=0, allow_none=True)
    by_hand = torch.cat([own[0] for own in passes_by_hand(LOUD) if own])
    assert torch.equal(first["div"].tensor(), by_hand)
    two = go(halved, LOUD.split(1), "div", tmp_path / "c", passes=[0, 2], allow_none=True)
    assert set(two.nodes) == {"div", "div:3"}
    named = go(halved, LOUD.split(1), "div:2", tmp_path / "d", allow_none=True)
    assert named.nodes == ("div:2",)
    assert torch.equal(named["div:2"].tensor(), two_of(2))


def two_of(number: int) -> Tensor:
    return torch.cat([own[number - 1] for own in passes_by_hand(LOUD) if len(own) >= number])


def test_passes_can_be_stacked(tmp_path: Path) -> None:
    wanted = [torch.stack(own, 1) for own in passes_by_hand(LOUD) if own]
    found = go(halved, LOUD.split(1), "div", tmp_path, passes="stack", allow_none=True)
    assert found["div"].shape is None
    for row, by_hand in zip(found["div"], wanted, strict=True):
        assert torch.equal(row, by_hand[0])
    with pytest.raises(InputError, match="have different shapes"):
        found["div"].tensor()
    assert [tuple(rows.shape) for _, rows in found["div"].batches()] == [w.shape for w in wanted]
    stored = load_file(next(tmp_path.glob("*.safetensors")))
    flat, shapes, offsets = (stored[f"div{end}"] for end in ("", "#shapes", "#offsets"))
    for number, by_hand in enumerate(wanted):
        row = flat[offsets[number] : offsets[number + 1]].view(*shapes[number].tolist())
        assert torch.equal(row, by_hand[0])


# Paths


def test_it_says_which_inputs_took_a_branch(tmp_path: Path) -> None:
    model, data = branching(), samples(30, 3)
    found = go(model, data.split(1), ["first", "loud"], tmp_path, shard_samples=7)
    up = [n for n, x in enumerate(data) if x.sum() > 0]
    assert 0 < len(up) < 30
    taken = found.took("x.sum() > 0", True)
    assert taken.ids == up
    assert taken.per_sample
    assert found.is_per_sample
    assert found.took("x.sum() > 0", False).ids == [n for n in range(30) if n not in up]
    line = next(
        n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.strip() == "if x.sum() > 0:"
    )  # fmt: skip
    assert found.took(line).ids == found.took(f"test_harvest.py:{line}").ids == up
    with torch.no_grad():
        assert found["loud"].positions.tolist() == up
        assert torch.equal(
            found["loud"].tensor(),
            torch.cat([model.loud(torch.relu(model.first(data[n : n + 1]))) for n in up]),
        )
        assert torch.equal(
            found["first"][taken], torch.cat([model.first(data[n : n + 1]) for n in up])
        )
    times: dict[int, list[int]] = {}
    for number, x in enumerate(data.split(1)):
        with torch.no_grad():
            h = torch.relu(model.first(x))
            h = torch.tanh(model.loud(h)) if x.sum() > 0 else h
            count = 0
            while h.norm() > 1:
                h, count = h / 2, count + 1
        times.setdefault(count, []).append(number)
    for count, numbers in times.items():
        if count:
            assert found.took("h.norm() > 1", count).ids == numbers
    assert sum(found.counts.values()) == 30
    for path in found.paths:
        ids = found.samples(path).ids
        assert len(ids) == found.counts[path.name]
        ups = {c.outcome for c in path.conditions if c.text == "x.sum() > 0"}
        assert ups == {ids[0] in up}
    assert found.to_pandas()["path"].nunique() == len(found.paths)
    with pytest.raises(InputError, match=r"no batch reached a branch 'x.sum"):
        found.took("x.sum() > 1")


def test_a_branch_on_a_batch_is_a_property_of_the_batch(tmp_path: Path) -> None:
    data = torch.tensor([[1.0], [1.0], [-1.0], [-3.0], [5.0]])
    found = go(lambda x: x if x.sum() > 0 else -x, data.split(2), (), tmp_path)
    assert found.nodes == ()
    taken = found.took("x.sum() > 0", True)
    assert (taken.ids, taken.per_sample) == ([0, 1, 4], False)
    assert "in batches" in repr(found)


def test_rows_of_batches_that_came_by_a_node_know_their_samples(tmp_path: Path) -> None:
    data = torch.tensor([[1.0], [1.0], [-1.0], [-3.0], [5.0], [-6.0], [-7.0]])
    found = go(
        lambda x: x if x.sum() > 0 else torch.neg(x), data.split(2), "neg", tmp_path,
        allow_none=True, shard_samples=4,
    )  # fmt: skip
    assert found["neg"].positions.tolist() == [2, 3, 4, 5, 6]
    assert torch.equal(found["neg"].tensor(), -data[2:])
    assert torch.equal(found["neg"][found.took("x.sum() > 0", False)], -data[2:])
    stored = [load_file(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    assert [shard.get("neg#rows", torch.empty(0)).tolist() for shard in stored] == [[2, 3], []]
    items = found.dataset("neg")
    assert (len(items), items.positions.tolist()) == (5, [2, 3, 4, 5, 6])
    assert torch.equal(items[1][0], -data[3])
    assert set(found.dataset()[0]) == {"id"}


def test_only_paths_are_told_where_no_node_is_asked_for(tmp_path: Path) -> None:
    model = branching()
    found = go(model, samples(9, 3).split(1), (), tmp_path)
    assert (len(found), found.nodes) == (9, ())
    assert len(found.took("x.sum() > 0", True)) + len(found.took("x.sum() > 0", False)) == 9


def test_paths_have_the_same_names_however_they_were_come_by(tmp_path: Path) -> None:
    data = samples(20, 3)
    one = go(branching(), data.split(1), "first", tmp_path / "a")
    bended = bt.BendedModule(branching())
    go(bended, data.flip(0).split(1), "first", tmp_path / "b")
    two = go(bended, data.split(1), "first", tmp_path / "c")  # from replays alone
    assert one.to_pandas()["path"].tolist() == two.to_pandas()["path"].tolist()
    other = go(branching(), data.split(1), "relu", tmp_path / "d")
    assert one.to_pandas()["path"].tolist() == other.to_pandas()["path"].tolist()


def test_branches_on_python_values_tell_paths_apart(tmp_path: Path) -> None:
    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        return torch.relu(x) if y is None else torch.relu(x) + y

    batches = [{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 2), "y": torch.ones(1, 2)}] * 2
    found = go(model, batches, "relu", tmp_path)
    assert [found.samples(path).ids for path in found.paths] == [[0, 2], [1, 3]]


# Samples


def test_ids_and_what_is_kept_come_along(tmp_path: Path) -> None:
    x, y = samples(10, 3), torch.arange(10) % 2
    names = [f"s{n}" for n in range(10)]
    batches = [
        {"x": x[n : n + 4], "labels": y[n : n + 4], "name": names[n : n + 4]}
        for n in range(0, 10, 4)
    ]
    found = go(
        torch.tanh, batches, "tanh", tmp_path, ids="name", shard_samples=4,
        keep={"labels": "labels", "sums": lambda batch: batch["x"].sum(1)},
        call=lambda model, batch: model(batch["x"]),
    )  # fmt: skip
    assert found.ids == names
    assert torch.equal(found.kept["labels"].tensor(), y)
    assert torch.equal(found["kept/sums"].tensor(), x.sum(1))
    pairs = found.dataset("tanh", "kept/labels")
    loaded = DataLoader(pairs, batch_size=3)
    features, labels = zip(*loaded, strict=True)
    assert torch.equal(torch.cat(features), x.tanh())
    assert torch.equal(torch.cat(labels), y)
    item = found.dataset()[3]
    assert (item["id"], int(item["kept/labels"])) == ("s3", 1)
    assert found.to_pandas()["id"].tolist() == names


def test_a_tuple_batch_keeps_its_labels(tmp_path: Path) -> None:
    x, y = samples(10, 3), torch.arange(10)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    found = go(
        torch.tanh, loader, "tanh", tmp_path, keep={"y": 1}, ids=1,
        call=lambda model, batch: model(batch[0]),
    )  # fmt: skip
    assert torch.equal(found.kept["y"].tensor(), y)
    assert found.ids == list(range(10))


def test_rows_are_found_by_every_kind_of_index(tmp_path: Path) -> None:
    data = samples(23, 3)
    column = go(torch.tanh, data.split(4), "tanh", tmp_path, shard_samples=8)["tanh"]
    wanted = data.tanh()
    assert (len(column), column.shape, column.dtype) == (23, (23, 3), torch.float32)
    for index in (0, -1, 22, -23, 7):
        assert torch.equal(column[index], wanted[index])
    for part in (slice(None), slice(3, 17), slice(-5, None), slice(4, 4), slice(20, 2, -3)):
        by_hand = torch.stack([wanted[n] for n in range(23)[part]] or [torch.empty(3)])
        assert torch.equal(column[part], by_hand[: len(range(23)[part])])
    assert torch.equal(column[[5, 1, 22]], wanted[[5, 1, 22]])
    assert torch.equal(column[torch.tensor([5, 1])], wanted[[5, 1]])
    assert torch.equal(column[wanted[:, 0] > 0], wanted[wanted[:, 0] > 0])
    with pytest.raises(IndexError, match="23 rows"):
        column[23]
    column[0].fill_(7)  # stays in this process
    assert torch.equal(Harvest.open(tmp_path)["tanh"].tensor(), wanted)
    copy = pickle.loads(pickle.dumps(column))
    assert torch.equal(copy.tensor(), wanted)


def test_a_name_that_is_not_there_names_near_ones(tmp_path: Path) -> None:
    found = go(torch.tanh, [samples(3, 2)], "tanh", tmp_path)
    with pytest.raises(NodePathError, match="no 'tan' in this harvest; did you mean 'tanh'"):
        found["tan"]
    assert "tanh" in found
    assert list(found) == ["tanh"]
    assert found._ipython_key_completions_() == ["tanh"]


def test_its_repr_tells_what_there_is(tmp_path: Path) -> None:
    found = go(lambda x: x.abs() if x.sum() > 0 else -x, samples(9, 2).split(1), "abs", tmp_path)
    assert re.search(r"Harvest of 9 samples in 1 shard\n  <abs: float32\[\d, 2\]>", repr(found))
    assert re.search(r"    \w{12} \d: x.sum\(\) > 0: True\n", repr(found))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_is_gone_over_as_it_is(workers: int, tmp_path: Path) -> None:
    data = samples(21, 3)
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        TensorDataset(data), 4, shuffle=True, generator=generator, num_workers=workers
    )
    state = generator.get_state()
    wanted = torch.cat([batch[0] for batch in loader])
    generator.set_state(state)
    found = go(torch.tanh, loader, "tanh", tmp_path)
    assert torch.equal(found["tanh"].tensor(), wanted.tanh())


def test_a_batch_of_a_tensor_data_set_is_the_one_that_its_loader_gives(tmp_path: Path) -> None:
    tensors = [
        samples(9, 2, 3), torch.arange(9),
        samples(9, 2, 4, 4).to(memory_format=torch.channels_last),
        samples(9, 4).t().contiguous().t(), torch.rand(9) > 0.5,
    ]  # fmt: skip
    loader = DataLoader(TensorDataset(*tensors), 4, shuffle=True, generator=torch.Generator())
    seen: list[Any] = []

    def noting(bended: Any, batch: Any) -> None:
        seen.append(batch)
        bended(batch[0])

    state = loader.generator.get_state()
    wanted = list(loader)
    loader.generator.set_state(state)
    go(torch.tanh, loader, "tanh", tmp_path, call=noting)
    assert bits(seen) == bits(wanted)
    assert type(seen[0]) is type(wanted[0])
    layouts = [[t.stride() for t in batch] for batch in wanted]
    assert [[t.stride() for t in batch] for batch in seen] == layouts
    backwards = DataLoader(TensorDataset(*tensors), batch_sampler=[[-1, 2], [3, -2]])
    seen.clear()
    go(torch.tanh, backwards, "tanh", tmp_path / "b", call=noting)
    assert bits(seen) == bits(list(backwards))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(samples(10, 3))


def test_loaders_of_every_kind(tmp_path: Path) -> None:
    wanted = samples(10, 3).tanh()
    loaders: dict[str, Any] = {
        "stream": DataLoader(Stream(), 4),
        "generator": (part for part in samples(10, 3).split(3)),
        "without batches": DataLoader(list(samples(10, 3).split(1)), batch_size=None),  # type: ignore[arg-type]
        "own batches": DataLoader(
            TensorDataset(samples(10, 3)), batch_sampler=[[0, 1, 2], [3], list(range(4, 10))]
        ),
        "collated": DataLoader(list(samples(10, 3)), 3, collate_fn=torch.stack),  # type: ignore[arg-type]
    }
    for name, loader in loaders.items():
        found = go(torch.tanh, loader, "tanh", tmp_path / name)
        assert torch.equal(found["tanh"].tensor(), wanted), name


def test_a_loader_that_was_empty_leaves_a_harvest_that_can_begin(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the loader yielded no batch"):
        go(torch.tanh, iter(()), "tanh", tmp_path)
    assert len(go(torch.tanh, [samples(2, 3)], "tanh", tmp_path)) == 2


# Errors


def test_what_makes_no_sense_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    out = tmp_path / "out"
    data = [samples(4, 3)]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"reduce": "sum"}, "reduce= takes"),
        ({"reduce": {"tan": "mean"}}, "reduce= has an entry for 'tan'"),
        ({"batch_axis": "0"}, "batch_axis= takes"),
        ({"dtype": "float16"}, "dtype= has to be"),
        ({"dtype": torch.int8}, "dtype= has to be"),
        ({"passes": "all"}, "accepts is"),
        ({"passes": [0.5]}, "passes= takes"),
        ({"shard_samples": 0}, "shard_samples= has to be"),
        ({"shard_bytes": 1.5}, "shard_bytes= has to be"),
        ({"seed": -1}, "seed= has to be"),
        ({"format": "hdf5"}, "format= has to be"),
        ({"keep": 1.5}, "keep= takes"),
        ({"keep": {"a#": 0}}, "cannot be stored"),
        ({"call": 3}, "call= is called"),
        ({"feature_axis": 1.0}, "feature_axis="),
    ]
    for options, message in bad:
        with pytest.raises(InputError, match=message):
            go(torch.tanh, data, "tanh", out, **options)
    with pytest.raises(InputError, match="a loader has to be iterable"):
        go(torch.tanh, 3, "tanh", out)
    with pytest.raises(InputError):
        go(3, data, "tanh", out)
    bended = bt.BendedModule(torch.tanh)
    bended(data[0])
    with torch.no_grad():
        bended(data[0])
    with pytest.raises(NodePathError, match="tan"):
        go(bended, data, "tan", out)
    assert not out.exists()
    assert not bended.insertions


def test_ids_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    batch = {"x": samples(2, 3), "n": [1, 2], "mixed": [1, "a"], "float": [0.5, 1.0]}
    options: dict[str, Any] = {"call": lambda model, batch: model(batch["x"])}
    for ids, message in (
        ("m", "names 'm', which is not in the batch"),
        ("mixed", "all strings, not"),
        ("float", "all ints or"),
        (lambda batch: "text", "one id for each sample"),
        (lambda batch: [2**64, 1], "64 bits"),
        (lambda batch: [1], "for a batch of 1 samples"),
    ):
        with pytest.raises(InputError, match=message):
            go(torch.tanh, [batch], "tanh", tmp_path / str(ids), ids=ids, **options)
    with pytest.raises(InputError, match="number of samples"):
        go(lambda text: torch.ones(2), [["a", "b"]], "ones", tmp_path / "z")


def test_an_error_of_the_model_names_the_samples_and_keeps_what_was_done(tmp_path: Path) -> None:
    data = samples(20, 3)
    broken = [True]

    def model(x: Tensor) -> Tensor:
        h = torch.tanh(x)
        if torch.equal(x, data[12:14]) and broken:
            raise ValueError("no such luck")
        return h

    bended = bt.BendedModule(model)
    with pytest.raises(HarvestError, match="batch 6, samples 12, 13 failed: ValueError") as caught:
        go(bended, data.split(2), "tanh", tmp_path / "a", shard_samples=8)
    assert (caught.value.batch, caught.value.ids) == (6, (12, 13))
    assert isinstance(caught.value.__cause__, ValueError)
    assert not bended.insertions
    part = Harvest.open(tmp_path / "a")
    assert (len(part), part.is_complete) == (12, False)
    assert "not complete" in repr(part)
    assert torch.equal(part["tanh"].tensor(), data[:12].tanh())
    broken.clear()
    found = go(bt.BendedModule(model), data.split(2), "tanh", tmp_path / "a", shard_samples=8)
    assert torch.equal(found["tanh"].tensor(), data.tanh())
    go(bt.BendedModule(model), data.split(2), "tanh", tmp_path / "b", shard_samples=8)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_an_interruption_by_hand_keeps_what_was_done(tmp_path: Path) -> None:
    data = samples(20, 4, 3)

    def stopping() -> Iterator[Tensor]:
        for number, part in enumerate(data.split(2)):
            if number == 7:
                raise KeyboardInterrupt
            yield part[:, : number % 3 + 1]

    with pytest.raises(KeyboardInterrupt):
        go(torch.tanh, stopping(), "tanh", tmp_path / "a", shard_samples=6)
    assert len(Harvest.open(tmp_path / "a")) == 14
    whole = [part[:, : n % 3 + 1] for n, part in enumerate(data.split(2))]
    go(torch.tanh, whole, "tanh", tmp_path / "a", shard_samples=6)
    go(torch.tanh, whole, "tanh", tmp_path / "b", shard_samples=6)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    data = [samples(4, 3)]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SaveError, match="it is a file"):
        go(torch.tanh, data, "tanh", tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(SaveError, match="contains other files"):
        go(torch.tanh, data, "tanh", tmp_path / "full")
    assert files_of(tmp_path / "full") == {"notes.txt": b"mine"}
    with pytest.raises(SaveError):
        go(torch.tanh, data, "tanh", tmp_path / "file" / "below")
    with pytest.raises(SaveError):
        go(torch.tanh, data, "tanh", Path("/proc/nowhere"))


def test_a_harvest_is_written_by_one_process_and_can_be_read_by_many(tmp_path: Path) -> None:
    data = [samples(4, 3)]
    lock = DirectoryLock(str(tmp_path))
    with pytest.raises(SaveError, match="something else is being saved there right now"):
        go(torch.tanh, data, "tanh", tmp_path)
    lock.release()
    go(torch.tanh, data, "tanh", tmp_path)
    assert LOCK not in files_of(tmp_path)
    lock = DirectoryLock(str(tmp_path))
    assert len(go(torch.tanh, data, "tanh", tmp_path)) == 4
    lock.release()


def test_another_harvest_is_refused_and_left_alone(tmp_path: Path) -> None:
    data = samples(12, 3).split(4)
    model = branching()
    go(model, data, "first", tmp_path, reduce=lambda v: v + 1)
    before = files_of(tmp_path)
    others: list[tuple[Any, Any, dict[str, Any], str]] = [
        (model, "relu", {"reduce": lambda v: v + 1}, "where= was"),
        (model, "first", {}, "reduce= was"),
        (model, "first", {"reduce": lambda v: v + 2}, "reduce= was"),
        (model, "first", {"reduce": lambda v: v + 1, "dtype": torch.float16}, "dtype= was"),
        (model, "first", {"reduce": lambda v: v + 1, "seed": 1}, "seed= was"),
        (model, "first", {"reduce": lambda v: v + 1, "format": "zarr"}, "format= was"),
        (model, "first", {"reduce": lambda v: v + 1, "resume": False}, "resume=False"),
        (Branching(), "first", {"reduce": lambda v: v + 1}, "weights of the model have changed"),
        (branching().eval(), "first", {"reduce": lambda v: v + 1}, "training modes"),
        (nn.Linear(3, 2), "output", {"reduce": lambda v: v + 1}, "was a Branching, and is a L"),
    ]
    for other, where, options, message in others:
        with pytest.raises(InputError, match=message):
            go(other, data, where, tmp_path, **options)
    assert files_of(tmp_path) == before
    again = go(model, data, "first", tmp_path, reduce=lambda v: v + 1)  # it is complete
    assert len(again) == 12
    assert files_of(tmp_path) == before


def test_a_full_disk_stops_it_and_it_can_be_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bendtrace.research.reading as files

    data = samples(40, 3).split(2)
    real, written = files.write_all, [0]

    def full(fd: int, content: memoryview) -> None:
        written[0] += 1
        if written[0] > 12:
            raise OSError(28, "No space left on device")
        real(fd, content)

    monkeypatch.setattr(files, "write_all", full)
    with pytest.raises(SaveError, match="No space left"):
        go(torch.tanh, data, "tanh", tmp_path / "a", shard_samples=8)
    monkeypatch.setattr(files, "write_all", real)
    assert len(Harvest.open(tmp_path / "a")) % 8 == 0
    go(torch.tanh, data, "tanh", tmp_path / "a", shard_samples=8)
    go(torch.tanh, data, "tanh", tmp_path / "b", shard_samples=8)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_damage_is_noticed(tmp_path: Path) -> None:
    data = samples(12, 3).split(4)
    go(torch.tanh, data, "tanh", tmp_path, shard_samples=4)
    files = sorted(tmp_path.glob("*.safetensors"))
    kept = {path: path.read_bytes() for path in [*files, *tmp_path.glob("*.json")]}
    content = bytearray(kept[files[1]])
    content[-4] ^= 1
    files[1].write_bytes(content)
    with pytest.raises(LoadError, match="has changed"):
        Harvest.open(tmp_path).verify()
    files[1].write_bytes(content[:-1])
    with pytest.raises(LoadError, match="damaged"):
        Harvest.open(tmp_path)["tanh"].tensor()
    files[1].write_bytes(kept[files[1]])
    index = files[1].with_suffix(".json")
    index.write_text(index.read_text().replace('"sizes": [\n  4', '"sizes": [\n  3'))
    with pytest.raises(LoadError, match="checksum"):
        Harvest.open(tmp_path)
    index.unlink()
    with pytest.raises(LoadError, match="is missing"):
        Harvest.open(tmp_path)
    files[2].with_suffix(".json").unlink()
    with pytest.raises(LoadError, match=r"not those in index.json"):
        Harvest.open(tmp_path)
    with pytest.raises(LoadError, match="no such directory"):
        Harvest.open(tmp_path / "nowhere")
    with pytest.raises(LoadError, match="it is not a harvest"):
        Harvest.open(tmp_path.parent)


# Going on


def stopped(
    data: Any, out: Path, batches: int, model: Any = torch.tanh, where: Any = "tanh", **options: Any
) -> None:
    """Harvest some batches, and fail."""

    def stopping() -> Iterator[Any]:
        for number, part in enumerate(data):
            if number == batches:
                raise OSError("is missing")
            yield part

    with pytest.raises(OSError, match="is missing"):
        go(model, stopping(), where, out, **options)


def test_another_order_is_refused(tmp_path: Path) -> None:
    data = samples(24, 3)
    stopped(data.split(2), tmp_path / "a", 7, shard_samples=4)
    with pytest.raises(InputError, match="differs from the one that was harvested before"):
        go(torch.tanh, data.flip(0).split(2), "tanh", tmp_path / "a", shard_samples=4)
    with pytest.raises(InputError, match="yielded 2 batches, but 7 were harvested"):
        go(torch.tanh, data.split(2)[:2], "tanh", tmp_path / "a", shard_samples=4)
    assert len(Harvest.open(tmp_path / "a")) == 14
    assert len(go(torch.tanh, data.split(2), "tanh", tmp_path / "a", shard_samples=4)) == 24


def failing_at(number: int) -> Callable[[Any, Any], Any]:
    count = [number]

    def call(bended: Any, batch: Any) -> Any:
        count[0] -= 1
        if count[0] == 0:
            raise RuntimeError("stop")
        return bended(batch[0] if isinstance(batch, list) else batch)

    return call


def test_what_is_done_is_not_loaded_again_and_a_shuffle_is_noticed(tmp_path: Path) -> None:
    data = Listed(list(samples(24, 3)))

    def loader(seed: int) -> DataLoader[Any]:
        return DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(seed))

    call, on = failing_at(8), failing_at(0)
    with pytest.raises(HarvestError):
        go(torch.tanh, loader(1), "tanh", tmp_path / "a", call=call, shard_samples=4)
    done = len(Harvest.open(tmp_path / "a"))
    assert done == 14
    with pytest.raises(InputError, match="its order has changed"):
        go(torch.tanh, loader(2), "tanh", tmp_path / "a", call=on, shard_samples=4)
    data.loaded.clear()
    on = failing_at(0)
    found = go(torch.tanh, loader(1), "tanh", tmp_path / "a", call=on, shard_samples=4)
    assert len(data.loaded) == 24 - 14 + 2  # the last batch is looked at again
    assert torch.equal(found["tanh"].tensor(), torch.cat(list(loader(1))).tanh())


def test_an_order_that_ends_alike_is_noticed(tmp_path: Path) -> None:
    content = TensorDataset(samples(10, 3))
    orders = [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], [[2, 3], [0, 1], [4, 5], [6, 7], [8, 9]]]
    first, other = (DataLoader(content, batch_sampler=order) for order in orders)
    call = failing_at(4)
    with pytest.raises(HarvestError):
        go(torch.tanh, first, "tanh", tmp_path, call=call)
    call = failing_at(0)
    with pytest.raises(InputError, match="its order has changed"):
        go(torch.tanh, other, "tanh", tmp_path, call=call)
    assert len(go(torch.tanh, first, "tanh", tmp_path, call=call)) == 10


def test_other_data_of_the_same_order_is_noticed(tmp_path: Path) -> None:
    call = failing_at(8)
    first, other = (DataLoader(TensorDataset(samples(24, 3, seed=n)), 2) for n in (1, 2))
    with pytest.raises(HarvestError):
        go(torch.tanh, first, "tanh", tmp_path, call=call)
    call = failing_at(0)
    with pytest.raises(InputError, match="the data set or its order has changed"):
        go(torch.tanh, other, "tanh", tmp_path, call=call)


def test_a_model_that_changes_while_it_runs_is_not_gone_on_with(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh())
    data = samples(24, 3).split(4)
    stopped(data, tmp_path, 3, model, "1")
    fresh = nn.Sequential(nn.BatchNorm1d(3), nn.Tanh())
    with pytest.raises(InputError, match=r"changes '0\.\w+' while it runs"):
        go(fresh, data, "1", tmp_path)


def test_a_model_that_draws_is_gone_on_with_if_it_has_a_seed(tmp_path: Path) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, True)

    data = samples(24, 3).split(4)
    stopped(data, tmp_path / "a", 3, model, "dropout")
    with pytest.raises(InputError, match="draws random numbers"):
        go(model, data, "dropout", tmp_path / "a")
    stopped(data, tmp_path / "b", 3, model, "dropout", seed=7)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    found = go(model, data, "dropout", tmp_path / "b", seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    whole = go(model, data, "dropout", tmp_path / "c", seed=7)
    assert torch.equal(found["dropout"].tensor(), whole["dropout"].tensor())
    assert files_of(tmp_path / "b") == files_of(tmp_path / "c")


def test_random_numbers_are_those_of_the_model_alone(tmp_path: Path) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.dropout(x, 0.5, True)

    data = samples(24, 3).split(4)
    torch.manual_seed(3)
    wanted = torch.cat([model(part) for part in data])
    after = torch.get_rng_state()
    torch.manual_seed(3)
    found = go(model, data, "dropout", tmp_path)
    assert torch.equal(found["dropout"].tensor(), wanted)
    assert torch.equal(torch.get_rng_state(), after)


# The model and the machine


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_gradients_are_left_as_they_are(training: bool, tmp_path: Path) -> None:
    model = branching().train(training)
    model.first.weight.grad = torch.ones(4, 3)
    found = go(model, samples(8, 3).split(2), "first", tmp_path)
    assert model.training is training
    assert torch.equal(model.first.weight.grad, torch.ones(4, 3))
    assert torch.is_grad_enabled()
    assert not found["first"].tensor().requires_grad
    with torch.inference_mode():
        again = go(model, samples(8, 3).split(2), "first", tmp_path / "b")
    assert torch.equal(found["first"].tensor(), again["first"].tensor())


MEASURED = """
import resource, sys, tempfile, torch, bendtrace as bt
torch.set_num_threads(1)
def batches(count):
    for number in range(count):
        yield torch.full((64, 256), float(number))
def rounds(count):
    with tempfile.TemporaryDirectory() as out:
        bt.harvest(torch.tanh, batches(count), where="tanh", out=out, progress=False,
                   shard_samples=2048)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
rounds(100)
small = rounds(200)
print(rounds(2000) - small)
"""


@pytest.mark.all
def test_memory_does_not_grow_with_the_data_set(tmp_path: Path) -> None:
    # The longer one is of 128 MiB.
    told = subprocess.run(
        [sys.executable, "-c", MEASURED], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert float(told.stdout) < 16


def test_the_progress_bar_tells_rate_and_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = DataLoader(TensorDataset(samples(12, 3)), 4)
    bt.harvest(torch.tanh, loader, where="tanh", out=tmp_path)
    told = capsys.readouterr().err
    assert re.search(r"harvest: 100%.*12/12 .*samples/s, \d+ MiB", told)
