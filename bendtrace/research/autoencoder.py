"""Splicing sparse autoencoders into models, and changing single latents there."""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn

from bendtrace.errors import InputError, InterjectionError, LoadError
from bendtrace.insert.bend import Expression, value_of
from bendtrace.insert.insertion import Report
from bendtrace.insert.interjection import Effect, Inputs, Interjection, NodePass
from bendtrace.insert.leaves import describe
from bendtrace.insert.purity import (
    LiftedCallable,
    build_callable,
    effect_of_function,
    lift_tensors,
    why_not_pure,
)
from bendtrace.insert.registry import InsertionGroup, InsertionHandle, is_root
from bendtrace.insert.resolver import describe_where
from bendtrace.insert.state_access import is_contained
from bendtrace.insert.where import Where
from bendtrace.module import BendedModule, required_bended
from bendtrace.python.lazy import imported, required
from bendtrace.tape.tape import TensorMeta


class LatentEdit:
    """A change of the latents, until it is removed; a context manager.

    Attributes:
        change: a function of the latents.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Identity()))
        >>> spliced = bt.workflows.splice_autoencoder(
        ...     bended, "0", torch.nn.Identity(), encode=torch.neg, decode=torch.neg
        ... )
        >>> edit = spliced.edit(lambda latents: latents * 10)
        >>> bended(torch.ones(2)), edit.active
        (tensor([10., 10.]), True)
        >>> edit.remove()
        >>> bended(torch.ones(2)), edit.active
        (tensor([1., 1.]), False)
    """

    def __init__(self, edits: list[LatentEdit], change: Callable[[Tensor], Any]) -> None:
        self.change = change
        self.setting: tuple[tuple[int, ...], Any] | None = None  # which latents are set to what
        self._edits = edits
        edits.append(self)

    def effect(self) -> Effect | str:
        """Return its effect on latents, or the reason why that cannot be compiled."""
        if self.setting is None:
            return effect_of_function(self.change)
        indices, value = self.setting[0], value_of(self.setting[1])
        given = value if isinstance(value, Tensor) else torch.tensor(value)
        if type(value) is float:
            given = torch.tensor(value, dtype=torch.float64)
        return Effect(lambda made, new: _set(made, indices, new), (given,), ("set", indices))

    @property
    def active(self) -> bool:
        """True if the change applies."""
        return any(edit is self for edit in self._edits)

    def remove(self) -> None:
        """End the change. A second call does nothing."""
        self._edits[:] = [edit for edit in self._edits if edit is not self]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


