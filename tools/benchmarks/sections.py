"""The sections of the report: what each measures, and the tables made of it.

What is measured is plain data, so that the tables of the page can be made again from its JSON.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.benchmarks import starting
from tools.benchmarks.changes import CHANGES
from tools.benchmarks.comparing import Cells, merged
from tools.benchmarks.compiled import KINDS, NODES
from tools.benchmarks.exported import EXPORTED, table_of_exported
from tools.benchmarks.feeding import after_first, relative
from tools.benchmarks.growth import GROWTHS
from tools.benchmarks.guarding import LAYERS
from tools.benchmarks.memory import DEEP
from tools.benchmarks.models import CASES, case_of
from tools.benchmarks.streams import STREAMS
from tools.benchmarks.table import Table, amount, duration, ratio
from tools.benchmarks.ways import WAYS
from tools.benchmarks.worker import ask

__all__ = ["SECTIONS", "Options", "Section"]

Data = dict[str, Any]

# Measured with all threads as well: the others are calls of the same code.
_WITH_ALL_THREADS = ("eager", "replay", "bended", "bended, inductor", "torch.compile")


@dataclass(frozen=True)
class Options:
    """What to measure, and how long.

    Attributes:
        rounds: of each comparison.
        seconds: that one way may take in one comparison, about.
        threads: numbers of threads.
        models: names of the models.
        streams: names of the models that are fed streams.
        changes: names of the models that are fed streams with something inserted, or that write.
        peers: whether others are measured too.
        quick: whether a look is enough.
        here: whether to measure in this process where that is possible.
        tell: is told what is going on.
    """

    rounds: int = 20
    seconds: float = 2.0
    threads: tuple[int, ...] = (1, os.cpu_count() or 1)
    models: tuple[str, ...] = tuple(case.name for case in CASES if case.is_installed())
    streams: tuple[str, ...] = tuple(stream.name for stream in STREAMS)
    changes: tuple[str, ...] = tuple(change.name for change in CHANGES)
    peers: bool = True
    quick: bool = False
    here: bool = False
    tell: Callable[[str], object] = field(default=lambda text: None)

    @property
    def command(self) -> str:
        """What gives the same again, but for the section."""
        return "python -m tools.benchmarks"


@dataclass(frozen=True)
class Section:
    """One part of the report.

    Attributes:
        name: by which it is chosen.
        measure: returns what was found.
        tables: makes tables of that.
    """

    name: str
    measure: Callable[[Options], Data]
    tables: Callable[[Data], list[Table]]


_OURS = ("eager", "flat list", "replay", "bended", "bended, inductor")


def _compared(kind: str, options: Options, threads: int, only: Sequence[str] | None) -> Data:
    """Compare the ways of one kind for each model; those that need it in processes of their own."""
    found: dict[str, Cells] = {}
    for name in options.models:
        options.tell(f"{kind}, {threads} thread(s): {name}")
        found[name] = ask(
            "compare", threads=threads, here=options.here, kind=kind, case=name,
            rounds=options.rounds, seconds=options.seconds, only=only and list(only),
        )  # fmt: skip
    return found


def _alone(kind: str, way: str, options: Options, found: dict[str, Cells]) -> None:
    """Add a way that needs processes of its own."""
    answers = []
    for number in range(1 if options.quick else 2):
        options.tell(f"{kind}: {way}, process {number + 1}")
        answers.append(
            ask(
                "alone", kind=kind, cases=list(options.models), way=way,
                rounds=max(3, options.rounds // 4), seconds=options.seconds / 2,
            )
        )  # fmt: skip
    for name in options.models:
        found[name][way] = merged([answer[name][way] for answer in answers])


# Calls


def _measure_calls(options: Options) -> Data:
    found: Data = {}
    # Without others, and for a look without compilers, which take their time.
    only: tuple[str, ...] | None = None if options.peers else _OURS
    if options.quick:
        only = ("eager", "native hooks", "flat list", "replay", "bended", "torch.fx", "make_fx")
    for threads in dict.fromkeys(options.threads):
        some = only
        if threads > 1 and 1 in options.threads and not options.quick:
            some = tuple(name for name in _WITH_ALL_THREADS if only is None or name in only)
        cells = _compared("calls", options, threads, some)
        if threads == 1 and options.peers and not options.quick:
            _alone("calls", "nnsight", options, cells)
        found[str(threads)] = cells
    found["check"] = {
        name: ask(
            "checking", here=options.here, case=name, rounds=options.rounds,
            seconds=options.seconds,
        )
        for name in options.models
    }  # fmt: skip
    found["guards"] = [
        ask(
            "guards", here=options.here, layers=layers, rounds=options.rounds,
            seconds=options.seconds, compiles=options.peers and not options.quick,
        )
        for layers in LAYERS
    ]  # fmt: skip
    return found


_TAKING_LONG = (
    "bended", "bended, inductor", "torch.fx", "make_fx", "torch.export", "torch.compile",
)  # fmt: skip


def _tables_of_calls(data: Data) -> list[Table]:
    tables = []
    command = "python -m tools.benchmarks calls"
    for threads, cells in data.items():
        if threads in ("check", "guards"):
            continue
        names = _names_of(cells)
        rows = [
            [name, duration(one["eager"]["median"]), *(ratio(one.get(way)) for way in names[1:])]
            for name, one in cells.items()
        ]
        several = "one thread" if threads == "1" else f"{threads} threads"
        tables.append(
            Table(
                f"calls-{threads}", f"A call without gradients, {several}, of eager's time",
                ["model", "eager", *names[1:]], rows, f"{command} --threads {threads}",
            )
        )  # fmt: skip
    first = data[next(iter(data))]
    shown = [way for way in _TAKING_LONG if any(way in cells for cells in first.values())]
    rows = [[name, *(_first(way, cells) for way in shown)] for name, cells in first.items()]
    tables.append(
        Table(
            "first", "Until the first output, in a process where torch was used before",
            ["model", *shown], rows, command,
            "In brackets: until a call takes no longer than any later one, where that is much more "
            "(compiled replays first run as they are, and are measured against them). Kernels that "
            "are the same are compiled once: by ours, which comes first.",
        )
    )  # fmt: skip
    rows = [
        [name, str(cell["ops"]), str(cell["guards"]), duration(cell["median"]),
         f"{duration(cell['low'])} - {duration(cell['high'])}"]
        for name, cell in data["check"].items()
    ]  # fmt: skip
    tables.append(
        Table(
            "check", "Finding that a known program fits (input guards only)",
            ["model", "ops", "guards", "check", "quartiles"], rows, command,
        )
    )  # fmt: skip
    if "guards" in data:
        tables.append(_table_of_guards(data["guards"], command))
    return tables


def _table_of_guards(data: list[Data], command: str) -> Table:
    rows = [
        [str(one["modules"]), duration(one["check"]["median"]), _guards_of_compile(one)]
        for one in data
    ]
    return Table(
        "guards", "The same by the number of modules, in layers that are all alike",
        ["modules", "check", "torch.compile"], rows, command,
        "torch.compile: evaluating the guards of what it has compiled with the backend `eager`.",
    )  # fmt: skip


def _guards_of_compile(one: Data) -> str:
    found = one.get("torch.compile", "not measured")
    return found if isinstance(found, str) else duration(found["median"])


def _names_of(cells: dict[str, Cells]) -> list[str]:
    named = dict.fromkeys(name for one in cells.values() for name in one)
    order = {way.name: number for number, way in enumerate(WAYS)}
    return sorted(named, key=lambda name: order.get(name, len(order)))


def _first(way: str, cells: Cells) -> str:
    # Where a model is one graph, it has been compiled by then.
    again = "torch.compile, fullgraph" if way == "torch.compile" else way
    cell = max(
        (cells[name] for name in (way, again) if "first" in cells.get(name, {})),
        key=lambda cell: float(cell["first"]), default=cells.get(way),
    )  # fmt: skip
    if cell is None:
        return "not measured"
    if "first" not in cell:
        return str(cell["reason"])
    more = cell["settled"] > 2 * cell["first"] and cell["settled"] - cell["first"] > 1
    settled = f" ({duration(cell['settled'])})" if more else ""
    return f"{duration(cell['first'])}{settled}"


# Tracing


def _measure_tracing(options: Options) -> Data:
    ours = ("eager", "trace, nothing saved", "trace, all saved")
    only: tuple[str, ...] | None = None if options.peers else ours
    if options.peers and options.quick:
        only = (*ours, "torch.fx")
    cells = _compared("tracing", options, 1, only)
    if options.peers and not options.quick:
        _alone("tracing", "torchlens", options, cells)
    memory: Data = {}
    for name in options.models:
        options.tell(f"memory: {name}")
        memory[name] = ask("memory", here=options.here, case=name)
    theirs: Data = dict.fromkeys(options.models, "not measured")
    if options.peers and not options.quick:
        theirs = ask("memory of torchlens", cases=list(options.models))
    for name, size in theirs.items():
        memory[name]["torchlens"] = size
    per_op = ask("per op", here=options.here, rounds=options.rounds * 3, seconds=options.seconds)
    return {"times": cells, "memory": memory, "per op": per_op}


def _tables_of_tracing(data: Data) -> list[Table]:
    command = "python -m tools.benchmarks tracing"
    cells, memory = data["times"], data["memory"]
    names = list(dict.fromkeys(name for one in cells.values() for name in one))
    rows = [
        [name, str(memory[name]["ops"]), duration(one["eager"]["median"]),
         *(ratio(one.get(way)) for way in names[1:])]
        for name, one in cells.items()
    ]  # fmt: skip
    times = Table(
        "tracing", "Getting a graph or a log, one thread, of eager's time",
        ["model", "ops", "eager", *names[1:]], rows, command,
        "torchlens saves all; torch.fx, make_fx and torch.export keep no values.",
    )  # fmt: skip
    rows = [
        [name, f"{(took['median']) * 1e6:.2f} us", f"{took['least'] * 1e6:.2f} us"]
        for name, took in data["per op"].items()
    ]
    per_op = Table(
        "per-op", "What tracing adds to each of 500 ops of 4 by 4 numbers (eager: what one takes)",
        ["", "median", "least"], rows, command,
        "Of the thread's own processor time.",
    )  # fmt: skip
    columns = ["eager's peak", "trace's peak", "kept by all saved", "saved one by one"]
    rows = [
        [name, *(amount(one[column]) for column in columns), f"{one['python']} B",
         _size(one["torchlens"])]
        for name, one in memory.items()
    ]  # fmt: skip
    sizes = Table(
        "memory", "Memory of traces",
        ["model", *columns, "a trace besides tensors, an op", "saved by torchlens"], rows, command,
        "Peaks are bytes of tensors that ops made and that are alive at once. Saved one by one is "
        "what copies of all values would take.",
    )  # fmt: skip
    return [times, per_op, sizes]


def _size(size: Any) -> str:
    return size if isinstance(size, str) else amount(size)


# Insertions


def _measure_inserting(options: Options) -> Data:
    inserting = _compared("inserting", options, 1, None)
    gradients = _compared("gradients", options, 1, None)
    if options.peers and not options.quick:
        _alone("inserting", "nnsight, one module", options, inserting)
        _alone("gradients", "torchlens, gradients", options, gradients)
    return {"inserting": inserting, "gradients": gradients}


def _tables_of_inserting(data: Data) -> list[Table]:
    command = "python -m tools.benchmarks inserting"
    titles = {
        "inserting": "A call with something inserted, one thread, of eager's time",
        "gradients": "A call and its backward pass, with gradients looked at, of eager's time",
    }
    tables = []
    for kind, title in titles.items():
        cells: dict[str, Cells] = data[kind]
        names = list(dict.fromkeys(name for one in cells.values() for name in one))
        rows = [
            [name, _eager(one), *(ratio(one.get(way)) for way in names[1:])]
            for name, one in cells.items()
        ]
        tables.append(Table(kind, title, ["model", "eager", *names[1:]], rows, command))
    return tables


def _eager(cells: Cells) -> str:
    cell = cells["eager"]
    return duration(cell["median"]) if "median" in cell else str(cell["reason"])


# Leaving what is known


def _measure_leaving(options: Options) -> Data:
    found: Data = {}
    for name in options.models:
        if case_of(name).elsewhere is None:
            continue
        options.tell(f"leaving: {name}")
        found[name] = ask(
            "leaving", here=options.here, case=name, rounds=max(1, options.rounds // 2)
        )
        if options.peers and not options.quick:
            again = ask("recompiling", case=name)
            found[name]["torch.compile, beyond a call"] = {"median": again}
    return found


def _tables_of_leaving(data: Data) -> list[Table]:
    names = list(dict.fromkeys(name for one in data.values() for name in one))
    rows = [
        [
            name, duration(one["eager"]["median"]),
            *(
                ratio(one.get(way)) if "relative" in one.get(way, {}) or way not in one
                else duration(max(0.0, one[way]["median"]))
                for way in names[1:]
            ),
        ]
        for name, one in data.items()
    ]  # fmt: skip
    return [
        Table(
            "leaving", "A call that goes another way than the calls before, of eager's time",
            ["model", "eager", *names[1:]], rows, "python -m tools.benchmarks leaving",
        )
    ]  # fmt: skip


# Streams of random inputs

_STREAMED, _PART = 1000, 100  # calls, and calls that are one part
_STREAMED_QUICKLY, _PART_QUICKLY = 60, 20
_LIMIT = 60.0  # seconds for a stream of torch.compile; its compilers are ended after twice that


def _calls_of(options: Options) -> tuple[int, int]:
    return (_STREAMED_QUICKLY, _PART_QUICKLY) if options.quick else (_STREAMED, _PART)


def _measure_streams(options: Options) -> Data:
    calls, size = _calls_of(options)
    found: Data = {}
    for name in options.streams:
        options.tell(f"streams: {name}")
        one = found[name] = ask("stream", here=options.here, name=name, calls=calls, size=size)
        if options.peers and not options.quick:
            try:
                one["torch.compile"] = ask(
                    "stream, compiled", limit=2 * _LIMIT, name=name, calls=calls, size=size,
                    seconds=_LIMIT,
                )  # fmt: skip
            except TimeoutError:
                one["torch.compile"] = {"reason": f"no answer in {2 * _LIMIT:.0f} s"}
            except RuntimeError as error:
                one["torch.compile"] = {"reason": str(error).strip().splitlines()[-1][:60]}
    return found


def _measure_changes(options: Options) -> Data:
    calls, size = _calls_of(options)
    found: Data = {}
    for name in options.changes:
        options.tell(f"changes: {name}")
        found[name] = ask("stream, changed", here=options.here, name=name, calls=calls, size=size)
    return found


def _tables_of_streams(data: Data) -> list[Table]:
    if not data:
        return []
    peers = [one.get("torch.compile") for one in data.values()]
    theirs = [relative(one)[-1] for one in peers if one is not None and "reason" not in one]
    mean = f"{statistics.geometric_mean(theirs):.2f}x, of {len(theirs)}" if theirs else "-"
    headers, rows = _rows_of_streams(data)
    cells = [*map(_stream_compiled, peers), mean]
    return [
        Table(
            "streams", "A call with an input like none before, one thread, of eager's time",
            ["model", *headers[:4], f"torch.compile, {headers[3]}", *headers[4:]],
            [[*row[:5], cell, *row[5:]] for row, cell in zip(rows, cells, strict=True)],
            "python -m tools.benchmarks streams",
            "Recorded: runs of the model under the tracer. Pairs: answers that are known, over "
            "all states. Live: calls that the model itself served. Breaks: how often "
            "torch.compile's tracer had to stop; graphs: what it compiled. Where it compiles "
            "none, the model runs as it is.",
        )
    ]  # fmt: skip


def _tables_of_changes(data: Data) -> list[Table]:
    if not data:
        return []
    headers, rows = _rows_of_streams(data)
    calls = next(iter(data.values()))["calls"]
    return [
        Table(
            "changes", "The same with something inserted, of the time of native hooks, and for "
            "models that write, of their own",
            ["model", *headers], rows, "python -m tools.benchmarks changes",
            f"{calls:,} calls of each.",
        )
    ]  # fmt: skip


def _rows_of_streams(data: Data) -> tuple[list[str], list[list[str]]]:
    """Return the headers of all columns but the first, and the rows."""
    size = next(iter(data.values()))["size"]
    rows: list[list[str]] = []
    shares: list[list[float]] = []
    for name, one in data.items():
        parts = relative(one)
        shares.append([parts[0], after_first(parts), parts[-1]])
        pairs = "-" if one["pairs"] is None else str(one["pairs"])
        rows.append(
            [name, duration(sum(one["seconds"]["eager"]) / one["calls"]),
             *(f"{share:.2f}x" for share in shares[-1]), str(one["traces"]), pairs,
             str(one["live"])]
        )  # fmt: skip
    means = [f"{statistics.geometric_mean(each):.2f}x" for each in zip(*shares, strict=True)]
    rows.append(["geometric mean", "-", *means, "-", "-", "-"])
    headers = [
        "eager", f"first {size}", f"median {size} after", f"last {size}", "recorded", "pairs",
        "live",
    ]  # fmt: skip
    return headers, rows


def _stream_compiled(found: Data | None) -> str:
    if found is None:
        return "not measured"
    if "reason" in found:
        return f"- ({found['reason']})"
    breaks = sum(found["breaks"].values())
    differ = f", {found['differ']} outputs differ" if found["differ"] else ""
    return f"{relative(found)[-1]:.2f}x ({breaks} breaks, {found['graphs']} graphs{differ})"


# Peaks of memory


def _measure_peaks(options: Options) -> Data:
    found: Data = {}
    for name in list(DEEP)[:1] if options.quick else DEEP:
        options.tell(f"peaks: {name}")
        hooked, replayed = ask("peaks", here=options.here, name=name, kind="padded")
        found[name] = {"native hook": hooked, "replay": replayed}
    return found


def _tables_of_peaks(data: Data) -> list[Table]:
    rows = [
        [name, amount(one["native hook"]), amount(one["replay"]),
         f"{one['replay'] / one['native hook']:.2f}x"]
        for name, one in data.items()
    ]  # fmt: skip
    return [
        Table(
            "peaks", "The most memory that tensors take at once in a call with one module changed",
            ["model", "native hook", "replay", "ratio"], rows, "python -m tools.benchmarks peaks",
        )
    ]  # fmt: skip


# Starting


def _measure_starting(options: Options) -> Data:
    rounds = 1 if options.quick else max(3, options.rounds // 4)
    options.tell("import times")
    found: Data = {"imports": starting.imports(rounds, options.peers and not options.quick)}
    ways = ["eager", "bended"] if options.quick else None
    if not options.peers:
        ways = ["eager", "bended", "bended, inductor"]
    case = "20 gated layers" if options.quick else "tiny transformer"
    options.tell("cold starts")
    found["cold"] = starting.cold(case, 1 if options.quick else 3, ways)
    found["case"] = case
    return found


def _tables_of_starting(data: Data) -> list[Table]:
    command = "python -m tools.benchmarks starting"
    rows = []
    for name, cell in data["imports"].items():
        if "reason" in cell:
            rows.append([name, *[cell["reason"]] * 4])
            continue
        spread = f"{duration(cell['low'])} - {duration(cell['high'])}"
        rows.append(
            [name, f"{duration(cell['median'])} ({spread})", duration(cell["cpu"]),
             str(cell["modules"]), str(cell["installs"])]
        )  # fmt: skip
    importing = Table(
        "imports", "Importing after torch, in fresh processes that take turns",
        ["package", "time", "processor time", "modules", "packages beyond torch's"], rows, command,
    )  # fmt: skip
    rows = [
        [name, cell["reason"], ""] if "reason" in cell
        else [
            name, duration(cell["median"]), f"{duration(cell['low'])} - {duration(cell['high'])}"
        ]
        for name, cell in data["cold"].items()
    ]  # fmt: skip
    cold = Table(
        "cold",
        f"From a {data['case']} just made to its first output, in a fresh process, imports "
        "included",
        ["way", "time", "quartiles"], rows, command,
    )  # fmt: skip
    return [importing, cold]


# Growth

_LARGEST = {
    "ops in a loop": 100_000, "ops in a chain": 100_000, "traces by inputs": 100,
    "traces by values": 100, "traces by iterations": 100, "data guards": 10_000,
    "input guards": 10_000,
}  # fmt: skip


def _measure_growth(options: Options) -> Data:
    found: Data = {}
    for kind in GROWTHS:
        options.tell(f"growth with {kind}")
        largest = _LARGEST[kind] if not options.quick else GROWTHS[kind][1] * 10
        found[kind] = ask("growth", here=options.here, kind=kind, largest=largest)
    return found


def _tables_of_growth(data: Data) -> list[Table]:
    rows = []
    for kind, found in data.items():
        sizes = found["sizes"]
        for name, values in found["series"].items():
            per = _each(name, values[-1] / sizes[-1])
            span = f"{sizes[0]:,} to {sizes[-1]:,}"
            exponent = found["exponents"][name]
            rows.append([kind, span, name, f"{exponent:.2f}", per])
    return [
        Table(
            "growth", "Growth, as the exponent fitted to the larger sizes (1 is linear)",
            ["with", "from", "of", "exponent", "each, at the largest"], rows,
            "python -m tools.benchmarks growth",
        )
    ]  # fmt: skip


def _each(name: str, value: float) -> str:
    return f"{value:.1f}" if "blocks" in name else duration(value)


# Insertions on compiled paths


def _measure_compiled(options: Options) -> Data:
    found: Data = {}
    for name in options.models:
        found[name] = {}
        for kind in KINDS[:1] if options.quick else KINDS:
            options.tell(f"compiled, with {kind}: {name}")
            found[name][kind] = ask(
                "with insertions", here=options.here, case=name, kind=kind, rounds=options.rounds,
                seconds=options.seconds, backend="aot_eager" if options.quick else "inductor",
            )  # fmt: skip
    return found


def _tables_of_compiled(data: Data) -> list[Table]:
    beside = ("compiled, nothing inserted", "native hooks", "replay")
    rows = [
        [
            name, kind, str(cell["reason"]) if "reason" in cell else duration(cell["median"]),
            *(f"{cell[f'of {way}']:.2f}x" if f"of {way}" in cell else "" for way in beside),
        ]
        for name, kinds in data.items()
        for kind, cell in kinds.items()
    ]  # fmt: skip
    return [
        Table(
            "compiled", f"Compiled calls with insertions at {NODES} nodes, of other calls",
            ["model", "inserted", "a call", *(f"of {way}" for way in beside)], rows,
            "python -m tools.benchmarks compiled",
            "Native hooks are those of the model that is not compiled. Times of the process, one "
            "thread.",
        )
    ]  # fmt: skip


# Exported programs


def _measure_exported(options: Options) -> Data:
    found: Data = {}
    for name in ("solver",) if options.quick else EXPORTED:
        options.tell(f"exported: {name}")
        found[name] = ask(
            "exported", here=options.here, name=name, rounds=options.rounds,
            seconds=options.seconds, compiles=options.peers and not options.quick,
        )  # fmt: skip
    return found


SECTIONS = (
    Section("calls", _measure_calls, _tables_of_calls),
    Section("tracing", _measure_tracing, _tables_of_tracing),
    Section("inserting", _measure_inserting, _tables_of_inserting),
    Section("leaving", _measure_leaving, _tables_of_leaving),
    Section("streams", _measure_streams, _tables_of_streams),
    Section("changes", _measure_changes, _tables_of_changes),
    Section("peaks", _measure_peaks, _tables_of_peaks),
    Section("starting", _measure_starting, _tables_of_starting),
    Section("growth", _measure_growth, _tables_of_growth),
    Section("compiled", _measure_compiled, _tables_of_compiled),
    Section("export", _measure_exported, lambda data: [table_of_exported(data)]),
)
