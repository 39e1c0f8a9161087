"""Linear probes: the information that is linearly encoded in the outputs of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bendtrace.analysis.spectra import Products
from bendtrace.analysis.spectra import ridge as closed_form
from bendtrace.calls import Call, rows_of, seen_in
from bendtrace.errors import InputError
from bendtrace.interject.structure import describe
from bendtrace.interject.where import Where
from bendtrace.module import bended_of


@dataclass(frozen=True)
class ProbeData:
    """Features and labels.

    Attributes:
        features: the outputs of nodes, by path: (samples, size).
        labels: one for each sample: (samples,) or (samples, numbers).

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> batches = [(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))]
        >>> data = bt.workflows.probe_data(model, batches, ["0", "1"])
        >>> data["sub_1"].shape, data.labels
        (torch.Size([4, 2]), tensor([0, 1, 0, 1]))
    """

    features: Mapping[str, Tensor] = field(repr=False)
    labels: Tensor = field(repr=False)

    def __getitem__(self, path: str) -> Tensor:
        return self.features[path]

    def __repr__(self) -> str:
        shown = ", ".join(f"{path}: {tuple(v.shape)}" for path, v in self.features.items())
        return f"<ProbeData: {len(self.labels)} samples, {shown}>"


@dataclass(frozen=True)
class RidgeProbe:
    """A linear map from features to labels, fitted in closed form.

    Attributes:
        weight: (numbers, size); in double precision.
        bias: (numbers,).
        classes: the label of each output; None for a regression.

    Example:
        >>> import torch, bendtrace as bt
        >>> features = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> labels = torch.tensor([4, 4, 7, 7])
        >>> probe = bt.workflows.fit_ridge(features, labels)
        >>> probe.classes, probe.weight.shape
        (tensor([4, 7]), torch.Size([2, 1]))
        >>> probe.predict(torch.tensor([[-1.0], [5.0]])), probe.accuracy(features, labels)
        (tensor([4, 7]), 1.0)
    """

    weight: Tensor = field(repr=False)
    bias: Tensor = field(repr=False)
    classes: Tensor | None = None

    def scores(self, features: Tensor) -> Tensor:
        """Return the outputs for some features: (samples, numbers)."""
        return features.to(self.weight.dtype) @ self.weight.T + self.bias

    def predict(self, features: Tensor) -> Tensor:
        """Return the labels for some features: classes, or numbers for a regression."""
        scores = self.scores(features)
        return scores if self.classes is None else self.classes[scores.argmax(-1)]

    def accuracy(self, features: Tensor, labels: Tensor) -> float:
        """Return the share of samples whose class is right.

        Raises:
            InputError: it is a regression.
        """
        if self.classes is None:
            raise InputError("a regression has no accuracy: compare the values of predict()")
        return (self.predict(features) == labels).double().mean().item()


def probe_data(
    model: Callable[..., Any],
    loader: Iterable[Any],
    where: Where,
    *,
    split: Callable[[Any], tuple[Any, Tensor]] | None = None,
    reduce: str | Callable[[Tensor, Call], Tensor] = "mean",
) -> ProbeData:
    """Call a model on labelled batches, and return the outputs of nodes with the labels.

    Args:
        model: a module, a function or a `BendedModule`.
        loader: batches of inputs (see `Call.of`) and labels, as pairs.
        where: nodes; see `BendedModule.interject`. Each outputs one tensor, once per call.
        split: a function from a batch to a pair of inputs and labels, if batches are not pairs.
        reduce: how to reduce the axes between the first and the last: "mean", "last" or "flatten";
            or a function of the value and the `Call` that returns (samples, size).

    Returns:
        `ProbeData`, on the CPU, without gradients.

    Raises:
        InputError: a batch or a value does not fit.
        NodePathError: `where` matches no node.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
        >>> batches = [(torch.randn(4, 3), torch.tensor([0, 1, 0, 1])) for _ in range(3)]
        >>> bt.workflows.probe_data(model, batches, ["0", "1"])
        <ProbeData: 12 samples, sub_0: (12, 2), sub_1: (12, 2)>
    """
    if reduce not in ("mean", "last", "flatten") and not callable(reduce):
        raise InputError(
            f"reduce= has to be 'mean', 'last', 'flatten' or a function, not {reduce!r}"
        )
    bended = bended_of(model)
    features: dict[str, list[Tensor]] = {}
    labels: list[Tensor] = []
    for number, batch in enumerate(loader):
        inputs, given = _pair(batch, split)
        call = Call.of(inputs)
        with torch.no_grad():
            found = seen_in(bended, call, where)
        rows = {path: _row(value, call, reduce, path) for path, value in found.items()}
        if not rows or (number and rows.keys() != features.keys()):
            listed = ", ".join(map(repr, rows)) or "none of them"
            raise InputError(
                f"batch {number} reached {listed}, and others "
                f"{', '.join(map(repr, features)) or 'none'}: all samples have to reach the same "
                "nodes; harvest() separates "
                "them by path"
            )
        for path, value in rows.items():
            if len(value) != len(given):
                raise InputError(
                    f"{path} returns {len(value)} rows for the {len(given)} labels of batch "
                    f"{number}"
                )
            features.setdefault(path, []).append(value.cpu())
        labels.append(given.to("cpu", copy=True))  # the loader may use its memory again
    if not labels:
        raise InputError("the loader has no batches")
    return ProbeData(
        {path: torch.cat(values) for path, values in features.items()}, torch.cat(labels)
    )


def _pair(batch: Any, split: Callable[[Any], tuple[Any, Tensor]] | None) -> tuple[Any, Tensor]:
    pair = batch if split is None else split(batch)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], Tensor):
        raise InputError(
            f"a batch has to be a pair of inputs and a tensor of labels, not {describe(pair)}: "
            "pass a function that converts batches as split="
        )
    return pair[0], pair[1].detach()


def _row(given: Any, call: Call, reduce: Any, path: str) -> Tensor:
    if callable(reduce):
        return rows_of(given, path, "reduce", reduce(given, call))
    value = rows_of(given, path, "reduce")
    if value.dim() == 2:
        return value
    if reduce == "flatten":
        return value.flatten(1)
    return value.flatten(1, -2).mean(1) if reduce == "mean" else value.flatten(1, -2)[:, -1]


def fit_ridge(features: Tensor, labels: Tensor, *, ridge: float = 1e-3) -> RidgeProbe:
    """Fit a linear map to labels by regularised least squares, in double precision.

    It minimises the sum of squared errors plus `ridge` times that of the weights (Hoerl and
    Kennard, 1970); the bias is not penalised. For classes there is one output per class, fitted to
    1 for the class and 0 otherwise; the prediction is the class with the greatest output.
    `bt.analysis.LinearProbe` trains many probes at once along a stream.

    Args:
        features: (samples, size).
        labels: integers or bools, (samples,), for classes; floating point numbers, (samples,) or
            (samples, numbers), for a regression.
        ridge: the weight of the penalty; 0 for none.

    Returns:
        A `RidgeProbe`, in double precision.

    Raises:
        InputError: the shapes do not fit, there is only one class, or a value is not finite.

    Example:
        >>> import torch, bendtrace as bt
        >>> features = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
        >>> probe = bt.workflows.fit_ridge(features, torch.tensor([0, 0, 1, 1]))
        >>> probe.accuracy(features, torch.tensor([0, 0, 1, 1]))
        1.0
    """
    if features.dim() != 2 or not len(features) or len(labels) != len(features):
        raise InputError(
            "features have to be (samples, size) with as many labels, not "
            f"{tuple(features.shape)} and {tuple(labels.shape)}"
        )
    classes = None
    if labels.is_floating_point():
        targets = labels.double().reshape(len(labels), -1)
    else:
        if labels.dim() != 1:
            raise InputError(f"classes have to be (samples,), not {tuple(labels.shape)}")
        classes, which = labels.unique(return_inverse=True)
        if len(classes) < 2:
            raise InputError(f"all labels are {classes[0].item()}: at least two classes are needed")
        targets = torch.nn.functional.one_hot(which).double()
    sums = Products()
    sums.update(torch.cat([features.detach().double(), targets], 1))
    weight, bias = closed_form(sums, targets.shape[1], ridge)
    return RidgeProbe(weight, bias, classes)
