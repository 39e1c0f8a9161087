"""The exceptions that bendtrace raises, with the facts known at that point as attributes.

>>> import torch, bendtrace as bt
>>> trace = bt.trace(lambda x: x + 1 if x.shape[0] > 2 else x, torch.ones(3))
>>> try:
...     trace.replay(torch.ones(1))
... except bt.errors.DivergenceError as error:
...     print(error.step.text, "is no longer", error.step.value)
x.shape[0] > 2 is no longer True
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bendtrace.flow import FlowStep

__all__ = [
    "AuditError",
    "BendError",
    "BendShapeError",
    "BendtraceError",
    "CompileWarning",
    "ConversionError",
    "DivergenceError",
    "ExportError",
    "HarvestError",
    "HookNameError",
    "IncompatibleVersionWarning",
    "InputError",
    "InterjectionError",
    "LayerKeyError",
    "LoadError",
    "NameOrderWarning",
    "NeverFiredWarning",
    "NoLayerError",
    "NodePathError",
    "NonFiniteError",
    "NondeterminismError",
    "NotReplayableError",
    "PatchError",
    "RankDivergenceError",
    "SaveError",
    "SiteError",
    "TraceLimitWarning",
]
__dir__ = __all__.copy


class BendtraceError(Exception):
    """Base of every error that bendtrace raises on purpose.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x * 2, torch.ones(2))
        >>> mistakes = lambda: trace["relu"], lambda: trace.replay(3), lambda: bt.BendedModule(3)
        >>> for mistake in mistakes:
        ...     try:
        ...         mistake()
        ...     except bt.BendtraceError as error:
        ...         print(type(error).__name__)
        LayerKeyError
        DivergenceError
        InputError
    """

    def __reduce__(self) -> tuple[Any, ...]:  # which calls no __init__: some take more than `args`
        return _restore, (type(self), self.args), vars(self)


def _restore(kind: type[BendtraceError], args: tuple[Any, ...]) -> BendtraceError:
    error = kind.__new__(kind, *args)
    error.args = args
    return error


class InputError(BendtraceError, ValueError):
    """An argument is of a kind or value that bendtrace cannot work with.

    Example:
        >>> import torch, bendtrace as bt
        >>> bt.BendedModule(torch.nn.ReLU(), max_traces=0)
        Traceback (most recent call last):
        bendtrace.errors.InputError: max_traces has to be a positive int or None, not 0
    """


class Uninitialized(InputError):
    """A model has lazy modules that have not been called yet, or its code reaches some.

    Args:
        function: the model.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(
            "the model has lazy modules, whose parameters are created by the first call: call it "
            "once first"
        )
        self.function = function


