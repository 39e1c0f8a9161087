"""The tree of a run: its nodes, which complete and print, also in the form for selectors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from keyword import iskeyword
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from bendtrace.errors import InputError, NodePathError
from bendtrace.log.entries import counted
from bendtrace.log.nodes import (
    LIMIT,
    Chosen,
    Events,
    Pass,
    Text,
    TreeNode,
    children_of,
    describe_node,
    draw_tree,
    metas_in,
    passes_in,
    plain_keys,
)
from bendtrace.log.nodes import NodePath as NodePath
from bendtrace.python.checks import did_you_mean
from bendtrace.python.lazy import networkx as nx
from bendtrace.python.sites import Site
from bendtrace.tape.tape import ModuleCall, Op, OpKind, Ref, refs_in
from bendtrace.watch.functions import METADATA, SHAPES, VALUES, is_inserted, works_on_containers

if TYPE_CHECKING:
    from bendtrace.log.path_tree import Builder, StepSource

Found = tuple[TreeNode, Chosen]
_SHOWN = 12  # completions that a message names
_BRACKET = re.compile(r"\[\s*(?:'([^']*)'|\"([^\"]*)\"|(-?\w+))\s*\]")
_ITEM = re.compile(r"(\w+)_(\d+)(?=[.|:]|$)(.*)", re.DOTALL)
_PASS = re.compile(r":(\d+)")


def plain_path(text: str) -> str:
    """Return a path without passes, a leading dot and container signs."""
    return re.sub(r":\d+", "", text).replace("|", ".").strip().lstrip(".")


def is_path_only(text: str) -> bool:
    """Return whether a string can only be a node path: it begins with a dot, or is a `NodePath`."""
    return isinstance(text, NodePath) or text.lstrip().startswith(".")


def find_node(root: TreeNode, path: str, chosen: Chosen = None) -> Found:
    """Return the node at a path, and its passes if it names some (see `Tree.resolve`)."""
    search = _PathSearch(path)
    spelled = [path, _BRACKET.sub(lambda m: "." + next(filter(None, m.groups()), ""), path)]
    for text in dict.fromkeys(spelled):
        for found in search.matches(root, chosen, text.strip().lstrip("."), 0):
            return found
    raise search.error()


def require_leaf(root: TreeNode, found: Found, path: str) -> None:
    """Raise if a node is not a single value."""
    node, chosen = found
    if node.kind == "graph":
        names = tuple(inner.path for inner, _ in children_of(node, chosen))
        raise NodePathError(
            f"{path or '<root>'!r} is a {describe_node(node, chosen)}, not a value; it contains "
            f"{_list_names(names)}",
            path,
            names,
        )
    if node.kind == "container":
        digs = tuple(dug(root, inner) for inner in _values_in(node, chosen))
        way = f"name a value in it: {_list_names(digs)}" if digs else "it contains no values"
        raise NodePathError(
            f"{path!r} is a {describe_node(node, chosen)}, not a single value; {way}", path, digs
        )


def dug(root: TreeNode, node: TreeNode) -> str:
    """Return the path of a node with `|` where it leads into a container."""
    names = node.path.split(".")
    inner = root
    for position, name in enumerate(names[:-1], 1):
        inner = inner.children[name]
        if inner.kind == "container":
            return f"{'.'.join(names[:position])}|{'.'.join(names[position:])}"
    return node.path


def _values_in(node: TreeNode, chosen: Chosen) -> Iterator[TreeNode]:
    for inner, passes in children_of(node, chosen):
        if inner.kind == "container":
            yield from _values_in(inner, passes)
        elif inner.kind != "other":
            yield inner


def _list_names(names: tuple[str, ...]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


class _PathSearch:
    """Looks for a path, and remembers how far it got."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._depth = -1
        self._failure: tuple[TreeNode, Chosen, str, str] | None = None

    def matches(self, node: TreeNode, chosen: Chosen, rest: str, depth: int) -> Iterator[Found]:
        """Yield the meanings of the rest of a path below a node, likeliest first."""
        if not rest:
            yield node, chosen
            return
        spellings = _spellings(node)
        reached = False
        for end in [m.start() for m in re.finditer(r"[.|:]", rest)] + [len(rest)]:
            for child in spellings.get(rest[:end], ()):
                passes = passes_in(child, chosen)
                if passes is None or passes:
                    reached = True
                    yield from self._after(child, passes, rest[end:], depth + 1)
        if not reached:  # `features_6` for an item of a module that is itself called
            item_of = _ITEM.match(rest)
            name, item, after = item_of.groups() if item_of is not None else ("", "", "")
            for child in spellings.get(name, ()):
                passes = passes_in(child, chosen)
                if child.kind == "graph" and passes != [] and item in _spellings(child):
                    reached = True
                    yield from self.matches(child, passes, item + after, depth + 1)
        if not reached and depth > self._depth:
            self._depth = depth
            self._failure = node, chosen, re.split(r"[.|:]", rest, maxsplit=1)[0], ""

    def _after(self, node: TreeNode, chosen: Chosen, rest: str, depth: int) -> Iterator[Found]:
        """Go on after the name of a node."""
        named = _PASS.match(rest)
        if named is not None:
            passes = list(range(len(node.passes))) if chosen is None else list(chosen)
            number = int(named[1])
            if not 1 <= number <= len(passes):
                self._fail(
                    node, chosen, depth,
                    f"{node.path!r} has {counted(len(passes), 'pass')}, so there is no :{number}",
                )  # fmt: skip
                return
            chosen, rest = [passes[number - 1]], rest[named.end() :]
        if not rest:
            yield node, chosen
        elif rest[0] == "|" and node.kind != "container":
            self._fail(
                node, chosen, depth,
                f"{node.path!r} is a {describe_node(node, chosen)}: '|' leads only into tuples, "
                "lists, dicts and other containers",
            )  # fmt: skip
        elif rest[0] in ".|" and len(rest) > 1:
            yield from self.matches(node, chosen, rest[1:], depth)
        else:
            self._fail(node, chosen, depth, f"{rest!r} after {node.path!r} has no meaning")

    def _fail(self, node: TreeNode, chosen: Chosen, depth: int, reason: str) -> None:
        if depth > self._depth:
            self._depth, self._failure = depth, (node, chosen, "", reason)

    def error(self) -> NodePathError:
        assert self._failure is not None
        node, chosen, wrong, reason = self._failure
        names = [child.name for child, _ in children_of(node, chosen)]
        completions = tuple(map(node.child_path, names))
        if reason:
            return NodePathError(f"no node {self.path!r}: {reason}", self.path, completions)
        where = repr(node.path) if node.path else "the model"
        if not names:
            message = f"{where} is a {describe_node(node, chosen)} with nothing below it"
            return NodePathError(f"no node {self.path!r}: {message}", self.path)
        near = did_you_mean(wrong, names, cutoff=0.5, otherwise=";")
        message = f"{where} has no {wrong!r}{near} it has {_list_names(tuple(names))}"
        return NodePathError(f"no node {self.path!r}: {message}", self.path, completions)


