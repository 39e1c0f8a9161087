"""Every model of the corpus with an analyser at all its nodes, against what an observer keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import bendtrace as bt
from bendtrace.analysis import AnalyserList, FeatureStatistics, RunningQuantile
from bendtrace.research.streaming import parts_of
from tests.corpus import CASES
from tests.corpus._case import Case
from tests.promise import bits
from tests.shares import some


class Keeps(bt.Interjection):
    """Keeps a copy of every tensor."""

    observes = True
    self_contained = True

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}

    def after(self, at: bt.NodePass, inputs: bt.Inputs, output: Any) -> None:
        path = at.path or "output"
        if at.path and at.module is not None and not isinstance(output, Tensor):
            path += ".output"
        for name, value in parts_of(path, output):
            self.values.setdefault(name, []).append(value.detach().clone())


def can_be_seen(node: bt.node_selector.Candidate) -> bool:
    if "empty" in node.path:  # whose content is chance
        return False
    return node.path != "" and not node.is_module


def run(model: Any, case: Case, seed: int) -> list[Any]:
    found = []
    for number, path in enumerate([*case.paths, *case.paths]):
        torch.manual_seed(seed + number)
        args, kwargs = case.paths[path]()
        try:
            found.append(bits(model(*args, **kwargs)))
        except Exception as error:
            found.append(repr(error))
    return found


@pytest.mark.parametrize("case", some(CASES, 8, start=1), ids=lambda case: case.name)
def test_statistics_at_all_nodes_are_those_of_what_the_nodes_gave(case: Case) -> None:
    statistics = FeatureStatistics(keep=())
    quantiles = RunningQuantile([0.0, 0.5, 1.0], keep=())
    keeps = Keeps()
    outputs = []
    for what in (None, keeps, AnalyserList([statistics, quantiles])):
        torch.manual_seed(0)
        bended = bt.BendedModule(case.make())
        if what is not None:
            bended.interject(can_be_seen, what, allow_none=True)
        outputs.append(run(bended, case, 5))
    if "an analyser needs tensors or numbers" in repr(outputs[2]):  # at a dtype, an object
        return
    assert outputs[1] == outputs[2]
    assert outputs[0] == outputs[2]
    assert statistics.results.keys() == keeps.values.keys()
    for path, values in keeps.values.items():
        found = statistics.results[path]
        rows = np.concatenate([value.double().numpy().ravel() for value in values])
        assert statistics.calls[path] == len(values)
        assert found["count"] == len(rows)
        if not len(rows):
            continue
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(found["mean"], rows.mean(), rtol=1e-10, atol=1e-12)
            if len(rows) > 1:
                np.testing.assert_allclose(found["var"], rows.var(ddof=1), rtol=1e-9, atol=1e-15)
        assert found["min"].item() == rows.min() or np.isnan(rows.min())
        assert found["max"].item() == rows.max() or np.isnan(rows.max())
        if len(rows) < 2048 and np.isfinite(rows).all():
            ranks = np.quantile(rows, [0.0, 0.5, 1.0])
            np.testing.assert_array_equal(quantiles.results[path]["quantiles"], ranks)
