"""Lenses: the outputs of earlier nodes, decoded by the end of the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bendtrace.debug.calls import Call, as_rows, values_in_call
from bendtrace.errors import InputError
from bendtrace.insert.leaves import describe
from bendtrace.insert.where import Where
from bendtrace.log.entries import counted
from bendtrace.module import BendedModule, bended_of
from bendtrace.python.lazy import required_pandas
from bendtrace.research.spectra import Products
from bendtrace.research.spectra import ridge as closed_form
from bendtrace.show.paint import heat_map

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LensResult:
    """Logits at several sites of a model, and the model's own logits.

    Attributes:
        sites: node paths, in the order given.
        logits: for each site, with shape (examples, positions, classes), or (examples, classes).
        final: the logits of the model, with the same shape.
        decode: a function from a class to its text; None uses the index.

    Example:
        >>> import torch, bendtrace as bt
        >>> _ = torch.manual_seed(0)
        >>> layers = torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 5)
        >>> model = torch.nn.Sequential(*layers)
        >>> found = bt.workflows.logit_lens(model, torch.ones(2, 3), ["0", "1"], unembed=["2"])
        >>> found.sites, found["sub_0"].shape, found.final.shape
        (('sub_0', 'sub_1'), torch.Size([2, 5]), torch.Size([2, 5]))
        >>> found.top(3)["sub_1"].shape, found.kl()["sub_1"]
        (torch.Size([2, 3]), tensor([0., 0.]))
    """

    sites: tuple[str, ...]
    logits: Mapping[str, Tensor] = field(repr=False)
    final: Tensor = field(repr=False)
    decode: Callable[[int], str] | None = field(default=None, repr=False)

    def __getitem__(self, site: str) -> Tensor:
        return self.logits[site]

    def top(self, k: int = 1) -> Mapping[str, Tensor]:
        """Return the k classes with the greatest logits at each site: (examples, positions, k)."""
        return {site: value.topk(k, dim=-1).indices for site, value in self.logits.items()}

    def entropy(self) -> Mapping[str, Tensor]:
        """Return the entropy at each site, in nats: (examples, positions)."""
        found = {}
        for site, value in self.logits.items():
            logs = _logs(value)
            found[site] = -torch.xlogy(logs.exp(), logs.exp()).sum(-1)
        return found

    def kl(self) -> Mapping[str, Tensor]:
        """Return KL(final || site), in nats: (examples, positions). 0 if they are equal."""
        return {site: divergence(self.final, value) for site, value in self.logits.items()}

    def rank(self, classes: Tensor) -> Mapping[str, Tensor]:
        """Return how many classes have greater logits than the given ones, at each site.

        Args:
            classes: one for each example and position: (examples, positions).
        """
        found = {}
        for site, value in self.logits.items():
            own = value.gather(-1, classes.unsqueeze(-1).to(value.device))
            found[site] = (value > own).sum(-1)
        return found

    def to_pandas(self, k: int = 1) -> pd.DataFrame:
        """Return a table with a row for each site, example and position.

        Args:
            k: how many classes to list.

        Raises:
            ImportError: pandas is not installed.
        """
        entropy, kl, rows = self.entropy(), self.kl(), []
        for site, value in self.logits.items():
            best = value.softmax(-1).topk(k, dim=-1)
            for at in product(*map(range, value.shape[:-1])):
                shown = [self._class_text(int(c)) for c in best.indices[at]]
                row: dict[str, Any] = {"site": site}
                row |= dict(zip(("example", "position"), at, strict=False))
                row |= {"top": shown[0] if k == 1 else shown}
                chances = best.values[at].tolist()
                row |= {"probability": chances[0] if k == 1 else chances}
                row |= {"entropy": entropy[site][at].item(), "kl": kl[site][at].item()}
                rows.append(row)
        return required_pandas().DataFrame(rows)  # type: ignore[no-any-return]

    def _class_text(self, number: int) -> Any:
        return number if self.decode is None else self.decode(number)

    def _repr_html_(self) -> str:
        """Return the best classes of the first example, coloured by their probabilities."""
        best = {site: value[0].softmax(-1).max(-1) for site, value in self.logits.items()}
        values = [found.values.reshape(-1).tolist() for found in best.values()]
        texts = [list(map(self._class_text, b.indices.reshape(-1).tolist())) for b in best.values()]
        columns = [str(number) for number in range(len(values[0]))]
        title = "best classes of the first example, and their probabilities"
        return heat_map(title, columns, self.sites, values, texts)

    def __repr__(self) -> str:
        kl = self.kl()
        wide = max(map(len, self.sites))
        sites = counted(len(self.sites), "site")
        lines = [f"<LensResult: {sites}, logits {tuple(self.final.shape)}>"]
        for site in self.sites:
            row = self.logits[site][0].reshape(-1, self.final.shape[-1]).argmax(-1).tolist()
            shown = " ".join(str(self._class_text(number)) for number in row[:8])
            more = " ..." if len(row) > 8 else ""
            lines.append(f"  {site:<{wide}}  kl {kl[site].mean():.3f}  top {shown}{more}")
        return "\n".join(lines)


def divergence(final: Tensor, logits: Tensor) -> Tensor:
    """Return KL(final || logits) along the last axis, in nats."""
    ours, theirs = _logs(final), _logs(logits)
    # Classes without probability in the first count nothing, whatever they have in the second.
    terms = torch.where(ours == -torch.inf, 0.0, ours.exp() * (ours - theirs))
    return terms.sum(-1)


def _logs(logits: Tensor) -> Tensor:
    """Return logarithms of probabilities, for half precision in single precision."""
    return logits.log_softmax(-1, torch.float32 if logits.dtype.itemsize < 4 else None)


def logit_lens(
    model: Callable[..., Any],
    inputs: Any,
    sites: Any,
    unembed: Any = ("ln_f", "lm_head"),
    *,
    output: Callable[[Any], Tensor] | None = None,
    decode: Callable[[int], str] | None = None,
) -> LensResult:
    """Apply the end of a model to the outputs of earlier nodes (nostalgebraist, 2020).

    Args:
        model: a module, a function or a `BendedModule`.
        inputs: its inputs; see `Call.of`.
        sites: nodes, in the desired order; see `BendedModule.interject`. The output of each is a
            tensor that the end of the model accepts.
        unembed: the end of the model, in order: qualified names of modules (`"transformer.ln_f"`,
            `"lm_head"`), modules, and functions.
        output: a function from the model's output to the logits; None if the output is a tensor, or
            has `logits`.
        decode: a function from the index of a class to its text, such as a tokenizer's `decode`.

    Returns:
        A `LensResult`, without gradients. At a site whose value is the model's own input to its
        end, the logits equal those of the model, bit for bit.

    Raises:
        InputError: the end does not accept the output of a site, or an argument is invalid.
        NodePathError: a site matches no node.

    Example:
        >>> import torch, bendtrace as bt
        >>> from collections import OrderedDict
        >>> layers = OrderedDict(a=torch.nn.Linear(3, 3), b=torch.nn.ReLU())
        >>> model = torch.nn.Sequential(layers | {"head": torch.nn.Linear(3, 5)})
        >>> found = bt.workflows.logit_lens(model, torch.ones(2, 3), ["a", "b"], unembed=["head"])
        >>> torch.equal(found["b"], found.final)
        True
        >>> found.entropy()["a"].shape
        torch.Size([2])
    """
    bended = bended_of(model)
    end = _ModelEnd(bended.model, unembed)
    with torch.no_grad():
        found, final = _site_values(bended, Call.of(inputs), sites, output)
        logits = {site: end(value, site) for site, value in found.items()}
    for site, value in logits.items():
        _check_fits(site, value, final)
    return LensResult(tuple(logits), logits, final, decode)


def _site_values(
    bended: BendedModule, call: Call, sites: Any, output: Callable[[Any], Tensor] | None
) -> tuple[dict[str, Any], Tensor]:
    """Return the outputs of sites in a call, in the order of `sites`, and the model's logits."""
    found, given = values_in_call(bended, call, sites, return_output=True)
    if not found:
        raise InputError(f"this call reached none of the sites {sites!r}")
    return dict(found), _logits_in(given, output).detach()