def _spellings(node: TreeNode) -> dict[str, list[TreeNode]]:
    """Return the names that children of a node can have, likeliest first.

    A name stands for its child. It can stand for another one besides, whose own name was taken,
    if there is nothing below the child: `output.dense`. `input` stands for the first argument of a
    call, unless a child has this name.
    """
    if node.spellings is None:
        found = {child.name: [child] for child in node.children.values()}
        also: dict[str, TreeNode] = {}
        for child in node.children.values():
            for alias in _aliases(child):
                also.setdefault(alias, child)
        for alias, child in also.items():
            named = found.setdefault(alias, [])
            if child not in named and all(other.kind != "graph" for other in named):
                named.append(child)
        arguments = [child for child in node.children.values() if child.role == "input"]
        if node.kind == "graph" and arguments and "input" not in found:
            found["input"] = arguments[:1]
        node.spellings = found
    return node.spellings


def _aliases(node: TreeNode) -> Iterator[str]:
    """Yield what else a node can be called in a string, besides its name."""
    if node.label:
        yield node.label
    if node.key is not None:
        yield str(node.key)
        if isinstance(node.key, int):
            yield f"sub_{node.key}"
        elif node.role == "call":
            suffix = node.name.removeprefix(str(node.key).replace(".", "_"))
            if suffix != node.name and suffix:
                yield f"{node.key}{suffix}"
    if node.name.endswith("_") and iskeyword(node.name[:-1]):
        yield node.name[:-1]


