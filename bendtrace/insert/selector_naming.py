"""Selectors for the names of a node, its function or module, and its output."""

from __future__ import annotations

import builtins
import re
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized as _is_parametrized

from bendtrace.errors import InputError
from bendtrace.insert.selector_algebra import Selector
from bendtrace.insert.selector_algebra import as_selector as as_selector
from bendtrace.insert.selector_algebra import find_nodes as find_nodes
from bendtrace.log.path_views import Candidate, CandidateGraph, Node, NodeSelector, dug
from bendtrace.tape.captured import PLAIN_TYPES
from bendtrace.watch.code_facts import codes_in
from bendtrace.watch.functions import is_torchs_function, name_of
from bendtrace.watch.owners import modules_in
from bendtrace.watch.provenance import is_finished, is_installed_space, is_users_class


def matches_name(name: str | re.Pattern[str]) -> Selector:
    """Select nodes by the last part of their path: `relu_1`.

    Args:
        name: the name, or a regular expression that is searched for in it.

    Raises:
        InputError: `name` is neither.

    Example:
        >>> import re, torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: (x.relu() + 1).relu().tanh(), torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.matches_name("relu_1"), trace)
        [<node relu_1: relu>]
        >>> bt.node_selector.find(bt.node_selector.matches_name(re.compile("^relu|tanh")), trace)
        [<node relu: relu>, <node relu_1: relu>, <node tanh: tanh>]
    """
    return TextSelector("name", _text_or_pattern(name))


def matches_path(path: str | re.Pattern[str]) -> Selector:
    """Select nodes by their path: `layers_0.mlp.relu`.

    Args:
        path: the path, as the tree prints it, or a regular expression that is searched for in it.

    Raises:
        InputError: it is the path of one pass, or of a part of a node's output; selectors select
            whole nodes.

    Example:
        >>> import re, torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> trace = bt.trace(model, torch.ones(1, 2))
        >>> bt.node_selector.find(bt.node_selector.matches_path("sub_0.linear"), trace)
        [<node sub_0.linear: linear>]
        >>> bt.node_selector.find(bt.node_selector.matches_path(re.compile("^sub_1")), trace)
        [<node sub_1: ReLU>, <node sub_1.relu: relu>]
    """
    path = _text_or_pattern(path)
    if isinstance(path, str) and re.search(r"[|:\[]|(^|\.)\d", path):
        raise InputError(
            f"{path!r} is not the path of a whole node: selectors select whole nodes, in all "
            "their passes, by the paths that the tree prints, such as `layers_0.mlp` or "
            "`features.sub_6`"
        )
    return TextSelector("path", path)


def matches_qualified_name(name: str | re.Pattern[str]) -> Selector:
    """Select nodes by qualified name: `layers.0.mlp` for a module, `layers.0.mlp.relu` for an op.

    All calls of a module have its name, wherever they occur.

    Args:
        name: the name, or a regular expression that is searched for in it.

    Raises:
        InputError: `name` is neither.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> trace = bt.trace(model, torch.ones(1, 2))
        >>> bt.node_selector.find(bt.node_selector.matches_qualified_name("0"), trace)
        [<node sub_0: Linear>]
        >>> bt.node_selector.find(bt.node_selector.matches_qualified_name("1.relu"), trace)
        [<node sub_1.relu: relu>]
    """
    return TextSelector("qualified_name", _text_or_pattern(name))


def source_text(text: str | re.Pattern[str]) -> Selector:
    """Select nodes by their expression in the source: `self.conv1(x)`.

    Args:
        text: the whole expression, with collapsed white space, or a regular expression that is
            searched for in it.

    Raises:
        InputError: `text` is neither.

    Example:
        >>> import re, torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.exp() * 2 + x.exp() * 3, torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.source_text("x.exp() * 3"), trace)
        [<node mul_1: mul>]
        >>> bt.node_selector.find(bt.node_selector.source_text(re.compile("[*] [23]$")), trace)
        [<node mul: mul>, <node mul_1: mul>, <node add: add>]
    """
    return TextSelector("text", _text_or_pattern(text))


