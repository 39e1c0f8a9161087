"""Harvests by several processes under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.harvesting import Harvest

pytestmark = pytest.mark.all

ROOT = Path(__file__).parent.parent
COUNT = 41


def model(x: Tensor) -> Tensor:
    h = torch.tanh(x)
    if x.sum() > 0:
        h = torch.exp(h)
    return h


def data() -> Tensor:
    return torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(0))


FATE = {"batches": 0, "killed": 0, "fails": 0}


def plain(bended: Any, batch: Any) -> None:
    """Call the model; in the last process be killed at a batch, or fail at one."""
    FATE["batches"] += 1
    if dist.is_initialized() and dist.get_rank():
        if FATE["batches"] == FATE["killed"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if FATE["batches"] == FATE["fails"]:
            raise ValueError("no such luck")
    bended(batch[0])


def harvested(out: Path) -> Harvest:
    return bt.harvest(
        model, DataLoader(TensorDataset(data()), 2), where=["tanh", "exp"], out=out,
        shard_samples=4, call=plain, progress=False, allow_none=True, seed=1,
    )  # fmt: skip


def by_parts(out: Path, padded: bool) -> Harvest:
    """Harvest with a loader that gives each process its own part."""
    content = TensorDataset(data()[: 41 if padded else 40], torch.arange(41 if padded else 40))
    loader = DataLoader(content, 3, sampler=DistributedSampler(content, shuffle=False))
    return bt.harvest(
        model, loader, where="tanh", out=out, sharded=True, ids=1, call=plain, progress=False
    )


def main(what: str, out: str) -> None:
    """Do one thing in each process, and say how it ended."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    told = "done"
    try:
        if what == "parts":
            by_parts(Path(out), padded=False)
            try:
                by_parts(Path(out, "more"), padded=True)
            except InputError as error:
                told = str(error)
            loader = DataLoader(TensorDataset(data()), sampler=DistributedSampler(data()))  # type: ignore[arg-type]
            try:
                bt.harvest(model, loader, where="tanh", out=Path(out, "more"), progress=False)
            except InputError as error:
                told += str(error)
        else:
            name, _, number = what.partition(" ")
            FATE[name] = int(number)
            harvested(Path(out))
    except bt.BendtraceError as error:
        told = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"[{dist.get_rank()} {told}]\n")
    dist.destroy_process_group()


def run(what: str, out: Path) -> str:
    """Run `main` in two processes."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
        "-m", "tests.test_harvest_workers", what, str(out),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    return told.stdout if told.returncode == 0 else f"failed: {told.stdout}{told.stderr}"


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_two_processes_give_what_one_gives_also_after_a_kill(tmp_path: Path) -> None:
    assert run("batches 0", tmp_path / "two").count("done") == 2
    one = harvested(tmp_path / "one")
    two = Harvest.open(tmp_path / "two")
    assert {shard.rank for shard in two.shards} == {0, 1}
    assert two.is_complete
    assert two.ids == one.ids == list(range(COUNT))
    for name in ("tanh", "exp"):
        assert torch.equal(two[name].tensor(), one[name].tensor())
        assert torch.equal(two[name].positions, one[name].positions)
    assert torch.equal(two["tanh"].tensor(), data().tanh())
    assert two.took("x.sum() > 0").ids == one.took("x.sum() > 0").ids
    assert two.to_pandas()["process"].tolist() == [n // 2 % 2 for n in range(COUNT)]

    assert run("killed 7", tmp_path / "killed").startswith("failed")
    part = Harvest.open(tmp_path / "killed")
    assert 0 < len(part) < COUNT
    with pytest.raises(InputError, match="2 processes wrote there, but now there are 1"):
        harvested(tmp_path / "killed")
    assert run("batches 0", tmp_path / "killed").count("done") == 2
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "two")


def test_an_error_of_one_process_is_told_in_all(tmp_path: Path) -> None:
    told = run("fails 4", tmp_path)
    assert "[1 HarvestError: harvesting batch 7, samples 14, 15 failed: ValueError" in told
    assert "[0 BendtraceError: another process of the harvest has failed: process 1: Harv" in told
    assert not Harvest.open(tmp_path).is_complete


def test_loaders_that_give_each_process_a_part(tmp_path: Path) -> None:
    told = run("parts", tmp_path / "parts")
    assert told.count("yields 1 of them twice") == 2
    assert told.count("pass sharded=True") == 2
    found = Harvest.open(tmp_path / "parts")
    assert sorted(found.ids) == list(range(40))
    assert torch.equal(found["tanh"].tensor(), data()[found.ids].tanh())


if __name__ == "__main__":
    main(*sys.argv[1:])