class Tree:
    """The nodes of a run."""

    def __init__(
        self,
        data: TreeNode,
        elements: dict[int, tuple[int, tuple[Any, ...]]] | None = None,
        steps: StepSource | None = None,
    ) -> None:
        self.data = data
        self._elements = elements or {}
        self._steps = steps

    @property
    def root(self) -> Node:
        """The root, as the start for looking at nodes."""
        return Node(self, self.data)

    def resolve(self, path: str | Node, *, leaf: bool = True) -> Node:
        """Return the node at a path.

        Args:
            path: names joined by dots, `|` before a part of a container, `:2` for the
                second pass; items of lists of modules as `layers_8`, `layers.8` or `layers[8]`.
            leaf: whether it has to be a single value, not a graph or a container.

        Raises:
            NodePathError: the node does not exist, or is not a single value.
        """
        text = path._path if isinstance(path, Node) else path
        if not isinstance(text, str):
            raise InputError(f"a node path has to be a string or a node, not {type(path).__name__}")
        found = find_node(self.data, text)
        if leaf:
            require_leaf(self.data, found, text)
        return Node(self, *found)

    def locate(self, index: int, element: tuple[Any, ...] = ()) -> Node | None:
        """Return the node, and its pass, of the value of an op or of a part of it, if any."""
        found = self._places.get(self.origin(index, element)) or self._places.get((index, element))
        return None if found is None else Node(self, *found)

    def origin(self, index: int, element: tuple[Any, ...] = ()) -> tuple[int, tuple[Any, ...]]:
        """Return the op whose result contains a value of the tape, and the keys that lead to it."""
        root, keys = self._elements.get(index, (index, ()))
        return root, (*keys, *element)

    def path_of(self, index: int, element: tuple[Any, ...] = ()) -> str:
        """Return the path of a value of the tape, with its pass if there are several, or ""."""
        node = self.locate(index, element)
        if node is None:
            return ""
        return str(node._data.path if node._data.role == "state" else node._path)

    def call_path(self, number: int) -> str:
        """Return the path of a module call, by its number among all; "" for the root's."""
        found = self._calls.get(number)
        return "" if found is None else str(Node(self, *found)._path)

    @property
    def outputs(self) -> list[tuple[str, int | None, tuple[Any, ...]]]:
        """Path, op and element of each output value of the run; None for other objects."""
        return [
            (str(Node(self, node)._path), node.passes[0].index, node.passes[0].element)
            for child in self.data.children.values()
            if child.role == "output"
            for node in child.walk()
            if not node.children
        ]

    def place_steps(self) -> None:
        """Find the places of the flow steps, if they are not known yet."""
        if self._steps is not None:
            source, self._steps = self._steps, None
            source.place()

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as plain values, ready for JSON."""
        self.place_steps()
        elements = [
            [index, root, plain_keys(keys)] for index, (root, keys) in self._elements.items()
        ]
        return {"root": self.data.to_rows(), "elements": elements}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Tree:
        """Read what `to_dict` wrote."""
        try:
            elements = {index: (root, tuple(keys)) for index, root, keys in row["elements"]}
            return cls(TreeNode.from_rows(row["root"]), elements)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"this is not a stored tree of paths: {error!r}") from error

    @cached_property
    def _places(self) -> dict[tuple[int, tuple[Any, ...]], tuple[TreeNode, list[int]]]:
        """The node and pass in which each value came up first."""
        found: dict[tuple[int, tuple[Any, ...]], tuple[TreeNode, list[int]]] = {}
        first: dict[tuple[int, tuple[Any, ...]], tuple[TreeNode, list[int]]] = {}
        for node in self.data.walk():
            if node.kind == "graph":
                continue
            for number, made in enumerate(node.passes):
                if made.index is not None:
                    wanted = found if node.role == "op" else first
                    if node.role != "output":
                        wanted.setdefault((made.index, made.element), (node, [number]))
        return {**first, **found}

    @cached_property
    def _calls(self) -> dict[int, tuple[TreeNode, list[int]]]:
        return {
            made.index: (node, [number])
            for node in self.data.walk()
            if node.kind == "graph"
            for number, made in enumerate(node.passes)
            if made.index is not None
        }

    def __repr__(self) -> str:
        return repr(self.root)


class Node:
    """A node of a tree: the nodes below it are its attributes, its items, and its completions.

    All names of the class itself begin with an underscore, so that they do not clash with names of
    nodes.
    """

    __slots__ = ("_chosen", "_data", "_tree")
    _tree: Tree  # the tree it belongs to
    _data: TreeNode
    _chosen: Chosen  # numbers of its passes; None for all

    def __init__(self, tree: Tree, data: TreeNode, chosen: Chosen = None) -> None:
        object.__setattr__(self, "_tree", tree)
        object.__setattr__(self, "_data", data)
        if chosen is not None and len(chosen) == len(data.passes):
            chosen = None
        object.__setattr__(self, "_chosen", chosen)

    @property
    def _name(self) -> str:
        """Its name in the node around it; "<root>" for the root."""
        return self._data.name + self._suffix if self._data.path else "<root>"

    @property
    def _path(self) -> NodePath:
        """The dotted path from the root, with the pass if it stands for one of several."""
        return NodePath(self._data.path + self._suffix)

    @property
    def _suffix(self) -> str:
        if self._chosen is None or len(self._chosen) != 1:
            return ""
        return f":{self._chosen[0] + 1}"

    @property
    def _passes(self) -> list[Pass]:
        """The passes that it stands for."""
        every = self._data.passes
        return list(every) if self._chosen is None else [every[i] for i in self._chosen]

    @property
    def _shape(self) -> Any:
        """The shape in its first pass.

        A `torch.Size` for a tensor, nested tuples of such (and of None, for other objects)
        for a container, the shape of the output for a graph.
        """
        number = 0 if self._chosen is None else self._chosen[0]
        return _shape_of_node(self._data, number)

    @property
    def _code(self) -> Text:
        """The code of a graph; for other nodes the lines of the source that led to it."""
        data = self._data
        places = "\n".join(map(str, data.places))
        if data.kind != "graph":
            return Text(places or _without_place(data))
        chosen = range(len(data.passes)) if self._chosen is None else self._chosen
        code = [v for v in data.code if any(number in chosen for number in v.passes)]
        text = code[0].text if code else ""
        if len(code) > 1:
            text = "\n".join(f"# {_pass_text(v.passes)}\n{v.text}" for v in code)
        return Text(f"Calling context:\n{places}\nCompiled code:\n{text}" if places else text)

    def _show(
        self, *, flow: bool = False, depth: int | None = None, limit: int | None = LIMIT
    ) -> Text:
        """Return the node and the nodes below it as text."""
        if flow:
            self._tree.place_steps()
        title = self._name
        return Text(draw_tree(self._data, title, self._chosen, flow=flow, depth=depth, limit=limit))

    def __getattr__(self, name: str) -> Node:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self._below(name)
        except NodePathError as error:
            raise AttributeError(str(error), name=name, obj=self) from None

    def __getitem__(self, path: str | int) -> Node:
        """Return the node at a path from here; a number is an item of a container."""
        if isinstance(path, int):
            path = f"[{path}]"
        if not isinstance(path, str):
            raise InputError(f"a node path has to be a string, not {type(path).__name__}")
        return self._below(path)

    def _below(self, path: str) -> Node:
        return Node(self._tree, *find_node(self._data, path, self._chosen))

    def __contains__(self, path: object) -> bool:
        try:
            return isinstance(path, (str, int)) and self[path] is not None
        except NodePathError:
            return False

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the nodes directly below."""
        return (child.name for child, _ in children_of(self._data, self._chosen))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return [*self, "_code", "_path", "_passes", "_shape", "_show"]

    def _ipython_key_completions_(self) -> list[str]:
        names = list(self)
        below = [f"{name}.{inner}" for name in names for inner in self[name]]
        return names + below

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name!r} cannot be set: a tree only shows what was recorded")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name!r} cannot be deleted: a tree only shows what was recorded")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        return self._data is other._data and self._chosen == other._chosen

    def __hash__(self) -> int:
        return hash(self._path)

    def __repr__(self) -> str:
        return str(self._show())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": repr(self)}


