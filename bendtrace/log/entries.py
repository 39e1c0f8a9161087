"""The content of the log: an entry for each value of a run, and one for each call of a module.

Entries are plain data. They refer to each other by label, so that a log can be stored and read
again without the model.
"""

from __future__ import annotations

import copy
import hashlib
import json
import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    overload,
    runtime_checkable,
)

import torch
from torch import Tensor, nn

from bendtrace.flow import FlowSteps, LoopFlowStep
from bendtrace.python.checks import required_choice
from bendtrace.python.lazy import LazyMethod, required_pandas, tabulate
from bendtrace.python.sites import assigns, full_place_text, operates
from bendtrace.tape.tape import ModuleCall, Op, OpKind, Ref, TensorMeta, map_refs, refs_in
from bendtrace.watch.functions import METADATA, SHAPES, is_inserted, name_of

if TYPE_CHECKING:
    import pandas

    from bendtrace.log.run_log import RunLog
    from bendtrace.show.treescope_forms import entry as folded
else:
    folded = LazyMethod("bendtrace.show.treescope_forms", "entry")


@runtime_checkable
class Readable(Protocol):
    """A value that is stored elsewhere, for example on disk."""

    def read(self) -> Tensor:
        """Return the value."""


EntryKind = Literal["input", "op", "number", "state", "output"]


class Source(NamedTuple):
    """A place in the user's code."""

    file: str  # path of the source file
    line: int  # its line, counted from 1
    function: str  # name of the function that the line is in
    text: str  # source text of the expression, with collapsed white space
    statement: str  # source text of the whole line

    def __str__(self) -> str:
        return full_place_text(self.file, self.line)


