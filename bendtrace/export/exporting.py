"""`BendedModule.export`: the known runs of a model as one program without its Python."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import operator
import os
import traceback
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.errors import ExportError, InputError
from bendtrace.export import targets
from bendtrace.export.machine import Machine, refuse, told
from bendtrace.export.writer import Unseen, Written, write
from bendtrace.history.sizes import counted
from bendtrace.recording.lifting import Counter, Lifting
from bendtrace.recording.recorder import Recording
from bendtrace.recording.run import Signature, record
from bendtrace.replay.explain import explain_check
from bendtrace.replay.global_state import GlobalState
from bendtrace.replay.program import Program
from bendtrace.source.internals import pytree

__all__ = ["Exported", "calls_in", "compare", "difference", "export", "tensors_in"]

_serials = itertools.count()
_TOLERANCE = 1e-5
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False)
class Exported:
    """A model with its branches and loops as one program.

    Called, it runs the program. Printed, it says what was exported and compared.

    Attributes:
        program: the `torch.export.ExportedProgram`.
        unseen: the sides of questions that no input took, and numbers that it cannot compute with
            (`seen` is empty for them): a call that comes to one raises.
        compared: how many inputs it was compared with the model for.
        notes: what else is worth knowing.
        source: the program as it was written, before torch.export traced it.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x.relu() if x.sum() > 0 else x * 2)
        >>> exported = bended.export(torch.ones(3), -torch.ones(3))
        >>> exported(torch.tensor([1.0, -3.0]))
        tensor([ 2., -6.])
        >>> [str(node.target) for node in exported.program.graph.nodes if "cond" in node.name]
        ['cond']
    """

    program: torch.export.ExportedProgram
    unseen: tuple[Unseen, ...]
    compared: int
    notes: tuple[str, ...]
    source: str = field(repr=False)
    # Gives the structure of arguments, and those that it was exported from.
    _form: Callable[[tuple[Any, ...], dict[str, Any]], Any] = field(repr=False, init=False)
    _forms: tuple[Any, ...] = field(default=(), repr=False, init=False)
    _module: Any = field(default=None, repr=False, init=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program.

        Raises:
            InputError: the containers are others than those that it was exported from, or have
                other keys, or these in another order.
        """
        if self._module is None:
            self._module = self.program.module()
        form = self._form(args, kwargs)
        if form not in self._forms:
            raise InputError(
                "the arguments have another structure than those that this was exported from: "
                f"{form} in place of {self._forms[0]}"
            )
        with torch.no_grad():
            return self._module(*args, **kwargs)

    def __repr__(self) -> str:
        inputs = counted(self.compared, "input")
        lines = [f"exported: equal to the model, bit by bit, for {inputs}"]
        sides = [unseen for unseen in self.unseen if unseen.seen]
        limits = [unseen for unseen in self.unseen if not unseen.seen]
        if sides:
            lines.append(f"{counted(len(sides), 'side')} never taken, where it raises:")
            lines += _each(sides)
        if limits:
            lines.append("it also raises for:")
            lines += _each(limits)
        lines += self.notes
        return "\n".join(lines)


def _each(unseen: Iterable[Unseen]) -> list[str]:
    """Return a line for each text, with how often it occurs: each round of a loop has one."""
    often = Counts(map(str, unseen))
    return [f"    {text}" + (f" ({n} times)" if n > 1 else "") for text, n in often.items()]


def export(
    model: Callable[..., Any],
    signature: Signature,
    calls: Sequence[Inputs],
    to: str | os.PathLike[str] | None,
    unseen: str,
    tell: Callable[[str], None] = lambda step: None,
) -> Exported:
    """Export a model.

    Args:
        model: the model.
        signature: names its arguments.
        calls: the inputs.
        to: as for `BendedModule.export`.
        unseen: likewise.
        tell: called with the name of each step: "record" and "compare" once for each of the inputs,
            "trace", and "write" if there is a file.
    """
    if unseen not in ("assert", "error"):
        raise InputError(f"unseen is 'assert' or 'error', not {unseen!r}")
    if not calls:
        raise InputError("no paths are known: give inputs, which the model is run with")
    for number, (args, kwargs) in enumerate(calls, 1):
        if (len(args), set(kwargs)) != (len(calls[0][0]), set(calls[0][1])):
            raise InputError(
                f"input {number} has other positional or keyword arguments than the first: a "
                "program is called in one way"
            )
    target = None if to is None else targets.target_of(to)
    export_once = functools.partial(_export, model, signature, calls, to, target, unseen, tell)
    with torch.no_grad():
        excluded: frozenset[Counter] = frozenset()
        while True:
            liftings = [Lifting(excluded, as_tensors=True) for _ in calls]
            try:
                recordings = _recorded(model, signature, calls, tell, liftings)
                needed = frozenset().union(
                    *(one.needed(run.tape) for one, run in zip(liftings, recordings, strict=True))
                )
                if not needed:
                    return export_once(recordings)
            except ExportError:
                if not any(one.lifted for one in liftings):
                    raise
                break  # it may have a form with each round as a state of its own
            excluded |= needed
        return export_once(_recorded(model, signature, calls, tell, [None] * len(calls)))


