"""Random programs by the thousand: `python -m tests.programs --examples 50000 --out DIR`."""

from __future__ import annotations

import argparse
import collections
import faulthandler
import re
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings

from tests.programs import Program, check, programs
from tests.programs.reduction import reduced

_BATCH = 250


def main() -> None:
    """Check programs, go on after failures, and write the smallest of each kind."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description=__doc__)
    parser.add_argument("--examples", type=int, default=50_000, help="of all shards together")
    parser.add_argument("--shard", default="0/1", help="which part of them to do: 0/2, 1/2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--statements", type=int, default=20, help="at most, in a function")
    parser.add_argument("--each", type=int, default=2, help="how many of a kind to make small")
    parser.add_argument("--world", type=int, default=3, help="one in so many has a world around it")
    parser.add_argument("--out", type=Path, required=True, help="where failures are written to")
    options = parser.parse_args()
    shard, shards = map(int, options.shard.split("/"))
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    hunt = _Hunt(
        options.out, f"{options.seed}-{shard}", options.each, options.statements, options.world
    )
    batches = range(shard, -(-options.examples // _BATCH), shards)
    for batch in batches:
        hunt.batch(options.seed * 1_000_003 + batch, min(_BATCH, options.examples - batch * _BATCH))
        hunt.report()


class _Hunt:
    def __init__(self, out: Path, name: str, each: int, statements: int, world: int) -> None:
        self.out = out
        self.name = name
        self.each = each
        self.statements = statements
        self.world = world
        self.done = 0
        self.failed: collections.Counter[str] = collections.Counter()
        self.written: collections.Counter[str] = collections.Counter()
        self.totals: collections.Counter[str] = collections.Counter()
        self.started = time.monotonic()

    def batch(self, seed: int, examples: int) -> None:
        """Check so many programs, and make those small that fail in a new way."""
        failed: list[tuple[str, Program]] = []

        @hypothesis.seed(seed)
        @settings(
            max_examples=examples, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(programs(statements=self.statements, world=self.world))
        def one(program: Program) -> None:
            self.done += 1
            kind, stats = _outcome(program)
            if kind is not None:
                self.failed[kind] += 1
                failed.append((kind, program))
                return
            for name in ("traces", "replays", "resumes", "live", "raised"):
                self.totals[name] += getattr(stats, name)
            self.totals["calls"] += len(program.calls)

        one()
        self.report()
        for kind, program in sorted(failed, key=lambda found: len(found[1].source)):
            if self.written[kind] < self.each:
                self.written[kind] += 1
                small = reduced(program, lambda p, kind=kind: _outcome(p, 4)[0] == kind)
                self._write(kind, small)

    def _write(self, kind: str, program: Program) -> None:
        path = self.out / f"{self.name}-{sum(self.written.values())}.py"
        comment = "".join(f"# {line}\n" for line in kind.splitlines())
        calls = "".join(f"        {call!r},\n" for call in program.calls)
        path.write_text(
            f"{comment}from tests.programs import Call, Program, check\n\ncheck(\n    Program(\n"
            f'        """\\\n{program.source}""",\n        (\n{calls}        ),\n'
            f'        """\\\n{program.world}""",\n        {program.told!r},\n    )\n)\n'
        )

    def report(self) -> None:
        spent = time.monotonic() - self.started
        lines = [f"{self.done} programs in {spent:.0f} s, {sum(self.failed.values())} failed"]
        lines.append(str(dict(self.totals)))
        lines += [f"{count} x {kind}" for kind, count in self.failed.most_common()]
        (self.out / f"{self.name}.txt").write_text("\n".join(lines) + "\n")


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise in what takes longer, which is taken to hang."""

    def stop(*_: Any) -> None:
        raise _Hangs

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


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
