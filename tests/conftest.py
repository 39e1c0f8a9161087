"""What all tests share."""

from __future__ import annotations

import gc
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


def pytest_configure(config: pytest.Config) -> None:
    # Workers are given arguments; the option reaches them with all the others.
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        config.option.brief = not any(map(config.getoption, OPTIONS))


def _needed_option(item: pytest.Item, tests: set[str]) -> str | None:
    """Return the option that a test needs, if it is not part of the shortest run.

    Args:
        item: a test, or a case of one.
        tests: the tests that had a case before; this one is added.
    """
    for name in ("slow", "all"):
        if item.get_closest_marker(name) is not None:
            return f"--{name}"
    test = item.nodeid.partition("[")[0]
    is_first = test not in tests
    tests.add(test)
    return None if is_first and item.get_closest_marker("more") is None else "--more"


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
    tests: set[str] = set()
    runs = _options_that_run(config)
    needed = [(item, _needed_option(item, tests)) for item in items]
    left = [(item, option) for item, option in needed if option not in runs]
    if left:
        items[:] = [item for item, option in needed if option in runs]
        config.hook.pytest_deselected(items=[item for item, _ in left])
    config.stash[LEFT] = dict(Counter(option for _, option in left if option))


def pytest_collection_finish() -> None:
    # What is imported stays. Looking through all of it, in each search for garbage, took
    # longer than many tests.
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


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    # Importing torch's own test databases forbids to change the flags of backends directly.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
