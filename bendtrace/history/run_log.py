"""RunLog: the log of a run, for printing and looking up values."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

from bendtrace._checks import required_choice
from bendtrace._lazy import networkx as nx
from bendtrace.flow import FlowSteps
from bendtrace.history.building import Log
from bendtrace.history.entries import LayerEntry, ModuleEntry
from bendtrace.history.exports import Form, write_as
from bendtrace.history.lookup import Entries, Key, Lookup
from bendtrace.history.tables import Table, data_frame, hash_of, table_of
from bendtrace.history.text import (
    Facts,
    entry_text,
    flow_text,
    log_text,
    rolled_graph,
    rolled_table,
)
from bendtrace.paths.view import Node, Tree

if TYPE_CHECKING:
    import pandas

    from bendtrace.graph.mirror import Graph

__all__ = ["RunLog"]

_MOST = 50  # layers that are printed


class RunLog:
    """The log of one run: every tensor that was computed, and every flow step.

    Entries are looked up by key: the name of a layer (`conv2d_3_7`, `conv2d_3`, `conv2d_3_7:1`), of
    a module that returned it (`features.6`, `features.6:1`), a position (`7`, `-17`), a node path
    (`features_6.conv2d`), a regular expression, a slice or a list of keys; if the model is
    available, also a selector, a module, a class of modules, a torch function or a function of a
    node.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
        >>> history = bt.log_forward_pass(model, torch.ones(4, 2))
        >>> [entry.label for entry in history]
        ['input_1_0', 'linear_1_1', 'relu_1_2', 'output_1_3']
        >>> history["linear_1"].parents
        ['input_1_0']
        >>> history.tree.sub_1
        sub_1: Graph(3)
        ├─input: Tensor(4, 3)
        ├─relu: Tensor(4, 3)
        └─output: Tensor(4, 3)
    """

    def __init__(
        self,
        log: Log,
        tree: Tree,
        graph: Graph,
        facts: Facts,
        guards: list[dict[str, Any]] | None = None,
    ) -> None:
        self.__dict__.update(_log=log, _tree=tree, graph=graph, _facts=facts)
        self.tree = tree.root
        self._guard_rows = guards or []
        self._claim(log)

    _log: Log
    _tree: Tree
    _facts: Facts
    _has_details = True  # whether the printed line of a layer has its shape and its module
    graph: Graph
    """The networkx mirror at op level."""
    tree: Node
    """The tree of node paths: `history.tree.features.sub_6.conv2d`."""

    def _claim(self, log: Log) -> None:
        """Mark entries as those of this log."""
        for entry in log.entries:
            entry._belong(weakref.ref(self))

    def _parts(self) -> tuple[Log, Tree, Graph, Facts, list[dict[str, Any]]]:
        """Return the parts from which another log of the same run can be made."""
        return self._log, self._tree, self.graph, self._facts, self.guard_rows()

    @property
    def name(self) -> str:
        """The name of what was run: the class of the model, or the name of the function."""
        return self._log.name

    @property
    def entries(self) -> list[LayerEntry]:
        """All values of the run in order: inputs, results of ops, numbers, state, outputs."""
        return self._log.entries

    @property
    def layers(self) -> list[LayerEntry]:
        """The entries that count as layers: the tensors among inputs, results and outputs."""
        return self._lookup.layers

    @property
    def modules(self) -> list[ModuleEntry]:
        """The module calls in the order in which they began, without that of the model."""
        return self._log.modules

    @property
    def flow_steps(self) -> FlowSteps:
        """Where the model's Python depended on the inputs."""
        return self._log.flow_steps

    @property
    def step_labels(self) -> list[str]:
        """For each flow step, the label of the entry with the value that it used."""
        return self._log.step_labels

    @property
    def flow_table(self) -> str:
        """The flow steps as a table that refers to values by label."""
        return flow_text(self._log)

    @property
    def seed(self) -> int | None:
        """The seed of torch's generator at the start of the run; None if nothing was captured."""
        return self._facts.seed

    @property
    def time(self) -> float | None:
        """The duration of the run in seconds; None if nothing was captured."""
        return self._facts.seconds

    @property
    def why_live(self) -> tuple[str, ...]:
        """The reasons why the run cannot be replayed; empty if it can."""
        return tuple(self._facts.live)

    def guard_rows(self) -> list[dict[str, Any]]:
        """Return the guards as plain values, ready for JSON."""
        return self._guard_rows

    # Looking things up

    @overload
    def __getitem__(self, key: int) -> LayerEntry: ...
    @overload
    def __getitem__(self, key: slice | list[Any]) -> Entries: ...
    @overload
    def __getitem__(self, key: Key) -> LayerEntry | Entries: ...
    def __getitem__(self, key: Key | slice | list[Any]) -> LayerEntry | Entries:
        found = self._lookup.find(key)
        for entry in found:
            entry._belong(lambda: self)
        return found

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerEntry]:
        return iter(self.layers)

    def __contains__(self, key: object) -> bool:
        try:
            self._lookup.find(key)
        except KeyError:
            return False
        return True

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._lookup.keys())

    @cached_property
    def _lookup(self) -> Lookup:
        return Lookup(self._log, self._tree)

    # Telling

    def _describe(self, entry: LayerEntry) -> str:
        """Return a text that describes an entry in full."""
        return entry_text(entry, self._log, self._lookup)

    def _keys_of(self, entry: LayerEntry) -> list[str]:
        """Return the keys that find exactly this entry.

        Example:
            >>> import torch, bendtrace as bt
            >>> history = bt.trace(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.ones(4, 2))
            >>> history["linear_1"].lookup_keys
            ['-2', '1', '0', '0:1', 'linear_1_1', 'linear_1_1:1']
        """
        return self._lookup.keys_of(entry)

    def to_text(self, layers: int | None = _MOST, *, only: Literal["all", "mine"] = "all") -> str:
        """Return the log as text.

        Args:
            layers: how many layers to list; None for all.
            only: "mine" leaves out the flow steps of installed packages.

        Raises:
            InputError: `only` is another word.
        """
        mine = required_choice("only", only, "all", "mine") == "mine"
        facts, details = self._facts, self._has_details
        return log_text(self._log, self._lookup, facts, layers, details=details, mine=mine)

    def rolled_graph(self) -> nx.DiGraph[str]:
        """Return a networkx graph with one node per layer, with all its passes merged.

        Its edges have the attribute `back`: whether they lead from one pass to a later one.

        Example:
            >>> import torch, bendtrace as bt
            >>> def shrink(x):
            ...     while x.norm() > 1:
            ...         x = x / 2
            ...     return x
            >>> graph = bt.trace(shrink, torch.full((4,), 3.0)).rolled_graph()
            >>> [(source, target) for source, target, back in graph.edges(data="back") if back]
            [('div_1_3', 'norm_1_1'), ('div_1_3', 'div_1_3')]
        """
        return rolled_graph(self._entries_without_state())

    def rolled(self, most: int | None = _MOST) -> str:
        """Return a table with one line per layer, with all its passes merged.

        Args:
            most: the maximum number of lines; None for all.

        Example:
            >>> import torch, bendtrace as bt
            >>> def shrink(x):
            ...     while x.norm() > 1:
            ...         x = x / 2
            ...     return x
            >>> print(bt.trace(shrink, torch.full((4,), 3.0)).rolled())
            layer       passes    shapes    module    from
            ----------  --------  --------  --------  ---------------------------------------
            input_1_0   1         (4,)
            norm_1_1    4         ()                  input_1_0, div_1_3 (of the pass before)
            gt_1_2      4         ()                  norm_1_1
            bool_1      4                             gt_1_2
            div_1_3     3         (4,)                input_1_0, div_1_3 (of the pass before)
            output_1_4  1         (4,)                div_1_3
        """
        return rolled_table(self._entries_without_state(), most)

    def _entries_without_state(self) -> list[LayerEntry]:
        """Return the entries that were computed in this run."""
        return [entry for entry in self.entries if entry.kind != "state"]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the log as a table with a row for each layer.

        Raises:
            ImportError: pandas is not installed.

        Example:
            >>> import torch, bendtrace as bt
            >>> history = bt.trace(torch.nn.Sequential(torch.nn.Linear(2, 3)), torch.ones(4, 2))
            >>> history.to_pandas()["shape"].to_dict()
            {'input_1_0': (4, 2), 'linear_1_1': (4, 3), 'output_1_2': (4, 3)}
        """
        return data_frame(self._lookup.layers)

    def table(self, what: str = "ops") -> Table:
        """Return a table of the run, which prints and has `to_list()`.

        Args:
            what: "ops", with their arguments; "modules", with the ops and bytes in all of their
                calls; "parameters" or "buffers", with the number of ops that use each.

        Raises:
            InputError: there is no such table.

        Example:
            >>> import torch, bendtrace as bt
            >>> layer = torch.nn.Linear(2, 2)
            >>> trace = bt.trace(torch.nn.Sequential(layer, layer), torch.ones(1, 2))
            >>> print(trace.table("parameters"))
            name      shape    nbytes    trainable    ops
            --------  -------  --------  -----------  -----
            0.bias    (2,)     8 B       True         2
            0.weight  (2, 2)   16 B      True         2
        """
        return table_of(self.entries, self.modules, what)

    def write_as(self, form: Form, path: str | os.PathLike[str]) -> None:
        """Write the log for a viewer of others.

        Args:
            form: "chrome", a trace of the ops and modules for chrome://tracing and Perfetto, one
                after the other, as long as they took; "model_explorer", the JSON that Google's
                Model Explorer opens; "tensorboard", a graph for TensorBoard; "parquet", a table of
                the layers.
            path: the file; for "tensorboard" the directory.

        Raises:
            InputError: there is no such form, or a Chrome trace is asked of a run that was not
                measured.
            ImportError: tensorboard, pandas or pyarrow is missing.
            OSError: the file cannot be written.

        Example:
            >>> import json, os, tempfile, torch, bendtrace as bt
            >>> trace = bt.trace(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2), save="none")
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     path = os.path.join(directory, "run.json")
            ...     trace.write_as("chrome", path)
            ...     with open(path) as file:
            ...         [event["name"] for event in json.load(file)["traceEvents"]]
            ['process_name', 'Sequential', '0:1', 'relu_1_1']
        """
        write_as(form, path, self.name, self.entries, self.modules)

    @property
    def hash(self) -> str:
        """A hash of the structure of the run, for tests: `assert trace.hash == "..."`.

        It covers the ops with their functions, arguments, shapes, dtypes, modules, operands and
        parameters, and the flow steps with their answers. It does not cover values, times, devices
        and lines, so it is the same on other machines.

        Example:
            >>> import torch, bendtrace as bt
            >>> runs = [bt.trace(torch.nn.ReLU(), torch.rand(size)) for size in (3, 3, 2)]
            >>> [run.hash == runs[0].hash for run in runs]
            [True, True, False]
        """
        return hash_of(self.entries, self.flow_steps)

    def _count_flops(self) -> None:
        """Count floating point operations; a log without its run has only earlier counts."""

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        counts = f"{len(self)} layers, {len(self.flow_steps)} flow steps"
        return f"<{type(self).__name__} of {self.name}: {counts}>"