def _export(
    model: Callable[..., Any],
    signature: Signature,
    calls: Sequence[Inputs],
    to: str | os.PathLike[str] | None,
    target: str | None,
    unseen: str,
    tell: Callable[[str], None],
    recordings: list[Recording],
) -> Exported:
    """Export recorded runs."""
    machine = Machine(recordings)
    args, kwargs = _largest(calls)
    names = signature.arrange(args, kwargs)[0]
    parameters = [_variable(name) for name in names]
    head = [_variable(name) for name in signature.names(args, kwargs)]
    state = _names_of(model)
    written = write(machine, parameters, head, state, False)
    never = [one for one in written.unseen if one.seen]
    if never and unseen == "error":
        listed = "\n".join(f"    {one}" for one in never)
        raise ExportError(f"inputs never took some sides:\n{listed}")
    tell("trace")
    program = _traced(written, signature, args, kwargs)
    made = Exported(program, written.unseen, len(calls), written.told, written.text)
    made._form = form = functools.partial(_form, signature)
    made._forms = tuple({repr(one): one for one in itertools.starmap(form, calls)}.values())
    compare(made, calls, recordings, tell=tell)
    if to is None:
        return made
    check = functools.partial(compare, calls=calls, recordings=recordings)
    loosely = functools.partial(check, tolerance=_TOLERANCE)
    tell("write")
    if target == "pt2":
        targets.save_program(program, to, check)
    elif target == "aoti":
        targets.save_package(program, to, calls, loosely)
    else:
        flagged = write(machine, parameters, head, state, True)
        messages = {one.number: one.message for one in flagged.unseen}
        targets.save_onnx(_traced(flagged, signature, args, kwargs), to, messages, loosely)
    within = "bit by bit" if target == "pt2" else f"within {_TOLERANCE:g}"
    made.notes = (*made.notes, f"written to {os.fspath(to)}, whose outputs are equal {within}")
    return made


