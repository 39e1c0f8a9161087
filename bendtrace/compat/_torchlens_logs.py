"""Logs and entries with the fields of TorchLens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from bendtrace._compare import same_bits
from bendtrace._lazy import required_pandas
from bendtrace._trace import LoadedHistory, ModelHistory, Trace
from bendtrace.compat._torchlens_debug import FindNanResult, find_nan, op_label, show
from bendtrace.errors import InputError, LayerKeyError
from bendtrace.history.entries import LayerEntry, ModuleEntry, depths, size_text
from bendtrace.history.run_log import Entries
from bendtrace.tape.tape import OpKind, map_refs

if TYPE_CHECKING:
    from bendtrace.backward import BackwardPass
    from bendtrace.view.picture import Picture


class Gradient(NamedTuple):
    """The gradient of a value in one backward pass.

    Attributes:
        ordinal: its number among the gradients of the value, counted from 1.
        backward_pass_index: the number of the backward pass, counted from 1.
        owner: the entry of the value.
        grad: the gradient; None if it was not kept.
    """

    ordinal: int
    backward_pass_index: int
    owner: Op
    grad: Tensor | None

    @property
    def memory(self) -> int:
        """Its size in bytes."""
        return 0 if self.grad is None else _nbytes(self.grad)


class Gradients(list[Gradient]):
    """The gradients of a value, in the order of the backward passes."""

    def for_pass(self, number: int) -> Gradient:
        """Return the gradient of one backward pass, counted from 1."""
        for one in self:
            if one.backward_pass_index == number:
                return one
        raise LayerKeyError(f"backward pass {number} has no gradient here", number)


class Op(LayerEntry):
    """An entry of a log that has the fields of TorchLens as well, of all its versions.

    Example:
        >>> import torch, bendtrace as bt
        >>> entry = bt.compat.torchlens.trace(torch.nn.ReLU(), torch.ones(2))["relu_1"]
        >>> entry.layer_label, entry.func_applied_name, entry.out, entry.tensor_fsize_nice
        ('relu_1_1', 'relu', tensor([1., 1.]), '8 B')

    Attributes:
        min_distance_from_input: the length of the shortest way from an input to it. This, and
            the others like it, is None unless the log was made with `mark_layer_depths=True`,
            and where there is no such way. Numbers that Python computes count as layers.
        max_distance_from_input: the length of the longest way.
        min_distance_to_output: the length of the shortest way from it to an output.
        max_distance_to_output: the length of the longest way.
    """

    _transform: Callable[[Tensor], Any] | None = None
    _saves_arguments = False
    _is_old = False  # whether labels are those of the first releases
    min_distance_from_input: int | None = None
    max_distance_from_input: int | None = None
    min_distance_to_output: int | None = None
    max_distance_to_output: int | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def transformed_out(self) -> Any:
        """The result of `activation_transform` for the output; None without it."""
        is_there = self._transform is not None and isinstance(self.out, Tensor)
        return self._transform(self.out) if is_there else None  # type: ignore[misc]

    @property
    def func_applied(self) -> Callable[..., Any] | None:
        """The function; None for inputs and outputs, and in logs that were loaded."""
        log = self._about()
        is_call = isinstance(log, Trace) and self.function and self.index is not None
        return cast("Trace", log).ops[self.index or 0].target if is_call else None

    @property
    def creation_args(self) -> tuple[Any, ...] | None:
        """The positional arguments of the function; None unless they were saved."""
        return cast("tuple[Any, ...] | None", self._arguments(0))

    @property
    def creation_kwargs(self) -> dict[str, Any] | None:
        """The keyword arguments of the function; None unless they were saved."""
        return cast("dict[str, Any] | None", self._arguments(1))

    @property
    def grads(self) -> Gradients:
        """The gradients of the passes that `log_backward` has run."""
        found, log = Gradients(), cast("Any", self._about())
        passes = () if log is None else log.backward_passes
        source = log[self.parents[0]] if passes and self.kind == "output" and self.parents else self
        for number, record in enumerate(passes, 1):
            at = record._graph.place(source)
            node = None if at is None else record.all_nodes[at[0]]
            if at is not None and node is not None and node.order is not None:
                kept = (node.gradients_in or {at[1]: None})[at[1]]
                found.append(Gradient(len(found) + 1, number, self, kept))
        return found

    def grad_for(self, bwd: int) -> Tensor | None:
        """Return the gradient of one backward pass, counted from 1."""
        return self.grads.for_pass(bwd).grad

    @property
    def grad(self) -> Tensor | None:
        """The gradient; None without one.

        Raises:
            InputError: several backward passes were logged.
        """
        if len(self.grads) > 1:
            raise InputError("there are several gradients: use op.grads[...] / op.grad_for(bwd=k)")
        return self.grad_contents

    def show(self, method: str = "auto") -> Any:
        """Draw the saved value: as "heatmap", by "channels", in colours ("rgb") or as "hist"."""
        return show(self.out, self.label, method)

    def _is_replaced(self) -> bool | None:
        log = self._about()
        if not isinstance(log, Trace):  # a file does not say
            return None
        return self.kind == "op" and (self.index, self.element) in log._log.changed

    def _arguments(self, part: int) -> Any:
        log = self._about()
        if not (self._saves_arguments and isinstance(log, Trace)) or self.index is None:
            return None
        op = log._recording.plain_ops[self.index]
        values = {each.index: each.tensor_contents for each in log.layers if not each.element}
        states = log._capture.states if log._capture is not None else {}

        def value_of(ref: Any) -> Any:
            if log.ops[ref.index].kind is OpKind.STATE and ref.index in states:
                return states[ref.index].read()
            return values.get(ref.index)

        return map_refs((op.args, op.kwargs), value_of)[part]

    def _labels_of(self, others: Iterable[str], near: Callable[[LayerEntry], list[str]]) -> Any:
        log = self._about()
        found = [
            label for one in others for entry in cast("Any", log)[one] for label in near(entry)
        ]
        return [label for label in dict.fromkeys(found) if label != self.label]


def _params(entry: Op) -> list[Any]:
    return [used for used in entry.state if used.is_parameter]


def _short(entry: Op) -> str:
    return entry.short_name if entry.passes == 1 else f"{entry.short_name}:{entry.pass_number}"


def _passes(entry: Op) -> list[str]:
    return (
        [entry.label]
        if entry.passes == 1
        else [f"{entry.name}:{n + 1}" for n in range(entry.passes)]
    )


def _of_gradient(read: Callable[[Tensor], Any]) -> Callable[[Op], Any]:
    return lambda entry: None if entry.grad_contents is None else read(entry.grad_contents)


def _nbytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


_SAME = """
    layer_label_no_pass=name layer_label_no_pass_short=short_name pass_num=pass_number
    pass_index=pass_number layer_passes_total=passes num_passes=passes operation_num=ordinal
    has_saved_activations=has_contents has_saved_activation=has_contents out=tensor_contents
    tensor_shape=shape tensor_dtype=dtype tensor_fsize=nbytes
    func_name=layer_type func_time_elapsed=time function_is_inplace=inplace
    function_args_saved=_saves_arguments gradfunc=grad_fn parent_layers=parents
    child_layers=children min_distance_from_output=min_distance_to_output
    max_distance_from_output=max_distance_to_output saved_args=creation_args
    saved_kwargs=creation_kwargs
