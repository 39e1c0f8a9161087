"""`BendedModule.export`: the known runs of a model as one program without its Python."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import keyword
import operator
import os
import traceback
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution

from bendtrace.debug.calls import Call
from bendtrace.debug.preserved_state import PreservedState
from bendtrace.engine.explain import explain_check
from bendtrace.engine.global_state import GlobalState
from bendtrace.engine.program import Program
from bendtrace.errors import ExportError, InputError
from bendtrace.export import targets
from bendtrace.export.conditions import (
    Fact,
    arguments_of,
    common_sizes,
    compares_identity,
    conditions_in_files,
    conditions_on,
    copies_of,
    empty_sizes,
    require_constant,
    require_plain,
    separate_copies_of,
    share,
    sizes_of_one,
)
from bendtrace.export.insertions import Insertions
from bendtrace.export.machine import Machine, cite, lengths_in, parameters_in, refuse
from bendtrace.export.writer import BODY, ProgramWriter, Unseen, Written
from bendtrace.log.entries import counted
from bendtrace.python.internals import TorchDispatchMode, internal, pytree
from bendtrace.python.results import can_exchange
from bendtrace.record.recorded_call import Signature, record
from bendtrace.record.recorder import Recording
from bendtrace.record.varying import Counter, Lifting
from bendtrace.tape.guards import Place

if TYPE_CHECKING:
    from bendtrace.module import BendedModule


_serials = itertools.count()
_VARYING = (
    "values decide how many elements this picks, and torch.export requires another number of them: "
    "keep all elements, and mark those that are left, as in `left = left & (iou <= limit)` with "
    "`while left.any()`"
)
_LONGER = (
    "this gets longer in each round, but tensors of a loop keep their size, or lose elements: make "
    "it as long as it can get before the loop, and write into it by an index"
)
_NUMBERS = (bool, int, float)


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
        insertions: the tensors of what is inserted that are inputs of the program, by their names:
            each call may pass others by keyword.

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
    insertions: dict[str, Tensor] = field(repr=False, init=False)
    # Gives the structure of arguments, and those that it was exported from.
    _form: Callable[[tuple[Any, ...], dict[str, Any]], Any] = field(repr=False, init=False)
    _forms: tuple[Any, ...] = field(default=(), repr=False, init=False)
    _constants: Sequence[Any] = field(default=(), repr=False, init=False)
    _module: Any = field(default=None, repr=False, init=False)
    _state_ids: frozenset[int] = field(default=frozenset(), repr=False, init=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program.

        Raises:
            InputError: the containers are others than those that it was exported from, or have
                other keys, or these in another order; or a tensor is one of the program itself.
        """
        kwargs = {**kwargs, **{k: v for k, v in self.insertions.items() if k not in kwargs}}
        if self._module is None:
            self._module = self.program.module()
            self._state_ids = frozenset(map(id, self.program.state_dict.values()))
        form = self._form(args, kwargs)
        if form not in self._forms:
            raise InputError(
                "the arguments have another structure than those that this was exported from: "
                f"{form} in place of {self._forms[0]}"
            )
        leaves = pytree.tree_leaves((args, kwargs))
        if not self._state_ids.isdisjoint(map(id, leaves)):
            raise InputError("an argument is a tensor of the program itself: pass a clone()")
        for leaf, constant in zip(leaves, self._constants, strict=False):
            if type(leaf) is type(constant) and type(leaf) in _NUMBERS and leaf != constant:
                raise InputError(
                    f"an argument is {leaf!r}, but the program was exported with {constant!r}: "
                    f"export it with torch.tensor({constant!r}), and pass a tensor"
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


def export_calls(
    model: Callable[..., Any],
    signature: Signature,
    calls: Sequence[Inputs],
    to: str | os.PathLike[str] | None,
    unseen: str,
    inserted: Insertions | None = None,
    are_inputs: bool = False,
    tolerance: float = 1e-5,
    tell: Callable[[str], None] = lambda step: None,
) -> Exported:
    """Export a model, with the options of `BendedModule.export`.

    `tell` is called with the name of each step: "record" and "compare" once for each of the inputs,
    "trace", and "write" if there is a file.
    """
    if unseen not in ("assert", "error"):
        raise InputError(f"unseen is 'assert' or 'error', not {unseen!r}")
    if type(tolerance) not in (int, float) or not 0 <= tolerance < float("inf"):
        raise InputError(f"tolerance has to be a number from 0 on, not {tolerance!r}")
    if not calls:
        raise InputError(
            "no paths are known: give inputs, or call the model before with some of up to 1 MiB"
        )
    for number, (args, kwargs) in enumerate(calls, 1):
        if (len(args), set(kwargs)) != (len(calls[0][0]), set(calls[0][1])):
            raise InputError(
                f"input {number} has other positional or keyword arguments than the first: a "
                "program is called in one way"
            )
    target = None if to is None else targets.target_of(to)
    plain = functools.partial(record, model, reads_states=True)
    run = plain if inserted is None else inserted.record
    state = _names_of_state(model)

    def export_once(recordings: list[Recording]) -> Exported:
        tensors = {} if inserted is None else inserted.tensors(state, signature.parameters)
        named = {**state, **{id(tensor): name for name, tensor in tensors.items()}}
        made = _export(
            signature, calls, to, target, unseen, tell, named, tensors if are_inputs else {},
            (tolerance, model if inserted is None else None), recordings,
        )  # fmt: skip
        if inserted is not None:
            made.notes = (*inserted.notes, *made.notes)
        return made

    state_names = frozenset(state)
    for number, (args, kwargs) in enumerate(calls, 1):
        require_plain(number, signature.bind(args, kwargs), state_names)
    require_constant([signature.bind(*call) for call in calls])
    with torch.no_grad():
        excluded: frozenset[Counter] = frozenset()
        places: frozenset[Place] = frozenset()
        copy = separate_copies_of
        while True:
            liftings = [Lifting(excluded, as_tensors=True, places=places) for _ in calls]
            try:
                with _preserve(model):
                    recordings = _record_runs(run, signature, calls, tell, liftings, copy)
                if copy is separate_copies_of and any(map(compares_identity, recordings)):
                    copy = copies_of
                    if any(map(share, calls)):
                        continue
                if can_exchange() and not places and (places := lengths_in(recordings)):
                    continue
                pairs = zip(liftings, recordings, strict=True)
                needed = frozenset().union(*(one.needed_counters(of.tape) for one, of in pairs))
                if not needed:
                    return export_once(recordings)
            except ExportError:
                if not any(one.lifted for one in liftings):
                    raise
                break  # it may have a form with each round as a state of its own
            excluded |= needed
        with _preserve(model):
            nothing = [Lifting(None, places=places) for _ in calls]
            recordings = _record_runs(run, signature, calls, tell, nothing, copy)
        return export_once(recordings)


def _export(
    signature: Signature,
    calls: Sequence[Inputs],
    to: str | os.PathLike[str] | None,
    target: str | None,
    unseen: str,
    tell: Callable[[str], None],
    state: dict[int, str],
    added: dict[str, Tensor],
    closeness: tuple[float, Callable[..., Any] | None],
    recordings: list[Recording],
) -> Exported:
    """Export recorded runs, with the options of `export_calls`.

    Tensors of `added` are inputs besides the arguments. The closeness is the tolerance of files,
    and the model, whose rounding errors count.
    """
    if any(one.is_meta for run in recordings for one in tensors_and_numbers_in(run.result)):
        raise ExportError(
            "the model returns a tensor of the meta device, which has no values to compare: move "
            "the model and its inputs to another device"
        )
    machine = Machine(recordings)
    tensors = {name: tensor.detach() for name, tensor in added.items()}
    calls = [(args, {**kwargs, **tensors}) for args, kwargs in calls]
    args, kwargs = _largest_inputs(calls)
    names = signature.names(args, kwargs)
    head = _parameter_list(names, len(args))
    positions = [names.index(name) for name in signature.arrange(args, kwargs)[0]]
    own = {id(tensor): f"_i{names.index(name)}" for name, tensor in added.items()}
    written = ProgramWriter(machine, positions, state, own, False).write(head)
    never = [one for one in written.unseen if one.seen]
    if never and unseen == "error":
        listed = "\n".join(f"    {one}" for one in never)
        raise ExportError(f"inputs never took some sides:\n{listed}")
    tell("trace")
    renamed = dict(zip(names, head, strict=True))
    everywhere = [{renamed[k]: v for k, v in signature.bind(*call).items()} for call in calls]
    common = common_sizes([{name: one[name] for name in head} for one in everywhere])
    varying = machine.first_varying()
    try:
        program, above, is_fixed = _trace_program(written, head, args, kwargs, common)
    except ExportError as error:
        longer = machine.first_longer()
        if longer is not None and "same metadata" in str(error):
            raise ExportError(f"{_LONGER} ({error})", cite(longer)) from error
        raise
    inputs = dict(zip(head, (*args, *kwargs.values()), strict=True))
    notes = written.notes
    if is_fixed:
        notes += ("sizes that all inputs have are fixed: torch.export refuses to leave them open",)
    if fixed := sizes_of_one(program, inputs):
        notes += (f"fixed at 1, as a size of 1 means another operation: {', '.join(fixed)}",)
    facts = set(written.facts)
    if any(map(compares_identity, recordings)):
        facts.add(Fact.IDENTITY)
    empty = set() if above else empty_sizes(everywhere)
    required = conditions_on(inputs, facts, above, empty)
    if target in ("aoti", "onnx"):
        in_file = conditions_in_files(program, inputs, facts, above, empty)
    program._guards_code[:0] = required  # torch's, for one, take a rank for granted
    made = Exported(program, written.unseen, len(calls), notes, written.text)
    made.insertions = tensors
    made._constants = pytree.tree_leaves((args, kwargs))
    made._form = form = functools.partial(_call_structure, signature)
    made._forms = tuple({repr(one): one for one in itertools.starmap(form, calls)}.values())
    try:
        compare_program(made, calls, recordings, tell=tell)
    except ExportError as error:
        if varying is not None and "Runtime assertion failed for expression u" in str(error):
            raise ExportError(f"{_VARYING} ({error})", cite(varying)) from error
        raise
    if to is None:
        return made
    for spec in program.graph_signature.output_specs:
        if type(getattr(spec.arg, "value", None)) is str:
            raise ExportError(
                f"the model returns the text {spec.arg.value!r}, which no file can hold: return "
                "tensors and numbers"
            )
    check = functools.partial(compare_program, calls=calls, recordings=recordings)
    tolerance, model = closeness
    loosely = functools.partial(check, tolerance=tolerance, model=model)
    tell("write")
    if target == "pt2":
        targets.save_program(program, to, check)
    else:
        checker = ProgramWriter(machine, positions, state, own, target == "onnx")
        checked = checker.write(head, in_file)
        traced = _trace_program(checked, head, args, kwargs, common, [(above, is_fixed)])[0]
        compares = Fact.IDENTITY in facts
        arguments = arguments_of(args, kwargs, compares)
        if target == "aoti":
            groups = [group for _, text, group in arguments if compares and text is None]
            targets.save_package(traced, to, calls, groups, loosely)
        else:
            messages = {one.number: one.message for one in checked.unseen}
            targets.save_onnx(traced, to, messages, (arguments, compares), loosely)
    within = "bit by bit" if target == "pt2" else f"within {tolerance:g}"
    made.notes = (*made.notes, f"written to {os.fspath(to)}, whose outputs are equal {within}")
    return made


def _call_structure(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the structure of arguments, with the order of keys, which the model may go by."""
    return pytree.tree_structure(signature.bind(args, kwargs))


def _parameter_list(names: Sequence[str], positional: int) -> list[str]:
    """Return the parameters of a program for the names of arguments."""
    head = [name.replace("[", "_").replace("]", "").lstrip("*") for name in names]
    for place, name in enumerate(head):
        if name in _OF_FX and place < positional:
            head[place] = f"{name}_"
        elif name in ("self", "torch") or not name.isidentifier() or keyword.iskeyword(name):
            raise ExportError(
                f"no argument of a program can be called {name!r}: pass it by position, or in a "
                "dict"
            )
    for name in head:
        if head.count(name) > 1:
            raise ExportError(f"two arguments of the program would be called {name}: rename one")
    return head


# The names that the code of a program uses, as torch.fx writes it (2.13).
_OF_FX = frozenset({"device", "fx_pytree", "inf", "nan", "NoneType", "pytree", "self", "torch"})


def _preserve(model: Callable[..., Any]) -> PreservedState:
    """Return a context at whose end a model is as it was, with the random generators."""
    try:
        return PreservedState(model)
    except InputError:  # it can only run live, and will be refused
        return PreservedState(model, buffers=True)


def _record_runs(
    run: Callable[..., Recording],
    signature: Signature,
    calls: Sequence[Inputs],
    tell: Callable[[str], None],
    liftings: Sequence[Lifting],
    copy: Callable[[Any], Any],
) -> list[Recording]:
    """Record the model's runs with some inputs, with the state at each question."""
    recordings: list[Recording] = []
    first: Program | None = None
    for number, ((args, kwargs), lifting) in enumerate(zip(calls, liftings, strict=True), 1):
        tell("record")
        own_args, own_kwargs = copy((args, kwargs))
        try:
            recording = run(own_args, own_kwargs, signature, lifting=lifting)
        except ExportError:
            raise
        except Exception as error:
            hint = ""
            if isinstance(error, TypeError) and len(calls) == 1 and len(args) > 1:
                hint = "; a list holds the arguments of one call: for several calls, unpack it"
            raise ExportError(f"with input {number}, the model raises {error!r}{hint}") from error
        refuse(recording)
        recordings.append(recording)
        arguments = tuple(signature.bind(*copy((args, kwargs))).values())
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


def _largest_inputs(calls: Sequence[Inputs]) -> Inputs:
    """Return the inputs with the largest sizes: sizes of 1 and 0 are no example of others."""

    def size(call: Inputs) -> tuple[int, int]:
        leaves = pytree.tree_leaves(call)
        sizes = [size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape]
        return sum(size > 1 for size in sizes), sum(sizes)

    return max(calls, key=size)


def _names_of_state(model: Callable[..., Any]) -> dict[int, str]:
    if not isinstance(model, nn.Module):
        return {}
    return {id(t): name for name, t in (*model.named_buffers(), *model.named_parameters())}


class _Unmet(Exception):
    """A condition on sizes or numbers does not hold."""


_DIFFERS = "it depends on sizes in a way that differs between the inputs"


def _require(holds: Any, otherwise: str = _DIFFERS) -> None:
    if not holds:
        raise _Unmet(otherwise)


def _fix(common: Sequence[list[int | None]], inputs: Sequence[Any]) -> None:
    """Require that inputs have some sizes, which are fixed in a program then."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    for leaf, sizes in zip(leaves, common, strict=False):
        for dim, size in enumerate(sizes):
            _require(size is None or leaf.size(dim) == size)


def _module_of_source(written: Written, file: str, common: Sequence[list[int | None]]) -> nn.Module:
    """Make a module with the written forward, and the model's own tensors by their names."""
    names = {
        **written.names,
        "torch": torch,
        "read": operator.attrgetter,
        "require": _require,
        "fix": functools.partial(_fix, common),
        "cond": cond,
        "while_loop": while_loop,
        "fit": fit,
    }
    exec(compile(written.text, file, "exec"), names)
    functions = {"forward": names["forward"], BODY: names[BODY]}
    kind = type("Exported", (nn.Module,), functions)
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


# The size above which open sizes have to be, and whether those that all inputs have are fixed. Open
# sizes are refused where a size of 1 is broadcast, and before a branch where a layer makes a size
# smaller, as torch does not know then that it is not 0 (2.13).
_WAYS = ((0, False), (1, False), (1, True))


def _trace_program(
    written: Written,
    head: Sequence[str],
    args: Any,
    kwargs: Any,
    common: Sequence[list[int | None]],
    ways: Sequence[tuple[int, bool]] = _WAYS,
) -> tuple[torch.export.ExportedProgram, int, bool]:
    """Have torch.export trace a program, in the first of some ways that it accepts.

    With it come the size above which all open sizes have to be, and whether those that all inputs
    have are fixed.
    """
    file = f"<bendtrace export {next(_serials)}>"
    named = dict(zip(head[len(args) :], kwargs.values(), strict=True))
    args, named = separate_copies_of((tuple(args), named))
    shapes = dict(zip(head, map(_open, (*args, *named.values())), strict=True))
    for above, is_fixed in ways:
        sizes = targets.open_sizes(not above)
        module = _module_of_source(written, file, common if is_fixed else ())
        try:
            # torch prints what it had traced of a program that it refuses (seen in 2.13).
            with targets.quiet(), contextlib.redirect_stderr(io.StringIO()), sizes:
                with targets.each_side_once():
                    program = torch.export.export(
                        module, args, named, dynamic_shapes=shapes, strict=False
                    )
                program.graph_module.recompile()
            _write_sums(program)
            return program, above, is_fixed
        except Exception as error:
            if (above, is_fixed) == ways[-1]:
                raise ExportError(*_explain(error, written, file)) from error
    raise AssertionError


def _write_sums(program: torch.export.ExportedProgram) -> None:
    """Write the sums of sizes in a program as additions, as torch saves no other ones (2.13)."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.target is torch.sym_sum:
                first, *others = node.args[0]
                with module.graph.inserting_before(node):
                    for other in others:
                        first = module.graph.call_function(operator.add, (first, other))
                first.meta = dict(node.meta)
                node.replace_all_uses_with(first)
                module.graph.erase_node(node)
                module.recompile()


def _open(value: Any) -> Any:
    """Return the open sizes: all that the program does not depend on."""
    return pytree.tree_map(
        lambda leaf: (torch.export.Dim.AUTO,) * leaf.dim() if isinstance(leaf, Tensor) else None,
        value,
    )


def _explain(error: BaseException, written: Written, file: str) -> tuple[str, str]:
    """Return the error for code that torch.export refuses, with the line of the model."""
    seen: BaseException | None = error
    while seen is not None:
        lines = [f.lineno for f in traceback.extract_tb(seen.__traceback__) if f.filename == file]
        record = written.records.get(lines[-1] or 0) if lines else None
        if record is not None:
            first = str(error).strip().split("\n")[0].rstrip(":")
            what = f"torch.export refuses it: {type(error).__name__}: {first}"
            if "DataDependent" in type(error).__name__:
                what = (
                    "a size or an index depends on values here, in a way that torch.export does "
                    f"not support: keep sizes fixed, with a mask or torch.where ({first})"
                )
            if type(error).__name__ == "UnsupportedOperatorException":
                what = (
                    "torch.export does not know what this operator returns: register that with "
                    f"torch.library.register_fake ({first})"
                )
            if isinstance(seen, _Unmet):
                what = str(seen)
            return what, cite(record)
        seen = seen.__cause__ or seen.__context__
    return f"torch.export refuses it: {type(error).__name__}: {error}", ""


# Comparing what a program returns with what the model returned.

Inputs: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def compare_program(
    made: Callable[..., Any],
    calls: Sequence[Inputs],
    recordings: Sequence[Recording],
    tolerance: float | None = None,
    tell: Callable[[str], None] = lambda step: None,
    model: Callable[..., Any] | None = None,
) -> None:
    """Run a program with all inputs; raise if its outputs differ from those of the model.

    Besides a tolerance of floats, the rounding errors of the model are accepted. `tell` is called
    with "compare" before each of the inputs.
    """
    for number, ((args, kwargs), recording) in enumerate(zip(calls, recordings, strict=True), 1):
        tell("compare")
        try:
            with torch.no_grad():
                own_args, own_kwargs = copies_of((args, kwargs))
                given = made(*own_args, **own_kwargs)
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise ExportError(f"with input {number}, the program raises {first}") from error
        different = difference(given, recording.result, tolerance)
        if different is not None and tolerance is not None and model is not None:
            errors = rounding_errors(model, (args, kwargs), recording.result)
            different = difference(given, recording.result, tolerance, errors)
        if different is not None:
            hint = "" if tolerance is None else f" (tolerance={tolerance:g} is accepted)"
            raise ExportError(
                f"with input {number}, the program's output differs: {different}{hint}"
            )


class _Rounded(TorchDispatchMode):
    """Rounds the results of all operations once more, up or down at random.

    Parker, "Monte Carlo Arithmetic" (1997): so results differ by what rounding has left of them.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(one.alias_info is not None for one in func._schema.returns):
            return out  # views, and what works in place
        return pytree.tree_map_only(Tensor, self._moved, out)

    def _moved(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.dtype is torch.float64:
            return value
        chance = torch.rand(value.shape, generator=self._generator).to(value.device, value.dtype)
        return value + value * ((2 * chance - 1) * torch.finfo(value.dtype).eps)


def rounding_errors(model: Callable[..., Any], call: Inputs, expected: Any) -> list[float]:
    """Return by how much each output of a model may be off; 0 where that is not known."""
    theirs = tensors_and_numbers_in(expected)
    errors = [0.0] * len(theirs)
    for seed in range(_SAMPLES):
        args, kwargs = copies_of(call)
        try:
            with PreservedState(model), torch.no_grad(), _Rounded(seed):
                ours = tensors_and_numbers_in(model(*args, **kwargs))
        except Exception:  # an input may lead to another side then
            continue
        if [one.shape for one in ours] != [one.shape for one in theirs]:
            continue
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            off = (one.double() - other.double()).abs()
            if off.numel() and bool(off.isfinite().all()):
                errors[place] = max(errors[place], float(off.max()))
    return errors


_SAMPLES = 4
_TIMES = 8  # sums in other orders are off by more than one rounding of their result


def difference(
    given: Any, expected: Any, tolerance: float | None = None, errors: Sequence[float] = ()
) -> str | None:
    """Return how the outputs of a program and of the model differ; None if they do not.

    The tolerance is one of floats; the errors are the model's own, for each of its outputs.
    """
    ours, theirs = (tensors_and_numbers_in(value) for value in (given, expected))
    if len(ours) != len(theirs):
        return f"{len(ours)} values in place of {len(theirs)}"
    for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.dtype is not other.dtype or one.shape != other.shape:
            what = f"{one.dtype}{list(one.shape)} in place of {other.dtype}{list(other.shape)}"
            return f"value {place} is a {what}"
        error = errors[place] * _TIMES if errors else 0.0
        if not _is_equal(one, other, tolerance, error):
            off = (one.double() - other.double()).abs().max() if one.numel() else 0.0
            return f"value {place} is off by {float(off):.3g}"
    return None


def _is_equal(one: Tensor, other: Tensor, tolerance: float | None, error: float) -> bool:
    if tolerance is not None and one.is_floating_point():
        accepted = max(tolerance, error)
        return torch.allclose(one, other, rtol=tolerance, atol=accepted, equal_nan=True)
    if not one.is_floating_point():
        return torch.equal(one, other)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    same = one.contiguous().view(bits) == other.contiguous().view(bits)
    return bool((same | (one.isnan() & other.isnan())).all())


def tensors_and_numbers_in(value: Any) -> list[Tensor]:
    """Return the tensors and numbers in a value, numbers as tensors."""
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in tensors_and_numbers_in(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in tensors_and_numbers_in(item)]
    if isinstance(value, Distribution):
        return tensors_and_numbers_in(parameters_in(type(value), vars(value)))
    if type(value) is float:
        return [torch.tensor(value, dtype=torch.float64)]
    if type(value) in (bool, int):
        return [torch.tensor(value)]
    return []


# `cond` and `while_loop`, as programs call them while torch.export traces these.
#
# Both take tensors and open sizes; all other operands never change. A size that values decide is
# passed on as a tensor, and read where it is used: so a side may require something of it that
# holds only there, and a round of a loop may change it. A tensor of such a size is passed on as a
# whole, with zeros behind what is left of it in a loop, and cut where it is used:
#
#     before the loop     a round                              behind the loop
#     [5, 2, 7], 3   ->   [5, 2, 7] -> [2, 7] -> [2, 7, 0], 2   ...   ->   [2, 7]
#
# By themselves, both would check before they begin what a side or a round requires of sizes, and
# no round could change one (torch 2.13; the tests of shrinking loops notice a change).

_NOTHING: Mapping[str, int] = MappingProxyType({})


def cond(asked: Tensor, yes: Any, no: Any, operands: tuple[Any, ...]) -> Any:
    """Call `torch.cond`: an answer, the sides where it is True and False, and their operands."""
    carrier = _Operands(operands)
    sides = map(carrier.read_by, (yes, no))
    return torch.ops.higher_order.cond(asked, *sides, carrier.given)


def while_loop(
    test: Any, step: Any, carried: tuple[Any, ...], operands: tuple[Any, ...],
    varying: Sequence[tuple[int, ...] | None],
) -> Any:  # fmt: skip
    """Call `torch.while_loop`.

    `varying` has for each value that a round changes the dimensions that it makes smaller.
    """
    carrier, count = _Operands(operands), len(carried)
    dims = [
        (place, dim)
        for place, shrinking in enumerate(varying)
        if shrinking is not None
        for dim in sorted({*shrinking, *_varying_in(carried[place])})
    ]
    whole = {place: carried[place].contiguous() for place, _ in dims}
    carried = tuple(whole.get(place, value) for place, value in enumerate(carried))

    def cut(values: Sequence[Any]) -> list[Any]:
        found = list(values[:count])
        for (place, dim), size in zip(dims, values[count:], strict=True):
            found[place] = _narrow_dim(found[place], dim, _read_size(size))
        return found

    def among(given: tuple[Any, ...]) -> list[Any]:
        own = count + len(dims)
        return [*cut(given[:own]), *carrier.read(given[own:])]

    def one_round(*given: Any) -> tuple[Any, ...]:
        made = list(step(*among(given)))
        sizes = [_size_tensor(made[place].size(dim)) for place, dim in dims]
        for place, dim in dims:
            made[place] = _pad_dim(made[place], dim, given[place].size(dim))
        return *made, *sizes

    sizes = tuple(_size_tensor(carried[place].size(dim)) for place, dim in dims)
    begin = (*carried, *sizes)
    loop = torch.ops.higher_order.while_loop
    return cut(loop(lambda *given: test(*among(given)), one_round, begin, carrier.given))


def fit(values: tuple[Any, ...], holds: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Return values as a side of a question may take them that was not known to be asked for.

    Unless it `holds` that the side is the one to take, its results are not used, but it must be
    able to compute them, as it is with `shapes`: those of tensors, and `(n,)` for sizes.
    """
    carrier = _Operands(values)
    numbers = {
        str(size): number
        for value, shape in zip(values, shapes, strict=True)
        for size, number in zip(_sizes_of(value), shape, strict=True)
    }
    sizes = {
        text: _read_size(
            torch.where(holds, carrier.given[place + len(carrier.places)], numbers[text])
        )
        for text, place in carrier.sizes.items()
    }
    return [_resize(value, sizes, numbers) for value in values]


class _Operands:
    """Operands, and how they are passed on."""

    def __init__(self, values: Iterable[Any]) -> None:
        # A size that has turned out to be fixed is no operand: ONNX takes no number for one (2.13).
        self._values = [
            int(v) if isinstance(v, torch.SymInt) and v.node.maybe_as_int() is not None else v
            for v in values
        ]
        # The places of the sizes that values decide, by their expressions.
        self.sizes: dict[str, int] = {}
        sizes: list[Tensor] = []
        for size in (size for value in self._values for size in _sizes_of(value)):
            if _is_varying(size) and str(size) not in self.sizes:
                self.sizes[str(size)] = len(sizes)
                sizes.append(_size_tensor(size))
        # The numbers of the operands that are passed.
        self.places = [
            place
            for place, value in enumerate(self._values)
            if isinstance(value, Tensor)
            or (isinstance(value, torch.SymInt) and str(value) not in self.sizes)
        ]
        # What is passed: tensors and open sizes, and behind them the sizes that values decide.
        self.given = (*(self._values[place] for place in self.places), *sizes)

    def read_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is called with what is passed."""
        return lambda *given: function(*self.read(given))

    def read(self, given: Sequence[Any]) -> Iterator[Any]:
        """Return the operands where they are used."""
        values = list(self._values)
        for place, value in zip(self.places, given, strict=False):
            values[place] = value
        numbers = map(_read_size, given[len(self.places) :])
        sizes = dict(zip(self.sizes, numbers, strict=True))
        return (_resize(value, sizes) for value in values)


def _resize(value: Any, sizes: Mapping[str, Any], numbers: Mapping[str, int] = _NOTHING) -> Any:
    """Return a size as another one, or a tensor with as many elements; other values as they are.

    `numbers` says how many zeros are behind those elements that there are.
    """
    if isinstance(value, torch.SymInt):
        return sizes.get(str(value), value)
    found = value
    for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
        if (text := str(size)) in sizes:
            if text in numbers:
                rest = [*found.shape[:dim], numbers[text], *found.shape[dim + 1 :]]
                found = torch.cat([found, found.new_zeros(rest)], dim)
            found = _narrow_dim(found, dim, sizes[text])
    return found


def _sizes_of(value: Any) -> Sequence[Any]:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return (value,) if isinstance(value, torch.SymInt) else ()


def _is_varying(size: Any) -> bool:
    symbols: Callable[[Any], Any] = internal(
        "torch.fx.experimental.symbolic_shapes.free_unbacked_symbols"
    )
    return isinstance(size, torch.SymInt) and bool(symbols(size))


def _varying_in(value: Tensor) -> Iterator[int]:
    return (dim for dim, size in enumerate(value.shape) if _is_varying(size))


def _size_tensor(size: Any) -> Tensor:
    return torch.scalar_tensor(size, dtype=torch.int64)


def _read_size(size: Tensor) -> Any:
    # Of a copy: a number that torch has read from this very tensor elsewhere, as the other side of
    # a question does, is not read again, and inductor knows no place of it (2.13).
    number = size.clone().item()
    torch._check(number >= 0)
    return number


def _narrow_dim(value: Tensor, dim: int, size: Any) -> Tensor:
    """Return the first slices of a tensor."""
    return value.index_select(dim, torch.arange(size, device=value.device))


def _pad_dim(value: Tensor, dim: int, size: Any) -> Tensor:
    """Return a tensor with zeros behind it."""
    whole = value.new_zeros([*value.shape[:dim], size, *value.shape[dim + 1 :]])
    return whole.index_copy(dim, torch.arange(value.size(dim), device=value.device), value)


def export(
    bended: BendedModule[Any],
    /,
    *inputs: Any,
    to: str | os.PathLike[str] | None = None,
    unseen: str = "assert",
    insertions: str = "constants",
    tolerance: float = 1e-5,
) -> Exported:
    """Turn the model, with its branches and loops, into one program that runs without Python.

    The model runs with copies of the inputs, under `torch.no_grad`, and its state is restored
    afterwards. The runs become a `torch.export.ExportedProgram` in which questions are
    `torch.cond` and loops `torch.while_loop`. Before it is returned, the program is compared
    with the model for each of the inputs, bit by bit; so are files, within `tolerance` for
    other targets than `.pt2`. A call that reaches a side of a question that no input took
    raises an error that names the side.

    Args:
        bended: the model.
        *inputs: the inputs of one call each: a tensor or another single argument, a tuple of
            positional arguments, a dict of keyword arguments, or a pair (args, kwargs), as
            `explore` finds them (`bended.export(*known, *found.inputs)`). All have to pass the
            same guards of sizes and settings. Sizes that no guard fixes stay open. The default
            is the inputs of earlier calls that took new paths, up to 1 MiB each and 16 MiB in
            total.
        to: a file to write it to: `.pt2` for `torch.export.load`, `.aoti.pt2` for a package
            compiled by AOTInductor, `.onnx` for onnxruntime (see `OnnxProgram`).
        unseen: "assert" for an error when the program reaches an unknown side; "error" to
            refuse the export instead.
        insertions: insertions are part of the program. "constants" makes their tensors parts
            of the program, "inputs" makes them keyword inputs (see `Exported.insertions`).
        tolerance: the largest difference of floats, absolute and relative, that files other
            than `.pt2` may have, besides the rounding errors of the model itself.

    Returns:
        An object that you call like the model, with the program; it prints as a report.

    Raises:
        ExportError: something has no form without Python, an insertion does more than compute
            tensors, or with `unseen="error"` a side is unknown; the message names the line and
            says what to do. No file is written then.
        InputError: there are no inputs, the file cannot be written, or the extra `onnx` is
            not installed.

    Example:
        >>> import torch, bendtrace as bt
        >>> def halved(x):
        ...     while x.norm() > 1:
        ...         x = x / 2
        ...     return x
        >>> inputs = torch.zeros(3), torch.ones(3), torch.full((3,), 9.0)
        >>> exported = bt.BendedModule(halved).export(*inputs)
        >>> print(exported)
        exported: equal to the model, bit by bit, for 3 inputs
        >>> exported(torch.tensor([6.0, 8.0, 0.0, 0.0]))
        tensor([0.3750, 0.5000, 0.0000, 0.0000])
    """
    if insertions not in ("constants", "inputs"):
        raise InputError(f"insertions is 'constants' or 'inputs', not {insertions!r}")
    inserted = (
        Insertions(bended._insertion_registry, bended._knowledge) if bended._inserted else None
    )
    examples = bended._dispatcher.examples
    calls = [tuple(Call.of(one)) for one in inputs] if inputs else examples.calls()
    exported = export_calls(
        bended.model, bended._signature, calls, to, unseen, inserted, insertions == "inputs",
        tolerance,
    )  # fmt: skip
    if examples.missed and not inputs:
        note = f"without {examples.missed} of the calls, whose inputs were not kept: pass them"
        exported.notes = (*exported.notes, note)
    return exported