def _form(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the structure of arguments, with the order of keys, which the model may go by."""
    return pytree.tree_structure(signature.bind(args, kwargs))


def _variable(name: str) -> str:
    return name.replace("[", "_").replace("]", "").lstrip("*")


def calls_in(inputs: Sequence[Any]) -> list[Inputs]:
    """Return inputs as positional and keyword arguments."""
    calls: list[Inputs] = []
    for given in inputs:
        if hasattr(given, "args") and hasattr(given, "kwargs"):
            calls.append((tuple(given.args), dict(given.kwargs)))
        elif _is_pair(given):
            calls.append((tuple(given[0]), dict(given[1])))
        elif isinstance(given, Mapping):
            calls.append(((), dict(given)))
        elif type(given) in (tuple, list):
            calls.append((tuple(given), {}))
        else:
            calls.append(((given,), {}))
    return calls


def _is_pair(given: Any) -> bool:
    """Whether something is a tuple of positional arguments and a dict of keyword arguments."""
    return (
        type(given) is tuple
        and len(given) == 2
        and type(given[0]) is tuple
        and type(given[1]) is dict
        and all(type(key) is str for key in given[1])
    )


def _recorded(
    model: Callable[..., Any],
    signature: Signature,
    calls: Sequence[Inputs],
    tell: Callable[[str], None],
    liftings: Sequence[Lifting | None],
) -> list[Recording]:
    """Record the model's runs with some inputs, with the state at each question."""
    recordings: list[Recording] = []
    first: Program | None = None
    for number, ((args, kwargs), lifting) in enumerate(zip(calls, liftings, strict=True), 1):
        tell("record")
        own_args, own_kwargs = pytree.tree_map(_copied, (args, kwargs))
        try:
            recording = record(
                model, own_args, own_kwargs, signature, reads_states=True, lifting=lifting
            )
        except Exception as error:
            hint = ""
            if isinstance(error, TypeError) and len(calls) == 1 and len(args) > 1:
                hint = "; a list holds the arguments of one call: for several calls, unpack it"
            raise ExportError(f"with input {number}, the model raises {error!r}{hint}") from error
        refuse(recording)
        recordings.append(recording)
        arguments = tuple(signature.bind(*pytree.tree_map(_copied, (args, kwargs))).values())
        if first is None:
            first = Program(recording, GlobalState.current())
        else:
            failing = first.failing(arguments)
            if failing is not None:
                why = explain_check(failing, first, arguments)()
                raise ExportError(
                    f"input {number} is not of the same kind as the first, for which the model "
                    f"takes another path: {why}; export once for each kind"
                )
    return recordings


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _largest(calls: Sequence[Inputs]) -> Inputs:
    """Return the inputs with the largest sizes: sizes of 1 and 0 are no example of others."""

    def size(call: Inputs) -> int:
        leaves = pytree.tree_flatten(call)[0]
        return sum(min(t.shape, default=0) for t in leaves if isinstance(t, Tensor))

    return max(calls, key=size)


def _names_of(model: Callable[..., Any]) -> dict[int, str]:
    if not isinstance(model, nn.Module):
        return {}
    found = {id(tensor): name for name, tensor in model.named_buffers()}
    found.update((id(tensor), name) for name, tensor in model.named_parameters())
    return found


class _Unmet(Exception):
    """A condition on sizes does not hold."""


def _require(holds: Any) -> None:
    if not holds:
        raise _Unmet


def _has_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    torch.ops.aten._assert_tensor_metadata.default(tensor, dtype=dtype)


def _cond(asked: Tensor, yes: Any, no: Any, operands: tuple[Any, ...]) -> Any:
    """Call `cond` with its tensors and open sizes; other operands never change."""
    taken, sides = _operands(operands, yes, no)
    return torch.ops.higher_order.cond(asked, *sides, taken)


def _while_loop(test: Any, step: Any, carried: tuple[Any, ...], operands: tuple[Any, ...]) -> Any:
    """Call `while_loop` with its tensors and open sizes; other operands never change."""
    taken, functions = _operands(operands, test, step, first=len(carried))
    return torch.ops.higher_order.while_loop(*functions, carried, taken)


def _operands(
    operands: tuple[Any, ...], *functions: Callable[..., Any], first: int = 0
) -> tuple[tuple[Any, ...], list[Callable[..., Any]]]:
    """Return the tensors and open sizes among operands, and functions that take only these."""
    places = [n for n, v in enumerate(operands) if isinstance(v, (Tensor, torch.SymInt))]

    def given(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any) -> Any:
            every = list(operands)
            for place, value in zip(places, values[first:], strict=True):
                every[place] = value
            return function(*values[:first], *every)

        return call

    return tuple(operands[place] for place in places), list(map(given, functions))


def _module(written: Written, file: str) -> nn.Module:
    """Make a module with the written forward, and the model's own tensors by their names."""
    names = {
        **written.names,
        "torch": torch,
        "read": operator.attrgetter,
        "require": _require,
        "has_dtype": _has_dtype,
        "cond": _cond,
        "while_loop": _while_loop,
    }
    exec(compile(written.text, file, "exec"), names)
    kind = type("Exported", (nn.Module,), {"forward": names["forward"]})
    module: nn.Module = kind()
    for path, tensor in written.tensors.items():
        *owners, name = path.split(".")
        owner: nn.Module = module
        for part in owners:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(name, tensor)
        else:
            owner.register_buffer(name, tensor.detach())
    return module.eval()


def _traced(
    written: Written, signature: Signature, args: Any, kwargs: Any
) -> torch.export.ExportedProgram:
    file = f"<bendtrace export {next(_serials)}>"
    module = _module(written, file)
    names = signature.names(args, kwargs)
    named = [_variable(name) for name in names]
    given = dict(zip(named[len(args) :], kwargs.values(), strict=True))
    args, given = pytree.tree_map(_copied, (tuple(args), given))
    values = dict(zip(named, (*args, *given.values()), strict=True))
    shapes = {name: _open(value) for name, value in values.items()}
    try:
        # torch prints what it had traced of a program that it refuses (seen in 2.13).
        with targets.quiet(), contextlib.redirect_stderr(io.StringIO()):
            made = torch.export.export(module, args, given, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise ExportError(*_explained(error, written, file)) from error
    made._guards_code += _fixed(values)
    return made


def _fixed(values: dict[str, Any]) -> list[str]:
    """Return conditions on inputs that torch.export does not make.

    It compares numbers by `==`, and accepts anything for None, None for a tensor that is not used,
    and tensors with other numbers of dimensions (torch 2.13).
    """
    found = []
    for path, leaf in pytree.tree_leaves_with_path(values):
        name = f"L{pytree.keystr(path)}"
        if isinstance(leaf, Tensor):
            found.append(f"isinstance({name}, torch.Tensor)")
            found.append(f"{name}.dim() == {leaf.dim()}")
        elif leaf is None:
            found.append(f"{name} is None")
        elif type(leaf) in (bool, int, float, str):
            found.append(f"type({name}) is {type(leaf).__name__}")
        if type(leaf) is float and leaf == 0:
            found.append(f"math.copysign(1, {name}) == {math.copysign(1, leaf)}")
    return found


def _open(value: Any) -> Any:
    """Return the open sizes: all that the program does not depend on."""
    return pytree.tree_map(
        lambda leaf: (torch.export.Dim.AUTO,) * leaf.dim() if isinstance(leaf, Tensor) else None,
        value,
    )


def _explained(error: BaseException, written: Written, file: str) -> tuple[str, str]:
    """Return the error for what torch.export refuses, with the line of the model."""
    seen: BaseException | None = error
    while seen is not None:
        lines = [f.lineno for f in traceback.extract_tb(seen.__traceback__) if f.filename == file]
        record = written.records.get(lines[-1] or 0) if lines else None
        if record is not None:
            first = str(error).strip().split("\n")[0]
            what = f"torch.export refuses it: {type(error).__name__}: {first}"
            if "DataDependent" in type(error).__name__:
                what = (
                    "a size or an index depends on values here, in a way that torch.export does "
                    f"not support: keep sizes fixed, with a mask or torch.where ({first})"
                )
            if isinstance(seen, _Unmet):
                what = "it depends on sizes in a way that differs between the inputs"
            return what, told(record)
        seen = seen.__cause__ or seen.__context__
    return f"torch.export refuses it: {type(error).__name__}: {error}", ""


def compare(
    made: Callable[..., Any],
    calls: Sequence[Inputs],
    recordings: Sequence[Recording],
    tolerance: float | None = None,
    tell: Callable[[str], None] = lambda step: None,
) -> None:
    """Run a program with all inputs, and compare its outputs with those of the model.

    Args:
        made: the program.
        calls: the inputs.
        recordings: the runs of the model with them.
        tolerance: the largest accepted difference of floats; None for none.
        tell: called with "compare" before each of the inputs.

    Raises:
        ExportError: an output differs.
    """
    for number, ((args, kwargs), recording) in enumerate(zip(calls, recordings, strict=True), 1):
        tell("compare")
        try:
            with torch.no_grad():
                given = made(*pytree.tree_map(_copied, args), **pytree.tree_map(_copied, kwargs))
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise ExportError(f"with input {number}, the program raises {first}") from error
        different = difference(given, recording.result, tolerance)
        if different is not None:
            raise ExportError(f"with input {number}, the program's output differs: {different}")


def difference(given: Any, expected: Any, tolerance: float | None = None) -> str | None:
    """Return how the output of a program differs from that of the model; None if it does not."""
    ours, theirs = (tensors_in(value) for value in (given, expected))
    if len(ours) != len(theirs):
        return f"{len(ours)} values in place of {len(theirs)}"
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.dtype is not other.dtype or one.shape != other.shape:
            what = f"{one.dtype}{list(one.shape)} in place of {other.dtype}{list(other.shape)}"
            return f"value {place} is a {what}"
        if not _is_equal(one, other, tolerance):
            off = (one.double() - other.double()).abs().max() if one.numel() else 0.0
            return f"value {place} is off by {float(off):.3g}"
    return None


def _is_equal(one: Tensor, other: Tensor, tolerance: float | None) -> bool:
    if tolerance is not None and one.is_floating_point():
        return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    if not one.is_floating_point():
        return torch.equal(one, other)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same = one.contiguous().view(bits) == other.contiguous().view(bits)
    return bool((same | (one.isnan() & other.isnan())).all())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors and numbers in a value, numbers as tensors."""
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in tensors_in(item)]
    if type(value) is float:
        return [torch.tensor(value, dtype=torch.float64)]
    if type(value) in (bool, int):
        return [torch.tensor(value)]
    return []
