"""Every module that torch tests: traced, replayed, and replayed with other values.

In training mode the gradients of parameters and inputs are compared, too. Without `--slow` two of
the ways to make and call each module are tried.
"""

from __future__ import annotations

import pytest

from tests.shares import some
from tests.sweep.modules import MODULES, sweep

# Some constructors and calls warn that they are deprecated or slow; that is not the subject here.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def limit(request: pytest.FixtureRequest) -> int | None:
    return None if request.config.getoption("--slow") else 2


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", some(sorted(MODULES), 2))
def test_a_module_replays_bit_by_bit(name: str, training: bool, limit: int | None) -> None:
    done = dict(sweep(name, training=training, limit=limit))
    wrong = {label: served.wrong for label, served in done.items() if served.wrong}
    assert done
    assert not wrong
    for label, served in done.items():
        # With momentum=None these average over the batches so far, whose number Python reads.
        reads = training and "simple_average" in label
        # These become what they are in their first call.
        first = {"trace"} if "Lazy" in name else set()
        assert served.again in first | {"resume" if reads else "replay"}, (label, served.why)
        assert served.twin == ("resume" if reads else "replay") or not served.alike, label