class LazyRoot(Node):
    """The root of a tree that is made when it is first looked at.

    So it can be an attribute of a trace, whose names interactive shells complete: they do not
    evaluate a property.
    """

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Tree]) -> None:
        object.__setattr__(self, "_make", make)
        object.__setattr__(self, "_chosen", None)

    def __getattr__(self, name: str) -> Any:
        if name not in Node.__slots__:
            return super().__getattr__(name)
        if name == "_tree":
            object.__setattr__(self, "_tree", self._make())
        else:
            object.__setattr__(self, "_data", self._tree.data)
        return getattr(self, name)


def _shape_of_node(node: TreeNode, number: int) -> Any:
    if node.kind == "tensor":
        return torch.Size(node.passes[number].shape or ())
    inside = [
        _shape_of_node(child, passes[0] if passes else 0)
        for child, passes in children_of(node, [number])
        if node.kind == "container" or child.role == "output"
    ]
    if node.kind == "graph":
        return inside[0] if inside else None
    return tuple(inside) if node.kind == "container" else None


def _pass_text(passes: tuple[int, ...]) -> str:
    """`pass 1`, `passes 2 to 5`, `passes 1, 3, 4`."""
    numbers = [number + 1 for number in passes]
    if len(numbers) == 1:
        return f"pass {numbers[0]}"
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"passes {numbers[0]} to {numbers[-1]}"
    shown = ", ".join(map(str, numbers[:10]))
    return f"passes {shown}{', ...' if len(numbers) > 10 else ''}"


