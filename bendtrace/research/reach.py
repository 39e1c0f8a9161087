"""The reach of values: the ops that a value depends on, and the ops that depend on it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bendtrace._trace import Trace, run_trace
from bendtrace.debug.calls import Call
from bendtrace.errors import InputError, NodePathError
from bendtrace.flow import FlowStep, LogicalFlowStep
from bendtrace.insert.resolver import flat
from bendtrace.log.nodes import NodePath
from bendtrace.python.checks import did_you_mean
from bendtrace.python.lazy import networkx as nx
from bendtrace.python.sites import InstructionPlace, Span
from bendtrace.python.statements import conclude_truth, source_file, spans_of
from bendtrace.record.iterations import running_code, user_code
from bendtrace.record.op_names import NodeRef
from bendtrace.tape.tape import OpKind, refs_in
from bendtrace.watch.functions import METADATA, SHAPES

_NO_VALUES = frozenset({*SHAPES, *METADATA})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


@dataclass(frozen=True)
class Reach:
    """The nodes that values depend on, or that depend on them, along one recorded run.

    Attributes:
        of: the nodes in question, by their names in the mirror.
        nodes: the nodes that they depend on, or that depend on them, in the order of the run.
        inputs: the inputs among them.
        states: the parameters and buffers among them.
        outputs: the parts of the output that are reached: `output`, `output.logits`.
        decisions: for an ancestry, the branches and loops that decide whether these nodes run at
            all; for an influence, those that the nodes decide.
        under: nodes that run because of these decisions, and are not reached otherwise.
        deciding: nodes that the conditions of the decisions depend on, and that are not reached
            otherwise.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x, y):
        ...     return {"a": x.relu() + 1, "b": y * 2}
        >>> found = bt.workflows.influence(bt.trace(model, torch.ones(2), torch.ones(2)), "relu")
        >>> found
        Reach(of=('relu',), inputs=(), outputs=('output.a',), decisions=())
        >>> found.nodes, "mul" in found
        (('add',), False)
    """

    of: tuple[str, ...]
    nodes: tuple[str, ...] = field(repr=False)
    inputs: tuple[str, ...] = ()
    states: tuple[str, ...] = field(default=(), repr=False)
    outputs: tuple[str, ...] = ()
    decisions: tuple[FlowStep, ...] = ()
    under: tuple[str, ...] = field(default=(), repr=False)
    deciding: tuple[str, ...] = field(default=(), repr=False)

    def __contains__(self, name: object) -> bool:
        return name in self.nodes

    def __len__(self) -> int:
        return len(self.nodes)


def ancestry(trace: Any, node: Any, inputs: Any = None) -> Reach:
    """Return the nodes that a node's value is computed from, along the edges of the mirror.

    Values written into memory count, sizes do not. The conditions under which the node runs are
    listed separately.

    Args:
        trace: a `Trace`, or a model; then `inputs` are its inputs.
        node: the name of a mirror node (which goes before a node path that reads alike), a node
            path, a node of `trace.tree`, the qualified name of a module (for its output), `output`
            or a part of it, or several of these.
        inputs: for a model: see `Call.of`.

    Raises:
        NodePathError: there is no such node.
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x, y):
        ...     h = x.relu()
        ...     if y.sum() > 0:
        ...         h = h * 2
        ...     return h
        >>> found = bt.workflows.ancestry(bt.trace(model, torch.ones(2), torch.ones(2)), "mul")
        >>> found.inputs, [step.text for step in found.decisions], found.deciding
        (('x',), ['y.sum() > 0'], ('y', 'sum', 'gt', 'bool'))
    """
    trace = _trace_of(trace, inputs)
    found = _ops_of(trace, node)
    data = _data_graph(trace)
    written = _writes_into(trace, node)
    above = set(found) | written
    above = above.union(*(nx.ancestors(data, index) for index in above))
    kept = _ops_by_branch(trace)
    steps: set[int] = set()
    deciding: set[int] = set()
    new = {-1}
    while new:  # also the decisions that lead to the conditions
        more, conditions = _decisions_over(trace, kept, deciding | above)
        steps |= more
        new = conditions - deciding
        deciding = deciding.union(new, *(nx.ancestors(data, index) for index in new))
    kinds = {
        kind: _op_names(trace, [index for index in above if trace.ops[index].kind is kind])
        for kind in (OpKind.INPUT, OpKind.STATE)
    }
    return Reach(
        of=_op_names(trace, found), nodes=_op_names(trace, above - set(found)),
        inputs=kinds[OpKind.INPUT], states=kinds[OpKind.STATE],
        outputs=_ops_of_outputs(trace, set(found)),
        decisions=tuple(trace.flow_steps[number] for number in sorted(steps)),
        deciding=_op_names(trace, deciding - above),
    )  # fmt: skip


def influence(trace: Any, node: Any, inputs: Any = None) -> Reach:
    """Return the nodes that are computed from a node's value, along the edges of the mirror.

    Args:
        trace: a `Trace`, or a model; then `inputs` are its inputs.
        node: see `ancestry`; inputs and parameters (by the names of the mirror, or qualified
            names) are nodes, too.
        inputs: for a model: see `Call.of`.

    Raises:
        NodePathError: there is no such node.
        InputError: an argument is invalid.

    Example:
        >>> import torch, bendtrace as bt
        >>> def model(x, y):
        ...     return {"a": x + y, "b": y * 2 if y.sum() > 0 else y}
        >>> found = bt.workflows.influence(bt.trace(model, torch.ones(2), torch.ones(2)), "y")
        >>> found.outputs, [step.text for step in found.decisions], found.under
        (('output.a', 'output.b'), ['y.sum() > 0'], ())
    """
    trace = _trace_of(trace, inputs)
    found = _ops_of(trace, node)
    data = _data_graph(trace)
    below = set(found).union(*(nx.descendants(data, index) for index in found))
    steps = {
        number
        for number, step in enumerate(trace.flow_steps)
        if step.guard is not None and trace._recording.tape.guards[step.guard].index in below
    }
    under: set[int] = set()
    positions = {name: index for index, name in enumerate(trace.names)}
    for _, target, number in trace.graph.control_edges():
        if number in steps and target in positions:
            under.add(positions[target])
    for number, others in _ops_by_branch(trace).items():
        if number in steps:
            under |= others
    nested = set(under)
    for index in under:
        nested |= nx.descendants(data, index)
    return Reach(
        of=_op_names(trace, found), nodes=_op_names(trace, below - set(found)),
        outputs=_ops_of_outputs(trace, below),
        decisions=tuple(trace.flow_steps[number] for number in sorted(steps)),
        under=_op_names(trace, nested - below),
    )  # fmt: skip


def _writes_into(trace: Trace, node: Any) -> set[int]:
    """Return the ops that wrote into parts of the output, last, through another view or index."""
    named = [one for one in flat(node) if isinstance(one, str)]
    outputs = [one for one in named if one.replace("|", ".").split(".")[0] == "output"]
    reads = trace._recording.output_reads
    return {reads[index] for one in outputs for index in _ops_of(trace, one) if index in reads}


def _ops_by_branch(trace: Trace) -> dict[int, set[int]]:
    """Return for branches the ops that ran only because a branch did not leave their block.

    The control edges of the mirror know the ops behind such a branch in its block, and not those
    before it in the next iteration of a loop.
    """
    tape = trace._recording.tape
    branches = []
    for number, step in enumerate(trace.flow_steps):
        if step.guard is None or not isinstance(step, LogicalFlowStep):
            continue
        guard = tape.guards[step.guard]
        spans = tuple(_source_after_exit(step.place, bool(step.value)))
        if spans and guard.site is not None:
            _, activation, _ = user_code(guard.scope, guard.site)
            branches.append((number, guard.position, activation, step.place.file, spans))
    kept: dict[int, set[int]] = {}
    for op in trace.ops if branches else ():
        places = [] if op.site is None else list(running_code(op.scope, op.site))
        for number, position, activation, file, spans in branches:
            if op.index >= position and any(
                running == activation
                and place.file == file
                and any(span.holds(place.span) for span in spans)
                for place, running in places
            ):
                kept.setdefault(number, set()).add(op.index)
    return kept


def _source_after_exit(place: InstructionPlace, outcome: bool) -> Iterator[Span]:
    """Yield the source that would not run if a branch went the other way, and left a block."""
    file = source_file(place.file)
    node = file.expressions.get(place.span)
    if node is None:
        return
    test, value = conclude_truth(file, node, outcome)
    branch = test.parent
    if not isinstance(branch, ast.If) or test.child is not branch.test:
        return
    other = branch.orelse if value else branch.body
    last = other[-1] if other else None
    if not isinstance(last, (ast.Break, ast.Return, ast.Raise)):
        return
    for _, around in file.ancestors(branch):
        if isinstance(around, _FUNCTIONS):
            if not isinstance(last, ast.Break) and not isinstance(around, ast.Lambda):
                yield from spans_of(around.body)
            return
        if isinstance(around, _LOOPS) and isinstance(last, ast.Break):
            yield from spans_of(around.body)
            return


def _trace_of(model: Any, inputs: Any) -> Trace:
    if isinstance(model, Trace):
        if inputs is not None:
            raise InputError("a trace has its inputs already: do not pass inputs=")
        return model
    if inputs is None:
        raise InputError("pass the inputs of the model as inputs=, or pass a trace")
    args, kwargs = Call.of(inputs)
    return run_trace(model, args, kwargs, None)


def _data_graph(trace: Trace) -> nx.DiGraph[int]:
    """Return how values flow between ops, memory included and sizes not."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    for op in trace.ops:
        graph.add_node(op.index)
        if op.target in _NO_VALUES:
            continue
        for ref in refs_in((op.args, op.kwargs)):
            graph.add_edge(ref.index, op.index)
        for writer in op.reads.values():
            graph.add_edge(writer, op.index)
    return graph


