"""Has torch trace programs: quietly, each side of a question once, leaving nothing behind."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from bendtrace.compiled.attempts import Quiet
from bendtrace.source.internals import internal, pytree

_LOGGERS = ("torch.onnx", "torch._export", "onnxscript", "onnx_ir")
_TRACES = "do_not_emit_stack_traces"
_KeepsKeys: Any = internal("torch._C._PreserveDispatchKeyGuard", contextlib.nullcontext)
_FakeTensorMode: Any = internal("torch._subclasses.fake_tensor.FakeTensorMode", None)
_LOCK = threading.RLock()  # around what is exchanged in torch


def open_sizes(is_open: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch does not take all open sizes for larger than 1.

    By default it does, and does not check it (torch 2.13).
    """
    config: Any = internal("torch.fx.experimental._config")
    context: contextlib.AbstractContextManager[None] = config.patch(backed_size_oblivious=is_open)
    return context


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which torch and onnx log nothing: errors say what they refuse.

    Nodes of graphs get no stack traces, which only name generated code and take a tenth of the time
    (torch 2.13). After an error, the keys that torch dispatches by are as they were.
    """
    loggers = [*map(logging.getLogger, _LOGGERS)]
    levels = [logger.level for logger in loggers]
    settings: Any = internal("torch.fx.config", None)
    traces = getattr(settings, _TRACES, None)
    with warnings.catch_warnings(), Quiet(), torch.no_grad(), _KeepsKeys():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        if traces is not None:
            setattr(settings, _TRACES, True)
        try:
            yield
        except BaseException as error:
            _clear_frames(error)
            raise
        finally:
            if traces is not None:
                setattr(settings, _TRACES, traces)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames that an error has come through.

    Some of them hold guards of torch's: freed with the error, these would set the keys that torch
    dispatches by to those of the code that has failed, and the next export could end the process
    (torch 2.13; the test of operators that no fake tensor goes through notices a change).
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def each_side_once() -> Iterator[None]:
    """Return a context in which torch traces each side of a question once.

    By itself it runs the graph of a side again to learn what it returns, and after each of its
    passes writes the code of all graphs in a graph: the time grows with the third power of how many
    questions are in each other (torch 2.13). Who leaves this context calls `recompile`.
    """
    table = getattr(torch.ops.higher_order.cond, "python_key_table", {})
    run, write = table.get(_FakeTensorMode), getattr(fx.GraphModule, _WRITE, None)
    if run is None or write is None:
        yield
        return
    thread = threading.get_ident()

    def run_cond(mode: Any, asked: Any, yes: Any, no: Any, operands: Any) -> Any:
        made = [_outputs_of(side, operands, mode) for side in (yes, no)]
        if any(one is None for one in made):
            return run(mode, asked, yes, no, operands)
        return run(mode, asked, lambda *_: made[0], lambda *_: made[1], operands)

    def write_inner(module: fx.GraphModule) -> Any:
        return [] if threading.get_ident() == thread else write(module)

    with _LOCK:
        table[_FakeTensorMode] = run_cond
        setattr(fx.GraphModule, _WRITE, write_inner)
        try:
            yield
        finally:
            table[_FakeTensorMode] = run
            setattr(fx.GraphModule, _WRITE, write)


_WRITE = "_recompile_submodules"


def _outputs_of(side: Any, operands: Sequence[Any], mode: Any) -> Any:
    """Return what a graph has returned when it was traced with some operands; None if unknown."""
    if not isinstance(side, fx.GraphModule):
        return None
    given = [node.meta.get("val") for node in side.graph.find_nodes(op="placeholder")]
    nodes, structure = pytree.tree_flatten(side.graph.output_node().args[0])
    made = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]
    if not all(isinstance(one, Tensor) and _mode_of(one) is mode for one in made):
        return None
    same = len(given) == len(operands) and all(map(_are_alike, given, operands))
    return pytree.tree_unflatten(made, structure) if same else None


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two values are tensors of the same sizes, or the same size."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and str(one) == str(other)
    kinds = [(each.dtype, each.device, _mode_of(each)) for each in (one, other)]
    sizes = [[*map(str, (*each.shape, *each.stride()))] for each in (one, other)]
    return kinds[0] == kinds[1] and sizes[0] == sizes[1]


def _mode_of(value: Tensor) -> Any:
    return getattr(value, "fake_mode", None)
