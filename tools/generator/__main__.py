"""Random programs by the thousand: `python -m tools.generator --examples 50000 --out DIR`."""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import importlib
import multiprocessing
import re
import signal
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tools.generator import Program, check, programs
from tools.generator.reduction import reduced

_BATCH = 250


def main() -> None:
    """Check programs, go on after failures, and write the smallest of each kind."""
    parser = argparse.ArgumentParser(prog="python -m tools.generator", description=__doc__)
    parser.add_argument("--examples", type=int, default=50_000, help="of all shards together")
    parser.add_argument("--shard", default="0/1", help="which part of them to do: 0/2, 1/2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--statements", type=int, default=20, help="at most, in a function")
    parser.add_argument("--each", type=int, default=2, help="how many of a kind to make small")
    parser.add_argument("--world", type=int, default=3, help="one in so many has a world around it")
    parser.add_argument("--out", type=Path, required=True, help="where failures are written to")
    parser.add_argument("--first", type=int, default=0, help="how many programs to pass over")
    options = parser.parse_args()
    shard, shards = map(int, options.shard.split("/"))
    options.out.mkdir(parents=True, exist_ok=True)
    importlib.import_module("torch._dynamo.symbolic_convert")  # once, and not in each batch
    hunt = _Hunt(options.out, f"{options.seed}-{shard}", options.each)
    for batch in range(-(-options.examples // _BATCH)):
        if batch % shards != shard or batch * _BATCH < options.first:
            continue
        examples = min(_BATCH, options.examples - batch * _BATCH)
        seed = options.seed * 1_000_003 + batch
        # A process of its own: what is known of code is kept as long as its process lives.
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            task = (seed, examples, options.statements, options.world)
            hunt.add(*pool.submit(_batch, *task).result())
            hunt.report()
            for kind, program in hunt.to_reduce():
                hunt.write(kind, pool.submit(_reduced, kind, program).result())


class _Hunt:
    def __init__(self, out: Path, name: str, each: int) -> None:
        self.out = out
        self.name = name
        self.each = each
        self.done = 0
        self.failed: collections.Counter[str] = collections.Counter()
        self.written: collections.Counter[str] = collections.Counter()
        self.totals: collections.Counter[str] = collections.Counter()
        self.new: list[tuple[str, Program]] = []
        self.started = time.monotonic()

    def add(
        self, done: int, totals: collections.Counter[str], failed: list[tuple[str, Program]]
    ) -> None:
        """Add what a batch found."""
        self.done += done
        self.totals += totals
        self.failed.update(kind for kind, _ in failed)
        self.new = sorted(failed, key=lambda found: len(found[1].source))

    def to_reduce(self) -> Iterator[tuple[str, Program]]:
        """Yield the shortest programs that fail in a way not yet written often enough."""
        for kind, program in self.new:
            if self.written[kind] < self.each:
                yield kind, program

    def write(self, kind: str, program: Program) -> None:
        """Write a program that fails as a script that shows it."""
        self.written[kind] += 1
        path = self.out / f"{self.name}-{sum(self.written.values())}.py"
        comment = "".join(f"# {line}\n" for line in kind.splitlines())
        calls = "".join(f"        {call!r},\n" for call in program.calls)
        path.write_text(
            f"{comment}from tools.generator import Call, Program, check\n\ncheck(\n    Program(\n"
            f'        """\\\n{program.source}""",\n        (\n{calls}        ),\n'
            f'        """\\\n{program.world}""",\n        {program.told!r},\n'
            f"        {program.inserted!r},\n"
            "    )\n)\n"
        )

    def report(self) -> None:
        """Write how many were checked, and how those failed that did."""
        spent = time.monotonic() - self.started
        lines = [f"{self.done} programs in {spent:.0f} s, {sum(self.failed.values())} failed"]
        lines.append(str(dict(self.totals)))
        lines += [f"{count} x {kind}" for kind, count in self.failed.most_common()]
        (self.out / f"{self.name}.txt").write_text("\n".join(lines) + "\n")


def _batch(
    seed: int, examples: int, statements: int, world: int
) -> tuple[int, collections.Counter[str], list[tuple[str, Program]]]:
    """Check so many programs: how many there were, what became of their calls, which failed."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    gc.collect()
    gc.freeze()  # torch's objects need not be looked through again for each program
    totals: collections.Counter[str] = collections.Counter()
    failed: list[tuple[str, Program]] = []
    done = 0

    @hypothesis.seed(seed)
    @settings(
        max_examples=examples, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs(statements=statements, world=world))
    def one(program: Program) -> None:
        nonlocal done
        done += 1
        kind, stats = _outcome(program)
        if kind is not None:
            failed.append((kind, program))
            return
        for name, number in vars(stats).items():
            totals[name] += number if type(number) is int else 0
        totals["calls"] += len(program.calls)

    one()
    return done, totals, failed


def _reduced(kind: str, program: Program) -> Program:
    """Make a program small that fails in a way."""
    return reduced(program, lambda smaller: _outcome(smaller, 4)[0] == kind)


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise in what takes longer, which is taken to hang."""

    def stop(*_: Any) -> None:
        raise _Hangs

    signal.signal(signal.SIGPROF, stop)  # processor time: other processes may have the rest
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _Hangs(BaseException):
    """No `except Exception` of a program catches it."""


def _outcome(program: Program, seconds: float = 30) -> tuple[str | None, Any]:
    """How a program fails, if it does, and the statistics."""
    try:
        with _limit(seconds):
            return None, check(program)
    except (Exception, _Hangs) as error:
        return _kind(error), None


def _kind(error: BaseException) -> str:
    """What failures of the same cause have in common, as far as that can be told."""
    text = re.sub(r"\d+", "0", f"{type(error).__name__}: {error}")[:200]
    cause = error.__cause__ or error
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if "bendtrace" in f.filename]
    if frames and "bendtrace/" in frames[-1].filename:
        text += f"\n{Path(frames[-1].filename).name} {frames[-1].name}"
    return text


if __name__ == "__main__":
    main()