def matches_module_class(*classes: type[nn.Module]) -> Selector:
    """Select calls of modules by their class, including subclasses.

    Args:
        *classes: one or several classes.

    Raises:
        InputError: one of them is not a class of modules, or there are none.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Tanh())
        >>> trace = bt.trace(model, torch.ones(1, 2))
        >>> layers = bt.node_selector.matches_module_class(torch.nn.Linear, torch.nn.Tanh)
        >>> bt.node_selector.find(layers, trace)
        [<node sub_0: Linear>, <node sub_2: Tanh>]
    """
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise InputError(f"matches_module_class() takes subclasses of nn.Module, not {cls!r}")
    return ModuleClass(_some(classes, "matches_module_class() takes one class or several"))


def matches_module(*modules: nn.Module) -> Selector:
    """Select calls of certain modules, wherever they occur.

    Args:
        *modules: one or several modules of the model.

    Raises:
        InputError: one of them is not a module, or there are none.

    Example:
        >>> import torch, bendtrace as bt
        >>> shared = torch.nn.ReLU()
        >>> model = torch.nn.Sequential(shared, torch.nn.Tanh(), shared, torch.nn.ReLU())
        >>> trace = bt.trace(model, torch.ones(2))
        >>> bt.node_selector.find(bt.node_selector.matches_module(shared), trace)
        [<node sub_0: ReLU>]
    """
    for module in modules:
        if not isinstance(module, nn.Module):
            raise InputError(f"matches_module() takes modules, not {module!r}")
    return Modules(_some(modules, "matches_module() takes one module or several"))


def matches_module_lambda(predicate: Callable[[nn.Module], Any]) -> Selector:
    """Select calls of modules that satisfy a predicate.

    Args:
        predicate: called with each module.

    Raises:
        InputError: `predicate` cannot be called.

    Example:
        >>> import torch, bendtrace as bt
        >>> wide = bt.node_selector.matches_module_lambda(
        ...     lambda module: getattr(module, "out_features", 0) > 64
        ... )
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 100), torch.nn.Linear(100, 3))
        >>> bt.node_selector.find(wide, bt.trace(model, torch.ones(1, 2)))
        [<node sub_0: Linear>]
    """
    return Predicate(_callable(predicate, "matches_module_lambda"), of_module=True)


def node_lambda(predicate: Callable[[Candidate], Any]) -> Selector:
    """Select nodes that satisfy a predicate.

    Args:
        predicate: called with each node, as a `Candidate`.

    Raises:
        InputError: `predicate` cannot be called.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().sum(0).exp().sum(), torch.ones(2, 3))
        >>> small = bt.node_selector.node_lambda(lambda node: node.shape == (3,))
        >>> bt.node_selector.find(small, trace)
        [<node sum: sum>, <node exp: exp>]
    """
    return Predicate(_callable(predicate, "node_lambda"))


def matches_function(*functions: Callable[..., Any] | str) -> Selector:
    """Select calls of certain functions and methods, and not of others that do the same.

    Args:
        *functions: the functions (`F.relu`, `torch.Tensor.view`), or names that select any torch
            function, method or operator of that name (`"relu"`).

    Raises:
        InputError: one of them is neither, or there are none.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: torch.relu(x.relu()).exp(), torch.ones(2))
        >>> matches = bt.node_selector.matches_function
        >>> bt.node_selector.find(matches(torch.relu), trace)
        [<node relu_1: relu>]
        >>> bt.node_selector.find(matches("relu", torch.Tensor.exp), trace)
        [<node relu: relu>, <node relu_1: relu>, <node exp: exp>]
    """
    for function in functions:
        if not callable(function) and not isinstance(function, str):
            raise InputError(f"matches_function() takes functions and names, not {function!r}")
    return FunctionSelector(_some(functions, "matches_function() takes one function or several"))


