"""Everything against everybody: `python -m tools.scoreboard --quick`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from tools.benchmarks.machine import processor
from tools.scoreboard.page import summary, write_page
from tools.scoreboard.suites import SUITES, Suite, suite_of
from tools.scoreboard.supervising import Supervisor
from tools.scoreboard.ways import OURS, WAYS

_QUICK = 5 * 60.0
Results = dict[tuple[str, str, str], dict[str, Any]]


class _Request(NamedTuple):
    suite: Suite
    case: str
    way: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and not there yet; return 1 if we are wrong anywhere."""
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    store = _Store(options.out / "results.jsonl", _run_of(options))
    given = {"random": options.random, "ParityBench": options.paritybench}
    suites = [suite_of(name) for name in options.suite] or list(SUITES)
    left_out = {s.name: s.is_there(given.get(s.name)) for s in suites}
    left_out |= {way.name: f"{way.package} is not installed"
                 for way in WAYS if not way.is_installed()}  # fmt: skip
    suites = [suite for suite in suites if not left_out[suite.name]]
    wanted = list(_requests(suites, options, given, left_out))
    _run([r for r in wanted if _key(r) not in store.results], store, options, given)
    found = [store.results[_key(r)] for r in wanted if _key(r) in store.results]
    about = {**store.run, "cases": len({(f["suite"], f["case"]) for f in found}),
             "left out": {name: why for name, why in left_out.items() if why},
             "not run": len(wanted) - len(found)}  # fmt: skip
    report = summary(found, about | ({"note": options.note} if options.note else {}))
    print(report.text())
    if options.page is not None:
        write_page(report, options.page)
    return int(any(f["way"] == OURS and f["outcome"] in ("wrong", "crashed", "hung")
                   for f in found))  # fmt: skip


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.scoreboard", description=__doc__)
    names = [suite.name for suite in SUITES]
    parser.add_argument("--suite", nargs="+", choices=names, default=[], help="which ones; all")
    parser.add_argument("--way", nargs="+", choices=[w.name for w in WAYS], default=[])
    parser.add_argument("--quick", action="store_true", help="some of each suite, in 5 minutes")
    parser.add_argument("--limit", type=int, help="cases of each suite at most, spread evenly")
    parser.add_argument("--minutes", type=float, help="stop after so many; run again to go on")
    parser.add_argument(
        "--backend", default="aot_eager", choices=("eager", "aot_eager", "inductor"),
        help="of torch.compile; inductor takes many times as long",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=1, help="how many processes")
    parser.add_argument("--random", type=int, default=2000, help="how many random programs")
    parser.add_argument("--paritybench", type=Path, help="a checkout of pytorch-jit-paritybench")
    parser.add_argument(
        "--out", type=Path, default=Path("scoreboard"), help="where results are kept"
    )
    parser.add_argument("--page", type=Path, help="a page to write, with its data and its figure")
    parser.add_argument("--note", help="a sentence for the page")
    return parser.parse_args(arguments)


def _run_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what results have to agree on to be of one run."""
    import torch

    import bendtrace

    versions = {"torch": torch.__version__, "bendtrace": bendtrace.__version__}
    for package in ("transformers", "torchvision", "timm", "torchlens"):
        versions |= _version(package)
    return {
        "backend": options.backend,
        "Python": platform.python_version(),
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **versions,
    }


def _version(package: str) -> dict[str, str]:
    from importlib import metadata

    try:
        return {package: metadata.version(package)}
    except metadata.PackageNotFoundError:
        return {}


class _Store:
    """The results so far, a line each."""

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.results: Results = {}
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.run: dict[str, Any] = json.loads(lines[0]) if lines else run
        other = [name for name in run if name != "date" and self.run.get(name) != run[name]]
        if other:
            sys.exit(f"{path} is of another run, by its {', '.join(other)}: give another --out")
        if not lines:
            path.write_text(json.dumps(run) + "\n")
        for line in lines[1:]:
            try:
                result = json.loads(line)
            except json.JSONDecodeError:  # the last one, of a run that was ended
                continue
            self.results[result["suite"], result["case"], result["way"]] = result

    def add(self, result: dict[str, Any]) -> None:
        """Keep a result."""
        self.results[result["suite"], result["case"], result["way"]] = result
        with self._path.open("a") as file:
            file.write(json.dumps(result) + "\n")


def _requests(
    suites: list[Suite],
    options: argparse.Namespace,
    given: dict[str, Any],
    left_out: dict[str, str],
) -> Iterator[_Request]:
    """Yield what to run: of each suite the same cases for all ways, ours first."""
    chosen = {}
    for suite in suites:
        names = suite.names(given.get(suite.name))
        most = min(options.limit or len(names), suite.quick if options.quick else len(names))
        step = len(names) / max(1, min(most, len(names))) if suite.spread else 1
        chosen[suite.name] = [names[int(n * step)] for n in range(min(most, len(names)))]
    for way in WAYS:
        if left_out.get(way.name) or (options.way and way.name not in options.way):
            continue
        for suite in suites:
            for name in chosen[suite.name]:
                yield _Request(suite, name, way.name)


def _key(request: _Request) -> tuple[str, str, str]:
    return request.suite.name, request.case, request.way


def _run(
    requests: list[_Request], store: _Store, options: argparse.Namespace, given: dict[str, Any]
) -> None:
    minutes = options.minutes * 60 if options.minutes else _QUICK if options.quick else None
    until = None if minutes is None else time.monotonic() + minutes
    ways = list(dict.fromkeys(request.way for request in requests))
    shares: dict[str, float] = {}  # until when a way may run: each has as much of what is left
    counts: dict[str, int] = {}
    lock = threading.Lock()
    bar = tqdm(total=len(requests), unit="case", dynamic_ncols=True)
    waiting = iter(requests)

    def work() -> None:
        way = ""
        with Supervisor() as supervisor:
            while True:
                with lock:
                    request = next(waiting, None)
                    if request is None:
                        return
                    bar.update()
                    now = time.monotonic()
                    if until is not None and request.way not in shares:
                        left = len(ways) - ways.index(request.way)
                        shares[request.way] = now + (until - now) / left
                    if until is not None and now > shares[request.way]:
                        continue
                if request.way != way:
                    supervisor.stop()  # what one way does to torch is nothing to the others
                    way = request.way
                option = given.get(request.suite.name)
                answer = supervisor.ask(
                    {
                        "suite": request.suite.name, "case": request.case, "way": request.way,
                        "option": None if option is None else str(option),
                        "backend": options.backend,
                    },
                    request.suite.seconds,
                )  # fmt: skip
                with lock:
                    store.add(answer)
                    counts[answer["outcome"]] = counts.get(answer["outcome"], 0) + 1
                    bar.set_postfix(way=way, **counts, refresh=False)

    with bar, ThreadPoolExecutor(options.jobs) as pool:
        for job in [pool.submit(work) for _ in range(options.jobs)]:
            job.result()


if __name__ == "__main__":
    sys.exit(main())