def _without_place(node: TreeNode) -> str:
    descriptions = {
        "input": "an argument",
        "state": "a parameter, buffer or other tensor of the model",
    }
    text = descriptions.get(node.role, "given out" if node.role == "output" else "")
    return f"{node.path}: {describe_node(node)}, {text}" if text else node.path


# The nodes of a run in the form that selectors use, and the flow of values between them.


@dataclass(eq=False)
class Candidate:
    """A node that a selector judges: a call of a module, a function or a method.

    Attributes:
        path: node path: `layers_0.mlp.relu`; for calls of modules without an op: `layers_0.mlp`.
        base: its name without a number: `relu`, `conv1`.
        module: the module called; None for functions and methods.
        module_path: qualified name of that module: `layers.0.mlp`; "" for the root.
        function: the torch function or method that is called; None for calls of modules.
        scope: the module whose code makes the call; None outside all modules.
        scope_path: qualified name of that module.
        site: its place in the source; None for the root.
        shape: shape of the first tensor in its output; None if not known yet.
        dtype: dtype of that tensor.
        uses_parameter: for functions, whether a parameter is among the arguments.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 100), torch.nn.ReLU())
        >>> trace = bt.trace(model, torch.ones(1, 2))
        >>> linear = bt.node_selector.find(torch.nn.Linear, trace)[0]
        >>> linear, linear.path, linear.qualified_name, linear.shape
        (<node sub_0: Linear>, 'sub_0', '0', (1, 100))
        >>> bt.node_selector.find(lambda node: node.shape == (1, 100) and not node.is_module, trace)
        [<node sub_0.linear: linear>, <node sub_1.relu: relu>]
    """

    path: str
    base: str
    module: nn.Module | None
    module_path: str
    function: Callable[..., Any] | None
    scope: nn.Module | None
    scope_path: str
    site: Site | None = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    uses_parameter: bool = False

    @property
    def is_module(self) -> bool:
        """True if it is a call of a module."""
        return self.module is not None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def qualified_name(self) -> str:
        """Qualified name of the module; for ops, the name of the enclosing module and their own."""
        if self.is_module:
            return self.module_path
        return f"{self.scope_path}.{self.name}" if self.scope_path else self.name

    @property
    def file(self) -> str:
        """The source file; "" if unknown."""
        return "" if self.site is None else self.site.place.file

    @property
    def line(self) -> int:
        """The line in the source file, counted from 1; 0 if unknown."""
        return 0 if self.site is None else self.site.place.line

    @cached_property
    def text(self) -> str:
        """The expression in the source; "" if it cannot be read."""
        return "" if self.site is None else self.site.place.text

    def __repr__(self) -> str:
        what = type(self.module).__name__ if self.module is not None else self.base
        return f"<node {self.path or '<root>'}: {what}>"