@dataclass(frozen=True, repr=False)
class TextSelector(Selector):
    """Nodes with an attribute that equals or contains some text."""

    attribute: Literal["name", "path", "qualified_name", "text"]
    what: str | re.Pattern[str]

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        text: str = getattr(node, self.attribute)
        if isinstance(self.what, str):
            return text == self.what
        return self.what.search(text) is not None

    def __repr__(self) -> str:
        made = "source_text" if self.attribute == "text" else f"matches_{self.attribute}"
        return f"{made}({self.what!r})"


@dataclass(frozen=True, repr=False)
class ModuleClass(Selector):
    """Calls of modules of some classes."""

    is_of_modules = True
    classes: tuple[type[nn.Module], ...]

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        return isinstance(node.module, self.classes)

    def __repr__(self) -> str:
        return f"matches_module_class({', '.join(cls.__name__ for cls in self.classes)})"


@dataclass(frozen=True, repr=False)
class Modules(Selector):
    """Calls of some modules."""

    is_of_modules = True
    modules: tuple[nn.Module, ...]

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        return any(node.module is module for module in self.modules)

    def __repr__(self) -> str:
        return f"matches_module({', '.join(f'<{type(m).__name__}>' for m in self.modules)})"


@dataclass(frozen=True, repr=False)
class FunctionSelector(Selector):
    """Calls of some functions."""

    functions: tuple[Callable[..., Any] | str, ...]

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        function = node.function
        if function is None:
            return False
        return any(
            name_of(function) == one if isinstance(one, str) else function == one
            for one in self.functions
        )

    def __repr__(self) -> str:
        names = [repr(one) if isinstance(one, str) else name_of(one) for one in self.functions]
        return f"matches_function({', '.join(names)})"


@dataclass(frozen=True, repr=False)
class Predicate(Selector):
    """Nodes, or calls of modules, that satisfy a predicate."""

    predicate: Callable[[Any], Any] = field(compare=False)
    of_module: bool = False
    meaning: Hashable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "meaning", meaning_of(self.predicate))

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        if self.of_module:
            return node.module is not None and bool(self.predicate(node.module))
        return bool(self.predicate(node))

    def __repr__(self) -> str:
        made = "matches_module_lambda" if self.of_module else "node_lambda"
        return f"{made}({getattr(self.predicate, '__name__', repr(self.predicate))})"


@dataclass(frozen=True, repr=False)
class _KindSelector(Selector):
    """Nodes of one kind. The model as a whole has no kind."""

    name: str
    test: Callable[[Candidate], bool]

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        return self.test(node)

    def __repr__(self) -> str:
        return self.name


def _is_module_node(node: Candidate) -> bool:
    return node.is_module and node.path != ""


def _has_parametrizations(node: Candidate) -> bool:
    return node.module is not None and _is_parametrized(node.module)


def _has_parameters(node: Candidate) -> bool:
    """Return whether a module itself has parameters, or a function receives one.

    Parameters of submodules are not counted; those that parametrizations compute are.
    """
    if node.module is None or node.path == "":
        return node.uses_parameter
    own = node.module.parameters(recurse=False)
    return next(own, None) is not None or _is_parametrized(node.module)


is_module: Selector = _KindSelector("is_module", _is_module_node)
is_parametrized: Selector = _KindSelector("is_parametrized", _has_parametrizations)
has_parameters: Selector = _KindSelector("has_parameters", _has_parameters)


def _text_or_pattern(text: Any) -> str | re.Pattern[str]:
    if isinstance(text, re.Pattern) and isinstance(text.pattern, str):
        return text
    if not isinstance(text, str):
        raise InputError(f"pass a str or a compiled regular expression, not {text!r}")
    return text


