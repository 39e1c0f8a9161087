"""What is known of a model from its recorded runs: what insertions are looked up in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from bendtrace._later import Later
from bendtrace.errors import NodePathError
from bendtrace.flow import FlowSteps, flow_steps
from bendtrace.graph.names import node_names
from bendtrace.history.names import Names
from bendtrace.interject.candidate import Candidate
from bendtrace.interject.graphs import candidate_graph
from bendtrace.interject.rehearsal import Rehearsal, names_of, rehearse
from bendtrace.paths.naming import Registry, identifier
from bendtrace.paths.strings import find
from bendtrace.paths.tree import tree_of
from bendtrace.paths.view import Tree
from bendtrace.recording.owners import module_of
from bendtrace.recording.recorder import Recording

if TYPE_CHECKING:
    from bendtrace.interject import absence
    from bendtrace.view.outline.coverage import Coverage
else:
    absence = Later("bendtrace.interject.absence")

__all__ = ["Knowledge"]


class Knowledge:
    """The runs of one model, as insertions ask about them.

    Args:
        model: the model.
        registry: gives the names of its nodes.
        runs: returns the runs without insertions, the latest first.
        inserted: returns those with insertions.
        coverage: lists the branches of which a side was not seen.
        settled: returns the run without insertions that inputs are bound to repeat, if known.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        registry: Registry,
        runs: Callable[[], list[Recording]],
        inserted: Callable[[], list[Recording]],
        coverage: Callable[[], Coverage],
        settled: Callable[[tuple[Any, ...], dict[str, Any]], Recording | None],
    ) -> None:
        self.model = model
        self.registry = registry
        self.examples: list[Tree] = []
        self._runs = runs
        self._inserted = inserted
        self._coverage = coverage
        self._settled = settled
        # By identity, with the run itself so that no identity is used twice.
        self._trees: dict[int, tuple[Recording, Tree]] = {}
        self._nodes: dict[int, tuple[Recording, list[Candidate]]] = {}
        self._of_examples: dict[int, Names] = {}  # which are kept, as the examples are
        self._named: dict[int, tuple[Recording, bool, Names]] = {}
        self._steps: dict[int, tuple[Recording, FlowSteps]] = {}

    def trees(self) -> Iterator[Tree]:
        """Yield the trees of the runs, those without insertions first."""
        self.name_nodes()
        yield from self.examples
        for recording in self.recordings():
            yield self._tree(recording)

    def names(self) -> Iterator[Names]:
        """Yield what strings name in the runs, those without insertions first.

        Layers are counted in runs without insertions, if there are any.
        """
        self.name_nodes()
        for example in self.examples:
            yield self._of_examples.setdefault(id(example), Names(example, None))
        plain = self._runs()
        _forget(self._named, self.recordings())
        for recording in self.recordings():
            is_plain = not plain or any(recording is run for run in plain)
            known = self._named.get(id(recording))
            if known is None or known[1] is not is_plain:
                tree = self._tree(recording)
                names = names_of(recording, tree) if is_plain else Names(tree, None)
                known = self._named[id(recording)] = recording, is_plain, names
            yield known[2]

    def name_nodes(self) -> None:
        """Name the nodes of all runs in the order in which these were recorded."""
        for recording in reversed(self._runs()):
            self._tree(recording)

    def recordings(self) -> list[Recording]:
        """Return all runs that are known."""
        return [*self._runs(), *self._inserted()]

    def candidates(self) -> list[Candidate] | None:
        """Return the nodes of all runs without insertions; None if there were none."""
        runs = self._runs()
        if not runs:
            return None
        self.name_nodes()
        _forget(self._nodes, runs)
        found: dict[str, Candidate] = {}
        for recording in runs:
            known = self._nodes.get(id(recording))
            if known is None:
                graph = candidate_graph(recording, self.model, self.registry)
                known = self._nodes[id(recording)] = recording, list(graph)
            for node in known[1]:
                found.setdefault(node.path, node)
        return list(found.values())

    def modules(self) -> list[Candidate]:
        """Return the modules as nodes, those included that no run has come by."""
        owner = module_of(self.model)
        if owner is None:
            return []
        modules = dict(owner.named_modules(remove_duplicate=False))
        if owner is not self.model:
            del modules[""]  # no call of it is a node
        found = []
        for name, module in modules.items():
            scope, _, base = name.rpartition(".")
            path = ".".join(map(identifier, name.split("."))) if name else ""
            found.append(
                Candidate(
                    path, identifier(base) if base else "", module, name, None,
                    modules.get(scope) if name else None, scope,
                )
            )  # fmt: skip
        return found

    def paths_of(self, module: nn.Module) -> list[str]:
        """Return the paths of the calls of a module that are known."""
        names = {node.module_path for node in self.modules() if node.module is module}
        found = [
            node.path
            for tree in self.trees()
            for node in tree.data.walk()
            if node.role == "call" and node.module in names and node.path
        ]
        return list(dict.fromkeys(found))

    def path_of(self, name: str) -> str:
        """Return the node path of a module, where it is called first, by its qualified name."""
        for tree in self.trees():
            for node in tree.data.walk():
                if node.role == "call" and node.module == name:
                    return node.path
        return ".".join(map(identifier, name.split(".")))

    def mirror_path(self, name: str) -> str:
        """Return the path of the node of a mirror that has a name; "" if none has."""
        for recording in self._runs():
            names = node_names(recording.tape.ops)
            if name in names:
                return self._tree(recording).path_of(names.index(name))
        return ""

    def hint(self, name: str) -> str:
        """Say under which branch that was not taken something of a name may be."""
        base = re.sub(r"_\d+$", "", name.rpartition(".")[2])
        found = [
            branch
            for branch in self._coverage()
            if any(re.search(rf"\b{re.escape(base)}\b", text) for text in absence.unseen(branch))
        ]
        if not base or not found:
            return ""
        listed = ", ".join(
            f"{os.path.basename(branch.file)}:{branch.line} `{branch.text}`" for branch in found[:3]
        )
        return f"it may be under a branch of which that side was not seen: {listed}"

    def why_not(
        self, path: str, runs: Iterable[Recording], often_enough: Callable[[int], bool]
    ) -> str:
        """Say why some runs did not come by a node as often as others did; "" if that is unknown.

        Args:
            path: the node.
            runs: the runs.
            often_enough: whether a run that came by it so many times is one of the others.
        """
        others = [run for run in self.recordings() if often_enough(self.count_passes(path, run))]
        nodes = {node.path: node for node in self.candidates() or ()}
        if not others:
            return ""
        return absence.why_past(path, nodes, others, map(self._with_steps, runs))

    def count_passes(self, path: str, run: Recording) -> int:
        """Return how often a run came by a node."""
        try:
            return len(find(self._tree(run).data, path)[0].passes)
        except NodePathError:
            return 0

    def rehearsal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rehearsal:
        """Return what a run without insertions shows, of a copy of the model if need be."""
        recording = self._settled(args, kwargs)
        if recording is None:
            return rehearse(self.model, args, kwargs, self.registry)
        tree = self.tree(recording)
        totals = {node.path: len(node.passes) for node in tree.data.walk()}
        graph = candidate_graph(recording, self.model, self.registry)
        return Rehearsal(graph, tree, names_of(recording, tree), totals)

    def tree(self, recording: Recording) -> Tree:
        """Return the tree of a run, with the names that the runs before it leave to it."""
        self.name_nodes()
        return self._tree(recording)

    def _with_steps(self, recording: Recording) -> tuple[Recording, FlowSteps]:
        known = self._steps.get(id(recording))
        if known is None:
            _forget(self._steps, self.recordings())
            steps = flow_steps(recording.tape, node_names(recording.tape.ops))
            known = self._steps[id(recording)] = recording, steps
        return known

    def _tree(self, recording: Recording) -> Tree:
        known = self._trees.get(id(recording))
        if known is None:
            _forget(self._trees, self.recordings())
            tree = tree_of(recording, self.model, self.registry)
            known = self._trees[id(recording)] = recording, tree
        return known[1]


def _forget(kept: dict[int, Any], runs: list[Recording]) -> None:
    living = {id(recording) for recording in runs}
    for key in [key for key in kept if key not in living]:
        del kept[key]