@dataclass(eq=False, repr=False)
class _Reconstructs(Interjection):
    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any] | None
    whole: Callable[[Any], Any]
    error_term: bool
    own: frozenset[int]  # the identities of the model's modules
    edits: list[LatentEdit] = field(default_factory=list)
    latents: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        codes = (self.encode, self.decode, self.whole)
        self._is_contained = all(is_contained(code, self.own) for code in codes)

    @property
    def self_contained(self) -> bool:  # type: ignore[override]
        return self._is_contained and all(is_contained(edit.change) for edit in self.edits)

    @property
    def label(self) -> str:
        return str(getattr(self.whole, "__name__", type(self.whole).__name__))

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> Any:
        key = self._key(at)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            raise InterjectionError(
                f"{self.label} at {at.path}: the value is {describe(output)}, but a "
                "floating-point tensor is needed; for a container, name a part: "
                f"'{at.path}.output|sub_0'",
                at.path,
            )
        made, edited = self._reconstruct(output, key)
        for what in (made, edited):
            if not isinstance(what, Tensor) or what.shape != output.shape:
                raise InterjectionError(
                    f"{self.label} at {at.path} returned {describe(what)} for "
                    f"{describe(output)}: a reconstruction has to have the same shape",
                    at.path,
                )
        found, self.errors[key] = self._finish(output, made, edited)
        return found

    def _finish(self, value: Tensor, made: Tensor, edited: Tensor) -> tuple[Tensor, Tensor]:
        """Return what takes the place of a value, and the error of its reconstruction."""
        made, edited = made.to(value.dtype), edited.to(value.dtype)
        if self.error_term:
            # The same as `edited + (value - made).detach()`, but equal to the value, bit by bit,
            # where no latent is changed.
            edited = _WithError.apply(edited, made.detach(), value.detach())
        return edited, (value - made).detach()

    def effect(self, at: NodePass, like: TensorMeta) -> Effect | str | None:
        """Return its effect on a tensor; the latents and the error are kept after the run."""
        if self.encode is None or self.decode is None:
            return "it is one function, without encode and decode"
        if not like.dtype.is_floating_point:
            return f"it reconstructs no {like.dtype}"
        found: list[LiftedCallable] = []
        for code in (self.encode, self.decode):
            one = lift_tensors(code)
            if isinstance(one, str):
                return one
            found.append(one)
        edits = [edit.effect() for edit in self.edits]
        for edit in edits:
            if isinstance(edit, str):
                return edit
        changes = [edit for edit in edits if isinstance(edit, Effect)]
        parts: list[LiftedCallable | Effect] = [*found, *changes]
        counts = [len(one.tensors) for one in parts]
        spans = [slice(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]
        tensors = tuple(tensor for one in parts for tensor in one.tensors)
        specs = found[0].spec, found[1].spec
        functions = [change.function for change in changes]

        def coded(value: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
            encoder, decoder, *more = (given[own] for own in spans)
            latents = changed = build_callable(specs[0], encoder)(value)
            for function, own in zip(functions, more, strict=True):
                changed = function(changed.clone(), *own)
            decode = build_callable(specs[1], decoder)
            made = decode(latents)
            return changed, made, made if changed is latents else decode(changed)

        def reconstructed(value: Tensor, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            changed, made, edited = coded(value, given)
            if made.shape != value.shape or edited.shape != value.shape:
                raise ValueError("a reconstruction has the same shape")
            found, error = self._finish(value, made, edited)
            return found, changed, error

        def keep(kept: tuple[Tensor, ...]) -> None:
            key = self._key(at)
            self.latents[key], self.errors[key] = kept

        key = _Reconstructs, self.error_term, tuple(one.key for one in parts)
        return Effect(reconstructed, tensors, key, keep, 2, self._check(changes))

    def _check(self, changes: Sequence[Effect]) -> Callable[..., str | None]:
        encode, decode = self.encode, self.decode
        assert encode is not None
        assert decode is not None

        def check(value: Tensor, tensors: tuple[Tensor, ...]) -> str | None:
            reason = why_not_pure(encode, value)
            if reason is None:
                latents = encode(value.clone())
                reason = why_not_pure(decode, latents)
                for change in changes:
                    if reason is None and change.check is not None:
                        reason = change.check(latents, change.tensors)
            return reason

        return check

    def _key(self, at: NodePass) -> str:
        """Begin a pass of a node; return the key of its latents."""
        if at.number == 0:  # also of a part of the model that is called by itself
            self.forget(at.path)
        elif at.number == 1:
            for kept in (self.latents, self.errors):
                if at.path in kept:
                    kept[f"{at.path}:1"] = kept.pop(at.path)
        return at.path if at.number == 0 else f"{at.path}:{at.number + 1}"

    def forget(self, path: str | None = None) -> None:
        """Forget the latents of earlier calls, at one node or all."""
        for kept in (self.latents, self.errors):
            for key in [k for k in kept if path in (None, k, k.rpartition(":")[0])]:
                del kept[key]

    def _reconstruct(self, value: Tensor, key: str) -> tuple[Any, Any]:
        if self.encode is None or self.decode is None:
            made = self.whole(value)
            if isinstance(made, tuple) and len(made) == 2:
                made, self.latents[key] = made
            return made, made
        latents = self.encode(value)
        changed = latents
        for edit in self.edits:
            before = changed
            given = before.clone() if isinstance(before, Tensor) else before
            result = edit.change(given)
            changed = given if result is None else result
            if not isinstance(changed, Tensor) or changed.shape != before.shape:
                raise InputError(
                    f"a change of latents returned {describe(changed)} for {describe(before)}"
                )
        self.latents[key] = changed
        made = self.decode(latents)
        return made, made if changed is latents else self.decode(changed)


class _Begins(Interjection):
    """Has latents forgotten when the model is called again."""

    observes = True
    blind = True
    self_contained = True
    deferrable = True
    label = "splice_autoencoder"

    def __init__(self, inner: _Reconstructs) -> None:
        self._inner = inner

    def before(self, at: NodePass, inputs: Inputs) -> None:
        self._inner.forget()


class _WithError(torch.autograd.Function):
    """Adds the effect of changed latents to a value; the gradient flows to the effect."""

    @staticmethod
    def forward(ctx: Any, edited: Tensor, made: Tensor, value: Tensor) -> Tensor:
        # Without a change, neither signs of zeros nor nans may change.
        same = (edited == made) | (edited.isnan() & made.isnan())
        return torch.where(same, value, value + (edited - made))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class SplicedAutoencoder(InsertionHandle):
    """An autoencoder in a model, until it is removed; a context manager.

    Attributes:
        model: the `BendedModule` to call.
        autoencoder: the autoencoder.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Identity()))
        >>> spliced = bt.workflows.splice_autoencoder(
        ...     bended, "0", torch.nn.Identity(), encode=torch.round, decode=lambda latents: latents
        ... )
        >>> bended(torch.tensor([0.75, 2.0]))
        tensor([1., 2.])
        >>> spliced.latent, spliced.error
        (tensor([1., 2.]), tensor([-0.2500,  0.0000]))
        >>> with spliced.set(1, 5.0):
        ...     bended(torch.tensor([0.75, 2.0]))
        tensor([1., 5.])
        >>> spliced.remove()
        >>> spliced
        <Identity spliced in at '0', removed>
    """

    def __init__(
        self, bended: BendedModule, autoencoder: Any, group: InsertionGroup, inner: _Reconstructs
    ) -> None:
        super().__init__(bended, group)
        self.autoencoder = autoencoder
        self._inner = inner

    @property
    def latents(self) -> dict[str, Tensor]:
        """The latents of the latest call as they were decoded, with their graph, by node path.

        A node that ran several times has a key for each pass: `relu:1`, `relu:2`.
        """
        return dict(self._inner.latents)

    @property
    def latent(self) -> Tensor:
        """The latents, if there is only one node and pass.

        Raises:
            InputError: there are no latents, or several.
        """
        return _only_item(self._inner.latents, "latents")

    @property
    def errors(self) -> dict[str, Tensor]:
        """The value minus its reconstruction, without changes of latents, by node path."""
        return dict(self._inner.errors)

    @property
    def error(self) -> Tensor:
        """The error term, if there is only one node and pass.

        Raises:
            InputError: there are no error terms, or several.
        """
        return _only_item(self._inner.errors, "error terms")

    def edit(self, change: Callable[[Tensor], Any]) -> LatentEdit:
        """Change the latents from now on, before they are decoded.

        Args:
            change: a function of the latents; it may write into them, and return None.

        Returns:
            A handle, which is also a context manager.

        Raises:
            InputError: the autoencoder has no `encode` and `decode`.
        """
        if self._inner.encode is None or self._inner.decode is None:
            raise InputError(
                f"latents of {self._inner.label} cannot be changed: it has no encode and "
                "decode; pass these to splice_autoencoder"
            )
        if not callable(change) or isinstance(change, type):
            raise InputError(
                f"a change of latents has to be a function of the latents, not {change!r}"
            )
        edit = LatentEdit(self._inner.edits, change)
        if not is_contained(change):
            self._group.forget_plans()
        return edit

    def set(self, latents: int | Iterable[int], value: float | Expression) -> LatentEdit:
        """Set single latents, counted along the last axis, to a number or a `BendingParameter`."""
        indices = [latents] if isinstance(latents, int) else list(latents)
        if not indices or not all(type(index) is int for index in indices):
            raise InputError(f"latents have to be given by index, not by {latents!r}")

        def change(made: Tensor) -> Tensor:
            beyond = [i for i in indices if not -made.shape[-1] <= i < made.shape[-1]]
            if beyond:
                raise InputError(f"there is no latent {beyond[0]} among {made.shape[-1]}")
            return _set(made, indices, value_of(value))

        edit = self.edit(change)
        edit.setting = (tuple(indices), value)
        return edit

    def ablate(self, latents: int | Iterable[int]) -> LatentEdit:
        """Set single latents to zero."""
        return self.set(latents, 0.0)

    def remove(self) -> None:
        """Remove it, and forget the latents. A second call does nothing."""
        super().remove()
        self._inner.forget()

    def report(self) -> Report:
        """Return the nodes where it was called, and whether it changed anything."""
        return self._group.insertions[1].report()

    def __repr__(self) -> str:
        main = self._group.insertions[1]
        state = "" if main.active else ", removed"
        edits = f", {len(self._inner.edits)} edits" if self._inner.edits else ""
        return f"<{self._inner.label} spliced in at {describe_where(main.where)}{edits}{state}>"


def splice_autoencoder(
    model: BendedModule,
    where: Where,
    autoencoder: Any,
    *,
    error_term: bool = False,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> SplicedAutoencoder:
    """Replace values by their reconstructions with an autoencoder, from now on.

    Args:
        model: a `BendedModule`.
        where: nodes; see `BendedModule.interject`. The output of each has to be one tensor.
        autoencoder: a module or object with `encode` and `decode`; or a function of the value that
            returns a reconstruction, or (reconstruction, latents), whose latents cannot be changed.
        error_term: whether to add the reconstruction error back (Marks et al., "Sparse Feature
            Circuits", 2024): `decode(changed latents) + (value - decode(latents))`. If no latent is
            changed, the value stays as it is, bit for bit. The error term has no gradient: the
            whole gradient flows through the latents.
        encode: used instead of the method of that name.
        decode: used instead of the method of that name.

    Returns:
        A handle on the latents, which is also a context manager.

    Raises:
        InputError: an argument is invalid.
        NodePathError: `where` matches no node.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Sae(torch.nn.Module):
        ...     def encode(self, x):
        ...         return torch.cat([x.relu(), (-x).relu()], -1)
        ...     def decode(self, z):
        ...         return z[..., :2] - z[..., 2:]
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Identity()))
        >>> x = torch.tensor([[1.0, -2.0]])
        >>> with bt.workflows.splice_autoencoder(bended, "0", Sae()) as spliced:
        ...     bended(x), spliced.latent
        ...     with spliced.ablate(3):
        ...         bended(x)
        (tensor([[ 1., -2.]]), tensor([[1., 0., 0., 2.]]))
        tensor([[1., 0.]])
    """
    if (encode is None) != (decode is None):
        raise InputError("encode= and decode= have to be passed together")
    if encode is None and decode is None:
        encode, decode = (getattr(autoencoder, name, None) for name in ("encode", "decode"))
    parts = callable(encode) and callable(decode)
    if isinstance(autoencoder, type) or not (parts or callable(autoencoder)):
        raise InputError(
            "an autoencoder has to have encode and decode, or be a function of the value, not "
            f"{autoencoder!r}"
        )
    bended = required_bended(model, "an autoencoder")
    if isinstance(autoencoder, nn.Module) and any(autoencoder is m for m in bended.modules()):
        raise InputError(
            f"{type(autoencoder).__name__} is a part of the model: pass a separate one"
        )
    own = bended.model.modules() if isinstance(bended.model, nn.Module) else ()
    inner = _Reconstructs(
        encode if parts else None, decode if parts else None, autoencoder, error_term,
        frozenset(map(id, own)),
    )  # fmt: skip
    group = InsertionGroup(bended)
    group.make(is_root, _Begins(inner), allow_none=True)
    group.make(where, inner)
    return SplicedAutoencoder(bended, autoencoder, group, inner)


def _set(latents: Tensor, indices: Sequence[int], value: Any) -> Tensor:
    """Return latents with some of them replaced by a number."""
    where = torch.zeros(latents.shape[-1], dtype=torch.bool, device=latents.device)
    where[list(indices)] = True
    return torch.where(where, torch.as_tensor(value, dtype=latents.dtype), latents)


def _only_item(kept: dict[str, Tensor], what: str) -> Tensor:
    if len(kept) != 1:
        listed = ", ".join(map(repr, kept)) or "none; no call reached a node"
        raise InputError(f"expected one set of {what}, but there are {listed}")
    return next(iter(kept.values()))


# Sparse autoencoders in the folders of SAE-Lens and dictionary_learning.

_BOTH = ("W_enc", "W_dec", "b_dec")
# The tensors that each kind of encoder reads.
_READS = {
    "standard": (*_BOTH, "b_enc"),
    "gated": (*_BOTH, "b_gate", "b_mag", "r_mag"),
    "jumprelu": (*_BOTH, "b_enc", "threshold"),
    "topk": (*_BOTH, "b_enc"),
}
_LINEAR = {"encoder.weight": "W_enc", "encoder.bias": "b_enc", "decoder.weight": "W_dec"}


# The classes of dictionary_learning: which encoder they have, whether it subtracts `b_dec`, what
# they call its tensors, and which ones are not read.
_CLASSES: dict[str, tuple[str, bool, dict[str, str], tuple[str, ...]]] = {
    "AutoEncoder": ("standard", True, _LINEAR | {"bias": "b_dec"}, ()),
    "AutoEncoderNew": ("standard", False, _LINEAR | {"decoder.bias": "b_dec"}, ()),
    "GatedAutoEncoder": (
        "gated", True,
        _LINEAR | {"decoder_bias": "b_dec", "gate_bias": "b_gate", "mag_bias": "b_mag"}, (),
    ),
    "AutoEncoderTopK": ("topk", True, _LINEAR, ("k", "threshold")),
    # Outside of training, all that is above the threshold stays.
    "BatchTopKSAE": ("jumprelu", True, _LINEAR, ("k",)),
    "MatryoshkaBatchTopKSAE": ("jumprelu", True, {}, ("k", "group_sizes")),
    "JumpReluAutoEncoder": ("jumprelu", False, {}, ()),
}  # fmt: skip


class SparseAutoencoder(nn.Module):
    """A sparse autoencoder that was loaded; `load_autoencoder` makes it.

    With `pre = (x - b_dec) @ W_enc + b_enc`, where `b_dec` is subtracted only if `subtracts`, the
    latents are:

    - "standard": `relu(pre)`
    - "jumprelu": `relu(pre)` where `pre > threshold`, else 0
    - "topk": `relu(pre)` at the `k` largest of each row, else 0
    - "gated": `relu(h * exp(r_mag) + b_mag)` where `h + b_gate > 0`, else 0; `h` is `pre` without
      `b_enc`

    and the reconstruction is `latents @ W_dec + b_dec`. Inputs are converted to the dtype of the
    weights.

    Attributes:
        architecture: one of these words.
        subtracts: whether `b_dec` is subtracted from the input.
        k: how many latents "topk" keeps; otherwise None.
        rescales: whether the latents of "topk" are multiplied by the norms of the rows of `W_dec`
            before they are compared, and divided by them when they are decoded.
        config: the content of the folder's `cfg.json` or `config.json`.
        W_enc: (inputs, latents).
        W_dec: (latents, inputs).
        b_dec: (inputs,).

    Example:
        >>> import torch, bendtrace as bt
        >>> tensors = {"W_enc": torch.eye(2), "W_dec": torch.eye(2)}
        >>> tensors |= {"b_enc": torch.zeros(2), "b_dec": torch.zeros(2)}
        >>> sae = bt.workflows.SparseAutoencoder("standard", tensors, {}, subtracts=True)
        >>> sae, sae.encode(torch.tensor([[-1.0, 2.0]])).detach()
        (SparseAutoencoder(standard, 2 inputs, 2 latents), tensor([[0., 2.]]))
    """

    W_enc: Tensor
    W_dec: Tensor
    b_dec: Tensor
    b_enc: Tensor
    b_gate: Tensor
    b_mag: Tensor
    r_mag: Tensor
    threshold: Tensor

    def __init__(
        self,
        architecture: str,
        tensors: Mapping[str, Tensor],
        config: Mapping[str, Any],
        *,
        subtracts: bool,
        k: int | None = None,
        rescales: bool = False,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.subtracts = subtracts
        self.k = k
        self.rescales = rescales
        self.config: str = json.dumps(
            config
        )  # a text, since compiled code may depend on plain values only
        for name in _READS[architecture]:
            self.register_parameter(name, nn.Parameter(tensors[name]))

    def encode(self, x: Tensor) -> Tensor:
        """Return the latents: (..., inputs) to (..., latents)."""
        x = x.to(self.W_enc.dtype)
        pre = (x - self.b_dec if self.subtracts else x) @ self.W_enc
        if self.architecture == "gated":
            found = torch.relu(pre * self.r_mag.exp() + self.b_mag)
            return found * (pre + self.b_gate > 0).to(found.dtype)
        pre = pre + self.b_enc
        if self.architecture == "jumprelu":
            return torch.relu(pre) * (pre > self.threshold).to(pre.dtype)
        if self.k is None:
            return torch.relu(pre)
        if self.rescales:
            pre = pre * self.W_dec.norm(dim=-1)
        values, places = pre.topk(self.k, dim=-1)
        return torch.zeros_like(pre).scatter(-1, places, torch.relu(values))

    def decode(self, latents: Tensor) -> Tensor:
        """Return the reconstruction: (..., latents) to (..., inputs)."""
        if self.rescales:
            latents = latents / self.W_dec.norm(dim=-1)
        return latents @ self.W_dec + self.b_dec

    def forward(self, x: Tensor) -> Tensor:
        """Return the reconstruction of a value."""
        return self.decode(self.encode(x))

    def __repr__(self) -> str:
        inputs, latents = self.W_enc.shape
        kept = f", k={self.k}" if self.k is not None else ""
        name = f"SparseAutoencoder({self.architecture}{kept}"
        return f"{name}, {inputs} inputs, {latents} latents)"


class _Normalised(SparseAutoencoder):
    """Scales each input; `decode` undoes the scaling of the thread's last input."""

    def __init__(self, scaling: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scaling = scaling
        self._last: dict[int, tuple[Tensor, Tensor]] = {}  # mean and scale, by thread

    def encode(self, x: Tensor) -> Tensor:
        x = x.to(self.W_enc.dtype)
        if self.scaling == "layer_norm":
            mean = x.mean(-1, keepdim=True)
            x = x - mean
            scale = x.std(-1, keepdim=True)
            made = x / (scale + 1e-5)
        else:
            mean = x.new_zeros(())
            scale = x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
            made = x / scale
        self._last[threading.get_ident()] = mean, scale
        return super().encode(made)

    def decode(self, latents: Tensor) -> Tensor:
        if threading.get_ident() not in self._last:
            raise InputError("the scale of the input is not known: call encode first")
        mean, scale = self._last[threading.get_ident()]
        return super().decode(latents) * scale + mean


def load_autoencoder(folder: str | os.PathLike[str]) -> SparseAutoencoder:
    """Load a sparse autoencoder that SAE-Lens or dictionary_learning saved.

    SAE-Lens writes `cfg.json` and `sae_weights.safetensors`; the architectures "standard", "gated",
    "jumprelu" (as which BatchTopK is saved) and "topk" are known. dictionary_learning writes
    `config.json` and `ae.pt`; all its autoencoders are known. `ae.pt` is read with
    `weights_only=True`. The latents have the scale that the library's own loader gives them: the
    decoder of an `AutoEncoder` is normalised.

    Args:
        folder: the folder with both files.

    Returns:
        A module with `encode` and `decode`, for `splice_autoencoder`, on the CPU.

    Raises:
        LoadError: a file or tensor is missing or unexpected, or the architecture is unknown.
        ImportError: safetensors is not installed.

    Example:
        >>> import bendtrace as bt
        >>> sae = bt.workflows.load_autoencoder("trained")  # doctest: +SKIP
    """
    folder = os.fspath(folder)
    for load, files in (
        (_of_sae_lens, ("cfg.json", "sae_weights.safetensors")),
        (_of_dictionary_learning, ("config.json", "ae.pt")),
    ):
        config, weights = (os.path.join(folder, name) for name in files)
        if os.path.isfile(config) and os.path.isfile(weights):
            return load(_read_file(config), weights)
    raise LoadError(
        folder,
        "it holds neither cfg.json and sae_weights.safetensors (SAE-Lens) nor config.json and "
        "ae.pt (dictionary_learning)",
    )


def _of_sae_lens(config: dict[str, Any], path: str) -> SparseAutoencoder:
    safetensors = required("safetensors", f"reading {path!r}")
    try:
        tensors: dict[str, Tensor] = imported("safetensors.torch").load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise LoadError(path, f"it may be damaged: {error}") from None
    architecture = config.get("architecture", "standard")
    k = config.get("k")
    # Before version 6, the activation function was named separately.
    function = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    if function == "topk" and architecture == "standard":
        architecture = "topk"
        k = (config.get("activation_fn_kwargs") or {}).get("k")
    elif function not in ("relu", "topk"):
        raise LoadError(path, f"its activation function {function!r} is not known, only 'relu'")
    if architecture not in _READS:
        note = " (of training; SAE-Lens's save_inference_model writes a jumprelu)"
        raise LoadError(
            path,
            f"its architecture {architecture!r}{note if 'batchtopk' in str(architecture) else ''} "
            f"is not known, only {', '.join(_READS)}",
        )
    scaling = config.get("normalize_activations")
    if scaling not in (None, False, "none", "layer_norm", "constant_norm_rescale"):
        raise LoadError(
            path,
            f"normalize_activations is {scaling!r}: it needs a factor that is not in the folder. "
            "Have SAE-Lens fold the factor into the weights, and save it again",
        )
    if torch.all(tensors.get("scaling_factor", torch.ones(1)) == 1):
        tensors.pop("scaling_factor", None)
    _check_tensors(tensors, {name: name for name in _READS[architecture]}, architecture, path)
    dtype = getattr(torch, str(config.get("dtype", "")).removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    options: dict[str, Any] = {
        "subtracts": bool(config.get("apply_b_dec_to_input", True)),
        "k": _check_count(k, path) if architecture == "topk" else None,
        "rescales": architecture == "topk" and bool(config.get("rescale_acts_by_decoder_norm")),
    }
    if scaling in ("layer_norm", "constant_norm_rescale"):
        return _Normalised(scaling, architecture, tensors, config, **options)
    return SparseAutoencoder(architecture, tensors, config, **options)


def _of_dictionary_learning(config: dict[str, Any], path: str) -> SparseAutoencoder:
    trainer = config.get("trainer")
    name = trainer.get("dict_class") if isinstance(trainer, dict) else None
    if name not in _CLASSES:
        what = "says no trainer.dict_class" if name is None else f"says dict_class {name!r}"
        raise LoadError(path, f"its config.json {what}; known are {', '.join(_CLASSES)}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise LoadError(path, f"it may be damaged: {str(error).splitlines()[0]}") from None
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise LoadError(path, "it holds no dict of tensors")
    architecture, subtracts, names, ignored = _CLASSES[name]
    called = {ours: theirs for theirs, ours in names.items()}
    ours = {called.get(wanted, wanted): wanted for wanted in _READS[architecture]}
    found = {theirs: tensor for theirs, tensor in state.items() if theirs not in ignored}
    _check_tensors(found, ours, name, path)
    tensors = {
        ours[theirs]: tensor.T.contiguous() if theirs.endswith(".weight") else tensor
        for theirs, tensor in found.items()
    }
    k = None
    if architecture == "topk":
        k = _check_count(state["k"].item() if "k" in state else config["trainer"].get("k"), path)
    if name == "AutoEncoder":
        # Give the rows of the decoder length 1, and the latents their lengths.
        norms = tensors["W_dec"].norm(dim=1)
        if not torch.allclose(norms, torch.ones_like(norms)):
            norms = norms.where(norms > 0, 1.0)
            tensors["W_dec"] = tensors["W_dec"] / norms[:, None]
            tensors["W_enc"] = tensors["W_enc"] * norms
            tensors["b_enc"] = tensors["b_enc"] * norms
    return SparseAutoencoder(architecture, tensors, config, subtracts=subtracts, k=k)


def _check_tensors(
    found: Mapping[str, Tensor], wanted: Mapping[str, str], what: str, path: str
) -> None:
    """Raise an error that names tensors that are missing, unused or of a wrong shape."""
    missing = ", ".join(repr(name) for name in wanted if name not in found)
    others = ", ".join(repr(name) for name in found if name not in wanted)
    if missing or others:
        lacks = f"it lacks {missing}" if missing else ""
        holds = f"it holds {others}, which is unknown" if others else ""
        raise LoadError(path, f"as {what!r}, {' and '.join(filter(None, (lacks, holds)))}")
    shapes = {ours: tuple(found[name].shape) for name, ours in wanted.items()}
    turned = any(name.endswith(".weight") for name in wanted)
    if len(shapes["W_dec"]) == 2 and shapes["W_enc"] == shapes["W_dec"][::-1]:
        latents, inputs = shapes["W_dec"][::-1] if turned else shapes["W_dec"]
        each = {"W_enc": shapes["W_enc"], "W_dec": shapes["W_dec"], "b_dec": (inputs,)}
        if all(
            shape == each.get(name, (latents,)) or (name == "threshold" and shape == ())
            for name, shape in shapes.items()
        ):
            return
    raise LoadError(path, f"the shapes of its tensors do not fit: {shapes}")


def _check_count(k: Any, path: str) -> int:
    if type(k) is not int or k < 1:
        raise LoadError(path, f"the number k of latents that 'topk' keeps is {k!r}")
    return k


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise LoadError(path, f"it is no JSON file: {error}") from None
    if not isinstance(config, dict):
        raise LoadError(path, "it holds no JSON object")
    return config