def _callable(predicate: Any, name: str) -> Callable[[Any], Any]:
    if not callable(predicate):
        raise InputError(f"{name}() takes a function that returns a bool, not {predicate!r}")
    return predicate  # type: ignore[no-any-return]


def _some(given: tuple[Any, ...], message: str) -> tuple[Any, ...]:
    if not given:
        raise InputError(message)
    return given


@as_selector.register
def _(what: str) -> Selector:
    return matches_path(what)


@as_selector.register
def _(what: Node) -> Selector:
    node, whole = what._data, dug(what._tree.data, what._data) + what._suffix
    if node.role not in ("op", "call"):
        raise InputError(
            f"{whole!r} cannot be selected: selectors select calls of modules and functions. "
            "Pass the call that it belongs to"
        )
    return matches_path(whole)


@as_selector.register(re.Pattern)
def _(what: Any) -> Selector:
    return matches_path(what) | matches_qualified_name(what)


@as_selector.register
def _(what: nn.Module) -> Selector:
    return matches_module(what)


@as_selector.register(type)
def _(what: Any) -> Selector:
    return matches_module_class(what)


@as_selector.register(Callable)  # type: ignore[call-overload, untyped-decorator]
def _(what: Any) -> Selector:
    return matches_function(what) if is_torchs_function(what) else node_lambda(what)


Size = int | EllipsisType | None


def with_shape(*sizes: Size | tuple[Size, ...] | Callable[[tuple[int, ...]], Any]) -> Selector:
    """Select nodes by the shape of the first tensor in their output, in their first pass.

    Args:
        *sizes: its sizes, with None for any size and `...` for any number of sizes; or a predicate
            of the shape.

    Raises:
        InputError: a size is invalid, or there are two `...`.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: x.relu().T.sum(), torch.ones(2, 3))
        >>> bt.node_selector.find(bt.node_selector.with_shape(None, 3), trace)
        [<node relu: relu>]
        >>> bt.node_selector.find(bt.node_selector.with_shape(..., 2), trace)
        [<node T: T>]
        >>> bt.node_selector.find(bt.node_selector.with_shape(lambda shape: not shape), trace)
        [<node sum: sum>]
    """
    given = sizes
    if len(given) == 1:
        only = given[0]
        if isinstance(only, (tuple, list)):
            given = tuple(only)
        elif callable(only):
            return ShapeSelector(only)
    for size in given:
        if size is not None and size is not ... and (type(size) is not int or size < 0):
            raise InputError(
                "with_shape() takes sizes, None and `...`, or one predicate of the shape, not "
                f"{size!r}"
            )
    if given.count(...) > 1:
        raise InputError(
            "with_shape() takes only one `...`: otherwise the positions of the sizes are ambiguous"
        )
    return ShapeSelector(given)


def with_dtype(*dtypes: torch.dtype | Callable[[torch.dtype], Any]) -> Selector:
    """Select nodes by the dtype of the first tensor in their output, in their first pass.

    Args:
        *dtypes: one or several dtypes, or a predicate of the dtype.

    Raises:
        InputError: one of them is neither, or there are none.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(lambda x: (x * 2).half().relu().argmax(), torch.ones(2))
        >>> with_dtype = bt.node_selector.with_dtype
        >>> bt.node_selector.find(with_dtype(torch.float16), trace)
        [<node half: half>, <node relu: relu>]
        >>> bt.node_selector.find(with_dtype(lambda dtype: dtype.is_floating_point), trace)
        [<node mul: mul>, <node half: half>, <node relu: relu>]
    """
    if len(dtypes) == 1 and callable(dtypes[0]):
        return Dtype(dtypes[0])
    for dtype in dtypes:
        if not isinstance(dtype, torch.dtype):
            raise InputError(
                f"with_dtype() takes dtypes, or one predicate of the dtype, not {dtype!r}"
            )
    if not dtypes:
        raise InputError("with_dtype() takes one dtype or several")
    return Dtype(dtypes)