class ParameterUse(NamedTuple):
    """A parameter or buffer that an op computed with.

    Attributes:
        name: its qualified name in the model (`features.0.weight`), or the location of a tensor
            that belongs to no module.
        shape: its shape.
        numel: its number of elements.
        nbytes: its size in bytes.
        is_parameter: whether it is an `nn.Parameter`.
        trainable: whether it requires grad.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    nbytes: int
    is_parameter: bool
    trainable: bool


@dataclass(eq=False, repr=False)
class LayerEntry:
    """One value of a run: an input, a result of an op, a number from a tensor, or an output.

    Attributes:
        kind: "input", "op" (a tensor returned by an op), "number" (a Python number taken from a
            tensor, or computed from such numbers), "state" (a parameter, buffer or other tensor
            that existed before the run), or "output".
        layer_type: the base of its name: `conv2d`, `relu`, `input`.
        name: `conv2d_3_7` for the third convolution, which is the seventh layer; numbers and state
            do not count as layers: `item_1`, `features.0.weight`.
        short_name: the same without the position, `conv2d_3`.
        pass_number: the pass of the layer, counted from 1.
        passes: the number of passes of the layer. An op has another pass when the same call, at the
            same place of the same module, runs again; a module without parameters that is called
            in two places has different layers in each.
        ordinal: position among all layers, from 0; None for numbers and state.
        index: position of its op on the tape; None for outputs.
        element: for an op with several result tensors, the keys that lead to this one.
        node: name of its op's node in the networkx mirror; for an output the mirror's output.
        node_path: its path in `Trace.tree`, such as `features.sub_6.conv2d`.
        shape: its shape; None for numbers.
        dtype: its dtype; None for numbers.
        device: its device; None for numbers.
        nbytes: its size in bytes, ignoring shared memory.
        value: the number itself, for numbers.
        parents: labels of the entries that it was computed from, except state.
        children: labels of the entries that were computed from it.
        state: the state it was computed from, parameters first.
        function: name of the function that returned it, such as `conv2d` or `__add__`.
        target: the function's qualified name, such as `torch.conv2d`.
        arguments: how the function was called, as text with labels for values.
        grad_fn: name of its gradient function (`ConvolutionBackward0`); None if it has none, or if
            nothing was captured.
        inplace: whether the op worked in place.
        module: name of the innermost module it was computed in, "" for the root.
        scopes: the calls of modules around it, outermost first and without the root, as labels
            of `ModuleEntry`: `("features:1", "features.6:1")`.
        output_of: the module calls that returned it, innermost first.
        source: its place in the source; None for inputs and state.
        flow: numbers of the flow steps that it ran under, outermost first.
        time: duration of the op in seconds; None if nothing was captured.
        flop_count: the value of `flops`, if already known.
        saved: the kept value; see `tensor_contents`.
        unsaved: why the kept value could not be stored, for a log that was loaded.
        gradient: the kept gradient; see `grad_contents`.

    Iterating over it yields itself, so `for entry in log[key]` works for any key.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> entry = bt.trace(model, torch.ones(4, 2), save="all")["linear_1"]
        >>> entry
        <op linear_1_1 (4, 3)>
        >>> entry.shape, entry.module, entry.parents, entry.children
        ((4, 3), '0', ['input_1_0'], ['relu_1_2'])
        >>> [used.name for used in entry.state], entry.flops, entry.tensor_contents.shape
        (['0.bias', '0.weight'], 48, torch.Size([4, 3]))
    """

    kind: EntryKind
    layer_type: str
    name: str
    short_name: str
    pass_number: int = 1
    passes: int = 1
    ordinal: int | None = None
    index: int | None = None
    element: tuple[Any, ...] = ()
    node: str = ""
    node_path: str = ""
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    nbytes: int = 0
    value: Any = None
    parents: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    state: list[ParameterUse] = field(default_factory=list)
    function: str = ""
    target: str = ""
    arguments: str = ""
    grad_fn: str | None = None
    inplace: bool = False
    module: str = ""
    scopes: tuple[str, ...] = ()
    output_of: tuple[str, ...] = ()
    source: Source | None = None
    flow: tuple[int, ...] = ()
    time: float | None = None
    flop_count: int | None = None
    saved: Any = None
    unsaved: str = ""
    gradient: Any = None

    def _belong(self, log: Callable[[], RunLog | None]) -> None:
        """Set the log that it belongs to.

        The log is referenced weakly, except by entries that were looked up: when nobody holds the
        log, its activations are freed right away.
        """
        self.__dict__["_log"] = log

    def _about(self) -> RunLog | None:
        log: Callable[[], RunLog | None] | None = self.__dict__.get("_log")
        return None if log is None else log()

    @property
    def label(self) -> str:
        """Its name, with the number of the pass if there are several: unique in the log."""
        return self.name if self.passes == 1 else f"{self.name}:{self.pass_number}"

    @property
    def is_layer(self) -> bool:
        """True if it counts as a layer: an input, a tensor returned by an op, or an output."""
        return self.ordinal is not None

    @property
    def flops(self) -> int | None:
        """Floating point operations by the formulas of `torch.utils.flop_counter`.

        They count matrix multiplications, convolutions and attention; None if an op could not be
        counted. They are computed on first access, for the whole log.
        """
        about = self._about()
        if self.flop_count is None and about is not None:
            about._count_flops()
        return self.flop_count

    @property
    def macs(self) -> int | None:
        """Multiply-add pairs: half the floating point operations."""
        return None if self.flops is None else self.flops // 2

    @property
    def lookup_keys(self) -> list[str]:
        """The keys that find it in its log; only its label if the log no longer exists."""
        about = self._about()
        return [self.label] if about is None else about._keys_of(self)

    @property
    def has_contents(self) -> bool:
        """True if its value was saved."""
        return self.saved is not None

    @property
    def tensor_contents(self) -> Any:
        """Its value, as it was when it was computed; None if it was not saved.

        If `save=` was a function, its result for the entry. Values that are streamed to disk, or
        were loaded, are read again on each access.
        """
        return _materialize_value(self.saved)

    @property
    def grad_contents(self) -> Tensor | None:
        """Its gradient in the latest backward pass; None if there was none, or it was not saved."""
        gradient: Tensor | None = _materialize_value(self.gradient)
        return gradient

    def __iter__(self) -> Iterator[LayerEntry]:
        yield self

    __treescope_repr__ = folded

    def __repr__(self) -> str:
        about = "" if self.shape is None else f" {tuple(self.shape)}"
        value = "" if self.kind != "number" else f" = {self.value!r}"
        return f"<{self.kind} {self.label}{about}{value}>"

    def __str__(self) -> str:
        about = self._about()
        return repr(self) if about is None else about._describe(self)


def _materialize_value(kept: Any) -> Any:
    if kept is None or isinstance(kept, Tensor):  # checking for a protocol is slow
        return kept
    return kept.read() if isinstance(kept, Readable) else kept


@dataclass(eq=False)
class ModuleEntry:
    """One call of a module.

    Attributes:
        name: qualified name, "" for the traced module itself.
        pass_number: the number of this call of the module, counted from 1.
        passes: how often the module is called in the run.
        class_name: name of its class.
        parent: label of the enclosing call; "" for calls by the root.
        parameters: the number of elements of its own parameters, without those of submodules.
        training: whether it was in training mode.
        inputs: labels of its input entries.
        outputs: labels of its output entries.
        source: the place of the call.
        flow: numbers of the flow steps that the call ran under, outermost first.
    """

    name: str
    pass_number: int
    passes: int
    class_name: str
    parent: str
    parameters: int
    training: bool
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    source: Source | None = None
    flow: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """`features.6:1`: the name with the number of the call, even if there is only one."""
        return f"{self.name}:{self.pass_number}"


@dataclass(slots=True)
class Layer:
    """All values with one name: all passes of one op, at one place of one module."""

    layer_type: str  # the base of the name
    number: int  # its number among the layers of that type, counted from 1
    position: int | None  # the number of layers before it; None for numbers, which are not layers
    passes: int = 0  # the number of passes so far

    @property
    def short_name(self) -> str:
        """The name without the position."""
        return f"{self.layer_type}_{self.number}"

    @property
    def name(self) -> str:
        """The name."""
        return self.short_name if self.position is None else f"{self.short_name}_{self.position}"


class Namer:
    """Names the results of ops, in the order in which the ops return them.

    Two results are passes of one layer if the same call, at the same place of the same module,
    returned them. Of a module without parameters, each place that calls it counts separately,
    unless it is given results of the same layers there.

    With `torchlens`, it counts like TorchLens. A call is then also a pass of an earlier one whose
    result it takes, if both call the same function with the same settings in one module, the result
    of an insertion belongs to the layer of its node, operators have TorchLens's names, and inputs
    take no positions.
    """

    count: int  # the number of layers named so far, each pass counted separately

    def __init__(self, torchlens: bool = False) -> None:
        self.count = 0
        self.torchlens: bool = torchlens  # as given
        self._layers: dict[Any, Layer] = {}
        self._of_type: dict[str, int] = {}
        self._positions = int(torchlens)  # of the next layer
        self._callers: dict[int, tuple[Any, ...]] = {}
        self._links: dict[int, tuple[Any, Layer]] = {}

    def name(self, op: Op, element: tuple[Any, ...] = ()) -> tuple[Layer, int]:
        """Return the layer of a tensor that an op returned, and the number of its pass."""
        if self.torchlens and is_inserted(op):
            for ref in refs_in((op.args, op.kwargs)):
                if ref.index in self._links:
                    self._links[op.index] = link = self._links[ref.index]
                    return link[1], link[1].passes
        kind = layer_type(op)
        if self.torchlens:
            kind = _of_operator(op) or torchlens_name(kind)
        return self._pass(op, kind, element, is_layer=True)

    def name_number(self, op: Op, kind: str) -> tuple[Layer, int]:
        """Return the name of a number, and the number of its pass."""
        # Of a shape that was read once, several sizes can be used.
        element = op.args[1:] if op.target is operator.getitem else ()
        return self._pass(op, kind, element, is_layer=False)

    def name_output(self) -> tuple[Layer, int]:
        """Return the layer of the next output of the run."""
        return self._pass(None, "output", (), is_layer=True)

    def _pass(
        self, op: Op | None, kind: str, element: tuple[Any, ...], *, is_layer: bool
    ) -> tuple[Layer, int]:
        self.count += is_layer
        keys: list[Any] = []
        layer = link = None
        if op is not None and op.site is not None:
            scope = op.scope
            key = kind, id(scope.module), scope.path, op.site.identity, element
            called = self._called(scope)
            keys = [(*key, called)]
            if called:
                keys.append((*key, tuple(map(self._giver, refs_in((op.args, op.kwargs))))))
            layer = next(filter(None, map(self._layers.get, keys)), None)
        if op is not None and is_layer and not element:
            link = kind, op.scope.path, ""
            if self.torchlens:
                same = map_refs((op.args, op.kwargs), lambda ref: ref.index in self._links or ref)
                link = kind, op.scope.path, repr(same)
                layer = layer or self._shared_layer(op, link)
        if layer is None:
            number = self._of_type[kind] = self._of_type.get(kind, 0) + 1
            takes_none = self.torchlens and kind == "input"
            layer = Layer(kind, number, self._positions * (not takes_none) if is_layer else None)
            self._positions += is_layer and not takes_none
        for each in keys:
            self._layers.setdefault(each, layer)
        if link is not None and op is not None:
            self._links[op.index] = link, layer
        layer.passes += 1
        return layer, layer.passes

    def _giver(self, ref: Ref) -> int:
        """Return a number of the layer that an argument is from; of anything else, of the value."""
        link = self._links.get(ref.index)
        return -1 - ref.index if link is None else id(link[1])

    def _shared_layer(self, op: Op, link: Any) -> Layer | None:
        """Return the layer of an alike call whose result an op takes; None if it takes none."""
        for ref in refs_in((op.args, op.kwargs)):
            source = self._links.get(ref.index)
            if op.scope.path and source is not None and source[0] == link:
                return source[1]
        return None

    def _called(self, scope: ModuleCall) -> tuple[Any, ...]:
        """Return where the modules without parameters around an op were called, innermost first."""
        found = self._callers.get(id(scope))
        if found is None:
            found = ()
            if scope.parent is not None and scope.site is not None and not _learns(scope.module):
                found = (scope.site.identity, *self._called(scope.parent))
            self._callers[id(scope)] = found
        return found


def _learns(module: nn.Module | None) -> bool:
    """Return whether a module, or one inside of it, has parameters."""
    waiting = [] if module is None else [module]
    for each in waiting:
        if any(value is not None for value in each._parameters.values()):
            return True
        waiting += [child for child in each._modules.values() if child is not None]
    return False


_ASSIGNMENTS = {
    "add_": "iadd", "sub_": "isub", "mul_": "imul", "div_": "idiv", "floor_divide_": "ifloordiv",
    "remainder_": "imod", "pow_": "ipow",
}  # fmt: skip
_OF_OPERATORS = {"div": "truediv", "remainder": "mod"}
OPERATORS: frozenset[str] = frozenset({*_OF_OPERATORS, *_OF_OPERATORS.values()})
_TORCHLENS = {
    "floordiv": "floordivide", "rfloordiv": "floordivide", "rmod": "remainder", "rpow": "pow",
    "positive": "pos", "data": "detach",
}  # fmt: skip


def torchlens_name(kind: str) -> str:
    """Return TorchLens's name for a function that bendtrace names otherwise."""
    return _TORCHLENS.get(kind, kind)


