"""BendedModule: a model that replays its recorded paths and accepts insertions."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from bendtrace._lazy import LazyMethod, LazyModule
from bendtrace.base_module import BaseModule, R
from bendtrace.calls import Call
from bendtrace.errors import InputError
from bendtrace.history.entries import listed
from bendtrace.hooks import HookManager
from bendtrace.interject.activations import Activations, get_activations, inputs_of
from bendtrace.interject.bends.bend import Bend, Value
from bendtrace.interject.bends.bending import Bending, Out
from bendtrace.interject.bends.catalogue import BendHandle, Filter
from bendtrace.interject.bends.config import BendingConfig
from bendtrace.interject.insertion import Insertion, What
from bendtrace.interject.interjection import PassNumbers
from bendtrace.interject.patches.context import PatchContext, Patches
from bendtrace.interject.restricted import Rows
from bendtrace.interject.resume_point import from_activations, told
from bendtrace.interject.where import Where
from bendtrace.module_proxy import ModelT
from bendtrace.paths.nodes import Text

if TYPE_CHECKING:
    from bendtrace.export import exporting
    from bendtrace.export.exporting import Exported
    from bendtrace.stepping import run as stepping_run
    from bendtrace.stepping.run import SteppedRun
    from bendtrace.view.folded import bended_model as folded
else:
    exporting = LazyModule("bendtrace.export.exporting")
    folded = LazyMethod("bendtrace.view.folded", "bended_model")
    stepping_run = LazyModule("bendtrace.stepping.run")

__all__ = ["BendedModule"]


class BendedModule(BaseModule[ModelT]):
    """A model that is traced when called, and replayed when it would do the same again.

    It behaves like the model for every input. The first call, and each call that takes an unknown
    path, runs the model's own Python under the tracer. Calls along known paths run generated
    straight-line code with the same operations. Parameters, buffers and submodules are the model's
    own, not copies.

    Args:
        model: a module; a plain function works too.
        max_traces: how many paths to keep; None for all. Where there are more, those are
            forgotten, and traced again if they come up, that were used least of late. The first
            time, a `TraceLimitWarning` says what makes the model diverge so often.
        backend: None for replays that give what the model gives, bit for bit. Otherwise what
            compiles paths that are taken often: a name that torch.compile knows ("inductor"), or a
            function like its backends. Results are then equal within compile's own tolerance.
        backend_options: for that: `mode`, `options` and `dynamic` as torch.compile has them,
            `cuda_graphs`, `drop_slower`, `max_paths` (see docs/compiled.md).
        cache_dir: a directory that keeps what inductor compiles, so that other processes need not
            compile it again; None for none. The libraries in it are run: share it only with
            those whom you trust.
        audit: what share of the replays the model itself does again, to be compared bit for bit
            (see `audit`): 0.01 for one in a hundred.

    Raises:
        InputError: if `model` cannot be called, `max_traces` is not a positive number, there is
            no such backend or option, `cache_dir` is no directory, or `audit` is no share, or given
            with a backend.

    Example:
        >>> import torch, bendtrace as bt
        >>> def clipped(x):
        ...     return x if x.abs().max() < 1 else x.clamp(-1, 1)
        >>> bended = bt.BendedModule(clipped)
        >>> for value in (0.5, 0.25, 2.0, 0.75):
        ...     _ = bended(torch.tensor([value]))
        >>> bended.stats
        Stats(traces=2, replays=2, retraces=1, resumes=1, live=0)
    """

    _untraced = BaseModule._untraced | {"_bending", "hooks"}
    _shared = ("audit", "explore", "export", "remove_all", "reset", "step", "update")

    def __init__(
        self,
        model: ModelT,
        *,
        max_traces: int | None = 512,
        backend: str | Callable[..., Any] | None = None,
        backend_options: Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        audit: float = 0.0,
    ) -> None:
        super().__init__(
            model, max_traces=max_traces, backend=backend, backend_options=backend_options,
            cache_dir=cache_dir, audit=audit,
        )  # fmt: skip
        object.__setattr__(self, "_bending", Bending(self, self._known))

    _bending: Bending

    def interject(
        self,
        where: Where,
        what: What,
        *,
        passes: PassNumbers = None,
        every: int | None = None,
        calls: PassNumbers = None,
        allow_none: bool = False,
    ) -> Insertion:
        """Insert something in the model: every run that reaches the nodes calls it from now on.

        Args:
            where: the nodes: a node path (also into a container, `output|sub_0`, of an input of a
                module, `fc.input`, or of a parameter, `fc.weight`), a tree node, a regular
                expression for paths, a module, a class of modules, a selector, a torch function, a
                predicate of the `Candidate`, the name of a layer or an entry of the log, a
                `NodeRef` of the networkx mirror, or several of these; or an `Alias`.
            what: an `Interjection`, or a function or module that is called with the node's value.
                Its return value replaces the value; None keeps it. A function with two arguments
                also receives the `NodePass`.
            passes: the passes of each node to apply to: numbers counted from 0, or from the end if
                negative; or a function of the number.
            every: apply only in every n-th pass, beginning with the first.
            calls: the calls of the model to apply to, of those that reach a node: numbers counted
                from 0 at the insertion, or a function of the number. `generate` calls the model
                once in each step, so that `calls=range(2)` are the first two steps.
            allow_none: whether to accept that no node is selected.

        Returns:
            A handle, which is also a context manager: `remove()`, `report()`.

        Raises:
            InputError: an argument is invalid.
            NodePathError: `where` selects nothing.

        Example:
            >>> import torch, bendtrace as bt
            >>> def doubled(x):
            ...     return torch.relu(x) * 2
            >>> bended = bt.BendedModule(doubled)
            >>> x = torch.tensor([-1.0, 2.0])
            >>> bended(x)
            tensor([0., 4.])
            >>> with bended.interject("relu", lambda value: value + 10) as handle:
            ...     bended(x)
            tensor([20., 24.])
            >>> handle.report()
            function at 'relu': called once at 1 node
              relu: once, changed the value once
            >>> bended(x)
            tensor([0., 4.])
        """
        return self._board.insert(
            where, what, passes=passes, every=every, calls=calls, allow_none=allow_none
        )

    # What is inserted

    @property
    def insertions(self) -> tuple[Insertion, ...]:
        """The active insertions of the model, in the order in which they were made.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x.relu().exp())
            >>> handle = bended.interject("relu", torch.zeros_like)
            >>> bended.insertions
            (<insertion of zeros_like at 'relu', active>,)
            >>> handle.remove()
            >>> bended.insertions
            ()
        """
        return self._board.insertions

    def patch(self, patches: Patches, *, rows: Rows = None) -> PatchContext:
        """Return a context in which patches apply at nodes; after it the model is as before.

        Args:
            patches: for each node one patch, or several in the order in which they apply. Nodes are
                given by path (`layers_0.mlp.relu`, `linear.input`, `linear.weight`,
                `output|sub_0`), as tree nodes, or in any other way that `interject` accepts.
            rows: the rows of the batch to patch: an index, several, or a slice; None for all. The
                patches receive these rows only. So several examples of one batch can each have
                patches.

        Raises:
            NodePathError: a node does not exist, or does not hold a single value.
            InputError: a value in `patches` is not a patch, or `rows` selects no rows.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x.relu().sum())
            >>> bended(torch.ones(2))
            tensor(2.)
            >>> with bended.patch({"relu": bt.patches.AddPatch(value=1, slice=0)}):
            ...     bended(torch.ones(2))
            tensor(3.)
        """
        return PatchContext(self._board, self._known, patches, rows)

    @functools.cached_property
    def hooks(self) -> HookManager:
        """Hooks on the model's modules, by name; active hooks are listed in `insertions`.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Linear(2, 1)))
            >>> def show(module, inputs, outputs):
            ...     print(module.name, tuple(outputs[0].shape))
            >>> _ = bended.hooks.register_forward_hook(show, bended[0])
            >>> _ = bended(torch.ones(3, 2))
            0 (3, 1)
        """
        return HookManager(self)

    @property
    def bending(self) -> Bending:
        """The bends of the model: configurations, versions of weights, captures."""
        return self._bending

    def bend(
        self,
        callback: Bend | BendingConfig | Callable[[Tensor], Any],
        *where: Where,
        weights: bool | None = None,
        activations: bool = True,
        allow_none: bool = False,
    ) -> BendHandle:
        """Bend activations and weights from now on.

        Args:
            callback: a bending callback, a function of a tensor, or a `BendingConfig` alone.
            *where: patterns for names. A pattern for activations (see `print_activations`) matches
                from the start of the name; a pattern for weights has to match in full, including
                the last part (`conv.weight`, `.*bias`). Everything else that `interject` accepts is
                accepted, too.
            weights: whether patterns apply to weights: None for the weights that they match in
                full, True also for the parameters that they match from the start, False for no
                weights.
            activations: whether patterns apply to activations.
            allow_none: whether to accept that nothing has such a name so far.

        Returns:
            A handle, which is also a context manager: `remove()`, `report()`.

        Raises:
            InputError: nothing has such a name, or an argument is invalid.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Linear(2, 2)))
            >>> x = torch.ones(1, 2)
            >>> before = bended(x)
            >>> handle = bended.bend(bt.bends.Bias(1.0), "0$")
            >>> torch.equal(bended(x), before + 1)
            True
            >>> bended.reset()
            >>> torch.equal(bended(x), before)
            True
        """
        return self._bending.bend(
            callback, *where, weights=weights, activations=activations, allow_none=allow_none
        )

    def reset(self, *what: Any) -> None:
        """Stop bending (see `Bending.reset`). Other insertions stay (see `remove_all`).

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Identity()))
            >>> _ = bended.bend(bt.bends.Scale(2.0), "0$"), bended.bend(bt.bends.Bias(1.0), "1$")
            >>> bended(torch.ones(1))
            tensor([3.])
            >>> bended.reset("1$")
            >>> bended(torch.ones(1))
            tensor([2.])
        """
        self._bending.reset(*what)

    def remove_all(self) -> None:
        """Remove all insertions: interjections, patches, bends, and those of workflows.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: x.relu() * 2)
            >>> handles = bended.interject("relu", torch.zeros_like), bended.interject("mul", abs)
            >>> bended.remove_all()
            >>> bended.insertions, bended(torch.ones(1))
            ((), tensor([2.]))
        """
        self._bending.reset()
        self._board.clear()

    def update(self, name: str | None = None, value: Value | None = None) -> None:
        """Set a parameter of the callbacks, or match the patterns again.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU()))
            >>> _ = bended.bend(bt.bends.Scale(bt.bends.BendingParameter("gain", 1.0)), "0$")
            >>> bended.update("gain", 3.0)
            >>> bended(torch.ones(2))
            tensor([3., 3.])
        """
        self._bending.update(name, value)

    def bended_keys(self) -> list[str]:
        """Return the names of everything that is bent: node paths, and names of the state dict.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Linear(2, 2)))
            >>> _ = bended(torch.ones(1, 2)), bended.bend(bt.bends.Scale(2.0), "0.*", "0.weight")
            >>> bended.bended_keys()
            ['sub_0', '0.weight']
        """
        return self._bending.bended_keys()

    def bending_config(self, name: str | None = None) -> BendingConfig:
        """Return the active bends, or those saved under a name, as a configuration.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU()))
            >>> handle = bended.bend(bt.bends.Scale(2.0), "0$")
            >>> config = bended.bending_config()
            >>> config
            BendingConfig(
              (Scale(scale=2.0), '0$'),
            )
            >>> handle.remove()
            >>> with bended.bend(config):
            ...     bended(torch.ones(2))
            tensor([2., 2.])
        """
        return self._bending.bending_config(name)

    def activation_names(self, flt: Filter = None, exclude: Filter = None) -> list[str]:
        """Return the names of the activations that the patterns of `bend` are matched against.

        Example:
            >>> import torch, bendtrace as bt
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
            >>> bended = bt.BendedModule(model)
            >>> _ = bended(torch.ones(1, 2))
            >>> bended.activation_names()
            ['input', 'sub_0', 'sub_1']
            >>> bended.activation_names(flt="1")
            ['sub_1']
        """
        return self._bending.activation_names(flt, exclude)

    @property
    def weight_names(self) -> list[str]:
        """The names of the parameters."""
        return self._bending.weight_names

    def print_activations(
        self, flt: Filter = None, exclude: Filter = None, out: Out = None
    ) -> Text:
        """Print a table of the activations, and return it (see `Bending.print_activations`).

        Example:
            >>> import torch, bendtrace as bt
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
            >>> bended = bt.BendedModule(model)
            >>> _ = bended(torch.ones(1, 2))
            >>> _ = bended.print_activations()
            -----  -----------  ------------------
            input  placeholder  torch.Size([1, 2])
            sub_0  call_module  torch.Size([1, 3])
            sub_1  call_module  torch.Size([1, 3])
            -----  -----------  ------------------
        """
        return self._bending.print_activations(flt, exclude, out)

    def print_weights(self, flt: Filter = None, exclude: Filter = None, out: Out = None) -> Text:
        """Print a table of the parameters, and return it (see `Bending.print_weights`).

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.LayerNorm(2)))
            >>> _ = bended.print_weights()
            name      shape            dtype            min    max    mean    stddev
            --------  ---------------  -------------  -----  -----  ------  --------
            0.weight  torch.Size([2])  torch.float32      1      1       1         0
            0.bias    torch.Size([2])  torch.float32      0      0       0         0
        """
        return self._bending.print_weights(flt, exclude, out)

    @overload
    def get_activations(
        self, *where: Where, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None,
        passes: PassNumbers = None, detach: bool = True, bended: bool = True,
        return_output: Literal[False] = False, allow_none: bool = False, **inputs: Any,
    ) -> Activations: ...  # fmt: skip
    @overload
    def get_activations(
        self: BendedModule[Callable[..., R]], *where: Where, args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None, passes: PassNumbers = None, detach: bool = True,
        bended: bool = True, return_output: Literal[True], allow_none: bool = False, **inputs: Any,
    ) -> tuple[Activations, R]: ...  # fmt: skip
    @overload
    def get_activations(
        self, *where: Where, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None,
        passes: PassNumbers = None, detach: bool = True, bended: bool = True, return_output: bool,
        allow_none: bool = False, **inputs: Any,
    ) -> Activations | tuple[Activations, Any]: ...  # fmt: skip
    def get_activations(
        self,
        *where: Where,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        passes: PassNumbers = None,
        detach: bool = True,
        bended: bool = True,
        return_output: bool = False,
        allow_none: bool = False,
        **inputs: Any,
    ) -> Any:
        """Call the model, and return the outputs of some nodes in that call, by path.

        Args:
            *where: the nodes: paths, regular expressions, modules, and everything else that
                `interject` accepts.
            args: the model's positional arguments.
            kwargs: keyword arguments of the model whose names are taken by options.
            passes: the passes of each node.
            detach: whether to return snapshots, or the tensors themselves.
            bended: whether to return the values after the insertions at a node, or before.
            return_output: whether to return the output of the model as well.
            allow_none: whether to accept that the call reaches no selected node.
            **inputs: keyword arguments of the model.

        Returns:
            An `Activations`, which is a dict; with `return_output` that and the output.

        Raises:
            NodePathError: no node is selected.
            InputError: an argument is invalid.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: torch.relu(x) * 2)
            >>> found = bended.get_activations("relu", args=(torch.tensor([-1.0, 2.0]),))
            >>> found["relu"]
            tensor([0., 2.])
        """
        return get_activations(
            self, list(where), args, inputs_of(self, kwargs, inputs), passes=passes, detach=detach,
            bended=bended, return_output=return_output, allow_none=allow_none,
        )  # fmt: skip

    def from_activations(
        self: BendedModule[Callable[..., R]], *args: Any, _bended: bool = True, **kwargs: Any
    ) -> R:
        """Run the rest of the model from given activations, and return its output.

        Args:
            *args: first a dict of values by node path; then the model's positional arguments, as
                far as the rest needs them. Or, as in torchbend, only the names of nodes, with their
                values as keyword arguments.
            _bended: whether the run continues with the values as they are, or first applies the
                insertions at these nodes.
            **kwargs: the model's keyword arguments, as far as the rest needs them.

        Raises:
            NodePathError: there is no such node.
            InputError: an argument that the rest needs is missing.
            DivergenceError: the rest takes a path that no recorded run took, and the arguments
                needed to run the model's own Python are missing.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: torch.relu(x) * 2)
            >>> _ = bended(torch.ones(2))
            >>> bended.from_activations({"relu": torch.tensor([3.0])})
            tensor([6.])
        """
        output: R = from_activations(self, *told(args, kwargs), bended=_bended)
        return output

    def step(self, *args: Any, budget: int = 2**30, **kwargs: Any) -> SteppedRun:
        """Run the model, and return the run as a place to experiment.

        In it one can go to any op, question or line, forward and back, look at the variables of the
        model's Python, replace values and answers, and go on from there. Under `torch.no_grad`,
        nothing that came before is computed again, as far as the budget reaches; where autograd
        records, values in its graph are. The model, the inputs and the random generators stay as
        they are (see `SteppedRun.finish`). `SteppedRun.to_html` shows it as a page, and so does a
        notebook. A submodule called `step` is hidden by this method: it is `bended.model.step`.

        Args:
            *args: positional arguments of the model.
            budget: how many bytes of values to keep.
            **kwargs: keyword arguments of the model.

        Raises:
            InputError: something is inserted, or the run cannot be stepped through: it depends on
                something that no guard can watch, or changes something that cannot be restored.
            Exception: what the model raises before its first op, such as for missing arguments.

        Example:
            >>> import torch, bendtrace as bt
            >>> bended = bt.BendedModule(lambda x: torch.relu(x) * 2)
            >>> run = bended.step(torch.tensor([-1.0, 2.0]))
            >>> run.set("relu", torch.tensor([5.0, 5.0])).output
            tensor([10., 10.])
        """
        if self._board:
            raise InputError("a run to be stepped through has nothing inserted: remove it first")
        return stepping_run.SteppedRun(
            self._model, args, kwargs, self._signature, self._known.registry, budget
        )

    # Copies

    def export(
        self,
        *inputs: Any,
        to: str | os.PathLike[str] | None = None,
        unseen: str = "assert",
        insertions: str = "constants",
        tolerance: float = 1e-5,
    ) -> Exported:
        """Turn the model, with its branches and loops, into one program that runs without Python.

        The model is run with copies of the inputs, under `torch.no_grad`, and what it changes is
        restored. What these runs have shown becomes
        a `torch.export.ExportedProgram` in which questions are `torch.cond` and loops
        `torch.while_loop`. For each of the inputs it is compared with the model, bit by bit,
        before it is returned; so are files, those of other targets within `tolerance`. A call that
        comes to a side of a question that no input took raises an error that names it.

        Args:
            *inputs: the inputs of one call each: a tensor or another single argument, a tuple of
                positional arguments, a dict of keyword arguments, or a pair (args, kwargs), as
                `explore` finds them (`bended.export(*known, *found.inputs)`). All have to pass the
                same guards of sizes and settings. Sizes that no guard fixes stay open. Without any,
                those of the calls so far that took new paths, up to 1 MiB each and 16 MiB in all.
            to: a file to write it to: `.pt2` for `torch.export.load`, `.aoti.pt2` for a package
                compiled by AOTInductor, `.onnx` for onnxruntime (see `OnnxProgram`).
            unseen: "assert" for that error in the program; "error" to refuse right away.
            insertions: what is inserted is part of the program. "constants" for its tensors as
                parts of the program, "inputs" for keyword inputs (see `Exported.insertions`).
            tolerance: the largest difference of floats, absolute and relative, that is accepted of
                files other than `.pt2`, besides the rounding errors that the model itself has.

        Returns:
            What is called like the model, has the program, and prints as a report.

        Raises:
            ExportError: something has no form without Python, something inserted does more than
                compute tensors, or with `unseen="error"` sides are
                not known; it says which line, and what to do. No file is written then.
            InputError: there are no inputs, the file cannot be written, or the extra `onnx` is
                not installed.

        Example:
            >>> import torch, bendtrace as bt
            >>> def halved(x):
            ...     while x.norm() > 1:
            ...         x = x / 2
            ...     return x
            >>> inputs = torch.zeros(3), torch.ones(3), torch.full((3,), 9.0)
            >>> exported = bt.BendedModule(halved).export(*inputs)
            >>> print(exported)
            exported: equal to the model, bit by bit, for 3 inputs
            >>> exported(torch.tensor([6.0, 8.0, 0.0, 0.0]))
            tensor([0.3750, 0.5000, 0.0000, 0.0000])
        """
        if insertions not in ("constants", "inputs"):
            raise InputError(f"insertions is 'constants' or 'inputs', not {insertions!r}")
        inserted = exporting.Insertions(self._board, self._known) if self._board else None
        examples = self._dispatcher.examples
        calls = [tuple(Call.of(one)) for one in inputs] if inputs else examples.calls()
        exported = exporting.export(
            self._model, self._signature, calls, to, unseen, inserted, insertions == "inputs",
            tolerance,
        )  # fmt: skip
        if examples.missed and not inputs:
            note = f"without {examples.missed} of the calls, whose inputs were not kept: pass them"
            exported.notes = (*exported.notes, note)
        return exported

    def __deepcopy__(self, memo: dict[int, Any]) -> BendedModule:
        # Paths are not copied: their code holds on to the tensors and modules of this model.
        made = memo[id(self)] = type(self).__new__(type(self))  # the model may hold this one
        model = copy.deepcopy(self._model, memo)
        self._fill_tables(model, memo)
        carried = self._carried(memo)
        BendedModule.__init__(
            made, model, max_traces=self._trees.limit, **carried["backend"],
        )  # fmt: skip
        made._take_over(carried)
        return made

    def __reduce__(self) -> Any:
        return _wrap, (type(self), self._model, self._trees.limit, self._carried(None))

    def _carried(self, memo: dict[int, Any] | None) -> dict[str, Any]:
        """Return what a copy is to have besides the model.

        That is names, what is inserted, the backend, and the hooks on this module itself.
        """
        speculation = self._dispatcher.speculation
        return {
            "hooks": self._own_hooks() if memo is None else copy.deepcopy(self._own_hooks(), memo),
            "backend": {} if speculation is None else speculation.settings.arguments,
            "registry": self._known.registry.__getstate__(),
            "bends": self._bending._kept(memo),
            "insertions": self._board.kept(memo),
        }

    def _take_over(self, carried: dict[str, Any]) -> None:
        self._known.registry.__setstate__(carried["registry"])
        self._board.restore(*carried["insertions"])
        self._bending._restore(carried["bends"])
        vars(self).update(carried["hooks"])

    __treescope_repr__ = folded

    def __dir__(self) -> list[str]:
        # `torch.jit.trace` asks for all that is listed.
        nothing = {"latest_trace"} if self._dispatcher.latest is None else set()
        return [name for name in super().__dir__() if name not in nothing]

    def __repr__(self) -> str:
        counts = repr(self.stats).removeprefix("Stats(").removesuffix(")")
        inserted = listed([repr(each) for each in self.insertions], 3) or "nothing"
        return f"BendedModule({self._model!r})\n  calls: {counts}\n  inserted: {inserted}"


def _wrap(
    cls: type[BendedModule], model: Callable[..., Any], limit: int | None, carried: dict[str, Any]
) -> BendedModule:
    made = cls.__new__(cls)
    BendedModule.__init__(made, model, max_traces=limit, **carried["backend"])
    made._take_over(carried)
    return made


def bended_of(model: Callable[..., Any]) -> BendedModule:
    """Return a model as a `BendedModule`: itself, where it is one.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(torch.relu)
        >>> bended_of(bended) is bended
        True
    """
    return model if isinstance(model, BendedModule) else BendedModule(model)


def required_bended(model: Any, what: str) -> BendedModule:
    """Return a model that something stays in after the call."""
    if not isinstance(model, BendedModule):
        raise InputError(
            f"{what} stays in the model until it is removed, so the model has to be a "
            "BendedModule: make `bended = bendtrace.BendedModule(model)`, and pass that"
        )
    return model