@dataclass(frozen=True, repr=False)
class ShapeSelector(Selector):
    """Nodes that output a tensor of a certain shape. The model as a whole is not among them."""

    sizes: tuple[Any, ...] | Callable[[tuple[int, ...]], Any]
    needs_output = True

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        if node.shape is None or node.path == "":
            return False
        if not isinstance(self.sizes, tuple):
            return bool(self.sizes(tuple(node.shape)))
        return _shape_fits(self.sizes, tuple(node.shape))

    def __repr__(self) -> str:
        return f"with_shape({_name_text(self.sizes)})"


@dataclass(frozen=True, repr=False)
class Dtype(Selector):
    """Nodes that output a tensor of a certain dtype. The model as a whole is not among them."""

    dtypes: tuple[Any, ...] | Callable[[torch.dtype], Any]
    needs_output = True

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        if node.dtype is None or node.path == "":
            return False
        if not isinstance(self.dtypes, tuple):
            return bool(self.dtypes(node.dtype))
        return node.dtype in self.dtypes

    def __repr__(self) -> str:
        return f"with_dtype({_name_text(self.dtypes)})"


def _shape_fits(sizes: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    if ... in sizes:
        before = sizes.index(...)
        after = len(sizes) - before - 1
        if len(shape) < before + after:
            return False
        sizes = (*sizes[:before], *[None] * (len(shape) - before - after), *sizes[before + 1 :])
    return len(sizes) == len(shape) and all(
        wanted is None or wanted == size for wanted, size in zip(sizes, shape, strict=True)
    )


def _name_text(what: Any) -> str:
    if isinstance(what, tuple):
        return ", ".join("..." if item is ... else repr(item) for item in what)
    return getattr(what, "__name__", repr(what))


# Tells whether two functions decide the same: those of one expression that runs again and again.
#
# A predicate that is written in a loop is a new function each time. Traces are kept for the nodes
# that it selects, so it should be recognised. Two functions decide the same if they have the same
# code, and everything that this can read is equal, by its content.

_MOST = 1000  # items of a container


class _UnknownValue(Exception):
    """Raised if a function reads values that may change or are not known."""


def meaning_of(function: Any) -> Hashable:
    """Return a value that is equal for functions that decide the same.

    It is the function itself if that is not known.
    """
    itself: Hashable = function
    try:
        return _function_key(function, ()) if type(function) is types.FunctionType else itself
    except _UnknownValue:
        return itself


def _function_key(function: types.FunctionType, around: tuple[Any, ...]) -> Hashable:
    is_constant = bool(around) and not function.__closure__ and is_finished(function)
    if is_constant or any(function is other for other in around):
        return function
    around = (*around, function)
    if vars(function):
        raise _UnknownValue
    read = dict(_globals(function))
    return (
        function.__code__,
        tuple(_value_key(cell, around) for cell in _closure_contents(function)),
        _value_key(function.__defaults__, around),
        _value_key(function.__kwdefaults__, around),
        tuple((name, _value_key(value, around)) for name, value in sorted(read.items())),
    )


def _closure_contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            raise _UnknownValue from None


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    space = function.__globals__
    for code in codes_in(function.__code__):
        for name in code.co_names:
            if name in space:
                yield name, space[name]
            elif name in ("eval", "exec", "globals", "next", "open", "input"):
                raise _UnknownValue


def _value_key(value: Any, around: tuple[Any, ...]) -> Hashable:
    kind = type(value)
    if kind in PLAIN_TYPES:
        return kind, value
    if kind is types.FunctionType:
        return _function_key(value, around)
    if kind in (tuple, list, set, frozenset, dict) and len(value) <= _MOST:
        items = [*value.items()] if kind is dict else value
        keys = [_value_key(item, around) for item in items]
        return kind, frozenset(keys) if kind in (set, frozenset) else tuple(keys)
    if kind is types.ModuleType and is_installed_space(vars(value)):
        return str(value.__name__)
    if isinstance(value, type) and not is_users_class(value):
        return value
    if kind in _CONSTANT or (kind is types.BuiltinFunctionType and _is_builtin(value)):
        constant: Hashable = value
        return constant
    raise _UnknownValue


def _is_builtin(function: Any) -> bool:
    return vars(builtins).get(function.__name__) is function


_CONSTANT = (re.Pattern, torch.dtype, torch.device, torch.layout)


# Leaf modules, whose inside is not selected, as in torch.fx.

# Other options of fx's tracers, which make no sense for a run on real inputs.
_NOT_NEEDED = frozenset(
    {"autowrap_functions", "autowrap_modules", "param_shapes_constant", "suppress_diff_warning"}
)


@dataclass(frozen=True, repr=False)
class Outside(Selector):
    """The nodes that a selector selects outside some modules.

    The calls of these modules themselves are included.
    """

    selector: NodeSelector
    names: frozenset[str]
    looks_ahead: bool = field(init=False, compare=False)
    needs_output: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "looks_ahead", self.selector.looks_ahead)
        object.__setattr__(self, "needs_output", self.selector.needs_output)

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        return not self._is_inside(node) and self.selector.matches(node)

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        nodes = {path: node for path, node in graph.nodes.items() if not self._is_inside(node)}
        return self.selector.select(CandidateGraph(nodes, graph.edges.subgraph(nodes)))

    def _is_inside(self, node: Candidate) -> bool:
        if node.path == "":
            return False
        scope = node.scope_path
        while scope not in self.names:
            if not scope:
                return False
            scope = scope.rpartition(".")[0]
        return True

    def __repr__(self) -> str:
        return f"{self.selector!r} outside {', '.join(sorted(self.names))}"