def _of_operator(op: Op) -> str | None:
    """Return the operator that called a function, if TorchLens names it: `x / y` is no `div`."""
    found = _OF_OPERATORS.get(name_of(op.target)) if op.kind is OpKind.CALL else None
    return found if found and _is_called_by(op, operates) else None


def _is_called_by(op: Op, kind: Callable[[CodeType, int], bool]) -> bool:
    """Return whether the instruction of the model that made an op is of a kind."""
    return op.site is not None and bool(op.site.chain) and kind(*op.site.chain[op.site.level])


def layer_type(op: Op) -> str:
    """Return the base of a tensor's name: the function that returned it, as one word."""
    if op.kind is OpKind.INPUT:
        return "input"
    if op.kind is OpKind.UNKNOWN:
        return "unknown"
    assigned = _ASSIGNMENTS.get(name_of(op.target))
    if assigned and _is_called_by(op, assigns):
        return assigned  # `x += y` calls what `x.add_(y)` calls
    return layer_type_of(op.target)


def layer_type_of(function: Any) -> str:
    """Return the name of a function as one word."""
    return "".join(char for char in name_of(function).lower() if char.isalnum()) or "op"


def number_type(op: Op, ops: list[Op]) -> str | None:
    """Return the base of a number's name; None for values that get no name."""
    if type(op.meta) not in (int, float, bool, complex):
        return None
    if op.kind is OpKind.INPUT:
        return "input"
    if op.kind is OpKind.CALL:
        return None if op.target in METADATA else layer_type(op)
    if op.kind is not OpKind.SCALAR:
        return None
    source = op
    while source.is_element:
        source = ops[source.args[0].index]
    if source is op:
        return f"{type(op.meta).__name__}{layer_type(op)}"
    return "size" if source.target in SHAPES else layer_type(source)


