"""Harvests whose process is killed, at every step of writing and at random moments."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import bendtrace as bt
from bendtrace.harvesting import Harvest
from bendtrace.log.saved_tensors import LOCK

pytestmark = pytest.mark.all

ROOT = Path(__file__).parent.parent
COUNT = 36


def model(x: Tensor) -> Tensor:
    """A branch, a loop, and rows of several shapes."""
    h = torch.tanh(x)
    if x.sum() > 0:
        h = torch.exp(h)
    while h.norm() > 2:
        h = torch.div(h, 2)
    return h[:, : 1 + int(x[0, 0] > 0)] + 0


def data() -> Tensor:
    return torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(0))


def harvested(
    out: Path, form: str, of: Any = model, batch: Callable[[], None] = lambda: None
) -> Harvest:
    """Harvest it all.

    Args:
        out: where to.
        form: the format.
        of: the model.
        batch: called for each batch.
    """

    hooks = [batch]  # in a list, since another function that it closes over is another `call`

    def call(bended: Any, content: Any) -> None:
        hooks[0]()
        bended(content[0])

    generator = torch.Generator().manual_seed(4)
    loader = DataLoader(TensorDataset(data()), 3, shuffle=True, generator=generator)
    return bt.harvest(
        of, loader, where=["tanh", "exp", "div", "add"], out=out, call=call, format=form,
        shard_samples=12, allow_none=True, progress=False,
        ids=lambda content: [int(n) for n in content[0][:, 0] * 1e6],
    )  # fmt: skip


def files_of(directory: Path) -> dict[str, bytes]:
    # If the last step, the removal of the lock, was not reached, the lock is still there.
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != LOCK)
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def killed_at(step: int) -> None:
    """Have this process be killed at a step of what it asks of the system."""
    count = [0]

    def counting(name: str) -> None:
        real = getattr(os, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == step:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "write" and count[0] == step - 1:  # half of it gets there
                args = (args[0], bytes(args[1])[: len(args[1]) // 2])
            return real(*args, **kwargs)

        setattr(os, name, counted)

    for name in ("write", "fsync", "replace", "remove"):
        counting(name)


def forked(run: Callable[[], object]) -> int:
    """Run something in a copy of this process; return the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def main(out: str, form: str) -> None:
    """Be killed at ever later steps, going on each time; then at single steps, beginning anew."""
    torch.set_num_threads(1)
    # Paths that are known are not traced again by each copy of this process.
    bended = bt.BendedModule(model)
    harvested(Path(out, "known"), form, bended)

    def to_be_killed(directory: Path, step: int) -> None:
        killed_at(step)
        harvested(directory, form, bended)

    going_on, kills = Path(out, "on"), 0
    first, more, every = STEPS[form]
    while forked(functools.partial(to_be_killed, going_on, first + more * kills)):
        kills += 1
    anew, step = 0, 1
    while forked(functools.partial(to_be_killed, Path(out, "anew", str(step)), step)):
        forked(functools.partial(harvested, Path(out, "anew", str(step)), form, bended))
        anew += 1
        # Each step of the first shard, and some later on.
        step += every if step < 30 else 3 * every + 10
    sys.stdout.write(f"{kills} {anew}")


STEPS = {"safetensors": (5, 13, 2), "zarr": (60, 90, 16)}


@pytest.mark.parametrize("form", ["safetensors", "zarr"])
def test_killed_at_every_step_of_writing_it_goes_on_to_the_same_files(
    form: str, tmp_path: Path
) -> None:
    run = [sys.executable, "-m", "tests.test_harvest_killed", str(tmp_path), form]
    told = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    kills, steps = map(int, told.stdout.split())
    assert kills >= 2
    assert steps >= 5
    whole = harvested(tmp_path / "whole", form)
    assert (len(whole), len(set(whole.ids))) == (COUNT, COUNT)
    assert len(whole.shards) == 3
    wanted = files_of(tmp_path / "whole")
    directories = [tmp_path / "on", *(tmp_path / "anew").iterdir()]
    assert len(directories) == steps + 2  # one was not killed
    for directory in directories:
        assert files_of(directory) == wanted, directory


SLOWLY = """
import sys
from pathlib import Path
from tests.test_harvest_killed import harvested
def tell():
    sys.stdout.write("b")
    sys.stdout.flush()
harvested(Path(sys.argv[1]), "safetensors", batch=tell)
sys.stdout.write("e")
"""


def test_killed_from_outside_at_random_moments_it_goes_on_to_the_same_files(
    tmp_path: Path,
) -> None:
    chance = random.Random(0)
    kills = 0
    while True:
        run = [sys.executable, "-c", SLOWLY, str(tmp_path / "on")]
        with subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            told = b""
            for _ in range(chance.randint(6, 9)):
                told = process.stdout.read(1)
                if told in (b"", b"e"):
                    break
            if told not in (b"", b"e"):
                process.kill()
                kills += 1
        if told in (b"", b"e"):
            assert process.returncode == 0
            break
        assert kills < 40
    assert kills >= 1
    harvested(tmp_path / "whole", "safetensors")
    assert files_of(tmp_path / "on") == files_of(tmp_path / "whole")


def test_what_is_in_the_files_is_what_a_loop_finds(tmp_path: Path) -> None:
    found = harvested(tmp_path, "safetensors")
    generator = torch.Generator().manual_seed(4)
    loader = DataLoader(TensorDataset(data()), 3, shuffle=True, generator=generator)

    def rows() -> Iterator[tuple[int, Tensor, Tensor]]:
        for (part,) in loader:
            yield from zip(
                (int(n) for n in part[:, 0] * 1e6), part.tanh(), model(part), strict=True
            )

    wanted = list(rows())
    assert found.ids == [row[0] for row in wanted]
    assert torch.equal(found["tanh"].tensor(), torch.stack([row[1] for row in wanted]))
    for row, (_, _, by_hand) in zip(found["add"], wanted, strict=True):
        assert torch.equal(row, by_hand)


if __name__ == "__main__":
    main(*sys.argv[1:])