def outside(what: Any, model: Callable[..., Any], leaves: Iterable[Any]) -> NodeSelector:
    """Return a selector for the nodes that a selector selects outside some modules.

    The leaves are classes of modules, modules, or qualified names of modules. Raise `InputError`
    if one of the leaves is invalid.
    """
    selector = _selector_by_name(what) if isinstance(what, str) else as_selector(what)
    names = leaf_names(model, leaves)
    return Outside(selector, names) if names else selector


def leaf_names(model: Callable[..., Any], leaves: Iterable[Any]) -> frozenset[str]:
    """Return the qualified names of some modules (see `outside`).

    Raise `InputError` if one of the leaves is invalid.
    """
    modules = list(modules_in(model).items())
    found = (
        name for leaf in leaves for name, module in modules if _matches_leaf(leaf, name, module)
    )
    return frozenset(found)


def leaf_modules_in(tracer_kwargs: Mapping[str, Any] | None) -> list[Any]:
    """Return the `leaf_modules` of `tracer_kwargs`.

    Raise `InputError` if there are unknown options.
    """
    options = dict(tracer_kwargs or {})
    leaves = options.pop("leaf_modules", None) or ()
    if unknown := options.keys() - _NOT_NEEDED:
        raise InputError(
            f"tracer_kwargs= has unknown options {', '.join(sorted(map(repr, unknown)))}; only "
            "'leaf_modules' is supported"
        )
    return list(leaves)


def _selector_by_name(name: str) -> NodeSelector:
    try:
        return matches_qualified_name(name) | matches_path(name)
    except InputError:  # it can only be a qualified name: `layers.0`
        return matches_qualified_name(name)


def _matches_leaf(leaf: Any, name: str, module: nn.Module) -> bool:
    if isinstance(leaf, type) and issubclass(leaf, nn.Module):
        return isinstance(module, leaf)
    if isinstance(leaf, nn.Module):
        return module is leaf
    if isinstance(leaf, str):
        return name == leaf
    raise InputError(
        f"leaf_modules have to be classes of modules, modules or qualified names, not {leaf!r}"
    )
