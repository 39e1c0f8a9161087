"""The recorded runs of a model, as a base for looking up insertions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from bendtrace._lazy import LazyModule
from bendtrace._places import place_text
from bendtrace.errors import InputError, NodePathError
from bendtrace.history.names import Names
from bendtrace.paths.candidates import Candidate, RunNodes
from bendtrace.paths.nodes import Registry, identifier
from bendtrace.paths.view import Tree, find
from bendtrace.recording.recorder import Recording
from bendtrace.torch_rules.owners import module_of, modules_in

if TYPE_CHECKING:
    from bendtrace import run as run_views
    from bendtrace.interject.selectors import naming, source
    from bendtrace.run import Run
    from bendtrace.view.outline import Coverage
else:
    run_views = LazyModule("bendtrace.run")
    source = LazyModule("bendtrace.interject.selectors.source")
    naming = LazyModule("bendtrace.interject.selectors.naming")


class Knowledge:
    """The runs of one model, as insertions query them.

    Args:
        model: the model.
        registry: the registry of node names.
        runs: returns the runs without insertions, the latest first.
        inserted: returns those with insertions.
        coverage: lists the branches with a side that was not seen.
        settled: returns the run without insertions that the inputs will repeat, if that is certain.
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
        self._of_examples: dict[int, Names] = {}  # which are kept, as the examples are
        self._views: dict[int, Run] = {}  # by the identity of their recordings

    def trees(self) -> Iterator[Tree]:
        """Yield the trees of the runs, those without insertions first."""
        self.name_nodes()
        yield from self.examples
        for recording in self.recordings():
            yield self._run(recording).tree

    def names(self) -> Iterator[Names]:
        """Yield the names in the runs, those without insertions first.

        Layers are counted in runs without insertions, if there are any.
        """
        self.name_nodes()
        for example in self.examples:
            yield self._of_examples.setdefault(id(example), Names(example, None))
        plain = self._runs()
        for recording in self.recordings():
            run = self._run(recording)
            is_plain = not plain or any(recording is other for other in plain)
            yield run.naming if is_plain else run.naming_without_log

    def name_nodes(self) -> None:
        """Name the nodes of all runs in the order in which these were recorded."""
        for recording in reversed(self._runs()):
            _ = self._run(recording).tree

    def recordings(self) -> list[Recording]:
        """Return all known runs."""
        return [*self._runs(), *self._inserted()]

    def candidates(self) -> list[Candidate] | None:
        """Return the nodes of all runs without insertions; None if there were none."""
        runs = self._runs()
        if not runs:
            return None
        self.name_nodes()
        found: dict[str, Candidate] = {}
        for recording in runs:
            for node in self._run(recording).candidates:
                found.setdefault(node.path, node)
        return list(found.values())

    def select(self, what: Any) -> list[str]:
        """Return the paths of the nodes that a selector, or a value that converts to one, selects.

        Raises:
            InputError: nothing has been traced yet.
        """
        runs = self._runs()
        if not runs:
            raise InputError(
                f"nothing has been traced yet, so the nodes of {what!r} are unknown: call the "
                "module, or its trace(), first"
            )
        found: dict[str, None] = {}
        for recording in runs:
            nodes = naming.nodes_meant(what, self.run(recording).candidates)
            found.update(dict.fromkeys(node.path for node in nodes))
        return list(found)

    def modules(self) -> list[Candidate]:
        """Return the modules as nodes, including those that no run has reached."""
        owner = module_of(self.model)
        if owner is None:
            return []
        modules = modules_in(owner)
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
        """Return the known paths of the calls of a module."""
        names = {node.module_path for node in self.modules() if node.module is module}
        found = [
            node.path
            for tree in self.trees()
            for node in tree.data.walk()
            if node.role == "call" and node.module in names and node.path
        ]
        return list(dict.fromkeys(found))

    def path_of(self, name: str) -> str:
        """Return the node path of the first call of a module, by its qualified name."""
        for tree in self.trees():
            for node in tree.data.walk():
                if node.role == "call" and node.module == name:
                    return node.path
        return ".".join(map(identifier, name.split(".")))

    def mirror_path(self, name: str) -> str:
        """Return the path of the mirror node with a name; "" if there is none."""
        for recording in self._runs():
            if name in recording.names:
                return self.run(recording).tree.path_of(recording.names.index(name))
        return ""

    def hint(self, name: str) -> str:
        """Return the untaken branch in which something with a name may be."""
        base = re.sub(r"_\d+$", "", name.rpartition(".")[2])
        found = [
            branch
            for branch in self._coverage()
            if any(re.search(rf"\b{re.escape(base)}\b", text) for text in source.unseen(branch))
        ]
        if not base or not found:
            return ""
        listed = ", ".join(
            f"{place_text(branch.file, branch.line)} `{branch.text}`" for branch in found[:3]
        )
        return f"it may be in a branch that no run has taken: {listed}"

    def why_not(
        self, path: str, runs: Iterable[Recording], often_enough: Callable[[int], bool]
    ) -> str:
        """Return why some runs reached a node less often than others; "" if that is unknown.

        Args:
            path: the node.
            runs: the runs.
            often_enough: whether a run that reached the node a given number of times counts as one
                of the others.
        """
        others = [run for run in self.recordings() if often_enough(self.count_passes(path, run))]
        nodes = {node.path: node for node in self.candidates() or ()}
        if not others:
            return ""
        return source.why_past(path, nodes, others, runs)

    def count_passes(self, path: str, run: Recording) -> int:
        """Return how often a run reached a node."""
        try:
            return len(find(self.run(run).tree.data, path)[0].passes)
        except NodePathError:
            return 0

    def foreseen(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run | None:
        """Return a run without insertions that a call will repeat; None if that is not certain."""
        recording = self._settled(args, kwargs)
        return None if recording is None else self.run(recording)

    def run(self, recording: Recording) -> Run:
        """Return the views of a run, with node names that continue those of earlier runs."""
        self.name_nodes()
        return self._run(recording)

    def nodes_of(self, recording: Recording) -> RunNodes:
        """Return the nodes of a known run."""
        self.name_nodes()
        return self._run(recording).nodes

    def _run(self, recording: Recording) -> Run:
        known = self._views.get(id(recording))
        if known is None:
            living = {id(other) for other in self.recordings()}
            for key in [key for key in self._views if key not in living]:
                del self._views[key]
            run = run_views.Run(recording, self.model, self.registry)
            known = self._views[id(recording)] = run
        return known