def tensors_of(meta: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], TensorMeta]]:
    """Return the tensors in the kept result of an op, with the keys that lead to them."""
    if isinstance(meta, TensorMeta):
        return [(path, meta)]
    found = []
    if isinstance(meta, tuple):
        for position, item in enumerate(meta):
            found += tensors_of(item, (*path, position))
    return found


def nbytes_of(meta: TensorMeta) -> int:
    """Return the size of a tensor in bytes; ragged dimensions are ignored."""
    count = 1
    for size in meta.shape:
        count *= size if type(size) is int and size >= 0 else 1
    return count * meta.dtype.itemsize


# Sizes and counts in human-readable form.


def size_text(nbytes: int) -> str:
    """Return a size in bytes as text: `253.5 KB`, with 1024 bytes to the KB."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("KB", "MB", "GB", "TB"):
        size /= 1024
        if size < 1024 or unit == "TB":
            break
    return f"{size:.1f} {unit}"


def number_text(value: object) -> str:
    """Return a value as Python prints it, with six digits for long floats.

    Example:
        >>> number_text(0.30000001192092896), number_text(0.5), number_text("a")
        ('0.3', '0.5', "'a'")
    """
    text = repr(value)
    return f"{value:.6g}" if isinstance(value, float) and len(text) > 8 else text


def counted(number: int, noun: str) -> str:
    """Return `1 branch`, `2 branches`, `2 entries`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'sh', 'ch', 'x')) else 's'}"