def _decisions_over(
    trace: Trace, kept: dict[int, set[int]], ops: set[int]
) -> tuple[set[int], set[int]]:
    """Return the steps under which ops run, and the ops of their conditions."""
    positions = {name: index for index, name in enumerate(trace.names)}
    steps, conditions = set(), set()
    for condition, target, number in trace.graph.control_edges():
        if positions.get(target) in ops:
            steps.add(number)
            conditions.add(positions[condition])
    for number, others in kept.items():
        guard = trace.flow_steps[number].guard
        if others & ops and guard is not None:
            steps.add(number)
            conditions.add(trace._recording.tape.guards[guard].index)
    return steps, conditions


def _op_names(trace: Trace, ops: Iterable[int]) -> tuple[str, ...]:
    return tuple(trace.names[index] for index in sorted(ops))


def _ops_of_outputs(trace: Trace, ops: set[int]) -> tuple[str, ...]:
    written = trace._recording.output_reads  # the ops that wrote into outputs, after those ran
    return tuple(
        path
        for path, index, _ in trace._tree.outputs
        if index is not None and (index in ops or written.get(index) in ops)
    )


def _ops_of(trace: Trace, node: Any) -> list[int]:
    """Return the ops whose outputs are the value of a node."""
    if isinstance(node, (list, tuple, set, frozenset)):
        if not node:
            raise InputError("no node was given")
        return sorted({index for item in node for index in _ops_of(trace, item)})
    name = node.name if isinstance(node, NodeRef) else getattr(node, "_path", node)
    if not isinstance(name, str):
        raise InputError(f"a node has to be given by name or path, not by {node!r}")
    outputs = [(path, index) for path, index, _ in trace._tree.outputs if index is not None]
    name = name.replace("|", ".") if name.startswith("output|") else name
    found = [i for path, i in outputs if path == name or path.startswith(f"{name}.")]
    if found:
        return sorted(set(found))
    if name in trace.names and not isinstance(name, NodePath):
        return [trace.names.index(name)]
    paths = {op.index: trace._tree.path_of(op.index) for op in trace.ops}
    found = [i for i, path in paths.items() if path == name or path.rpartition(":")[0] == name]
    found += [
        op.index for op in trace.ops
        if op.kind is OpKind.STATE and str(op.target).removeprefix("self.") == name
    ]  # fmt: skip
    for number, call in enumerate(trace.module_calls):
        if name and name in (call.path, trace._tree.call_path(number)):
            found += [ref.index for ref in refs_in(call.output)]
    if not found:
        names = [*trace.names, *paths.values(), *(call.path for call in trace.module_calls)]
        near = did_you_mean(name, filter(None, names))
        raise NodePathError(f"the run has no node {name!r}{near}", name)
    return sorted(set(found))
