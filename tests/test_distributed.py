"""Models on two processes: each test is what both of them found, run under torchrun with gloo."""

from __future__ import annotations

import ast
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bendtrace as bt
from bendtrace.errors import InputError, RankDivergenceError
from bendtrace.watch import rank_sync as core
from bendtrace.watch.collectives import RankGroup, Ranks

ROOT = Path(__file__).parent.parent
HERE = ROOT / "tests" / "distributed"
LIMIT = 180  # seconds; whatever takes longer hangs

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(),
    reason="this torch was built without torch.distributed, or without gloo",
)


def _checks(module: str) -> list[str]:
    tree = ast.parse((HERE / f"{module}.py").read_text())
    return [
        part.name
        for part in tree.body
        if isinstance(part, ast.FunctionDef) and part.name.startswith("check_")
    ]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _run_on_two_ranks(*command: str, folder: Path) -> str:
    """Run a script under torchrun; return what it printed, errors included."""
    whole = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
        "--master-addr", "127.0.0.1", "--master-port", str(_free_port()), *command,
    ]  # fmt: skip
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    # A group of its own, so that no process of a run that hangs is left behind.
    with subprocess.Popen(
        whole, cwd=folder, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        try:
            return process.communicate(timeout=LIMIT)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0] + f"\nended after {LIMIT} s"


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory):
    """Run one module of checks on two processes, once."""

    @cache
    def started(module: str) -> tuple[Path, str]:
        results = tmp_path_factory.mktemp(module)
        command = ("-m", "tests.distributed.worker", module, str(results))
        return results, _run_on_two_ranks(*command, folder=ROOT)

    return started


@pytest.mark.all
@pytest.mark.parametrize(
    ("module", "check"),
    [
        pytest.param(module, check, id=f"{module}: {check[6:].replace('_', ' ')}")
        for module in (
            "data_parallel", "sharded", "tensor_parallel", "collectives", "agreement",
            "language_models",
        )
        for check in _checks(module)
    ],
)  # fmt: skip
def test_both_ranks_find(run, module: str, check: str) -> None:
    folder, output = run(module)
    for rank in range(2):
        file = folder / f"{check}.{rank}"
        assert file.exists(), f"rank {rank} did not come to the end of it:\n{output[-4000:]}"
        found = file.read_text()
        assert found == "passed", f"rank {rank}:\n{found}"


@pytest.mark.all
def test_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "page.py").write_text("".join(body for name, body in blocks if name == "python"))
    output = _run_on_two_ranks("page.py", folder=tmp_path)
    shown = "".join(body for name, body in blocks if not name)
    assert output.replace(f"{tmp_path}/", "") == shown