class CandidateGraph:
    """The nodes of one run in the order in which they first began, and the flow of values.

    An edge means that a value which one node returned, or wrote, is used by another. A module call
    and the ops inside it are separate nodes.

    Attributes:
        nodes: the nodes by path.

    Example:
        >>> import dataclasses, torch, bendtrace as bt
        >>> @dataclasses.dataclass(frozen=True)
        ... class Used(bt.node_selector.Selector):
        ...     times: int
        ...     looks_ahead = True
        ...     def select(self, graph):
        ...         return {node.path for node in graph if len(graph.followers(node)) == self.times}
        >>> trace = bt.trace(lambda x: (x := x.relu()).exp() + x.tanh(), torch.ones(2))
        >>> bt.node_selector.find(Used(2), trace)
        [<node relu: relu>]
    """

    def __init__(
        self, nodes: dict[str, Candidate], edges: nx.DiGraph[Any] | Iterable[tuple[str, str]] = ()
    ) -> None:
        self.nodes = nodes
        self._edges = edges

    @cached_property
    def edges(self) -> nx.DiGraph[Any]:
        """The data edges between paths, as a networkx graph, which may be part of a larger one."""
        if isinstance(self._edges, nx.DiGraph):
            return self._edges
        graph: nx.DiGraph[Any] = nx.DiGraph()
        graph.add_nodes_from(self.nodes)
        graph.add_edges_from(self._edges)
        return graph

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.nodes.values())

    def followers(self, node: Candidate) -> list[Candidate]:
        """The nodes that use the output of a node directly."""
        return [self.nodes[path] for path in self.edges.successors(node.path)]

    def preceding(self, node: Candidate) -> list[Candidate]:
        """The nodes whose outputs a node uses."""
        return [self.nodes[path] for path in self.edges.predecessors(node.path)]


class NodeSelector:
    """Selects nodes. Subclasses override `matches`, or `select` if they look ahead.

    Selectors are values: two with the same arguments are equal and have the same hash.

    Attributes:
        looks_ahead: whether the decision needs the whole graph. Such selectors are resolved in a
            known run of the model without insertions that the call will repeat.
        needs_output: whether the decision needs the output of a node.
        is_of_modules: whether it selects calls of modules only, by the module alone.

    Example:
        >>> import torch, bendtrace as bt
        >>> class OfMatrices(bt.node_selector.NodeSelector):
        ...     needs_output = True
        ...     def matches(self, node):
        ...         return node.shape is not None and len(node.shape) == 2
        >>> trace = bt.trace(lambda x: x.relu().sum(0).exp(), torch.ones(2, 3))
        >>> bt.node_selector.find(OfMatrices(), trace)
        [<node relu: relu>]
    """

    looks_ahead: bool = False
    needs_output: bool = False
    is_of_modules: bool = False

    def matches(self, node: Candidate) -> bool:
        """Return whether the selector selects a node, judged by the node alone."""
        raise NotImplementedError

    def select(self, graph: CandidateGraph) -> set[str]:
        """Return the paths of the selected nodes of a graph."""
        return {node.path for node in graph if self.matches(node)}


# What converts to a selector. Classes of modules, torch functions and predicates of the `Candidate`
# are callables.
OneSelectable: TypeAlias = (
    NodeSelector | str | Node | re.Pattern[str] | nn.Module | Callable[..., Any]
)
Selectable: TypeAlias = OneSelectable | Sequence[OneSelectable]


def candidates_of(nodes: RunNodes) -> CandidateGraph:
    """Return the nodes of a run, and the flow of values between them.

    Nodes are the calls of modules and functions that accept insertions; the tree of paths also
    shows sizes and arithmetic on numbers.
    """
    return CandidateGraph(nodes.candidates, list(_ValueFlow(nodes).edges()))


