"""What all tests share."""

from __future__ import annotations

import os

import pytest
import torch

# Small models on a small machine: more threads only add noise.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run what takes minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="takes minutes; run with --slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    # Importing torch's own test databases forbids to change the flags of backends directly.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