def _logits_in(given: Any, output: Callable[[Any], Tensor] | None) -> Tensor:
    if output is not None:
        given = output(given)
    elif not isinstance(given, Tensor):
        # Outputs of Hugging Face models are mappings, too.
        logits = given.get("logits") if isinstance(given, Mapping) else None
        given = getattr(given, "logits", given) if logits is None else logits
    if not isinstance(given, Tensor) or not given.is_floating_point() or given.dim() < 2:
        raise InputError(
            f"the model returns {describe(given)}, but logits are needed (examples, ..., "
            "classes): pass a function that extracts them as output="
        )
    return given


def _check_fits(site: str, logits: Tensor, final: Tensor) -> None:
    if logits.shape != final.shape:
        raise InputError(
            f"the end of the model returns {tuple(logits.shape)} for the output of {site}, but "
            f"the model returns {tuple(final.shape)}: pass the right modules as unembed=, or a "
            "function that extracts the logits as output="
        )


class _ModelEnd:
    """The end of a model, as functions that are called one after another."""

    def __init__(self, model: Any, unembed: Any) -> None:
        listed = (
            [unembed] if isinstance(unembed, (str, nn.Module)) or callable(unembed) else unembed
        )
        modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
        self.steps: list[Callable[[Any], Any]] = []
        if not isinstance(listed, Iterable):
            raise InputError(f"unembed= takes names of modules and functions, not {unembed!r}")
        for item in listed:
            if isinstance(item, str):
                step = modules.get(item)
                ends = [name for name in modules if name == item or name.endswith(f".{item}")]
                if step is None and len(ends) == 1:
                    step = modules[ends[0]]
                if step is None:
                    near = ", ".join(ends or list(modules)[1:12])
                    raise InputError(f"unembed=: the model has no module {item!r}; it has {near}")
                self.steps.append(step)
            elif callable(item) and not isinstance(item, type):
                self.steps.append(item)
            else:
                raise InputError(f"unembed= takes names of modules and functions, not {item!r}")
        if not self.steps:
            raise InputError(
                "unembed= is empty: pass the modules that turn activations into logits"
            )

    def __call__(self, value: Any, site: str) -> Tensor:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise InputError(
                f"{site} returns {describe(value)}, which is not a floating-point tensor; for "
                "a container, name a part: 'path|sub_0'"
            )
        try:
            made: Any = value
            # What it draws, if it is in training mode, is not the model's to draw.
            with torch.random.fork_rng(devices=[]):
                for step in self.steps:
                    made = _call_part(step, made)
        except RuntimeError as error:
            raise InputError(
                f"the end of the model cannot take the output of {site}, {tuple(value.shape)}: "
                f"{error}"
            ) from error
        if not isinstance(made, Tensor):
            raise InputError(
                f"the end of the model returns {describe(made)} at {site}, not a tensor"
            )
        return made