class _Crew:
    """Ranks that are threads, with a store of their own."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        store = dist.HashStore()
        self.ranks = [Ranks(store, rank, size, timeout) for rank in range(size)]

    def do(self, *actions: Callable[[Ranks], None] | None) -> list[str]:
        """Have each rank do something at once; return "" or what it raised."""
        found = ["" for _ in actions]

        def act(number: int, action: Callable[[Ranks], None]) -> None:
            try:
                action(self.ranks[number])
            except RankDivergenceError as error:
                found[number] = str(error)

        threads = [
            threading.Thread(target=act, args=(number, action))
            for number, action in enumerate(actions)
            if action is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive()
        return found


def _meets(group: RankGroup, *what: str) -> Callable[[Ranks], None]:
    def act(ranks: Ranks) -> None:
        for one in what:
            ranks.meet(group, one, f"{one} on {ranks.rank}")

    return act


ALL = RankGroup("all", (0, 1, 2))


def test_ranks_that_do_the_same_go_on_and_leave_little_behind() -> None:
    crew = _Crew(3)
    steps = [f"step {number}" for number in range(50)]
    assert crew.do(*[_meets(ALL, *steps)] * 3) == ["", "", ""]
    assert crew.ranks[0].store.num_keys() <= 9


def test_all_ranks_of_a_group_hear_of_one_that_differs() -> None:
    crew = _Crew(3)
    for odd in range(3):
        what = ["one" if rank == odd else "other" for rank in range(3)]
        found = crew.do(*(_meets(ALL, "same", each) for each in what))
        assert len(set(found)) == 1
        for rank, each in enumerate(what):
            assert f"rank {rank}: {each} on {rank}" in found[0]
    assert crew.do(*[_meets(ALL, "again")] * 3) == ["", "", ""]


def test_ranks_of_other_groups_do_not_hear_of_it() -> None:
    crew = _Crew(4)
    left, right = RankGroup("left", (0, 1)), RankGroup("right", (2, 3))
    found = crew.do(
        _meets(left, "one"), _meets(left, "other"), _meets(right, "same"), _meets(right, "same")
    )
    assert [bool(text) for text in found] == [True, True, False, False]


@pytest.mark.all
def test_ranks_that_wait_in_a_circle_are_told() -> None:
    crew = _Crew(3)
    pairs = [RankGroup(f"{a}{b}", (a, b)) for a, b in ((0, 1), (1, 2), (0, 2))]

    # Rank 0 waits for 1, who waits for 2, who waits for 0.
    def waits(group: RankGroup) -> Callable[[Ranks], None]:
        def act(ranks: Ranks) -> None:
            try:
                ranks.meet(group, "x", "x")
            except RankDivergenceError as error:
                ranks.leave([], "was told")  # as a call does that ends by an error
                raise error

        return act

    found = crew.do(*map(waits, pairs))
    assert all(re.search(r"which waits for rank|was told", text) for text in found)
    assert any("which waits for rank" in text for text in found)


def test_a_rank_that_leaves_is_not_waited_for_and_may_come_back() -> None:
    crew = _Crew(3)
    found = crew.do(
        _meets(ALL, "x"), lambda ranks: ranks.leave([ALL], "fell ill"), _meets(ALL, "x")
    )
    assert "rank 1: fell ill" in found[0]
    assert found[0] == found[2]
    assert crew.do(*[_meets(ALL, "y")] * 3) == ["", "", ""]


def test_ranks_that_raise_time_and_again_are_not_mixed_up_with_late_ones() -> None:
    crew = _Crew(2)
    pair = RankGroup("pair", (0, 1))

    def falls_ill(times: int) -> Callable[[Ranks], None]:
        def act(ranks: Ranks) -> None:
            for _ in range(times):
                ranks.leave([pair], "fell ill")
            ranks.meet(pair, "at last", "")

        return act

    def late(ranks: Ranks) -> None:
        for _ in range(3):
            with pytest.raises(RankDivergenceError, match="fell ill"):
                ranks.meet(pair, "x", "")
        ranks.meet(pair, "at last", "")

    assert crew.do(falls_ill(3), late) == ["", ""]


def test_who_does_not_come_is_given_up_after_the_time_set() -> None:
    crew = _Crew(3, timeout=0.5)
    found = crew.do(_meets(ALL, "x"), _meets(ALL, "x"), None)
    assert found[0] == found[1]
    assert "rank 2: did not come within 0.5 s" in found[0]


def test_the_error_can_be_pickled_and_says_who_did_what() -> None:
    error = RankDivergenceError("3", {1: "sleeps", 0: "works"})
    assert list(error.ranks) == [0, 1]
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.ranks == error.ranks
    assert isinstance(error, bt.BendtraceError)


def test_settings_are_checked_and_put_back() -> None:
    settings = core.settings
    before = (settings.enabled, settings.timeout)
    for wrong in (0, -1.0, float("nan"), True, "soon"):
        with pytest.raises(InputError, match="timeout"):
            bt.distributed.agreement(timeout=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="enabled"):
        bt.distributed.agreement(enabled=1)  # type: ignore[arg-type]
    handle = bt.distributed.agreement(enabled=False, timeout=5)
    assert (settings.enabled, settings.timeout) == (False, 5.0)
    handle.remove()
    handle.remove()
    assert (settings.enabled, settings.timeout) == before


def test_models_cannot_be_asked_to_agree_without_other_ranks() -> None:
    with pytest.raises(InputError, match="init_process_group"):
        bt.distributed.agree(bt.BendedModule(torch.nn.Linear(2, 2)))
    with pytest.raises(InputError, match="of a module or a function"):
        bt.distributed.agree("model")  # type: ignore[arg-type]


def test_what_is_whole_stays_as_it_is() -> None:
    x = torch.ones(2)
    assert bt.distributed.whole(x) is x
    found = bt.distributed.whole({"x": [x, 3]})
    assert found["x"][0] is x
    assert found == {"x": [x, 3]}


def test_a_process_alone_pays_nothing() -> None:
    bended = bt.BendedModule(torch.nn.Linear(2, 2))
    for _ in range(3):
        bended(torch.ones(1, 2))
    assert bt.distributed.traffic() == (0, 0)
    assert bended.stats.replays == 2
