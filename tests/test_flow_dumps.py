"""What is said of control flow does not depend on the Python that compiled the model."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import flow_dumps
from tests.corpus import CASES

ROOT = Path(__file__).parent.parent
# Where Pythons do not do the same, so that their flow steps differ.
DIFFERENT = {
    "beam_search": "sorting compares other items since Python 3.13",
    "dict_keyed_by_tuple": "a tuple keeps its hash since Python 3.14",
    "group_by_traced_label": "a dict comprehension names the item, not the whole, since 3.12",
}


@functools.cache
def others() -> tuple[str, ...]:
    """Return other Pythons that can run this; BENDTRACE_PYTHONS names more, as PATH would."""
    named = os.environ.get("BENDTRACE_PYTHONS", "").split(os.pathsep)
    found = [shutil.which(f"python3.{minor}") for minor in range(11, 20)]
    needs = "import sys, torch, networkx, pytest, tabulate, tqdm; print(sys.version_info[:2])"
    usable = {}
    for python in filter(None, [*named, *found]):
        said = subprocess.run(
            [python, "-c", needs], capture_output=True, text=True, check=False, cwd=ROOT
        )
        if said.returncode == 0 and said.stdout.strip() != str(sys.version_info[:2]):
            usable.setdefault(said.stdout, python)
    return tuple(usable.values())


@functools.cache
def own() -> dict[str, Any]:
    dumps = {case.name: flow_dumps.dump(case) for case in CASES}
    return dict(json.loads(json.dumps(dumps)))


@pytest.mark.more
def test_each_python_says_the_same_of_the_corpus(tmp_path: Path) -> None:
    if not others():
        pytest.skip("no other Python here has torch: name some in BENDTRACE_PYTHONS")
    for number, python in enumerate(others()):
        file = tmp_path / f"{number}.json"
        subprocess.run([python, "-m", "tests.flow_dumps", str(file)], check=True, cwd=ROOT)
        theirs = json.loads(file.read_text(encoding="utf-8"))
        assert theirs.keys() == own().keys()
        differing = {name for name, paths in own().items() if theirs[name] != paths}
        assert differing <= DIFFERENT.keys(), python


def test_which_iteration_a_test_of_a_list_is_in() -> None:
    case = next(case for case in CASES if case.name == "first_truth_of_a_list")
    steps = flow_dumps.dump(case)["later"]
    asked = [(value, iteration) for kind, _, value, _, iteration in steps if kind == "if"]
    assert asked == [(False, [0]), (False, [1]), (True, [2])]