# Tables of a run: its columns, ops, modules, parameters and buffers; its hash.
#
# A fact about entries that tables and exports show is one `LogColumn`.


_T = TypeVar("_T")


class Listing(Sequence[_T]):
    """The items of a result, which print together; a slice is a listing with the same facts."""

    def __init__(self, items: Iterable[_T]) -> None:
        self._items = tuple(items)

    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> _T | Self:
        if not isinstance(index, slice):
            return self._items[index]
        part = copy.copy(self)
        part._items = self._items[index]
        return part

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return str(self)


class Table(Listing[Any]):
    """Rows of a result, which print as a table.

    Args:
        rows: named tuples of one kind.
        formats: how the fields of some columns are shown, by name.

    Example:
        >>> import torch, bendtrace as bt
        >>> table = bt.trace(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2)).table("modules")
        >>> table[0].class_name, table.to_list()[0]["ops"]
        ('ReLU', 1)
    """

    def __init__(
        self, rows: Sequence[Any], formats: dict[str, Callable[[Any], str]] | None = None
    ) -> None:
        super().__init__(rows)
        self._formats = formats or {}

    def _laid_out(self, form: str) -> str:
        if not self._items:
            return "none"
        names = self._items[0]._fields
        shown = [
            [self._formats.get(name, str)(value) for name, value in zip(names, row, strict=True)]
            for row in self._items
        ]
        return str(tabulate.tabulate(shown, names, tablefmt=form, disable_numparse=True))

    def __str__(self) -> str:
        return self._laid_out("simple")

    def __repr__(self) -> str:
        return f"<Table of {len(self)} rows>"

    def _repr_html_(self) -> str:
        return self._laid_out("html")

    def to_list(self) -> list[dict[str, Any]]:
        """Return the rows as dicts of plain values."""
        return [row._asdict() for row in self._items]


View = Literal["ops", "frame", "chrome", "model_explorer", "tensorboard"]


