"""Linear probes at many nodes."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from bendtrace.errors import InputError
from bendtrace.log.capture import lazily_copied
from bendtrace.python.checks import required_int, required_number
from bendtrace.research.analyser import Analyser, Batch
from bendtrace.research.spectra import Products, as_matrix, check_features, check_width, ridge
from bendtrace.research.streaming import (
    Keep,
    Moments,
    Statistic,
    check_keep,
    decode_state,
    encode_state,
)

# So that a forgotten `train_step` ends with a message, and not with the memory.
_MOST_WAITING = 4096


class LinearProbe(Analyser):
    """Linear probes at nodes, trained and scored side by side.

    After Alain and Bengio, "Understanding intermediate layers using linear classifier probes"
    (2016).

    Each node has its own linear layer, which is created when its features are first seen, and its
    own optimizer. In training mode (`train()`, the initial mode) features are kept until
    `train_step()`, which makes one step with each probe; one call of the model serves all. In
    evaluation mode (`eval()`) nothing is trained, and scores are accumulated.

    No gradients reach the model, whose modes and parameters are not changed. It may be called under
    `torch.no_grad()` or `torch.inference_mode()`.

    Set the targets before the model is called, `probe.targets = labels`: class indices with
    `num_classes`, otherwise values of a regression, `(batch,)` or `(batch, outputs)`. If positions
    are separate samples (`keep` without `pool`), there is one target for each position.

    The values of several passes of a node, and of several calls of the model before a
    `train_step()`, form one batch. A probe makes no step if the calls did not reach its node, or if
    its batch has no samples or only targets with `ignore_index`.

    Results are, at each node, the scores since the probe last changed, or since `reset()`:
    `samples`, `loss`, and `accuracy`, `top_k_accuracy`, `class_accuracy`, `class_samples`; or
    `mse`, `r2`, `output_mse`, `output_r2`. In addition `steps`, the number of training steps, and
    `train_loss`, the loss of the last one.

    Args:
        num_classes: the number of classes; None for a regression.
        optimizer: a function from the parameters of each probe to an optimizer:
            `torch.optim.Adam`, the default, or `functools.partial(torch.optim.SGD, lr=0.1)`.
        closed_form: no training steps; sums of products are kept instead, from which `solve(alpha)`
            computes the least-squares map. For classes the targets are 1 and -1. These probes are
            float64, and can be merged before they are solved.
        criterion: a function of predictions and targets that returns the mean loss. None: cross
            entropy for classes, mean squared error for a regression.
        keep: which dimensions are features: `"units"` for all but the first, 1 for channels, -1 for
            the last, or several; each position in the others is a separate sample.
        pool: whether to take the mean over these positions, so that there is one sample per element
            of the batch.
        bias: whether the probes have a bias.
        top_k: the numbers k for which to report how often the target is among the k largest
            predictions.
        ignore_index: targets with this class are ignored.
        seed: each probe is initialised like `nn.Linear` after `torch.manual_seed(seed)`. The global
            random numbers are not touched.
        max_features: the limit of features with `closed_form`, including targets.
        per_pass: whether each pass of a node has its own probe.

    Raises:
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU())
        >>> bended = bt.BendedModule(model)
        >>> probe = bt.analysis.LinearProbe(2, torch.optim.Adam)
        >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        >>> with bended.interject(torch.nn.ReLU, probe), torch.no_grad():
        ...     probe.targets = (x[:, 0] > 0).long()
        ...     for _ in range(3):
        ...         _ = bended(x)
        ...         losses = probe.train_step()
        ...     _ = probe.eval()
        ...     _ = bended(x)
        >>> found = probe.to_dict()["sub_1"]
        >>> found["samples"], found["steps"], sorted(losses)
        (64, 3, ['sub_1'])
    """

    needs_targets: ClassVar[bool] = True

    def __init__(
        self,
        num_classes: int | None = None,
        optimizer: Callable[[Any], Optimizer] | None = None,
        *,
        closed_form: bool = False,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
        keep: Keep = "units",
        pool: bool = False,
        bias: bool = True,
        top_k: tuple[int, ...] = (),
        ignore_index: int = -100,
        seed: int = 0,
        max_features: int = 16384,
        per_pass: bool = False,
    ) -> None:
        super().__init__(per_pass=per_pass)
        required_int("num_classes", num_classes, 1, or_none=True)
        required_int("max_features", max_features, 1)
        required_int("seed", seed)
        for name, function in (("optimizer", optimizer), ("criterion", criterion)):
            if function is not None and not callable(function):
                raise InputError(f"{name} has to be a function, not {function!r}")
        if closed_form and (optimizer is not None or criterion is not None):
            raise InputError("closed_form uses neither an optimizer nor a criterion")
        if keep == "units" and pool:
            raise InputError("with pool, pass the dimensions of the features as keep=: 1, or -1")
        self.num_classes = num_classes
        self.optimizer: Callable[..., Any] | None = (
            None if closed_form else optimizer or torch.optim.Adam
        )
        self.closed_form = closed_form
        self.criterion = criterion
        self.keep = check_keep(keep)
        self.pool = pool
        self.bias = bias
        self.top_k: tuple[int, ...] = _check_top(top_k, num_classes)
        self.ignore_index = ignore_index
        self.seed = seed
        self.max_features = max_features
        self._training = True

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the constructor, by name; functions by their names."""
        found = super().settings
        for name in ("optimizer", "criterion"):
            found[name] = _function_text(found[name])
        return found

    # Modes

    @property
    def training(self) -> bool:
        """True if features are kept for a training step, or scored."""
        return self._training

    def train(self, mode: bool = True) -> Self:
        """Switch to training, or with False to scoring."""
        self._training = bool(mode)
        return self

    def eval(self) -> Self:
        """Switch to scoring."""
        return self.train(False)

    def reset(self) -> None:
        """Forget the scores. The probes, their pending features and their sums stay."""
        for probe in self._states.values():
            probe.scores = None
        self._calls.clear()

    def restart(self) -> None:
        """Forget everything, including the probes."""
        super().reset()

    def discard(self) -> None:
        """Discard the features that are kept for a training step."""
        for probe in self._states.values():
            probe.waiting.clear()

    # The probes

    @property
    def probes(self) -> dict[str, nn.Linear]:
        """The probes created so far, by node path."""
        found = ((path, probe.linear) for path, probe in self._states.items())
        return {path: linear for path, linear in found if linear is not None}

    @property
    def optimizers(self) -> dict[str, Optimizer]:
        """Their optimizers, for example for learning rate schedules."""
        found = {}
        for path, probe in self._states.items():
            self._ready(probe)
            if probe.optimizer is not None:
                found[path] = probe.optimizer
        return found

    def train_step(self) -> dict[str, Tensor]:
        """Make a step with each probe that has pending features.

        Returns:
            The loss of each, before the step, by node path.

        Raises:
            InputError: `closed_form` is set.
        """
        if self.closed_form:
            raise InputError("with closed_form there are no training steps: call solve()")
        losses = {}
        with torch.inference_mode(False), torch.enable_grad():
            for path, probe in self._states.items():
                if probe.waiting:
                    features, targets = probe.drain()
                    if self._has_any(targets):
                        losses[path] = self._step(probe, features, targets)
        return losses

    def _step(self, probe: Probe, features: Tensor, targets: Tensor) -> Tensor:
        optimizer, linear = self._ready(probe), probe.linear
        assert optimizer is not None  # both were made as the features came
        assert linear is not None

        def loss() -> Tensor:
            _clear(linear)
            found = self._loss(linear(features), targets)
            found.backward()
            return found

        # What is under autocast in the backward pass would be rounded as well.
        with torch.autocast(features.device.type, enabled=False):
            found = optimizer.step(loss)  # type: ignore[arg-type]
        _clear(linear)
        probe.scores = None
        probe.steps += 1
        probe.loss = torch.as_tensor(found).detach()
        return probe.loss

    def _has_any(self, targets: Tensor) -> bool:
        if self.num_classes is None:
            return len(targets) > 0
        return bool((targets != self.ignore_index).any())

    def solve(self, alpha: float = 1.0) -> None:
        """Set all probes to the best fit for everything seen in training mode.

        Args:
            alpha: weight of the penalty, the sum of the squared weights; see `ridge`.

        Raises:
            InputError: `closed_form` is not set, there is no data, or `alpha` is negative.
        """
        if not self.closed_form:
            raise InputError("solve() needs LinearProbe(..., closed_form=True)")
        required_number("alpha", alpha, finite=True)
        solved = {}
        for path, probe in self._states.items():
            try:
                solved[path] = ridge(probe.sums, probe.outputs, alpha, bias=self.bias)
            except InputError as error:
                raise InputError(f"{self.label} at {path!r}: {error}") from error
        if not solved:
            raise InputError("there is no data: run batches with targets first, and then solve")
        for path, (weight, bias) in solved.items():
            probe = self._states[path]
            probe.set(weight, bias if self.bias else None)
            probe.scores = None

    # As an analyser

    def start(self, key: str) -> Probe:
        """Return a probe whose features are not known yet."""
        return Probe()

    def update_state(self, state: Probe, value: Tensor, batch: Batch) -> None:
        """Keep features for the next step, add them up, or score the predictions for them."""
        assert batch.targets is not None  # since they are needed
        features, samples = self._features(value)
        targets, outputs = self._targets_for(batch.targets, samples)
        targets = targets.to(features.device)
        state.check(features.shape[1], outputs)
        if not self._training:
            self._score(state, features, targets, outputs)
        elif self.closed_form:
            self._sum(state, features, targets, outputs)
        else:
            if len(state.waiting) >= _MOST_WAITING:
                raise InputError(
                    f"the features of {_MOST_WAITING} batches are pending: call train_step() "
                    "after each call of the model, discard(), or eval() if nothing is to be "
                    "trained"
                )
            self._make(state, features, outputs)
            self._ready(state)
            # A copy, since their memory may be used for the next batch; and it is no inference
            # tensor, with which no gradient can be computed.
            state.waiting.append((lazily_copied(features), targets.clone()))

    def result(self, state: Probe) -> dict[Any, Any]:
        """Return the scores of a probe."""
        scores = state.scores or self._scores(state.outputs)
        found = scores.result()
        if not self.closed_form:
            loss = float("nan") if state.loss is None else float(state.loss)
            found |= {"steps": state.steps, "train_loss": loss}
        return found

    # Details

    def _features(self, value: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Return a matrix, and the shape that its samples have in the value."""
        if value.dim() == 0:
            raise InputError("a number has no dimension that counts samples")
        kept = _feature_dims(value, self.keep)
        rows = as_matrix(value, self.keep)
        samples = tuple(size for dim, size in enumerate(value.shape) if dim not in kept)
        exact = (
            torch.float64 if self.closed_form or not value.is_floating_point() else torch.float32
        )
        rows = rows.to(torch.promote_types(rows.dtype, exact))
        if self.pool and len(samples) > 1:
            rows = rows.reshape(samples[0], -1, rows.shape[1]).mean(1)
            samples = samples[:1]
        if not rows.shape[1]:
            raise InputError(f"a value of shape {tuple(value.shape)} has no features")
        return rows, samples

    def _targets_for(self, targets: Tensor, samples: tuple[int, ...]) -> tuple[Tensor, int]:
        """Return a target for each row, and how many outputs there are."""
        shape = tuple(targets.shape)
        if self.num_classes is None:
            outputs = shape[len(samples) :] if len(shape) > 1 else ()
            if len(outputs) > 1 or shape != (*samples, *outputs):
                raise InputError(_unfit_shape(shape, samples, " or that and one for outputs"))
            found = targets.reshape(-1, *outputs)
            if not bool(found.isfinite().all()):
                raise InputError("some targets are not finite")
            return found, outputs[0] if outputs else 1
        if targets.is_floating_point() or targets.is_complex():
            raise InputError(
                f"targets have to be class indices, but these are {targets.dtype}; for a "
                "regression do not pass num_classes"
            )
        if shape != samples:
            raise InputError(_unfit_shape(shape, samples, ""))
        found = targets.reshape(-1).long()
        wrong = ((found < 0) | (found >= self.num_classes)) & (found != self.ignore_index)
        if bool(wrong.any()):
            raise InputError(
                f"there is a target {int(found[wrong][0])}, but classes are numbered from 0 to "
                f"{self.num_classes - 1}"
            )
        return found, self.num_classes

    def _make(self, state: Probe, features: Tensor, outputs: int) -> None:
        if state.linear is None:
            state.make(features, outputs, self.bias, self.seed)

    def _ready(self, state: Probe) -> Optimizer | None:
        """Return the optimizer of a probe; a loaded or copied probe gets a new one."""
        if state.optimizer is None and state.linear is not None and self.optimizer is not None:
            with torch.inference_mode(False):
                state.optimizer = self.optimizer(state.linear.parameters())
                if state.optimizer_state is not None:
                    state.optimizer.load_state_dict(state.optimizer_state)
                    state.optimizer_state = None
        return state.optimizer

    def _loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        if self.num_classes is None:
            if targets.dim() == 1:
                predictions = predictions.squeeze(-1)
            targets = targets.to(predictions.dtype)
            return (self.criterion or F.mse_loss)(predictions, targets)
        if self.criterion is None:
            return F.cross_entropy(predictions, targets, ignore_index=self.ignore_index)
        counted = targets != self.ignore_index
        return self.criterion(predictions[counted], targets[counted])

    def _score(self, state: Probe, features: Tensor, targets: Tensor, outputs: int) -> None:
        if self.closed_form and state.linear is None:
            raise InputError("the probe is not solved yet: call solve() before scoring")
        self._make(state, features, outputs)
        linear = state.linear
        assert linear is not None
        if self.num_classes is not None:
            counted = targets != self.ignore_index
            features, targets = features[counted], targets[counted]
        features = features.to(linear.weight.device, linear.weight.dtype)
        targets = targets.to(features.device)
        predictions = linear(features)
        loss = 0.0
        if len(targets):
            # Sums in float64: the mean over all samples does not depend on the batches.
            exact = predictions if self.criterion is not None else predictions.double()
            loss = float(self._loss(exact, targets)) * len(targets)
        if state.scores is None:
            state.scores = self._scores(outputs)
        if isinstance(state.scores, ValueScores):
            targets = targets.reshape(len(targets), outputs)
        state.scores.add(predictions, targets, loss)

    def _scores(self, outputs: int) -> ClassScores | ValueScores:
        if self.num_classes is None:
            return ValueScores(outputs)
        return ClassScores(self.num_classes, self.top_k)

    def _sum(self, state: Probe, features: Tensor, targets: Tensor, outputs: int) -> None:
        check_features(features.shape[1] + outputs, self.max_features, "or pool=True")
        if self.num_classes is not None:
            counted = targets != self.ignore_index
            features, targets = features[counted], targets[counted]
            targets = 2 * F.one_hot(targets, self.num_classes) - 1
        targets = targets.reshape(len(features), outputs)
        state.sums.update(torch.cat([features, targets.to(features.dtype)], 1))
        state.outputs = outputs


def _clear(linear: nn.Linear) -> None:
    # As `zero_grad` does, which takes a good part of the time of a step.
    for parameter in linear.parameters():
        parameter.grad = None


def _feature_dims(value: Tensor, keep: Keep) -> set[int]:
    """Return which dimensions are features, as numbers from 0."""
    if value.dim() == 1:
        return set()
    if keep == "units":
        return set(range(1, value.dim()))
    dims = (keep,) if isinstance(keep, int) else keep
    return {int(dim) % value.dim() for dim in dims}


def _unfit_shape(shape: tuple[int, ...], samples: tuple[int, ...], more: str) -> str:
    hint = ""
    if len(samples) > 1 and len(shape) < len(samples):
        hint = "; pass one for each position, or pool=True"
    return (
        f"targets have shape {shape}, but the samples have shape {samples}: the two have to be "
        f"the same{more}{hint}"
    )


def _check_top(top_k: Any, classes: int | None) -> tuple[int, ...]:
    given = (top_k,) if isinstance(top_k, int) else tuple(top_k)
    if given and classes is None:
        raise InputError("top_k= is for classes: pass num_classes")
    for k in given:
        if type(k) is not int or not 1 <= k <= (classes or 0):
            raise InputError(f"top_k= has to be numbers from 1 to {classes}, not {k!r}")
    return given


def _function_text(function: Any) -> str | None:
    """Return the name of a function, with the arguments of a partial one."""
    if function is None:
        return None
    if isinstance(function, functools.partial):
        given = [repr(value) for value in function.args]
        given += [f"{name}={value!r}" for name, value in sorted(function.keywords.items())]
        return f"{_function_text(function.func)}({', '.join(given)})"
    return str(getattr(function, "__qualname__", type(function).__qualname__))


# One linear probe: its map, its optimizer, its pending batches, and its scores.


class ClassScores(Statistic):
    """Loss, accuracy, top-k accuracy, and accuracy for each class.

    Args:
        classes: the number of classes.
        top_k: the numbers k for the top-k accuracies.

    Example:
        >>> scores = ClassScores(2)
        >>> predicted, targets = torch.tensor([[2.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
        >>> scores.add(predicted, targets, loss=1.4)
        >>> scores.result()["accuracy"], scores.result()["class_accuracy"]
        (0.5, tensor([1., 0.], dtype=torch.float64))
    """

    correct: Tensor
    seen: Tensor
    loss: float
    count: int

    def __init__(self, classes: int, top_k: tuple[int, ...] = ()) -> None:
        self.top_k: tuple[int, ...] = tuple(top_k)
        self.count = 0
        self.loss = 0.0
        self.among: list[int] = [0] * len(self.top_k)
        self.seen = torch.zeros(classes, dtype=torch.int64)
        self.correct = torch.zeros(classes, dtype=torch.int64)

    def add(self, predictions: Tensor, targets: Tensor, loss: float) -> None:
        """Add (n, classes) predictions, (n,) numbers of classes, and the sum of their losses."""
        classes = len(self.seen)
        is_right = predictions.argmax(1) == targets
        self.seen += torch.bincount(targets, minlength=classes).cpu()
        self.correct += torch.bincount(targets[is_right], minlength=classes).cpu()
        if self.top_k:
            best = predictions.topk(max(self.top_k), dim=1).indices == targets[:, None]
            for i, k in enumerate(self.top_k):
                self.among[i] += int(best[:, :k].sum())
        self.loss += loss
        self.count += len(targets)

    def merge(self, other: Self) -> None:
        """Add the scores of others."""
        self.count += other.count
        self.loss += other.loss
        self.among = [mine + theirs for mine, theirs in zip(self.among, other.among, strict=True)]
        self.seen += other.seen
        self.correct += other.correct

    def result(self) -> dict[str, Any]:
        """Return the scores by name; NaN without samples."""
        return {
            "samples": self.count,
            "loss": _share_of(self.loss, self.count),
            "accuracy": _share_of(int(self.correct.sum()), self.count),
            **{
                f"top_{k}_accuracy": _share_of(among, self.count)
                for k, among in zip(self.top_k, self.among, strict=True)
            },
            "class_accuracy": self.correct.double() / self.seen,  # 0 / 0 is NaN
            "class_samples": self.seen.clone(),
        }


class ValueScores(Statistic):
    """Loss, mean squared error, and the coefficient of determination of each output.

    R2 is 1 minus the ratio of the sum of squared errors to the sum of the targets' squared
    deviations from their mean, averaged over the outputs, as in scikit-learn's `r2_score`: for
    constant targets it is 1 without errors, else 0, and NaN for fewer than two samples.

    Example:
        >>> scores = ValueScores(1)
        >>> scores.add(torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [4.0]]), loss=2.0)
        >>> scores.result()["mse"], scores.result()["r2"]
        (1.0, 0.75)
    """

    loss: float
    squares: Tensor

    def __init__(self, outputs: int) -> None:
        self.loss = 0.0
        self.squares = torch.zeros(outputs, dtype=torch.float64)
        self.targets: Moments = Moments()

    def add(self, predictions: Tensor, targets: Tensor, loss: float) -> None:
        """Add predictions and targets, (n, outputs) each, and the loss summed over them."""
        truth = targets.to("cpu", torch.float64)
        self.squares += (predictions.to("cpu", torch.float64) - truth).square().sum(0)
        self.targets.update(truth)
        self.loss += loss

    def merge(self, other: Self) -> None:
        """Add the scores of others."""
        self.targets.merge(other.targets)
        self.squares += other.squares
        self.loss += other.loss

    def result(self) -> dict[str, Any]:
        """Return the scores by name; NaN without samples."""
        count = self.targets.count
        r2 = self._determination(count)
        return {
            "samples": count,
            "loss": _share_of(self.loss, count),
            "mse": _share_of(float(self.squares.mean()), count),
            "r2": float(r2.mean()),
            "output_mse": self.squares / count,
            "output_r2": r2,
        }

    def _determination(self, count: int) -> Tensor:
        if count < 2:
            return torch.full_like(self.squares, math.nan)
        spread = self.targets.variance(correction=0) * count
        is_constant = spread == 0
        found = 1 - self.squares / torch.where(is_constant, 1.0, spread)
        return torch.where(is_constant, (self.squares == 0).double(), found)


def _share_of(total: float, count: int) -> float:
    return total / count if count else math.nan


class Probe(Statistic):
    """The state of one node's probe."""

    outputs: int  # the number of outputs; 1 while unknown
    steps: int  # the number of steps so far

    def __init__(self) -> None:
        # The map; None before features were seen, or before it is solved.
        self.linear: nn.Linear | None = None
        self.optimizer: Optimizer | None = None  # None until it is needed
        self.optimizer_state: dict[str, Any] | None = None  # the initial state of the optimizer
        self.waiting: list[tuple[Tensor, Tensor]] = []  # features and targets for the next step
        self.steps = 0
        self.loss: Tensor | None = None  # the loss of the last step
        self.sums: Products = Products()  # of products of features and targets, for the closed form
        self.outputs = 1
        self.scores: ClassScores | ValueScores | None = None  # None if the map has changed since

    def make(self, features: Tensor, outputs: int, bias: bool, seed: int) -> None:
        """Create the map for features like `nn.Linear` after `torch.manual_seed(seed)`."""
        count, dtype = features.shape[1], features.dtype
        generator = torch.Generator().manual_seed(seed)
        weight, shift = torch.empty(outputs, count, dtype=dtype), None
        # Those of nn.Linear, seen in torch 2.13 to 2.15; tests/test_analysis_probes.py compares.
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        if bias:
            bound = 1 / math.sqrt(count)
            shift = torch.empty(outputs, dtype=dtype).uniform_(-bound, bound, generator=generator)
        self.set(weight.to(features.device), shift)

    def set(self, weight: Tensor, bias: Tensor | None) -> None:
        """Set the map, and create it if necessary."""
        outputs, features = weight.shape
        with torch.inference_mode(False), torch.no_grad():
            linear = nn.utils.skip_init(
                nn.Linear, features, outputs, bias=bias is not None, dtype=weight.dtype,
                device=weight.device,
            )  # fmt: skip
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
        self.linear, self.outputs = linear, outputs

    def check(self, features: int, outputs: int) -> None:
        """Raise an `InputError` if the number of features or targets has changed."""
        width = self.sums.width
        n_features = None if width is None else width - self.outputs
        if self.linear is not None:
            n_features = self.linear.in_features
        check_width(n_features, features)
        if n_features is not None and outputs != self.outputs:
            raise InputError(f"targets have {outputs} values, but {self.outputs} before")

    def drain(self) -> tuple[Tensor, Tensor]:
        """Return the pending batches as one batch, and forget them."""
        waiting, self.waiting = self.waiting, []
        if len(waiting) == 1:
            features, targets = waiting[0]
        else:
            features = torch.cat([item for item, _ in waiting])
            targets = torch.cat([item for _, item in waiting])
        if self.linear is not None:
            weight = self.linear.weight
            features, targets = features.to(weight), targets.to(weight.device)
        return features, targets

    def merge(self, other: Self) -> None:
        """Add another one: its sums before they are solved, or its scores if the maps are equal."""
        if (self.linear is None) != (other.linear is None):
            raise InputError("one probe has a map, but the other has none yet")
        if self.linear is None:
            self.check_sums(other)
            self.sums.merge(other.sums)
            self.outputs = other.outputs if other.sums.width is not None else self.outputs
        elif not _equal(self.linear, other.linear):
            raise InputError(
                "the probes have different maps: scores can be merged if the same probe was "
                "loaded everywhere, and sums before they are solved"
            )
        elif not _equal_sums(self.sums, other.sums):
            raise InputError(
                "they were solved from different sums: merge the sums first, and then solve"
            )
        self.waiting += other.waiting
        if other.scores is not None:
            if self.scores is None:
                self.scores = copy.deepcopy(other.scores)
            else:
                self.scores.merge(other.scores)  # type: ignore[arg-type]

    def check_sums(self, other: Self) -> None:
        """Raise an `InputError` if the other sums have different features or targets."""
        if self.sums.width is not None and other.sums.width is not None:
            check_width(self.sums.width - self.outputs, other.sums.width - other.outputs)
            if self.outputs != other.outputs:
                raise InputError(
                    f"targets have {other.outputs} values there, but {self.outputs} here"
                )

    def result(self) -> dict[str, Any]:
        """Return the scores by name."""
        return {} if self.scores is None else self.scores.result()

    def state_dict(self) -> dict[str, Any]:
        """Return everything except the pending batches, as containers of tensors and numbers."""
        linear = None
        if self.linear is not None:
            linear = {
                name: value.detach().clone() for name, value in self.linear.named_parameters()
            }
        state = self.optimizer_state
        if self.optimizer is not None:
            state = copy.deepcopy(self.optimizer.state_dict())
        return {
            "linear": linear,
            "optimizer": state,
            "steps": self.steps,
            "loss": None if self.loss is None else self.loss.clone(),
            "sums": encode_state(self.sums),
            "outputs": self.outputs,
            "scores": None if self.scores is None else encode_state(self.scores),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of another probe."""
        Probe.__init__(self)
        if state["linear"] is not None:
            self.set(state["linear"]["weight"], state["linear"].get("bias"))
        self.optimizer_state = copy.deepcopy(state["optimizer"])
        self.steps, self.outputs = state["steps"], state["outputs"]
        self.loss = None if state["loss"] is None else state["loss"].clone()
        self.sums = decode_state(state["sums"])
        self.scores = None if state["scores"] is None else decode_state(state["scores"])


def _equal(one: nn.Linear, other: nn.Linear | None) -> bool:
    if other is None:
        return False
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        mine[name].shape == theirs[name].shape
        and torch.equal(mine[name], theirs[name].to(mine[name]))
        for name in mine
    )


def _equal_sums(one: Products, other: Products) -> bool:
    if one.count != other.count or one.width != other.width:
        return False
    return torch.equal(one.uncentred, other.uncentred.to(one.uncentred))
