"""What all tests share."""

from __future__ import annotations

import datetime
import gc
import hashlib
import os
from collections import Counter
from typing import Any

import pytest
import torch

# Small models on a small machine: more threads only add noise.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Nothing in it is a test or has an example, and importing it takes seconds.
collect_ignore_glob = ["distributed/*"]

LEFT = pytest.StashKey[dict[str, int]]()
OPTIONS = {
    "--more": "run what the command without arguments leaves out, and no more",
    "--all": "run the long sweeps, too",
    "--rest": "run what --all adds, and no more",
    "--slow": "run what takes hours, too",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, says in OPTIONS.items():
        parser.addoption(name, action="store_true", help=says)
    # Of the environment, so that several commands in a row can have the same.
    today = os.environ.get("BENDTRACE_TESTS_DAY") or datetime.date.today().isoformat()
    parser.addoption(
        "--day", default=today, help="draw the cases of another day, to repeat what failed then"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Workers are given arguments; the option, and the day, reach them with all the others.
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.option.brief = not any(map(config.getoption, OPTIONS))


def _drawn(items: list[pytest.Item], day: str) -> set[str]:
    """Return the cases of the shortest run: of each test one, drawn by the day."""
    cases: dict[str, list[str]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "all", "more"))):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item.nodeid)
    drawn = set()
    for test, of_test in cases.items():
        number = int.from_bytes(hashlib.sha256(f"{day} {test}".encode()).digest()[:8])
        drawn.add(of_test[number % len(of_test)])
    return drawn


def _needed_option(item: pytest.Item, drawn: set[str]) -> str | None:
    """Return the option that a case needs, if it is not part of the shortest run."""
    for name in ("slow", "all", "more"):
        if item.get_closest_marker(name) is not None:
            return f"--{name}"
    if item.nodeid in drawn or item.get_closest_marker("each") is not None:
        return None
    return "--more"


def _turn(case: str, day: str) -> bool:
    """Return whether a day is the one of nine in turn at which a case runs."""
    number = int.from_bytes(hashlib.sha256(case.encode()).digest()[:8])
    return (number + datetime.date.fromisoformat(day).toordinal()) % 9 == 0


def _of_today(needed: list[tuple[pytest.Item, str | None]], day: str) -> set[str]:
    """Return the cases of `--more`: of tests with many, a ninth each day."""
    cases = [item.nodeid for item, option in needed if option == "--more"]
    counts = Counter(case.partition("[")[0] for case in cases)
    return {c for c in cases if counts[c.partition("[")[0]] <= _MANY or _turn(c, day)}


_MANY = 12


def _options_that_run(config: pytest.Config) -> set[str | None]:
    """Return which tests run, by the options that they need."""
    # Whoever names a test, and not only its file, wants it.
    if config.getoption("--slow") or any("::" in argument for argument in config.args):
        return {None, *OPTIONS}
    if config.getoption("--all"):
        return {None, "--more", "--all"}
    if config.getoption("--rest"):
        return {"--all"}
    if config.getoption("--more"):
        return {"--more"}
    return {None} if getattr(config.option, "brief", False) else {None, "--more"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    runs, drawn = _options_that_run(config), _drawn(items, config.getoption("--day"))
    needed = [(item, _needed_option(item, drawn)) for item in items]
    left = [(item, option) for item, option in needed if option not in runs]
    if runs == {"--more"}:
        today = _of_today(needed, config.getoption("--day"))
        left = [(item, option) for item, option in needed if item.nodeid not in today]
    if left:
        out = {id(item) for item, _ in left}
        items[:] = [item for item in items if id(item) not in out]
        config.hook.pytest_deselected(items=[item for item, _ in left])
    config.stash[LEFT] = dict(Counter(option for _, option in left if option))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker in the shortest run, so that nothing is set up in all of them.

    The longer runs have files that take longer than all others together.
    """
    if not getattr(config.option, "brief", False):
        return None
    from xdist.scheduler import LoadFileScheduling  # there is xdist where this is called

    return LoadFileScheduling(config, log)


def pytest_collection() -> None:
    # Imports and cases make objects by the million, and hardly any garbage.
    gc.disable()


def pytest_collection_finish() -> None:
    # What is imported stays. Looking through all of it, in each search for garbage, took
    # longer than many tests.
    gc.enable()
    gc.collect()
    gc.freeze()


# With workers it is they who collect; each says how much it left out, and that is the same.
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(LEFT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left = config.stash.get(LEFT, {})
    for option in OPTIONS:
        if option in left and not (config.getoption("--more") or config.getoption("--rest")):
            terminalreporter.write_line(f"{left[option]} more tests are run with {option} only")
    if getattr(config.option, "brief", False) or config.getoption("--more"):
        day = config.getoption("--day")
        terminalreporter.write_line(f"one case of each test was drawn: --day={day} repeats it")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    # Importing torch's own test databases forbids to change the flags of backends directly.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