def _call_part(step: Callable[[Any], Any], value: Any) -> Any:
    """Call a part of a model without changing its buffers, as a batch norm in training would."""
    if isinstance(step, nn.Module):
        buffers = {name: buffer.clone() for name, buffer in step.named_buffers() if step.training}
        if buffers:
            return torch.func.functional_call(step, buffers, (value,))
    return step(value)


class TunedLens(nn.Module):
    """A logit lens with an affine translator at each site (Belrose et al., 2023).

    At each site the end of the model is applied to `value + A value + b`. `A` and `b` start at
    zero, so that it is the logit lens at first. Training brings the logits closer to those of the
    model: the loss is KL(final || site), the mean over examples and positions.

    Args:
        model: a module, a function or a `BendedModule`. It is not changed, and is not a submodule.
        sites: nodes; see `BendedModule.interject`. The output of each is one tensor.
        unembed: the end of the model; see `logit_lens`.
        inputs: an example, which determines the sites and their sizes.
        output: a function from the model's output to the logits; see `logit_lens`.

    Attributes:
        translators: a linear layer for each site.
        sites: their node paths.
        steps: the number of batches used for training so far.

    Raises:
        InputError: an argument is invalid.
        NodePathError: a site matches no node.

    Example:
        >>> import torch, bendtrace as bt
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        >>> batches = [torch.randn(8, 4) for _ in range(20)]
        >>> lens = bt.workflows.TunedLens(model, ["0", "1"], "2", batches[0])
        >>> losses = lens.fit(batches, lr=0.1)
        >>> losses[-1]["sub_0"] < losses[0]["sub_0"]
        True
    """

    def __init__(
        self,
        model: Callable[..., Any],
        sites: Any,
        unembed: Any,
        inputs: Any,
        *,
        output: Callable[[Any], Tensor] | None = None,
    ) -> None:
        super().__init__()
        bended = bended_of(model)
        end = _ModelEnd(bended.model, unembed)
        with torch.no_grad():
            found, final = _site_values(bended, Call.of(inputs), sites, output)
            for site, value in found.items():
                _check_fits(site, end(value, site), final)
        # Not submodules: they are neither trained nor saved.
        self.__dict__.update(_bended=bended, _end=end, _where=sites, _output=output)
        self.sites: tuple[str, ...] = tuple(found)
        self.steps: int = 0
        self.translators: nn.ModuleList = nn.ModuleList()
        for value in found.values():
            size = value.shape[-1]
            # `nn.Linear` would draw random numbers, and the weights are zero.
            made = nn.utils.skip_init(nn.Linear, size, size, dtype=value.dtype, device=value.device)
            nn.init.zeros_(made.weight)
            nn.init.zeros_(made.bias)
            self.translators.append(made)

    _bended: BendedModule
    _end: _ModelEnd

    def forward(self, site: str, value: Tensor) -> Tensor:
        """Return the logits for the output of a site."""
        translator = self.translators[self.sites.index(site)]
        return self._end(value + translator(value), site)

    def apply_to(self, inputs: Any, *, decode: Callable[[int], str] | None = None) -> LensResult:
        """Call the model, and return the logits at the sites.

        Args:
            inputs: the inputs of the model; see `Call.of`.
            decode: as for `logit_lens`.
        """
        with torch.no_grad():
            found, final = self._read_sites(inputs)
            logits = {site: self(site, value) for site, value in found.items()}
        return LensResult(tuple(logits), logits, final, decode)

    def losses(self, inputs: Any) -> dict[str, float]:
        """Return the mean of KL(final || site) for some inputs, at each site."""
        return {site: value.mean().item() for site, value in self.apply_to(inputs).kl().items()}

    def fit(
        self,
        batches: Iterable[Any],
        *,
        epochs: int = 1,
        lr: float = 1e-3,
        seed: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int = 100,
    ) -> list[dict[str, float]]:
        """Train the translators with Adam; the model's parameters and gradients are not changed.

        Args:
            batches: inputs of the model: a list, or an iterable such as a `DataLoader`. A list is
                shuffled in each epoch; other iterables keep their order.
            epochs: the number of epochs.
            lr: the learning rate.
            seed: seed for shuffling a list.
            checkpoint: a file for the full state. If it exists, training resumes from it and skips
                the batches before.
            every: write the file after this many batches, and at the end.

        Returns:
            The loss at each site, for each batch, including those before a resumption.

        Raises:
            InputError: an argument is invalid, or the file belongs to another lens.
        """
        if epochs < 1 or every < 1 or not lr > 0:
            raise InputError("epochs= and every= have to be at least 1, and lr= above 0")
        if isinstance(batches, Iterator) and epochs > 1:
            raise InputError("an iterator can be used only once: pass a list, or epochs=1")
        parameters = list(self.translators.parameters())
        if torch.is_inference_mode_enabled() or any(p.is_inference() for p in parameters):
            raise InputError("a lens can neither be created nor trained in torch.inference_mode()")
        optimizer = torch.optim.Adam(parameters, lr=lr)
        history: list[dict[str, float]] = []
        done = 0
        if checkpoint is not None and os.path.exists(checkpoint):
            history, done = self._resumed(checkpoint, optimizer, seed)
        number = 0
        for epoch in range(epochs):
            for batch in _batches_in_order(batches, seed, epoch):
                number += 1
                if number <= done:
                    continue
                history.append(self._step(batch, parameters, optimizer))
                self.steps += 1
                if checkpoint is not None and number % every == 0:
                    self._write(checkpoint, optimizer, history, number, seed)
        if not history:
            raise InputError("there were no batches to train with")
        if checkpoint is not None and number > done:
            self._write(checkpoint, optimizer, history, number, seed)
        return history

    def _step(
        self, batch: Any, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> dict[str, float]:
        with torch.no_grad():
            found, final = self._read_sites(batch)
        with torch.enable_grad():
            losses = {
                site: divergence(final, self(site, value)).mean() for site, value in found.items()
            }
            # Not `backward`, which would add to gradients of the model's own parameters.
            total = torch.stack(list(losses.values())).sum()
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        return {site: loss.item() for site, loss in losses.items()}

    def _read_sites(self, inputs: Any) -> tuple[dict[str, Any], Tensor]:
        own = self.__dict__
        found, final = _site_values(self._bended, Call.of(inputs), own["_where"], own["_output"])
        new = [site for site in found if site not in self.sites]
        if new:
            raise InputError(
                f"this call reached {new[0]!r}, but the lens has no translator for it, only "
                f"for {', '.join(map(repr, self.sites))}"
            )
        return found, final

    def _write(
        self,
        path: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer,
        history: list[dict[str, float]],
        number: int,
        seed: int,
    ) -> None:
        kept = {
            "sites": list(self.sites), "translators": self.translators.state_dict(),
            "optimizer": optimizer.state_dict(), "history": history, "number": number,
            "steps": self.steps, "seed": seed,
        }  # fmt: skip
        part = f"{os.fspath(path)}.part"
        torch.save(kept, part)
        os.replace(part, path)  # whole or not at all

    def _resumed(
        self, path: str | os.PathLike[str], optimizer: torch.optim.Optimizer, seed: int
    ) -> tuple[list[dict[str, float]], int]:
        kept = torch.load(path, weights_only=True)
        if tuple(kept["sites"]) != self.sites or kept["seed"] != seed:
            raise InputError(
                f"{os.fspath(path)} belongs to a lens with sites {kept['sites']} and seed "
                f"{kept['seed']}, not to this one"
            )
        self.translators.load_state_dict(kept["translators"])
        optimizer.load_state_dict(kept["optimizer"])
        self.steps = kept["steps"]
        return list(kept["history"]), int(kept["number"])

    def extra_repr(self) -> str:
        """Return the sites and the number of steps."""
        return f"sites={list(self.sites)}, steps={self.steps}"


def _batches_in_order(batches: Iterable[Any], seed: int, epoch: int) -> Iterator[Any]:
    if isinstance(batches, Sequence):
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(len(batches), generator=generator).tolist()
        yield from (batches[number] for number in order)
    else:
        yield from batches


# Linear probes: the information that is linearly encoded in the outputs of nodes.


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
        inputs, given = _split_batch(batch, split)
        call = Call.of(inputs)
        with torch.no_grad():
            found = values_in_call(bended, call, where)
        rows = {path: _position_row(value, call, reduce, path) for path, value in found.items()}
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


def _split_batch(
    batch: Any, split: Callable[[Any], tuple[Any, Tensor]] | None
) -> tuple[Any, Tensor]:
    pair = batch if split is None else split(batch)
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], Tensor):
        raise InputError(
            f"a batch has to be a pair of inputs and a tensor of labels, not {describe(pair)}: "
            "pass a function that converts batches as split="
        )
    return pair[0], pair[1].detach()


def _position_row(given: Any, call: Call, reduce: Any, path: str) -> Tensor:
    if callable(reduce):
        return as_rows(given, path, "reduce", reduce(given, call))
    value = as_rows(given, path, "reduce")
    if value.dim() == 2:
        return value
    if reduce == "flatten":
        return value.flatten(1)
    return value.flatten(1, -2).mean(1) if reduce == "mean" else value.flatten(1, -2)[:, -1]


def fit_ridge(features: Tensor, labels: Tensor, *, ridge: float = 1e-3) -> RidgeProbe:
    """Fit a linear map to labels by regularised least squares, in double precision.

    It minimises the sum of squared errors plus `ridge` times the sum of squared weights (Hoerl and
    Kennard, 1970); the bias is not penalised. For classes there is one output per class, fitted to
    1 for the class and 0 otherwise; the prediction is the class with the greatest output.
    `bt.analysis.LinearProbe` trains many probes together along a stream.

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