class LogColumn(NamedTuple):
    """A fact about each entry of a log, which tables and exports show."""

    name: str  # its heading
    # Where it is shown: in the table of ops, in the "frame" of pandas and parquet, and in the
    # exports with these names.
    views: tuple[View, ...]
    # Returns its value for an entry; None for the entry's attribute with that name.
    read: Callable[[LayerEntry], Any] | None = None

    def value(self, entry: LayerEntry) -> Any:
        """Return its value for an entry."""
        return getattr(entry, self.name) if self.read is None else self.read(entry)


def shape_text(entry: LayerEntry) -> str:
    """Return the dtype and shape of a tensor as `float32[2, 3]`, or a number as it prints."""
    return repr(entry.value) if entry.shape is None else f"{_dtype(entry)}{list(entry.shape)}"


def _dtype(entry: LayerEntry) -> str:
    return str(entry.dtype).removeprefix("torch.")


def _target(entry: LayerEntry) -> str:
    return entry.target or entry.function


def _parameter_count(entry: LayerEntry) -> int:
    return sum(use.numel for use in entry.state if use.is_parameter)


def _source_text(entry: LayerEntry) -> str | None:
    return None if entry.source is None else str(entry.source)


def _source_line(entry: LayerEntry) -> str | None:
    return None if entry.source is None else f"{entry.source}: {entry.source.text}"


# Each view shows them in this order.
COLUMNS = (
    LogColumn("label", ("ops",)),
    LogColumn("function", ("ops", "model_explorer"), _target),
    LogColumn("shape", ("chrome", "tensorboard"), shape_text),
    LogColumn("arguments", ("ops", "chrome", "model_explorer", "tensorboard")),
    LogColumn("layer_type", ("frame",)),
    LogColumn("kind", ("frame",)),
    LogColumn("pass", ("frame",), lambda entry: entry.pass_number),
    LogColumn("passes", ("frame",)),
    LogColumn("shape", ("ops", "frame")),
    LogColumn("dtype", ("ops",), _dtype),
    LogColumn("dtype", ("frame",), lambda entry: str(entry.dtype)),
    LogColumn("device", ("frame",), lambda entry: str(entry.device)),
    LogColumn("bytes", ("frame",), lambda entry: entry.nbytes),
    LogColumn("function", ("frame",)),
    LogColumn("grad_fn", ("frame",)),
    LogColumn("module", ("ops", "frame", "chrome")),
    LogColumn("nbytes", ("ops",)),
    LogColumn("parents", ("frame",)),
    LogColumn("children", ("frame",)),
    LogColumn("parameters", ("frame",), _parameter_count),
    LogColumn("seconds", ("frame",), lambda entry: entry.time),
    LogColumn("flops", ("frame",)),
    LogColumn("node_path", ("frame",)),
    LogColumn("source", ("frame",), _source_text),
    LogColumn("source", ("chrome", "model_explorer"), _source_line),
    LogColumn("saved", ("frame",), lambda entry: entry.has_contents),
)


def facts_of(entry: LayerEntry, view: View) -> dict[str, Any]:
    """Return the cells of an entry in a view, by the names of the columns."""
    return {column.name: column.value(entry) for column in COLUMNS if view in column.views}


def data_frame(entries: Sequence[LayerEntry]) -> pandas.DataFrame:
    """Return a row for each entry, indexed by label."""
    rows = {entry.label: facts_of(entry, "frame") for entry in entries}
    frame = required_pandas().DataFrame.from_dict(rows, orient="index")
    return frame.rename_axis("label")  # type: ignore[no-any-return]


OpRow: type[OpRow] = namedtuple("OpRow", [c.name for c in COLUMNS if "ops" in c.views])  # type: ignore[misc]


class ModuleRow(NamedTuple):
    """A module with all of its calls, for `table("modules")`."""

    name: str
    class_name: str
    calls: int
    parameters: int
    ops: int
    nbytes: int
    time: float | None