class RunNodes:
    """The node of which each op, and each call of a module, is a pass."""

    def __init__(self, builder: Builder) -> None:
        self.events: Events = builder.events  # the events of the run
        # The nodes by path, in the order in which they began.
        self.candidates: dict[str, Candidate] = {}
        self.of_op: dict[int, str] = {}  # the path of each op that is one
        self.of_call: dict[int, str] = {}  # the path of each call, by identity
        # The path of each op and call in the order in which they began.
        self.executions: list[str] = []
        self._builder = builder
        self._add_call(self.events.root)

    def _add_call(self, call: ModuleCall) -> None:
        builder = self._builder
        node, _ = builder.where[id(call)]
        self.of_call[id(call)] = node.path
        self.executions.append(node.path)
        if node.path not in self.candidates:
            is_root = call is self.events.root
            output = self.events.recording.root.output if is_root else call.output
            metas = [self.events.ops[ref.index].meta for ref in refs_in(output)]
            meta = next(metas_in(metas), None)
            around = None if is_root else call.parent
            self.candidates[node.path] = Candidate(
                node.path, node.label or node.name, call.module, call.path, None,
                None if around is None else around.module, "" if around is None else around.path,
                None if is_root else call.site,
                None if meta is None else meta.shape, None if meta is None else meta.dtype,
            )  # fmt: skip
        names: dict[int, TreeNode] = {}
        for position, name in builder.marks[id(call)]:
            child = node.children[name]
            if child.role == "op":  # a call that began there has the same position
                names[position] = child
        for event in self.events.of(call):
            if isinstance(event, ModuleCall):
                if id(event) in builder.where:
                    self._add_call(event)
            elif event.index in names and _can_be_cut_into(event):
                self._add_op(event, names[event.index])

    def _add_op(self, op: Op, node: TreeNode) -> None:
        self.of_op[op.index] = node.path
        self.executions.append(node.path)
        if node.path in self.candidates:
            return
        meta = next(metas_in(op.meta), None)
        self.candidates[node.path] = Candidate(
            node.path, node.label or node.name, None, "", op.target,
            op.scope.module, op.scope.path, op.site,
            None if meta is None else meta.shape, None if meta is None else meta.dtype,
            any(map(self._is_parameter, refs_in((op.args, op.kwargs)))),
        )  # fmt: skip

    def _is_parameter(self, ref: Ref) -> bool:
        op = self.events.ops[ref.index]
        return op.kind is OpKind.STATE and issubclass(op.target.type, nn.Parameter)


_GIVEN = (OpKind.INPUT, OpKind.STATE)


