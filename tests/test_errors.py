"""Errors as they come out of other processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from bendtrace import errors

EXAMPLES = [
    errors.BendShapeError("message", "path", (1,), (2,), (0,)),
    errors.DivergenceError("reason"),
    errors.ExportError("reason", "place"),
    errors.HarvestError("message", 3, ("a", "b")),
    errors.InterjectionError("message", "path"),
    errors.LoadError("directory", "reason", is_newer=True),
    errors.NodePathError("message", "path", ("path.a",)),
    errors.NotReplayableError(["one", "two"]),
    errors.PatchError("message", path="path", expected="Tensor(2)"),
    errors.RankDivergenceError("0", {1: "one", 0: "other"}),
    errors.SaveError("directory", "reason"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_crosses_to_another_process_with_all_that_it_says(error: Exception) -> None:
    error.add_note("raised in a worker")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert (str(other), vars(other)) == (str(error), vars(error))
