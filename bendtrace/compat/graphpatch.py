"""graphpatch: `PatchableGraph`, and all patches by name.

>>> import torch, bendtrace as bt
>>> gp = bt.compat.graphpatch
>>> pg = gp.PatchableGraph(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), torch.ones(2))
>>> with pg.patch({"sub_0.output": gp.ZeroPatch(slice=0)}):
...     print(pg(torch.zeros(2)))
tensor([0., 0.])
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import IO, Any

import torch
from torch import nn

from bendtrace import patches
from bendtrace.errors import InputError, NodePathError
from bendtrace.insert.patch_kinds import patched_numbers, raise_all
from bendtrace.insert.where import Rows
from bendtrace.log.nodes import NodePath, TreeNode, Variant, describe_node, identifier, passes_in
from bendtrace.log.path_views import Node, Tree
from bendtrace.module import BendedModule
from bendtrace.patches import *  # noqa: F403
from bendtrace.python.checks import free_name
from bendtrace.watch.owners import module_of, modules_in, states_of

__all__ = ["ExtractionOptions", "PatchableGraph"]
__dir__ = __all__.copy
__all__ += patches.__all__
__all__.sort()


@dataclass(kw_only=True)
class ExtractionOptions:
    """graphpatch's options, which scripts can keep passing; most have no effect.

    Nothing is compiled here: every module is looked into, whatever it contains.

    Args:
        skip_compilation: no effect.
        error_on_compilation_failure: no effect.
        warn_on_compilation_failure: no effect.
        allow_unused_submodules: no effect: submodules the example does not call stay as they are.
        classes_to_skip_compiling: no effect: nodes inside these modules can be patched as well.
        custom_extraction_functions: has to be empty; `bendtrace.opaque` makes a function one op.
        postprocessing_function: has to be None, since there is no graph to process.
        copy_transformers_generation_config: no effect: `generate` is the model's own.

    Raises:
        InputError: there are functions that would be called with a graph.

    Example:
        >>> import torch, bendtrace as bt
        >>> options = bt.compat.graphpatch.ExtractionOptions(skip_compilation=True)
        >>> pg = bt.PatchableGraph(torch.nn.ReLU(), options, torch.ones(2))
        >>> pg(torch.ones(2))
        tensor([1., 1.])
    """

    skip_compilation: bool = False
    error_on_compilation_failure: bool = False
    warn_on_compilation_failure: bool = False
    allow_unused_submodules: bool | None = False
    classes_to_skip_compiling: set[type[nn.Module]] = field(default_factory=set)
    custom_extraction_functions: Mapping[type[nn.Module], Any] = field(default_factory=dict)
    postprocessing_function: Callable[..., None] | None = None
    copy_transformers_generation_config: bool = True

    def __post_init__(self) -> None:
        refused = "{} not supported, since no graph is extracted: {}"
        if self.postprocessing_function is not None:
            how = "insert into the model with bendtrace's interject or rewriting"
            raise InputError(refused.format("postprocessing_function is", how))
        if self.custom_extraction_functions:
            how = "bendtrace.opaque makes a function one op"
            raise InputError(refused.format("custom_extraction_functions are", how))


class PatchableGraph(BendedModule):
    """A model that was run once on an example, so that its values are known by path.

    The class and its `graph` have their names from graphpatch. It is called like the model, and is
    traced and replayed like any `BendedModule`. The example is an ordinary call of the model: it
    draws random numbers and updates buffers, such as those of a batch norm in training mode. To
    avoid that, put the model in eval mode or seed it first.

    Args:
        model: a module; a plain function works too.
        *example_args: positional arguments of the example. `ExtractionOptions` before them are
            accepted.
        **example_kwargs: keyword arguments of the example.

    Raises:
        InputError: `model` cannot be called.
        Exception: whatever the model raises, unchanged.

    Example:
        >>> import torch, bendtrace as bt
        >>> pg = bt.PatchableGraph(torch.nn.Linear(2, 3), torch.ones(4, 2))
        >>> pg.graph
        <root>: Graph(5)
        ├─input: Tensor(4, 2)
        ├─weight: Tensor(3, 2)
        ├─bias: Tensor(3)
        ├─linear: Tensor(4, 3)
        └─output: Tensor(4, 3)
        >>> pg.graph.bias._shape
        torch.Size([3])
    """

    _untraced = BendedModule._untraced | {"_example", "_graph"}
    _example: Tree
    _graph: Tree | None = None  # the example as graphpatch numbers it, when it is first looked at

    def __init__(
        self, model: Callable[..., Any], /, *example_args: Any, **example_kwargs: Any
    ) -> None:
        super().__init__(model)
        if example_args and isinstance(example_args[0], ExtractionOptions):
            example_args = example_args[1:]
        recording = self.trace(*example_args, **example_kwargs)._recording
        self._keep(self._knowledge.run(recording).tree)

    @property
    def graph(self) -> Node:  # type: ignore[override]
        """The tree of the example: it prints, completes, and leads to every value by its path.

        As in graphpatch, loops are unrolled: `mul` is the first product, and `mul_1` the second.
        """
        return _Root(self._unrolled, self)

    @property
    def _unrolled(self) -> Tree:
        if self._graph is None:
            object.__setattr__(self, "_graph", unroll(self._example, self.model))
        assert self._graph is not None
        return self._graph

    def patch(self, patches: Any, *, rows: Rows = None) -> Any:
        """Return a context in which patches apply at nodes; after it the model is as before.

        Args:
            patches: for each node one patch, or several in the order in which they apply. A node is
                given as a node of `graph`, or by the path that graphpatch has for it:
                `"layers_0.mlp.relu"`, `"output|sub_0.sub_1"`; the first of several calls of a
                module also as `"linear_0.output"`. A node that only a later call reached has the
                path that it would have in the graph of that call. An attribute of a module that is
                a number has a path as well, `"scale"`: while the context lasts, the module has the
                new number, in all calls.
            rows: the rows of the batch to patch, for values that are tensors; None for all.

        Raises:
            NodePathError: a path does not lead to a single value.
            InputError: a key is neither a path nor a node, or a value is not a patch.

        Example:
            >>> import torch, bendtrace as bt
            >>> class Scaled(torch.nn.Module):
            ...     scale = 2
            ...     def forward(self, x):
            ...         return x * self.scale
            >>> pg = bt.PatchableGraph(Scaled(), torch.ones(2))
            >>> with pg.patch({"scale": bt.patches.AddPatch(value=1)}):
            ...     pg(torch.ones(2))
            tensor([3., 3.])
            >>> pg(torch.ones(2))
            tensor([2., 2.])
        """
        if not isinstance(patches, Mapping):
            return super().patch(patches, rows=rows)
        numbers: dict[tuple[nn.Module, str], Any] = {}
        others: dict[Any, Any] = {}
        errors: list[NodePathError] = []
        for where, given in patches.items():
            try:
                place = self._place(where)
            except NodePathError as error:
                errors.append(error)
            else:
                if isinstance(place, tuple):
                    numbers[place] = given
                else:
                    others[place] = given
        raise_all(errors)
        if not numbers:
            return super().patch(others, rows=rows)
        return patched_numbers(numbers, super().patch(others, rows=rows))

    def _place(self, where: Any) -> Node | NodePath | tuple[nn.Module, str]:
        """Return the node that a key names, or the module and the attribute."""
        if not isinstance(where, (str, Node)):
            raise InputError(f"patches are given by paths and nodes of the graph, not {where!r}")
        place: Any = where
        if isinstance(where, Node):
            node = where._data
        elif isinstance(where, NodePath):  # of a node of a tree, or of an attribute
            return self._number(where) or where
        elif found := dict(_paths(self._unrolled.data)).get(where) or self._elsewhere(where):
            node, place = found, NodePath(found.path)
        elif number := self._number(where):
            return number
        else:
            node = self._unrolled.resolve(where, leaf=False)._data  # which raises, or is an alias
            raise NodePathError(
                f"no node {where!r}: {node.path!r} has this name, but not in graphpatch", where
            )
        if node.kind in ("graph", "container"):
            text = where if type(where) is str else node.path
            inside = tuple(name for name, _ in _paths(node, text + _sign(node)))
            raise NodePathError(
                f"{text!r} is a {describe_node(node)}, not a single value; name a value in it: "
                f"{', '.join(map(repr, inside[:12]))}",
                text,
                inside,
            )
        return place  # type: ignore[no-any-return]

    def _elsewhere(self, path: str) -> TreeNode | None:
        """Return the node that a path names in calls other than the example; None for none."""
        graphs = [dict(_paths(unroll(tree, self.model).data)) for tree in self._knowledge.trees()]
        found = {graph[path].path: graph[path] for graph in graphs if path in graph}
        if len(found) > 1:
            raise NodePathError(
                f"{path!r} is ambiguous: the example has no such node, and other calls have "
                f"{' and '.join(map(repr, found))}",
                path,
                tuple(found),
            )
        return next(iter(found.values()), None)

    def _number(self, path: str) -> tuple[nn.Module, str] | None:
        """Return the module and the name of an attribute that is a number, if a path names one."""
        *parts, name = path.split(".")
        try:
            owner = (module_of(self.model) or nn.Module()).get_submodule(".".join(parts))
        except AttributeError:
            return None
        is_number = type(getattr(owner, name, None)) in (bool, int, float)
        return (owner, name) if is_number else None

    def save(self, target: str | os.PathLike[str] | IO[bytes]) -> None:
        """Save the model and its example, without hooks of accelerate that are on the model.

        `PatchableGraph.load(target)` loads it.

        Args:
            target: a path or a binary file.

        Raises:
            InputError: accelerate has put weights somewhere else.
        """
        with _without_hooks(self.model):
            torch.save(self, target)

    @staticmethod
    def load(source: str | os.PathLike[str] | IO[bytes], **options: Any) -> PatchableGraph:
        """Load a graph that `save` wrote, by `torch.load`, which runs code from the file: trust it.

        Args:
            source: a path or a binary file.
            **options: of `torch.load`, such as `map_location`.

        Raises:
            InputError: the file holds something else.
        """
        found = torch.load(source, **{"weights_only": False} | options)
        if not isinstance(found, PatchableGraph):
            raise InputError(f"the file holds a {type(found).__name__}, and no PatchableGraph")
        return found

    def _keep(self, example: Tree) -> None:
        object.__setattr__(self, "_example", example)
        self._knowledge.examples.append(example)

    def _carried(self, memo: dict[int, Any] | None) -> dict[str, Any]:
        return {**super()._carried(memo), "example": self._example.to_dict()}

    def _take_over(self, carried: dict[str, Any]) -> None:
        super()._take_over(carried)
        self._keep(Tree.from_dict(carried["example"]))

    def __repr__(self) -> str:
        return f"PatchableGraph({self._model!r}, {self.stats})"


class _Root(Node):
    """The root of an example, whose attributes are also the numbers of the model."""

    __slots__ = ("_owner",)
    _owner: PatchableGraph

    def __init__(self, tree: Tree, owner: PatchableGraph) -> None:
        super().__init__(tree, tree.data)
        object.__setattr__(self, "_owner", owner)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._owner._number(name) is not None:
                return NodePath(name)
            raise


def _paths(node: TreeNode, start: str = "") -> Iterator[tuple[str, TreeNode]]:
    """Yield the nodes below one of an unrolled tree by the strings that graphpatch has for them."""
    for child in node.children.values():
        inside = node.kind == "container" and isinstance(child.key, str)
        for name in filter(None, (str(child.key) if inside else child.name, child.label)):
            yield start + name, child
            sign = "." if node.kind == "container" else _sign(child)
            yield from _paths(child, f"{start}{name}{sign}")


def _sign(node: TreeNode) -> str:
    return "|" if node.kind == "container" else "."


# A tree of paths in which each node is one pass, as in the graphs of torch.fx.


def unroll(tree: Tree, model: Any) -> Tree:
    """Return a tree in which each node is one pass, numbered in the order of the run.

    Each node keeps the path of its pass in the given tree.
    """
    tree.place_steps()
    return Tree(_one_pass(tree.data, 0, "", modules_in(model)), tree._elements)


def _one_pass(node: TreeNode, number: int, name: str, modules: dict[str, nn.Module]) -> TreeNode:
    """Return one pass of a node, with a child for each pass that its children had in it.

    Graphs of graphpatch number repeated nodes in the order of a run. The path is the one of the
    pass in the given tree.
    """
    several = len(node.passes) > 1
    path = NodePath(f"{node.path}:{number + 1}") if several else node.path
    code = [Variant(one.text, (0,)) for one in node.code if number in one.passes]
    made = replace(
        node, name=name, label="", children={}, passes=[replace(node.passes[number], parent=0)],
        code=code, steps=[] if several else node.steps, path=path, spellings=None,
    )  # fmt: skip
    inside = [(c, n) for c in node.children.values() for n in passes_in(c, [number]) or ()]
    numbered = [(c, n) for c, n in inside if node.kind == "graph" and c.role in ("call", "op")]
    keys = {(c, n): c.passes[n].called or c.key for c, n in numbered}
    taken = {one[0].name for one in inside if one not in keys}
    bases = {(c, n): identifier(c.passes[n].called or c.label or c.name) for c, n in numbered}
    called = [(c, n) for c, n in numbered if c.role == "call"]
    for path, count in Counter(child.module for child, _ in called).items():
        several = sum(other is modules.get(path) for other in modules.values()) > 1
        calls = [(c, n) for c, n in called if c.module == path]
        if count > 1 and several and not all(c.passes[n].called for c, n in calls):
            # The code does not show the names of all calls, so that none can be numbered.
            keys |= dict.fromkeys(calls)
            bases |= {one: f"{bases[one]}_call" for one in calls}
    counts = Counter(bases[one] for one in called)
    if len({id(child) for child, _ in numbered}) < len(numbered):
        numbered.sort(key=lambda one: _began(*one))
    waiting = iter(numbered)
    for child, n in inside:
        child, n = next(waiting) if (child, n) in keys else (child, n)
        new, label, key = child.name, "", keys.get((child, n), child.key)
        if base := bases.get((child, n)):
            if counts[base] > 1 and base not in taken and child.role == "call" and key is not None:
                label = f"{base}_0"
            new = free_name(base, taken)
            taken.add(new)
        made.children[new] = replace(_one_pass(child, n, new, modules), label=label, key=key)
    return made


def _began(node: TreeNode, number: int) -> float:
    """Return where on the tape a pass of a node began; after its input, if it has no ops."""
    index = node.passes[number].index
    if not node.children:
        return -1 if index is None else index
    inside = [(c, n) for c in node.children.values() for n in passes_in(c, [number]) or ()]
    ops = [_began(*one) for one in inside if node.kind != "graph" or one[0].role in ("call", "op")]
    given = (_began(*one) + 0.5 for one in inside if one[0].role == "input")
    return min(ops, default=max(given, default=-1))


@contextmanager
def _without_hooks(model: Any) -> Iterator[None]:
    """Within it, the modules of a model are without accelerate's hooks, which cannot be pickled."""
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
    hooked = [part for part in modules_in(model).values() if "_hf_hook" in vars(part)]
    if hooked and any(tensor.is_meta for _, tensor in states_of(model)):
        raise InputError(
            "accelerate has put weights of the model somewhere else: load it without offloading, "
            "or call accelerate.hooks.remove_hook_from_module(model, recurse=True) first"
        )
    for part in hooked:
        table = vars(part)
        tables.append((table, dict(table)))
        original = table.pop("_old_forward", None)
        for name in ("_hf_hook", "forward"):
            table.pop(name, None)
        if original is not None and getattr(original, "__func__", None) is not type(part).forward:
            table["forward"] = original
    try:
        yield
    finally:
        for table, before in reversed(tables):
            table.update(before)
