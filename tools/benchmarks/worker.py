"""A process of its own for what is measured: `ask` starts one, this module run is one.

What is asked comes as JSON on standard input, and the answer is the last line of the output.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["TASKS", "ask", "carry_out"]


def _ways(kind: str, case: Any) -> tuple[Any, ...]:
    from tools.benchmarks import inserters, tracers, ways

    if kind == "calls":
        return ways.WAYS
    if kind == "tracing":
        return tracers.TRACERS
    return inserters.inserters(case) if kind == "inserting" else inserters.gradient_inserters(case)


def _compare(
    kind: str, case: str, rounds: int, seconds: float, only: list[str] | None = None
) -> Any:
    from tools.benchmarks.comparing import compared
    from tools.benchmarks.models import case_of
    from tools.benchmarks.ways import Refused, reason_of

    found = case_of(case)
    ways = [way for way in _ways(kind, found) if not way.alone and (not only or way.name in only)]
    try:
        return compared(found, ways, rounds, seconds, grad=kind == "gradients")
    except Refused as error:  # even the model itself
        return {way.name: {"reason": reason_of(error)} for way in ways}


def _alone(kind: str, cases: list[str], way: str, rounds: int, seconds: float) -> Any:
    from tools.benchmarks.comparing import compared_alone
    from tools.benchmarks.models import case_of

    pairs = []
    for name in cases:
        ways = _ways(kind, case_of(name))  # where something is inserted depends on the model
        meant = next(one for one in ways if one.name == way)
        pairs.append((case_of(name), meant, ways[0]))
    return compared_alone(pairs, rounds, seconds, grad=kind == "gradients")


def _checking(case: str, rounds: int, seconds: float) -> Any:
    """How long it takes to find that a known program admits some arguments."""
    import torch

    from bendtrace.engine.global_state import GlobalState
    from bendtrace.engine.program import Program
    from bendtrace.record.recorded_call import Signature, record
    from tools.benchmarks.models import case_of, inputs_of
    from tools.benchmarks.timing import interleaved

    found = case_of(case)
    model, args = found.model(), inputs_of(found)
    with torch.no_grad():
        recording = record(model, args, {}, Signature(model))
        program = Program(recording, GlobalState.current())
        assert program.admits(args)
        times = interleaved({"check": lambda: program.admits(args)}, rounds, seconds=seconds)
    return times["check"].json() | {
        "ops": len(recording.tape.ops), "guards": len(recording.tape.guards)
    }  # fmt: skip


def _guards(layers: int, rounds: int, seconds: float, compiles: bool) -> Any:
    from tools.benchmarks.guarding import guarded

    return guarded(layers, rounds, seconds, compiles)


def _memory(case: str) -> Any:
    from tools.benchmarks.models import case_of
    from tools.benchmarks.tracers import memory_of_traces

    return memory_of_traces(case_of(case))


def _memory_of_torchlens(cases: list[str]) -> Any:
    from tools.benchmarks.models import case_of
    from tools.benchmarks.tracers import memory_of_torchlens
    from tools.benchmarks.ways import reason_of

    found: dict[str, Any] = {}
    for name in cases:
        try:
            found[name] = memory_of_torchlens(case_of(name))
        except Exception as error:
            found[name] = reason_of(error)
    return found


def _per_op(rounds: int, seconds: float) -> Any:
    from tools.benchmarks.tracers import per_op

    return per_op(rounds, seconds)


def _leaving(case: str, rounds: int) -> Any:
    from tools.benchmarks.leaving import diverging
    from tools.benchmarks.models import case_of

    return diverging(case_of(case), rounds)


def _recompiling(case: str) -> Any:
    import torch

    from tools.benchmarks.leaving import recompiling
    from tools.benchmarks.models import case_of

    return recompiling(case_of(case), torch.compile)


def _growth(kind: str, largest: int) -> Any:
    from tools.benchmarks.growth import growth

    return growth(kind, largest)


def _stream(name: str, calls: int, size: int) -> Any:
    from tools.benchmarks.feeding import fed

    return fed(name, calls, size)


def _stream_changed(name: str, calls: int, size: int) -> Any:
    from tools.benchmarks.changes import fed_changed

    return fed_changed(name, calls, size)


def _stream_compiled(name: str, calls: int, size: int, seconds: float) -> Any:
    from tools.benchmarks.feeding import compiled

    return compiled(name, calls, size, seconds)


def _peaks(name: str, kind: str) -> Any:
    from tools.benchmarks.memory import measure_changed

    return measure_changed(name, kind)


def _with_insertions(case: str, kind: str, rounds: int, seconds: float, backend: str) -> Any:
    from tools.benchmarks.compiled import compared_with_insertions
    from tools.benchmarks.models import case_of

    return compared_with_insertions(case_of(case), kind, rounds, seconds, backend)


def _exported(name: str, rounds: int, seconds: float, compiles: bool) -> Any:
    from tools.benchmarks.exported import compared_exported

    return compared_exported(name, rounds, seconds, compiles)


TASKS: dict[str, Callable[..., Any]] = {
    "compare": _compare, "alone": _alone, "checking": _checking, "guards": _guards,
    "memory": _memory,
    "memory of torchlens": _memory_of_torchlens, "per op": _per_op, "leaving": _leaving,
    "recompiling": _recompiling, "growth": _growth, "stream": _stream,
    "stream, changed": _stream_changed, "stream, compiled": _stream_compiled,
    "peaks": _peaks, "with insertions": _with_insertions, "exported": _exported,
}  # fmt: skip


def carry_out(task: str, arguments: dict[str, Any], threads: int) -> Any:
    """Carry a task out here; what others say meanwhile is not to be heard."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TASKS[task](**arguments)
    finally:
        torch.set_num_threads(before)


def ask(
    task: str,
    *,
    threads: int = 1,
    here: bool = False,
    limit: float | None = None,
    **arguments: Any,
) -> Any:
    """Have a task carried out by a fresh process.

    Args:
        task: which one.
        threads: how many torch may use.
        here: whether to carry it out in this process after all.
        limit: seconds after which the process is ended; None for no limit.
        **arguments: of the task.

    Raises:
        RuntimeError: if the process fails.
        TimeoutError: if it is not done within the limit.
    """
    if here:
        return carry_out(task, arguments, threads)
    request = json.dumps({"task": task, "arguments": arguments, "threads": threads})
    environment = {
        "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1",
        # What a compiler finds out about the machine is kept for the next process, graphs are not.
        "TORCHINDUCTOR_CACHE_DIR": _caches().name, "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.benchmarks.worker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment}, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(request, timeout=limit)
    except BaseException as error:
        _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise TimeoutError(f"{task} {arguments} was not done in {limit:.0f} s") from None
        raise
    if process.returncode:
        raise RuntimeError(f"{task} {arguments} failed:\n{errors[-3000:]}")
    return json.loads(output.strip().splitlines()[-1])


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and those that it has started, as a compiler does."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own
    process.communicate()


@functools.cache
def _caches() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="benchmarks-")


def main() -> None:
    """Carry out what is asked on standard input."""
    logging.disable(logging.CRITICAL)
    request = json.load(sys.stdin)
    answer = carry_out(**request)
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
