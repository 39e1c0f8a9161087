"""Tensors on disk bit by bit, and streams of them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.log import saved_tensors as tensors
from bendtrace.log.saved_tensors import bits_of, layout_of
from bendtrace.storage import LoadError, NotSaved, SaveError, ShardWriter, StoredTensor, read_stream
from tests.stored import FullDisk, assert_same, of_bits, raw

DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not str(dtype).startswith(("torch.q", "torch.bits"))
    },
    key=str,
)


def forms(dtype: torch.dtype) -> dict[str, Tensor]:
    tensor = of_bits(dtype, 2, 3, 4, 5)
    return {
        "contiguous": tensor,
        "channels last": tensor.permute(0, 3, 1, 2),
        "transposed": tensor[0, 0].t(),
        "expanded": tensor[:1].expand(7, 3, 4, 5),
        "expanded column": tensor[:, :, :, :1].expand(2, 3, 4, 6),
        "expanded scalar": tensor[0, 0, 0, 0].expand(3, 2),
        "empty": tensor[:0],
        "empty inside": tensor[:, :, 2:2],
        "number": tensor[1, 2, 3, 4],
        "every other": tensor[:, :, ::2],
        "offset": tensor.flatten()[3:10],
        "overlapping": tensor.as_strided((3, 3), (1, 1), 5),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_layout_come_back_bit_by_bit(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    tensors = forms(dtype)
    with ShardWriter(tmp_path / "s") as writer:
        handles = {name: writer.add(name, tensor) for name, tensor in tensors.items()}
    for source in (handles, read_stream(tmp_path / "s")):
        for name, tensor in tensors.items():
            stored = source[name]
            assert isinstance(stored, StoredTensor)
            read = stored.read()
            assert_same(read, tensor)
            if name in ("every other", "expanded column", "overlapping"):
                assert 0 in read.stride() or read.is_contiguous()
            elif tensor.numel():
                assert read.stride() == tensor.stride()
    path = tmp_path / "s" / "shard-00001.safetensors"
    assert set(safetensors.torch.load_file(path)) == set(tensors)


@pytest.mark.parametrize(
    ("tensor", "stored"),
    [
        (torch.tensor([1.5, -0.0]), torch.tensor([1.5, -0.0])),
        (torch.tensor(3), torch.tensor(3)),
        (torch.tensor([1 + 2j]), torch.tensor([[1.0, 2.0]])),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([[1.0, -2.0]])),
        (torch.tensor([1 + 2j]).conj().imag, torch.tensor([-2.0])),
        (torch.ones(2, 1).expand(2, 9), torch.ones(2, 1)),
        (torch.ones(2).to(torch.float8_e5m2), torch.ones(2).to(torch.float8_e5m2)),
        (torch.tensor([1.0]).to(torch.float8_e8m0fnu), torch.tensor([[127]], dtype=torch.uint8)),
        (torch._efficientzerotensor(3), torch.zeros(3)),
        (nn.Parameter(torch.ones(2)), torch.ones(2)),
        (nn.Buffer(torch.ones(2)), torch.ones(2)),
        (torch.ones(2, requires_grad=True) * 2, torch.full((2,), 2.0)),
    ],
    ids=["float", "number", "complex", "conjugate", "negative", "expanded", "float8", "other",
         "zero", "parameter", "buffer", "graph"],
)  # fmt: skip
def test_the_safetensors_package_reads_what_is_written(
    tensor: Tensor, stored: Tensor, tmp_path: Path
) -> None:
    with ShardWriter(tmp_path / "s") as writer:
        handle = writer.add("x", tensor)
    assert isinstance(handle, StoredTensor)
    assert_same(handle.read(), tensor.detach().clone())
    found = safetensors.torch.load_file(tmp_path / "s" / "shard-00001.safetensors")["x"]
    assert_same(found, stored)


def test_a_tensor_written_after_it_was_saved_lazily_is_not_copied(tmp_path: Path) -> None:
    original = torch.ones(1000)
    lazy = original._lazy_clone()
    with ShardWriter(tmp_path / "s") as writer:
        writer.add("x", lazy)
    assert torch._C._is_cow_tensor(lazy)


def unstorable() -> dict[str, tuple[Tensor, str]]:
    class Mine(Tensor):
        pass

    with warnings.catch_warnings(action="ignore"):  # quantisation is deprecated, csr is a beta
        quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        rows = torch.eye(2).to_sparse_csr()
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    return {
        "sparse": (torch.eye(2).to_sparse(), "its layout is torch.sparse_coo"),
        "rows": (rows, "its layout is torch.sparse_csr"),
        "quantised": (quantised, "it is quantised (torch.qint8)"),
        "nested": (nested, "it is a nested tensor"),
        "meta": (torch.ones(2, device="meta"), "it is on the meta device and has no content"),
        "subclass": (torch.ones(2).as_subclass(Mine), f"it is a {Mine.__qualname__}, a subclass"
                     " of Tensor"),
    }  # fmt: skip


@pytest.mark.parametrize("name", unstorable())
def test_tensors_that_cannot_be_stored_are_recorded_as_such(name: str, tmp_path: Path) -> None:
    tensor, reason = unstorable()[name]
    with ShardWriter(tmp_path / "s") as writer:
        assert writer.add("x", tensor) == NotSaved(reason)
    assert str(read_stream(tmp_path / "s")["x"]) == f"not saved: {reason}"


def test_tensors_inside_transforms_cannot_be_stored(tmp_path: Path) -> None:
    found = []
    with ShardWriter(tmp_path / "s") as writer:

        def function(x: Tensor) -> Tensor:
            found.append(writer.add("x", x))
            return x

        torch.vmap(function)(torch.ones(2))
    assert found == [NotSaved("it belongs to a transform of functorch")]


def test_large_tensors_are_written_and_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bendtrace.log.saved_tensors._CHUNK", 64)
    monkeypatch.setattr(tensors, "_LARGEST_READ", 48)
    tensor = of_bits(torch.float32, 7, 31)
    pieces = [bytes(piece) for piece in bits_of(tensor.t(), layout_of(tensor.t()))]
    assert [len(piece) for piece in pieces] == [64] * 13 + [36]
    assert b"".join(pieces) == raw(tensor.t())
    with ShardWriter(tmp_path / "s") as writer:
        handle = writer.add("x", tensor.t())
    assert isinstance(handle, StoredTensor)
    assert_same(handle.read(), tensor.t())


def test_a_stream_reads_back_while_it_is_written_and_after(tmp_path: Path) -> None:
    tensors = {f"t{number}": torch.full((100,), float(number)) for number in range(10)}
    writer = ShardWriter(tmp_path / "deep" / "s", max_bytes=1 << 19)
    handles = {name: writer.add(name, tensor) for name, tensor in tensors.items()}
    for name, handle in handles.items():
        assert isinstance(handle, StoredTensor)
        assert_same(handle.read(), tensors[name])
    writer.close()
    writer.close()
    read = read_stream(tmp_path / "deep" / "s")
    assert list(read) == list(tensors)
    for name, handle in read.items():
        assert isinstance(handle, StoredTensor)
        assert_same(handle.read(), tensors[name])
    assert repr(writer).endswith("10 tensors, closed>")
    with pytest.raises(InputError, match="is closed"):
        writer.add("more", torch.ones(1))


def test_a_shard_is_closed_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardWriter(tmp_path / "bytes", max_bytes=(1 << 18) + 1000) as writer:
        for number in range(5):
            writer.add(str(number), torch.zeros(100))
    assert len(list((tmp_path / "bytes").glob("*.safetensors"))) == 3
    monkeypatch.setattr("bendtrace.log.saved_logs._HEADER", 512)
    names = ["x" * 400, "\udead" * 300, "é\n\t", "", "__metadata__", *map(str, range(20))]
    with ShardWriter(tmp_path / "header") as writer:
        for number, name in enumerate(names):
            writer.add(name, torch.tensor(number))
    read = read_stream(tmp_path / "header")
    assert list(read) == names
    assert [int(handle.read()) for handle in read.values()] == list(range(25))
    for path in (tmp_path / "header").glob("*.safetensors"):
        safetensors.torch.load_file(path)
    assert len(list((tmp_path / "header").glob("*.safetensors"))) == 2


def test_a_name_can_be_used_once(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "s") as writer:
        writer.add("x", torch.ones(1))
        with pytest.raises(InputError, match="'x' was already written"):
            writer.add("x", torch.ones(1))


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, True, "1"])
def test_a_shard_has_a_positive_size(tmp_path: Path, max_bytes: Any) -> None:
    with pytest.raises(InputError, match="max_bytes has to be a positive number"):
        ShardWriter(tmp_path / "s", max_bytes=max_bytes)
    assert not (tmp_path / "s").exists()


def test_a_run_that_is_recorded_does_not_notice_the_writing(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "s")

    def function(x: Tensor) -> Tensor:
        y = x * 2
        stored = writer.add("y", y.detach())
        assert isinstance(stored, StoredTensor)
        assert stored.read()[0] == 2
        return y + 1

    trace = bt.trace(bt.opaque(function), torch.ones(2))
    assert len([op for op in trace.ops if op.kind.value == "call"]) == 1


def test_an_interrupted_stream_says_so_and_can_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    writer = ShardWriter(path)
    writer.add("x", torch.ones(3))
    with pytest.raises(SaveError, match="something else is being saved there right now"):
        ShardWriter(path)
    writer.__exit__(KeyError, KeyError("the model failed"), None)
    with pytest.raises(LoadError, match="a run was writing its activations there and did not fin"):
        read_stream(path)
    with ShardWriter(path) as writer:
        writer.add("y", torch.ones(3))
    assert list(read_stream(path)) == ["y"]
    with pytest.raises(SaveError, match="holds a finished stream; choose another directory"):
        ShardWriter(path)


def test_a_stream_goes_to_no_directory_with_other_things(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all I have")
    with pytest.raises(SaveError, match="it is not empty but holds other files") as caught:
        ShardWriter(tmp_path)
    assert caught.value.path == str(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]
    with pytest.raises(SaveError, match=r"File exists|Not a directory"):
        ShardWriter(tmp_path / "thesis.txt")


def test_a_full_disk_while_streaming_is_a_save_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path / "s")
    writer.add("before", torch.ones(3))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", FullDisk(100))
        with pytest.raises(SaveError, match="No space left on device"):
            writer.add("x", torch.ones(1000))
    writer.add("x", torch.full((10,), 2.0))
    writer.close()
    sums = {
        name: float(handle.read().sum()) for name, handle in read_stream(tmp_path / "s").items()
    }
    assert sums == {"before": 3, "x": 20}