class StateRow(NamedTuple):
    """A parameter or buffer that a run used, for `table("parameters")` and `table("buffers")`."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    trainable: bool
    ops: int


def table_of(entries: Sequence[LayerEntry], modules: Iterable[ModuleEntry], what: str) -> Table:
    """Return one of the tables of a run; see `RunLog.table`."""
    required_choice("what", what, "ops", "modules", "parameters", "buffers")
    ops = [entry for entry in entries if entry.kind == "op"]
    if what == "ops":
        rows: list[Any] = [OpRow(**facts_of(entry, "ops")) for entry in ops]
    elif what == "modules":
        calls: dict[str, list[ModuleEntry]] = {}
        for module in modules:
            calls.setdefault(module.name, []).append(module)
        rows = []
        for name, its in calls.items():
            labels = {call.label for call in its}
            inside = [entry for entry in ops if not labels.isdisjoint(entry.scopes)]
            nbytes = sum(entry.nbytes for entry in inside)
            measured = [entry.time for entry in inside if entry.time is not None]
            first = its[0]
            rows.append(
                ModuleRow(name, first.class_name, len(its), first.parameters, len(inside), nbytes,
                          sum(measured) if measured else None)
            )  # fmt: skip
    else:
        uses = [use for entry in entries for use in entry.state if entry.kind != "state"]
        wanted = [use for use in uses if use.is_parameter is (what == "parameters")]
        times: dict[str, int] = {}
        for use in wanted:
            times[use.name] = times.get(use.name, 0) + 1
        first_uses = {use.name: use for use in reversed(wanted)}
        rows = [
            StateRow(name, first_uses[name].shape, first_uses[name].nbytes,
                     first_uses[name].trainable, count)
            for name, count in times.items()
        ]  # fmt: skip
    return Table(rows, {"nbytes": size_text, "time": in_seconds})


def hash_of(entries: Iterable[LayerEntry], steps: FlowSteps) -> str:
    """Return the hash of the structure of a run; see `RunLog.hash`."""
    values = [
        (
            entry.kind, entry.label, entry.target or entry.function, entry.arguments, entry.module,
            entry.shape, str(entry.dtype), entry.parents, [use.name for use in entry.state],
        )
        for entry in entries
    ]  # fmt: skip
    asked = [
        (
            step.kind, step.text, step.module_path, step.iteration,
            step.iterations if isinstance(step, LoopFlowStep) else _exact(step.value),
        )
        for step in steps
    ]  # fmt: skip
    text = json.dumps([values, asked], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _exact(value: Any) -> Any:
    """Return a value that is the same on every machine; None for a float, whose digits differ."""
    return value if type(value) in (bool, int, str) else None


def rounded(value: float | None) -> str:
    """Return a number with three digits; "" for None."""
    return "" if value is None else f"{value:.3g}"


def in_percent(value: float) -> str:
    """Return a share as a percentage."""
    return f"{value:.0%}"


def in_seconds(value: float | None) -> str:
    """Return seconds as milliseconds; "" for None."""
    return "" if value is None else f"{value * 1e3:.3g} ms"


# How far the entries of a log are from the inputs and outputs of the model.

Distance: TypeAlias = tuple[int | None, int | None]


def depths(entries: Sequence[LayerEntry]) -> list[tuple[Distance, Distance]]:
    """Count the entries on the ways between each entry and the inputs and outputs.

    Each gets the lengths of the shortest and the longest way from an input, and of those to an
    output; None where no way leads.
    """
    above = _distances(entries, "input", lambda entry: entry.parents)
    below = _distances(entries[::-1], "output", lambda entry: entry.children)
    none = (None, None)
    return [(above.get(one.label, none), below.get(one.label, none)) for one in entries]


def _distances(
    entries: Iterable[LayerEntry], ends: str, before: Callable[[LayerEntry], list[str]]
) -> dict[str, tuple[int, int]]:
    """Return how far entries are from the ends, at least and at most, in the order of the ways."""
    found: dict[str, tuple[int, int]] = {}
    for entry in entries:
        near = [found[label] for label in before(entry) if label in found]
        if entry.kind == ends:
            found[entry.label] = 0, 0
        elif near:
            found[entry.label] = (
                1 + min(low for low, _ in near), 1 + max(high for _, high in near)
            )  # fmt: skip
    return found
