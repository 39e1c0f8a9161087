"""What all tests share."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
import torch

# Small models on a small machine: more threads only add noise.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Nothing in it is a test or has an example, and importing it takes seconds.
collect_ignore_glob = ["distributed/*"]

LEFT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the long sweeps, too")
    parser.addoption("--rest", action="store_true", help="run what --all adds, and no more")
    parser.addoption("--slow", action="store_true", help="run what takes hours, too")


def _is_left_out(config: pytest.Config, item: pytest.Item) -> bool:
    is_slow = item.get_closest_marker("slow") is not None
    is_more = is_slow or item.get_closest_marker("all") is not None
    # Whoever names a test, and not only its file, wants it.
    is_named = any("::" in argument for argument in config.args)
    if is_named or config.getoption("--slow"):
        return False
    if config.getoption("--rest"):
        return not is_more or is_slow
    return is_slow if config.getoption("--all") else is_more


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [item for item in items if _is_left_out(config, item)]
    if left:
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left)
    config.stash[LEFT] = len(left)


def pytest_collection_finish() -> None:
    # What is imported stays. Looking through all of it, in each search for garbage, took
    # longer than many tests.
    gc.collect()
    gc.freeze()


# With workers it is they who collect; each says how much it left out, and that is the same.
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = session.config.stash.get(LEFT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT] = getattr(node, "workeroutput", {}).get("left", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    left = config.stash.get(LEFT, 0)
    if left and not config.getoption("--rest"):
        option = "--slow" if config.getoption("--all") else "--all"
        terminalreporter.write_line(f"{left} more tests are run with {option} only")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    # Importing torch's own test databases forbids to change the flags of backends directly.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