class DivergenceError(BendtraceError, RuntimeError):
    """The inputs do not satisfy a guard of the one trace that had to serve the call.

    Attributes:
        reason: what failed, in one line, with the recorded and the new value.
        step: the flow step whose guard failed, or None for guards on inputs and on state.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x + 1 if x.sum() > 0 else x, torch.ones(2))
        >>> try:
        ...     trace.replay(torch.tensor([-1.0, -1.0]))
        ... except bt.errors.DivergenceError as error:
        ...     print(error)  # doctest: +ELLIPSIS
        ...     print(error.step.text, "was", error.step.value)
        conditional expression `x.sum() > 0` at ...:1 was True when traced and is False now
        x.sum() > 0 was True
    """

    def __init__(self, reason: str, step: FlowStep | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.step = step


class NotReplayableError(BendtraceError, RuntimeError):
    """A trace depends on something that no guard can watch, so only the model's Python is right.

    Attributes:
        reasons: one line for each such dependency, with its place in the source.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x * float(str(x.numpy().std())), torch.tensor([1.0, 3.0]))
        >>> trace.replay(torch.tensor([1.0, 5.0]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bendtrace.errors.NotReplayableError: this trace cannot be replayed: numpy at ...:1 passes
        the content of a tensor to code that cannot be watched
    """

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons: tuple[str, ...] = tuple(reasons)
        super().__init__("this trace cannot be replayed: " + "; ".join(self.reasons))


class NondeterminismError(BendtraceError, RuntimeError):
    """On resuming a run the model took other steps than before, although all guards were equal.

    It depends on something that bendtrace cannot see, such as a torch setting that
    `docs/guarded.md` does not name. Earlier replays of the same operations may have been wrong.

    Example:
        >>> import torch, bendtrace as bt
        >>> def drifting(x):
        ...     x = x * (2 if torch.jit.onednn_fusion_enabled() else 3)
        ...     return x + 1 if x.sum() > 0 else x - 1
        >>> bended = bt.BendedModule(drifting)
        >>> _ = bended(torch.ones(2)), torch.jit.enable_onednn_fusion(True)
        >>> try:
        ...     bended(-torch.ones(2))
        ... except bt.errors.NondeterminismError as error:
        ...     print("with all guards equal" in str(error))
        True
        >>> torch.jit.enable_onednn_fusion(False)
    """


class AuditError(BendtraceError, AssertionError):
    """A replay was wrong: the model itself returns something else (see `BendedModule.audit`).

    Either bendtrace has a bug, or the model depends on something that `docs/limits.md` names.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x * (2 if torch.jit.onednn_fusion_enabled() else 3))
        >>> _ = bended(torch.ones(1)), torch.jit.enable_onednn_fusion(True)
        >>> try:
        ...     bended.audit(torch.ones(1))
        ... except bt.errors.AuditError as error:
        ...     print("gives mul" in str(error), "2, not 3" in str(error))
        True True
        >>> torch.jit.enable_onednn_fusion(False)
    """


class RankDivergenceError(BendtraceError, RuntimeError):
    """Ranks of a process group would have acted differently where they have to act together.

    Every rank of the group raises it instead of running the collective that it reached.

    Attributes:
        group: the name of the process group.
        ranks: for each rank, what it was about to do and the branches that led there.

    Example:
        >>> import bendtrace as bt
        >>> last = {0: "collective 1 in this call, all_reduce(8 float32)", 1: "the end of the call"}
        >>> print(bt.errors.RankDivergenceError("0", last))  # raised where there are two processes
        the ranks of process group 0 disagree:
          rank 0: collective 1 in this call, all_reduce(8 float32)
          rank 1: the end of the call
    """

    def __init__(self, group: str, texts: Mapping[int, str]) -> None:
        self.group = group
        self.ranks: dict[int, str] = dict(sorted(texts.items()))
        lines = "".join(f"\n  rank {rank}: {text}" for rank, text in self.ranks.items())
        super().__init__(f"the ranks of process group {group} disagree:{lines}")


class ConversionError(BendtraceError, ValueError):
    """A graph contains something that the other graph format cannot express.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Counts(torch.nn.Module):
        ...     def forward(self, x):
        ...         self.total = x.sum()
        ...         return x * 2
        >>> bt.trace(Counts(), torch.ones(2)).to_fx()
        Traceback (most recent call last):
        bendtrace.errors.ConversionError: the run sets self.total, which an fx graph cannot express
    """


class ExportError(BendtraceError, ValueError):
    """A model cannot be exported, or what was exported does not do the same.

    Attributes:
        reason: what cannot be exported, and what to do.
        place: the source text that it comes from, with file and line; "" if there is none.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x * torch.rand(2))
        >>> bended.export(torch.ones(2))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        bendtrace.errors.ExportError: `torch.rand(2)` at ...:1: rand may draw random numbers: call
        eval(), or pass random numbers as an input
    """

    place: str
    reason: str

    def __init__(self, reason: str, place: str = "") -> None:
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason, self.place = reason, place


class _MissingNameError(BendtraceError, KeyError):
    """There is nothing under a name."""

    def __str__(self) -> str:  # KeyError would show it quoted
        return str(self.args[0])


class NodePathError(_MissingNameError):
    """A node path names no node, or no node that can be used in that place.

    Attributes:
        path: the path, as passed.
        completions: existing paths that continue the part of the path that is right.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
        >>> _ = bended(torch.ones(1, 2))
        >>> try:
        ...     bended.interject("sub_0.linaer", print)
        ... except bt.errors.NodePathError as error:
        ...     print(error)
        ...     print(error.completions)
        no node 'sub_0.linaer': 'sub_0' has no 'linaer'; did you mean 'linear'? it has 'input',
        'weight', 'bias', 'linear', 'output'
        ('sub_0.input', 'sub_0.weight', 'sub_0.bias', 'sub_0.linear', 'sub_0.output')
    """

    def __init__(self, message: str, path: str, completions: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path
        self.completions = completions


class LayerKeyError(_MissingNameError):
    """A log has no entry under a key.

    Attributes:
        key: the key that was looked up.
        near: existing keys that look similar.

    Example:
        >>> import torch, bendtrace as bt
        >>> history = bt.log_forward_pass(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2))
        >>> try:
        ...     history["relu_2"]
        ... except bt.errors.LayerKeyError as error:
        ...     print(str(error).partition(";")[0])
        ...     print(error.near)
        there is no layer, module or node path 'relu_2'
        ('relu_1', 'relu_1_1', 'sub_0.relu')
    """

    def __init__(self, message: str, key: object, near: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.key = key
        self.near = near


class HookNameError(_MissingNameError):
    """A hook manager has no entry under a name.

    Attributes:
        name: the name that was looked up.
        near: existing names that look similar.

    Example:
        >>> import torch, bendtrace as bt
        >>> manager = bt.HookManager()
        >>> _ = manager.register_forward_hook(print, hook_fn_name="show", relu=torch.nn.ReLU())
        >>> manager.remove_hook_function_by_name("shwo")
        Traceback (most recent call last):
        bendtrace.errors.HookNameError: no hook function is registered as 'shwo'; registered: 'show'
    """

    def __init__(self, message: str, name: object, near: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.near = near


class NoLayerError(InputError, AttributeError):
    """A family has no layer with that name.

    Example:
        >>> import bendtrace as bt
        >>> bt.node_selector.Activations.Relu
        Traceback (most recent call last):
        bendtrace.errors.NoLayerError: Activations has no layer Relu; did you mean ReLU or RReLU or
        ReLU6?
        >>> bt.node_selector.Activations.Conv2d
        Traceback (most recent call last):
        bendtrace.errors.NoLayerError: Activations has no Conv2d; Convolutions has:
        Convolutions.Conv2d
    """


class InterjectionError(BendtraceError, TypeError):
    """An interjection returned something that cannot replace the node's value.

    Attributes:
        path: the node.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: torch.relu(x) + 1)
        >>> _ = bended.interject("relu", lambda value: value.tolist())
        >>> bended(torch.ones(2))
        Traceback (most recent call last):
        bendtrace.errors.InterjectionError: function at relu returned a value that cannot replace
        the node's value: expected a tensor, got a list of 2
    """

    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class PatchError(InputError):
    """A patch does not fit the value at its node, or changes it in a way that is not allowed.

    Attributes:
        path: path of the node; "" if the patch was called directly.
        expected: what would fit, such as `Tensor(2, 3)`.
        got: what the patch received.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: torch.relu(x) + 1)
        >>> with bended.patch({"relu": bt.patches.ReplacePatch(value=torch.zeros(5))}):
        ...     bended(torch.ones(2, 3))
        Traceback (most recent call last):
        bendtrace.errors.PatchError: ReplacePatch at 'relu': the value has to be Tensor(2, 3), or
        broadcast to that, but is Tensor(5)
    """

    def __init__(self, message: str, *, path: str = "", expected: str = "", got: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.expected = expected
        self.got = got


class BendError(InputError):
    """A callback cannot bend the value that it received.

    Attributes:
        path: node path of the value; "" if it has none.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU()))
        >>> _ = bended.bend(bt.bends.Permute(dim=2), "0$")
        >>> bended(torch.ones(2, 3))
        Traceback (most recent call last):
        bendtrace.errors.BendError: Permute(dim=2) has dim=2, but the tensor at 'sub_0' has shape
        (2, 3)
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class BendShapeError(BendError, RuntimeError):
    """A callback that drew its numbers for one shape received a value of another shape.

    Attributes:
        old: the shape, or the sizes along the callback's `dim`, that its numbers were drawn for.
        new: the shape or sizes that it received.
        candidates: values of `dim` for which its numbers would fit both.

    Example:
        >>> import torch, bendtrace as bt
        >>> mask = bt.bends.Mask(0.5, seed=0)
        >>> _ = mask(torch.ones(2, 3))
        >>> try:
        ...     mask(torch.ones(4, 3))
        ... except bt.errors.BendShapeError as error:
        ...     print(error.old, error.new, error.candidates)
        (2, 3) (4, 3) (-1,)
    """

    def __init__(
        self,
        message: str,
        path: str,
        old: tuple[int, ...],
        new: tuple[int, ...],
        candidates: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, path)
        self.old = old
        self.new = new
        self.candidates = candidates


class SiteError(InputError):
    """A value at a site cannot be replaced as requested.

    Attributes:
        site: the name of the site.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x):
        ...     return x.relu() if x.sum() > 0 else x.tanh()
        >>> clean, corrupted = torch.ones(1, 2), -torch.ones(1, 2)
        >>> bt.workflows.activation_patching(model, clean, corrupted, ["relu"], torch.sum)
        Traceback (most recent call last):
        bendtrace.errors.SiteError: cannot replace 'relu': relu: the corrupted run did not reach it
        (missing='nan' uses nan for values that cannot be replaced)
    """

    def __init__(self, message: str, site: str) -> None:
        super().__init__(message)
        self.site = site


class NonFiniteError(BendtraceError, FloatingPointError):
    """A node has returned NaN, or passed it on in the backward pass, under `raise_on_nan`.

    Attributes:
        path: the node.
        call: the number of the call of the model since the watch began, counted from 1.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: (x * 2).log())
        >>> with bt.workflows.raise_on_nan(bended):
        ...     bended(torch.tensor([-1.0]))
        Traceback (most recent call last):
        bendtrace.errors.NonFiniteError: log returned 1 NaN in call 1 of the model, from inputs
        without NaN
    """

    def __init__(self, message: str, path: str, call: int) -> None:
        super().__init__(message)
        self.path = path
        self.call = call


class HarvestError(BendtraceError, RuntimeError):
    """A batch could not be harvested. Earlier batches are saved, and harvesting can resume.

    The error raised by the model, or by a function that was passed in, is its `__cause__`.

    Attributes:
        batch: number of the batch, counted from 0.
        ids: the ids of its samples; empty if the ids themselves could not be determined.

    Example:
        >>> import tempfile, torch, bendtrace as bt
        >>> model, data = torch.nn.Linear(2, 3), [torch.ones(1, 2), torch.ones(1, 5)]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     try:
        ...         bt.harvest(model, data, where="linear", out=directory, progress=False)
        ...     except bt.errors.HarvestError as error:
        ...         print(error.batch, error.ids, type(error.__cause__).__name__)
        ...     len(bt.harvesting.Harvest.open(directory))
        1 (1,) RuntimeError
        1
    """

    def __init__(self, message: str, batch: int, ids: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.batch = batch
        self.ids = ids


class SaveError(BendtraceError, OSError):
    """Nothing was saved: the directory is foreign or in use, or it could not be written.

    Anything saved there before is unchanged.

    Attributes:
        path: the directory or file.

    Example:
        >>> import pathlib, tempfile, torch, bendtrace as bt
        >>> history = bt.log_forward_pass(torch.nn.ReLU(), torch.ones(2))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = pathlib.Path(directory, "thesis.tex").write_text("mine")
        ...     try:
        ...         history.save(directory)
        ...     except bt.errors.SaveError as error:
        ...         print(str(error).partition(": ")[2])
        it is not a save and holds other files (thesis.tex); choose another directory
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path: str = os.fspath(path)
        super().__init__(f"cannot save to {self.path!r}: {reason}")


class LoadError(BendtraceError, ValueError):
    """A directory or file contains no save, or one that is damaged, unfinished or too new.

    Attributes:
        path: the directory or file.
        is_newer: whether it was written in a format version that this bendtrace does not know.

    Example:
        >>> import tempfile, bendtrace as bt
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     try:
        ...         bt.load(directory)
        ...     except bt.errors.LoadError as error:
        ...         print(str(error).partition(": ")[2])
        ...         print(error.is_newer)
        it is not a save of bendtrace: there is no bendtrace.json
        False
    """

    def __init__(
        self, path: str | os.PathLike[str], reason: str, *, is_newer: bool = False
    ) -> None:
        self.path: str = os.fspath(path)
        self.is_newer = is_newer
        super().__init__(f"cannot load {self.path!r}: {reason}")


class CompileWarning(UserWarning):
    """The backend of a `BendedModule` does not work on this machine.

    Results stay right: calls are replayed as they would be without a backend.

    Example:
        >>> import warnings, torch, bendtrace as bt
        >>> def broken(graph, inputs):
        ...     raise OSError("no compiler")
        >>> bended = bt.BendedModule(torch.nn.ReLU(), backend=broken)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for _ in range(3):
        ...         _ = bended(torch.ones(2))
        >>> print(caught[0].message)
        the backend broken failed, so calls are replayed as they would be without one: OSError: no
        compiler
    """


class NameOrderWarning(UserWarning):
    """A name might belong to another node if calls had come in another order.

    Nodes of one name are numbered in the order in which runs reach them. Either known runs would
    number this node differently, or none of them has taken one side of a branch before it. The name
    stands for the node that has it now.

    Example:
        >>> import warnings, torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.relu() if x.sum() > 0 else (x + 1).relu())
        >>> _ = bended(torch.ones(2))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     _ = bended.interject("relu", print)
        >>> print(caught[0].message)  # doctest: +ELLIPSIS
        'relu' depends on which path came first: ...
    """


class NeverFiredWarning(UserWarning):
    """The context of an insertion has ended, and no run reached a node that it applies to.

    Example:
        >>> import warnings, torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.relu() if x.sum() > 0 else x.tanh())
        >>> _ = bended(torch.ones(2)), bended(-torch.ones(2))
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     with bended.interject("tanh", print):
        ...         _ = bended(torch.ones(2))
        >>> print(caught[0].message)  # doctest: +ELLIPSIS
        print at 'tanh' was never called: branch at ...:1 `x.sum() > 0` was taken for this input
    """


class TraceLimitWarning(UserWarning):
    """A model has taken more paths than its `BendedModule` keeps.

    Results stay right, but calls that are traced again and again are slower than the model itself.
    The message names what makes it diverge so often.

    Example:
        >>> import warnings, torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x * int(x.max()), max_traces=2)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     for value in (1.0, 2.0, 3.0):
        ...         _ = bended(torch.tensor([value]))
        >>> message = str(caught[0].message)
        >>> message.partition(":")[0], "int(x.max())" in message
        ('the model has taken more than 2 paths', True)
    """


class IncompatibleVersionWarning(UserWarning):
    """A part of bendtrace is switched off because this Python or torch behaves unexpectedly.

    Issued once per process, at the first trace, if the probes have found such a part.

    Example:
        >>> import warnings, torch, bendtrace as bt
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", bt.errors.IncompatibleVersionWarning)
        ...     out = bt.BendedModule(torch.relu)(torch.ones(1))
        >>> out
        tensor([1.])
    """
