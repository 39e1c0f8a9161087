"""TorchWatcher's probes, and the models that interjections are in."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bendtrace.errors import InputError
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.module import BendedModule


class LinearProbe(Interjection, nn.Module):
    """TorchWatcher's linear probes: one layer for each node, trained with any criterion.

    In contrast to `bendtrace.analysis.LinearProbe`, targets and losses are not checked: whatever
    the criterion takes for the outputs of the probes is accepted, such as targets of
    `nn.BCEWithLogitsLoss`. In training mode the outputs of the last call are kept for
    `train_step`; in evaluation mode scores are accumulated.

    Args:
        num_classes: outputs of each probe.
        partial_optim: a function from the parameters of a probe to its optimizer.
        criterion: the loss, a function of the outputs and the targets; None for none.

    Attributes:
        probes: the probes, by the name of the node with "_probe" after it. An item of a
            `nn.Sequential` is named by its number: "1_probe".
        optimisers: their optimizers, by the name of the node.
        targets: the targets of the next call.

    Example:
        >>> import torch, bendtrace as bt
        >>> tw = bt.compat.torchwatcher
        >>> probe = tw.LinearProbe(1, torch.optim.Adam, torch.nn.BCEWithLogitsLoss())
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> watched = tw.interject_by_match(model, bt.node_selector.Activations.is_relu, probe)
        >>> probe.targets = torch.ones(4, 1)
        >>> _ = watched(torch.ones(4, 2))
        >>> probe.train_step()
        >>> list(probe.probes), probe.to_dict()["1"].shape
        (['1_probe'], torch.Size([4, 1]))
        >>> _ = probe.eval()
        >>> _ = watched(torch.ones(4, 2))
        >>> sorted(probe.to_dict()["1"])
        ['acc', 'loss']
    """

    observes = True

    def __init__(
        self,
        num_classes: int,
        partial_optim: Callable[[Any], Optimizer] | None = None,
        criterion: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.num_classes = num_classes
        self.partial_optim = partial_optim or torch.optim.Adam
        self.criterion = criterion
        self.probes = nn.ModuleDict()
        self.optimisers: dict[str, Optimizer] = {}
        self.targets: Tensor | None = None
        self._outputs: dict[str, Tensor] = {}
        self._scores: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        return "LinearProbe"

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Keep the outputs of the probe of a node, or score them."""
        if not isinstance(output, Tensor) or output.dim() == 0:
            raise InputError(f"a linear probe at {at.path!r} needs a batch, not {type(output)}")
        name = re.sub(r"(^|\.)sub_(\d+)(?=\.|$)", r"\1\2", at.path)
        features = output.detach().flatten(1)
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            key = f"{name.replace('.', '_')}_probe"
            if key not in self.probes:
                made = nn.Linear(features.shape[1], self.num_classes)
                self.probes[key] = made.to(features.device, features.dtype)
                self.optimisers[name] = self.partial_optim(self.probes[key].parameters())
            predicted = self.probes[key](features.clone())
            if self.training:
                self._outputs[name] = predicted
            else:
                self._score(name, predicted.detach())

    def _score(self, name: str, predicted: Tensor) -> None:
        targets = self._given()
        loss = float("nan") if self.criterion is None else float(self.criterion(predicted, targets))
        if targets.is_floating_point():
            right = (predicted > 0) == (targets > 0.5)
        else:
            right = predicted.argmax(1) == targets
        sums = self._scores.setdefault(name, [0.0, 0.0, 0.0])
        count = len(predicted)
        for place, amount in enumerate((right.float().mean().item() * count, loss * count, count)):
            sums[place] += amount

    def _given(self) -> Tensor:
        if self.targets is None:
            raise InputError("set the targets first: probe.targets = labels")
        return self.targets

    def train_step(self) -> None:
        """Make a step with each probe that the last call of the model reached.

        Raises:
            InputError: there is no criterion, or there are no targets.
        """
        if self.criterion is None:
            raise InputError("train_step needs a criterion")
        targets = self._given()
        with torch.inference_mode(False), torch.enable_grad():
            for name, predicted in self._outputs.items():
                optimiser = self.optimisers[name]
                optimiser.zero_grad()
                self.criterion(predicted, targets).backward(retain_graph=True)
                optimiser.step()
        self._outputs = {name: predicted.detach() for name, predicted in self._outputs.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the outputs of the last call (in training) or the scores, by node."""
        if self.training:
            return {name: predicted.detach() for name, predicted in self._outputs.items()}
        return {
            name: {"acc": right / count, "loss": loss / count}
            for name, (right, loss, count) in self._scores.items()
        }

    def reset(self) -> None:
        """Forget the outputs and the scores, but not the probes."""
        self._outputs.clear()
        self._scores.clear()


class WatchedModule(BendedModule):
    """A model to which the interjections in it belong."""

    def _interjections(self) -> dict[str, nn.Module]:
        found = (getattr(one.what, "what", one.what) for one in self.insertions)
        modules: dict[int, Any] = {id(one): one for one in found if is_made(one)}
        return {f"{type(one).__name__}{n}": one for n, one in enumerate(modules.values())}

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of the model and of the interjections."""
        for module in self._interjections().values():
            module.train(mode)
        return super().train(mode)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        for module in self._interjections().values():
            module._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the model, and the interjections."""
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        for name, module in self._interjections().items():
            yield from module.named_modules(memo, f"{prefix}.{name}".strip("."), remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the model, with those of the interjections."""
        found = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        for name, module in self._interjections().items():
            found.update(module.state_dict(prefix=f"{prefix}{name}."))
        return found

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict that this model has returned."""
        own = dict(state_dict)
        for name, module in self._interjections().items():
            keys = [key for key in own if key.startswith(f"{name}.")]
            mine = {key.removeprefix(f"{name}."): own.pop(key) for key in keys}
            module.load_state_dict(mine, *args, **kwargs)
        return super().load_state_dict(own, *args, **kwargs)


def is_made(interjection: Any) -> bool:
    """Whether it is a module whose constructor was called."""
    return isinstance(interjection, nn.Module) and "_modules" in vars(interjection)