"""  # names of TorchLens, and what they are here
_FIELDS: dict[str, Callable[[Op], Any]] = {
    # names
    "layer_label": lambda entry: entry.label if entry._is_old else _new_name(entry),
    "layer_label_short": _short,
    "layer_label_w_pass": lambda entry: f"{entry.name}:{entry.pass_number}",
    "layer_label_w_pass_short": lambda entry: f"{entry.short_name}:{entry.pass_number}",
    "layer_type_num": lambda entry: int(entry.short_name.rpartition("_")[2]),
    "layer_total_num": lambda entry: int(entry.name.rpartition("_")[2]),
    "same_layer_operations": _passes,
    # values
    "tensor_fsize_nice": lambda entry: size_text(entry.nbytes),
    "has_saved_grad": lambda entry: entry.grad_contents is not None,
    "grad_shape": _of_gradient(lambda gradient: tuple(gradient.shape)),
    "grad_dtype": _of_gradient(lambda gradient: gradient.dtype),
    "grad_fsize": _of_gradient(_nbytes),
    "grad_fsize_nice": _of_gradient(lambda gradient: size_text(_nbytes(gradient))),
    # functions
    "func_applied_name": lambda entry: entry.function or "none",
    "has_out_variations": lambda entry: False,  # what is written later is a layer by itself
    "is_part_of_iterable_output": lambda entry: bool(entry.element),
    "iterable_output_index": lambda entry: entry.element[0] if entry.element else None,
    "code_context": lambda entry: [] if entry.source is None else [entry.source],
    # parameters
    "computed_with_params": lambda entry: bool(_params(entry)),
    "parent_params": _params,
    "parent_param_shapes": lambda entry: [used.shape for used in _params(entry)],
    "num_param_tensors": lambda entry: len(_params(entry)),
    "num_params_total": lambda entry: sum(used.numel for used in _params(entry)),
    "parent_params_fsize": lambda entry: sum(used.nbytes for used in _params(entry)),
    "parent_params_fsize_nice": lambda entry: size_text(sum(u.nbytes for u in _params(entry))),
    # the graph
    "has_parents": lambda entry: bool(entry.parents),
    "has_children": lambda entry: bool(entry.children),
    "sibling_layers": lambda entry: entry._labels_of(entry.parents, lambda one: one.children),
    "has_siblings": lambda entry: bool(entry.sibling_layers),
    "spouse_layers": lambda entry: entry._labels_of(entry.children, lambda one: one.parents),
    "has_spouses": lambda entry: bool(entry.spouse_layers),
    "is_input_layer": lambda entry: entry.kind == "input",
    "is_input": lambda entry: entry.kind == "input",
    "is_output_layer": lambda entry: entry.kind == "output",
    "is_output": lambda entry: entry.kind == "output",
    "is_output_parent": lambda entry: any(one.startswith("output_") for one in entry.children),
    "has_input_ancestor": lambda entry: entry.min_distance_from_input is not None,
    "has_output_descendant": lambda entry: entry.min_distance_to_output is not None,
    "is_output_ancestor": lambda entry: entry.min_distance_to_output is not None,
    "initialized_inside_model": lambda entry: entry.kind == "op" and not entry.parents,
    # modules
    "is_computed_inside_submodule": lambda entry: bool(entry.scopes),
    "containing_module_origin": lambda entry: entry.scopes[-1] if entry.scopes else None,
    "containing_modules_origin_nested": lambda entry: list(entry.scopes),
    "module_nesting_depth": lambda entry: len(entry.scopes),
    "modules_exited": lambda entry: [label.rpartition(":")[0] for label in entry.output_of],
    "module_passes_exited": lambda entry: list(entry.output_of),
    "is_submodule_output": lambda entry: bool(entry.output_of),
    "modules": lambda entry: list(entry.scopes),
    # changes
    "intervention_replaced": lambda entry: entry._is_replaced(),
}
_FIELDS |= {name: attrgetter(same) for name, same in (one.split("=") for one in _SAME.split())}
for _name, _read in _FIELDS.items():
    setattr(Op, _name, property(_read))


class Module(ModuleEntry):
    """One call of a module.

    Attributes:
        ops: the labels of what is computed in it.
    """

    ops: Sequence[str] = ()


class Layer(Entries):
    """All passes of a layer, with the fields that are the same in all of them."""

    def __getattr__(self, name: str) -> Any:
        if name in _FIELDS and self._entries:
            first, *others = (getattr(entry, name) for entry in self._entries)
            if all(same_bits(first, other) for other in others):
                return first
        return super().__getattr__(name)


class Accessor(list[Any]):
    """The layers or modules of a log in order, also found by name.

    Args:
        items: the items.
        find: finds an item by its name; None for a search among the items.

    Example:
        >>> import torch, bendtrace as bt
        >>> log = bt.compat.torchlens.trace(torch.nn.ReLU(), torch.ones(2))
        >>> log.layers["relu_1"], log.layers.labels()
        (<op relu_1_1 (2,)>, ['input_1_0', 'relu_1_1', 'output_1_2'])
    """

    def __init__(self, items: Iterable[Any], find: Callable[[Any], Any] | None = None) -> None:
        super().__init__(items)
        self._find = find

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        if self._find is not None:
            return self._find(key)
        found = [one for one in self if key in (one.name, getattr(one, "label", ""))]
        if not found:
            raise LayerKeyError(f"there is no {key!r} here", key)
        return found[0]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or any(
            key in (one.name, getattr(one, "label", "")) for one in self
        )

    def first(self) -> Any:
        """Return the first item."""
        return self[0]

    def labels(self) -> list[str]:
        """Return the labels of the items."""
        return [one.label for one in self]

    keys = labels

    def values(self) -> list[Any]:
        """Return the items."""
        return list(self)

    def items(self) -> list[tuple[str, Any]]:
        """Return the items with their labels."""
        return [(one.label, one) for one in self]

    def to_pandas(self) -> Any:
        """Return the public fields of the items as a `pandas.DataFrame`."""
        rows = [getattr(one, "_asdict", lambda one=one: vars(one))() for one in self]
        return required_pandas().DataFrame(
            [{k: v for k, v in row.items() if k[0] != "_"} for row in rows]
        )


class Log(ModelHistory):
    """A log that has the fields and methods of TorchLens as well, and prints as its logs do."""

    _call: Any = None
    _changes: tuple[Any, ...] = ()
    _has_details = False

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __getitem__(self, key: Any) -> Any:
        if key == "self":
            return self.modules[key]
        found = super().__getitem__(key)
        if type(found) is Entries:
            found.__class__ = Layer
        return found

    @property
    def layers(self) -> Accessor:
        """The layers in order; also by name."""
        return Accessor(super().layers, self.__getitem__)

    @property
    def modules(self) -> Accessor:
        """The calls of modules in order; also by name, "self" for the call of the model."""
        made = [Module(**vars(call)) for call in super().modules]
        root = Module("self", 1, 1, self._log.name, "", 0, False)
        for call in (*made, root):
            call.ops = [
                op_label(entry) if call is not root else _new_name(entry)
                for entry in self.layer_list
                if call is root or call.label in entry.scopes
            ]
        return Accessor(made, lambda key: root if key == "self" else Accessor(made)[key])

    @property
    def params(self) -> Accessor:
        """The parameters that were used; also by name."""
        used = {one.name: one for entry in self.entries for one in entry.state if one.is_parameter}
        return Accessor(used.values())

    @property
    def layer_list(self) -> list[Any]:
        """The layers in order."""
        return list(super().layers)

    @property
    def backward_passes(self) -> list[BackwardPass]:
        """The records of the backward passes that `log_backward` has run."""
        passes: list[BackwardPass] = self.__dict__.setdefault("_passes", [])
        return passes

    def cleanup(self) -> None:
        """Drop all saved values."""
        for entry in self.entries:
            entry.saved = None
        self.__dict__.pop("_passes", None)

    def log_backward(self, loss: Tensor, gradient: Tensor | None = None, **options: Any) -> Log:
        """Run and record a backward pass, and return the log."""
        run = cast("Trace", self)
        self.backward_passes.append(run.backward(loss, gradient, save="all", **options))
        return self

    def draw_backward(self, vis_outpath: Any = None, **_: Any) -> Picture:
        """Draw the latest backward pass."""
        return self.backward_passes[-1].draw(vis_outpath)

    def summary(self) -> str:
        """Return the log as text."""
        return self.to_text()

    def find_sites(self, where: Any) -> Accessor:
        """Return the layers that a selector or a key finds."""
        return Accessor(self.selected(where))

    def resolve_sites(self, where: Any, *, max_fanout: int = 8) -> Accessor:
        """Return the layers that a selector or a key finds, of which there are not too many."""
        found = self.find_sites(where)
        if len(found) > max_fanout:
            raise InputError(f"{len(found)} layers are selected, and max_fanout is {max_fanout}")
        return found

    def selected(self, where: Any) -> list[Any]:
        """Return the layers that a selector, a key, or a part of names finds."""
        if callable(where) and not isinstance(where, (type, torch.nn.Module)):
            return [entry for entry in super().layers if where(entry)]
        if isinstance(where, (list, tuple, set)):
            return list(dict.fromkeys(one for each in where for one in self.selected(each)))
        try:
            return list(self._lookup.all(where))
        except LayerKeyError:
            keys = (key for key in self._lookup.keys() if isinstance(where, str) and where in key)
            found = [entry for key in keys for entry in self._lookup.all(key) if entry.is_layer]
            if not found:
                raise
            return list(dict.fromkeys(found))

    def first_nonfinite(self) -> str:
        """Return in words which saved value is the first that is not finite."""
        found = self.find_nan()
        if not found.found:
            return found.message
        return (
            f"First non-finite value: {found.label} is {found.kind}, shape={found.op.shape} "
            f"dtype={found.op.dtype} parents={found.op.parents} source={found.source_line}"
        )

    def find_nan(self) -> FindNanResult:
        """Return the first saved value that holds a NaN or an infinity."""
        return find_nan(self)

    def render_graph(self, vis_opt: str = "unrolled", vis_outpath: Any = None) -> Picture:
        """Draw the run, as `draw` does."""
        return self.draw(vis_outpath, rolled=vis_opt == "rolled")

    def validate_saved_activations(self, *_: Any, **__: Any) -> bool:
        """Compute each op again from the saved values, and say whether all bits are the same."""
        return bool(cast("Trace", self).validate())

    # Changed runs

    def fork(self, name: str = "") -> Log:
        """Return a log of the same run, for changes; it is this one until it is run again."""
        if self._call is None:
            raise InputError("a log is forked only if it comes from trace(model, inputs)")
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def attach_hooks(self, where: Any, *what: Any, **_: Any) -> Log:
        """Let the next run replace what a selector finds, by helpers or functions of the value."""
        self._changes = (*self._changes, *((where, each) for each in what))
        return self

    def set(self, where: Any, value: Any, **_: Any) -> Log:
        """Let the next run replace what a selector finds by a value."""
        return self.attach_hooks(where, lambda _: value)

    def do(self, where: Any, what: Any, **_: Any) -> Log:
        """Replace what a selector finds, and run the model again."""
        return self.attach_hooks(where, what).replay()

    def replay(self) -> Log:
        """Run the model again on the same inputs with the changes; this log is then of that run."""
        return self.rerun(*self._call[1:3])

    def rerun(self, model: Any, inputs: Any, **_: Any) -> Log:
        """Run a model with the changes; this log then describes the run."""
        again, _, _, options = self._call
        options = dict(options, intervene=[*(options.get("intervene") or ()), *self._changes])
        changes, made = self._changes, again(model, inputs, **options)
        self.__dict__.clear()
        self.__dict__.update(made.__dict__)
        self._claim(self._log)
        self._changes = changes
        self._call = (again, model, inputs, dict(self._call[3], intervene=None))
        return self

    run = rerun


_OF_LOGS: dict[str, Callable[[Any], Any]] = {
    "total_backward_memory": lambda log: log.total_gradient_memory,
    "save_arg_values": lambda log: any(entry._saves_arguments for entry in log.layer_list),
    "layer_labels": lambda log: list(dict.fromkeys(map(_new_name, log.layer_list))),
    "op_labels": lambda log: [op_label(entry) for entry in log.layer_list],
    "input_layers": lambda log: [entry.label for entry in log.layer_list if entry.kind == "input"],
    "output_layers": lambda log: [
        entry.label for entry in log.layer_list if entry.kind == "output"
    ],
    "saved_ops": lambda log: Accessor(one for one in log.layer_list if one.has_contents),
    "save_grads": lambda log: log._call[3]["save_grads"],
    "total_gradient_memory": lambda log: sum(
        one.memory for entry in log.layer_list for one in entry.grads
    ),
    "saved_module_calls": lambda log: Accessor(
        one for one in log.modules if any(log[label].has_contents for label in one.outputs)
    ),
    "num_saved_module_calls": lambda log: len(log.saved_module_calls),
    "has_gradients": lambda log: bool(log.saved_grad_ops),
    "num_tensors": lambda log: len(log.layer_list),
    "num_ops": lambda log: sum(entry.kind == "op" for entry in log.layer_list),
    "num_params": lambda log: sum(one.numel for one in log.params),
    "total_flops": lambda log: sum(entry.flops or 0 for entry in log.layer_list),
    "grad_fns": lambda log: log.backward_passes[-1].nodes if log.backward_passes else [],
    "saved_grad_ops": lambda log: Accessor(
        one for one in log.layer_list if one.grad_contents is not None
    ),
}
for _name, _read in _OF_LOGS.items():
    setattr(Log, _name, property(_read))


class TraceLog(Log, Trace):
    """A trace with the fields of TorchLens.

    Example:
        >>> import torch, bendtrace as bt
        >>> tl = bt.compat.torchlens
        >>> isinstance(tl.trace(torch.nn.ReLU(), torch.ones(1)), tl.Trace)
        True
    """


class LoadedLog(Log, LoadedHistory):
    """A loaded log with the fields of TorchLens."""


def _new_name(entry: LayerEntry) -> str:
    return entry.name if entry.kind == "op" else entry.short_name


def with_names(
    log: ModelHistory,
    transform: Callable[[Tensor], Any] | None = None,
    distances: bool = False,
    arguments: bool = False,
) -> Log:
    """Let a log and its entries be read with the names of TorchLens.

    Args:
        log: a trace, or a log that was loaded.
        transform: for `transformed_out`.
        distances: whether to count how far entries are from inputs and outputs.
        arguments: whether entries have the arguments of their functions.
    """
    log.__class__ = TraceLog if isinstance(log, Trace) else LoadedLog
    for entry in log.entries:
        entry.__class__ = Op
        entry.__dict__.update(_transform=transform, _saves_arguments=arguments)
    if distances:
        entries = [each for each in log._entries_without_state() if isinstance(each, Op)]
        for each, (above, below) in zip(entries, depths(entries), strict=True):
            each.min_distance_from_input, each.max_distance_from_input = above
            each.min_distance_to_output, each.max_distance_to_output = below
    return cast("Log", log)