class _ValueFlow:
    """Follows values from where they are given to where they are used.

    Values pass through ops without a node: elements of results, arithmetic on numbers, writes such
    as `x[0] = 1`, and gates. Inputs and state are none either, but a module that hands one on gives
    it. A size or a dtype is not the value: nothing leads through reading one.
    """

    def __init__(self, nodes: RunNodes) -> None:
        self._nodes = nodes
        self._ops = nodes.events.ops
        # For each value the inputs, state and nodes that it comes from, by op. State that a call is
        # given can be read after the call began.
        self._carried: list[tuple[int, ...]] = [
            (op.index,) if op.kind in _GIVEN else () for op in self._ops
        ]
        # For tensors that were written to under their own name, the op that did last.
        self._written: dict[int, int] = {}
        # The calls that handed on what they had not computed themselves.
        self._calls_from: dict[int, list[ModuleCall]] = {}
        self._chains: dict[int, tuple[ModuleCall, ...]] = {}
        self._crossed: dict[tuple[int, int], tuple[list[str], list[str]]] = {}

    def edges(self) -> Iterator[tuple[str, str]]:
        """Yield the edges, as often as values went along them."""
        calls = iter(self._nodes.events.recording.tape.calls)
        coming = next(calls, None)
        running: list[ModuleCall] = []
        for position in range(len(self._ops) + 1):
            while coming is not None and coming.start <= position:
                # Calls that consist of no ops end where they began: before the next that is not
                # theirs.
                while running and running[-1] is not coming.parent:
                    self._leave(running.pop())
                yield from self._enter(coming)
                running.append(coming)
                coming = next(calls, None)
            while running and running[-1].stop <= position:
                self._leave(running.pop())
            if position < len(self._ops):
                yield from self._op(self._ops[position])

    def _op(self, op: Op) -> Iterator[tuple[str, str]]:
        if op.kind in _GIVEN or op.target in SHAPES or op.target in METADATA:
            return
        path = self._nodes.of_op.get(op.index)
        sources = tuple(dict.fromkeys(self._sources(op)))
        self._carried[op.index] = sources if path is None else (op.index,)
        if path is not None:
            for source in sources:
                yield from self._connect(source, path, op.scope)
        self._written.update(dict.fromkeys(op.writes, op.index))

    def _sources(self, op: Op) -> Iterator[int]:
        """Yield where the values come from that an op computes with, those written included."""
        for ref in refs_in((op.args, op.kwargs)):
            writer = op.reads.get(ref.index)
            if writer is not None:  # perhaps under another name, as a view
                yield from self._carried[writer]
            yield from self._latest(ref.index)

    def _latest(self, index: int) -> tuple[int, ...]:
        return self._carried[self._written.get(index, index)]

    def _enter(self, call: ModuleCall) -> Iterator[tuple[str, str]]:
        if call is self._nodes.events.root or id(call) not in self._nodes.of_call:
            return
        for ref in refs_in((call.args, call.kwargs)):
            for source in self._latest(ref.index):
                yield from self._connect(source, None, call)

    def _leave(self, call: ModuleCall) -> None:
        if call is self._nodes.events.root or id(call) not in self._nodes.of_call:
            return
        for ref in refs_in(call.output):
            for source in self._latest(ref.index):
                is_own = call in self._chain(self._ops[source].scope)
                if not is_own or self._ops[source].kind in _GIVEN:
                    calls = self._calls_from.setdefault(source, [])
                    if call not in calls:
                        calls.append(call)

    def _connect(
        self, source: int, path: str | None, scope: ModuleCall
    ) -> Iterator[tuple[str, str]]:
        """Yield the edges from each node to the nodes that use its value."""
        given = self._nodes.of_op.get(source)
        if given is not None:
            giving, using = self._between(self._ops[source].scope, scope)
            for giver in (given, *giving):
                yield from ((giver, user) for user in (*using, path) if user is not None)
        for call in self._calls_from.get(source, ()):
            giver = self._path(call)
            _, using = self._between(call, scope)
            yield from ((giver, user) for user in (*using, path) if user is not None)

    def _between(self, inner: ModuleCall, outer: ModuleCall) -> tuple[list[str], list[str]]:
        """Return the calls that a value leaves on its way between two, and those it enters."""
        cached = self._crossed.get((id(inner), id(outer)))
        if cached is None:
            left, entered = self._chain(inner), self._chain(outer)
            cached = self._crossed[id(inner), id(outer)] = (
                [self._path(call) for call in left if call not in entered],
                [self._path(call) for call in entered if call not in left],
            )
        return cached

    def _path(self, call: ModuleCall) -> str:
        return self._nodes.of_call[id(call)]

    def _chain(self, call: ModuleCall) -> tuple[ModuleCall, ...]:
        """Return a call and those around it, without the root."""
        cached = self._chains.get(id(call))
        if cached is None:
            chain = []
            around: ModuleCall | None = call
            while around is not None and around is not self._nodes.events.root:
                if id(around) in self._nodes.of_call:
                    chain.append(around)
                around = around.parent
            cached = self._chains[id(call)] = tuple(chain)
        return cached


def _can_be_cut_into(op: Op) -> bool:
    """Return whether an op that the tree shows accepts insertions.

    Sizes and arithmetic on numbers cannot, nor can values that Python reads right away, such as
    the truth of a tensor, operations on containers of the state, and what is an insertion itself.
    """
    if op.kind is not OpKind.CALL or op.target in SHAPES or op.target in VALUES:
        return False
    return not (is_inserted(op) or works_on_containers(op.target))
