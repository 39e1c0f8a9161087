"""Conditions on the inputs of a program: each call has to meet them as the exported inputs did.

Python can ask for more than the values of a tensor: whether two arguments are one object, how a
tensor lies in memory, of which class it is. A program cannot ask, so it takes no other inputs.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from bendtrace.errors import ExportError
from bendtrace.export.machine import DTYPES, cite
from bendtrace.log.capture import lazily_copied
from bendtrace.python.bytecode import code_compares_identity as asks
from bendtrace.python.internals import pytree
from bendtrace.record.recorder import Recording
from bendtrace.tape.tape import Guard, Op
from bendtrace.watch.functions import METADATA, name_of
from bendtrace.watch.writes import storage_of

# Copies


def copies_of(inputs: Any) -> Any:
    """Return copies of inputs, in which the same tensors are one object or share memory."""
    leaves = pytree.tree_leaves(inputs)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    users = Counter(map(storage_of, tensors.values()))
    memories: dict[int, torch.UntypedStorage] = {}

    def copy_of(leaf: Tensor) -> Tensor:
        storage = storage_of(leaf)
        if users[storage] == 1 or not storage:
            return _copy_of(leaf, lazily_copied)
        if storage not in memories:
            memories[storage] = leaf.untyped_storage().clone()
        return _copy_of(leaf, lambda tensor: _place_in_memory(tensor, memories[storage]))

    copies = {key: copy_of(leaf) for key, leaf in tensors.items()}
    return pytree.tree_map_only(Tensor, lambda leaf: copies[id(leaf)], inputs)


def separate_copies_of(inputs: Any) -> Any:
    """Return copies of inputs that share nothing."""
    return pytree.tree_map_only(Tensor, lambda leaf: _copy_of(leaf, lazily_copied), inputs)


def share(inputs: Any) -> bool:
    """Return whether two tensors of inputs are one object or in the same memory."""
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    storages = [storage for storage in map(storage_of, leaves) if storage]
    return len(set(storages)) != len(storages)


def _copy_of(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    plain = _copy_marks(tensor.detach(), copy)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(plain, tensor.requires_grad)
    return plain


def _place_in_memory(tensor: Tensor, memory: torch.UntypedStorage) -> Tensor:
    """Return a tensor that lies in some memory as another one lies in its own."""
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _copy_marks(tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> Tensor:
    """Copy a tensor, which stays conjugated or negated by a mark alone if it was."""
    if tensor.is_conj():
        return _copy_marks(tensor.conj(), copy).conj()
    if tensor.is_neg():
        return torch._neg_view(_copy_marks(torch._neg_view(tensor), copy))
    return copy(tensor)


def require_plain(number: int, inputs: Mapping[str, Any], state: Collection[int]) -> None:
    """Require that inputs are no more than tensors, numbers and containers."""
    leaves = pytree.tree_leaves_with_path(inputs)
    if inputs and not leaves:
        raise ExportError(f"input {number} holds no value: pass a tensor, a number or None")
    rebuilt = pytree.tree_map(lambda leaf: leaf, inputs)
    if pytree.tree_structure(rebuilt) != pytree.tree_structure(inputs):
        raise ExportError(f"input {number} holds a torch.Size: pass it as a tuple")
    for path, leaf in leaves:
        name = f"{path[0].key}{pytree.keystr(path[1:])} of input {number}"
        for key in (getattr(part, "key", 0) for part in path):
            if isinstance(key, str) and (type(key) is not str or not _PLAIN_KEY.fullmatch(key)):
                raise ExportError(
                    f"{name} stands under the key {key!r}, which the code of a program cannot "
                    "hold: use a plain text without quotes and backslashes"
                )
        if type(leaf) is float and math.isnan(leaf):
            raise ExportError(f"{name} is nan, which no call could equal: pass torch.tensor(nan)")
        if type(leaf) in (*DTYPES, str, type(None)):
            continue
        if not isinstance(leaf, Tensor):
            raise ExportError(
                f"{name} is a {type(leaf).__name__}, but a program takes tensors, plain numbers, "
                "texts and None, in tuples, lists and dicts: export a function that passes it to "
                "the model, and does not take it"
            )
        if type(leaf) not in (Tensor, nn.Parameter):
            raise ExportError(f"{name} is a {type(leaf).__name__}: pass a plain tensor")
        if leaf.__dict__:
            raise ExportError(
                f"{name} has the attribute {next(iter(leaf.__dict__))}, which a program cannot "
                "read: pass it as a separate argument"
            )
        if id(leaf) in state:
            raise ExportError(f"{name} is a tensor of the model itself: pass a clone()")


_PLAIN_KEY = re.compile(r"[^'\"\\\n]*")


# What is asked of the inputs of a program


class Fact(Enum):
    """A property of tensors that a model asks for, and a program does not compute."""

    DEVICE = "device"
    MEMORY = "memory"
    IDENTITY = "identity"


def fact_of(op: Op) -> Fact | None:
    """Return the property that an op asks for; None for sizes and dtypes, which are known."""
    name = name_of(op.target)
    if name in ("stride", "storage_offset", "is_contiguous", "is_conj", "is_neg"):
        return Fact.MEMORY
    if op.target not in METADATA or name in _KNOWN:
        return None
    if name in _OF_DEVICES:
        return Fact.DEVICE
    raise ExportError(
        f"it asks for {name} of a tensor, which exported programs do not know: leave the "
        "question out",
        cite(op),
    )


_KNOWN = frozenset(
    {
        "dtype", "layout", "ndim", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested",
        "is_mkldnn", "itemsize", "nbytes", "dim", "ndimension", "is_floating_point", "is_complex",
        "is_signed", "element_size", "is_same_size", "result_type",
    }
)  # fmt: skip
_OF_DEVICES = frozenset(
    {
        "device", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta", "is_vulkan", "is_xla",
        "is_ipu", "is_mtia", "is_maia", "get_device",
    }
)  # fmt: skip


def compares_identity(recording: Recording) -> bool:
    """Return whether code that ran may have asked which arguments are one object."""
    tape, environment = recording.tape, recording.environment
    records: list[Op | Guard] = [*tape.ops, *tape.guards]
    sites = {id(record.site): record.site for record in records}.values()
    codes = {id(code): code for site in sites if site is not None for code, _ in site.chain}
    functions = {id(one.__code__): one.__code__ for one in environment.functions}
    return environment.tells_identity or any(map(asks, (codes | functions).values()))


def conditions_on(
    inputs: Mapping[str, Any], facts: Collection[Fact], above: int, empty: Collection[str]
) -> list[str]:
    """Return the conditions on inputs that torch.export does not make.

    It compares numbers by `==`, accepts anything for None, None for a tensor that is not used, and
    tensors with other numbers of dimensions, of another class or in another place of memory; it
    assumes of all sizes that they are not 0 (torch 2.13).

    Sizes have to be above a number, and some were 0 in an example, such as `L['x'].size()[0]`. The
    conditions are Python expressions in which `L` stands for the arguments by name.
    """
    found: list[str] = []
    tensors: dict[int, list[str]] = {}
    for path, leaf in pytree.tree_leaves_with_path(inputs):
        name = f"L{pytree.keystr(path)}"
        if isinstance(leaf, Tensor):
            tensors.setdefault(id(leaf), []).append(name)
            found += _on_tensor(name, leaf, facts)
            sizes = (f"{name}.size()[{dim}]" for dim in range(leaf.dim()))
            found += [
                f"{size} > {above}"
                for size, number in zip(sizes, leaf.shape, strict=True)
                if number > above and size not in empty
            ]
        elif leaf is None:
            found.append(f"{name} is None")
        elif type(leaf) in (bool, int, float, str):
            found.append(f"type({name}) is {type(leaf).__name__}")
        if type(leaf) is float and leaf == 0:
            found.append(f"math.copysign(1, {name}) == {math.copysign(1, leaf)}")
    if Fact.IDENTITY in facts:
        found += _on_identity(list(tensors.values()))
    return found


def empty_sizes(calls: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the sizes that are 0 in one of some inputs, as expressions."""
    return {
        f"L{pytree.keystr(path)}.size()[{dim}]"
        for inputs in calls
        for path, leaf in pytree.tree_leaves_with_path(inputs)
        for dim, size in enumerate(leaf.shape if isinstance(leaf, Tensor) else ())
        if size == 0
    }


def common_sizes(calls: Sequence[Mapping[str, Any]]) -> list[list[int | None]]:
    """Return the sizes of each tensor that all inputs have, and None for those that differ."""
    shapes = [
        [leaf.shape for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        for inputs in calls
    ]
    return [
        [sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*each, strict=False)]
        for each in zip(*shapes, strict=False)
    ]


def _on_tensor(name: str, tensor: Tensor, facts: Collection[Fact]) -> Iterator[str]:
    yield f"isinstance({name}, torch.Tensor)"
    kinds = "torch.Tensor, torch._subclasses.FakeTensor"  # the latter while it is traced again
    if isinstance(tensor, nn.Parameter):
        yield f"isinstance({name}, torch.nn.Parameter)"
    else:
        yield f"type({name}) in ({kinds})"
        yield f"type({name}) is not torch.Tensor or not {name}.__dict__"
    yield f"{name}.dim() == {tensor.dim()}"
    yield f"{name}.layout == {tensor.layout}"
    if Fact.DEVICE in facts:
        yield f"str({name}.device) == '{tensor.device}'"
    if Fact.MEMORY in facts:
        yield f"{name}.is_conj() == {tensor.is_conj()}"
        yield f"{name}.is_neg() == {tensor.is_neg()}"
        yield f"{name}.storage_offset() == {tensor.storage_offset()}"
        if tensor.stride() == torch.empty(tensor.shape, device="meta").stride():
            yield f"{name}.stride() == torch.empty({name}.shape, device='meta').stride()"
        else:  # for other sizes, torch.export takes the strides for functions of the sizes
            yield f"tuple({name}.shape) == {tuple(tensor.shape)}"
            yield f"{name}.stride() == {tensor.stride()}"


def _on_identity(groups: Iterable[list[str]]) -> Iterator[str]:
    """Yield which of the tensors are one object, and that no others are."""
    firsts = [first for first, *_ in groups]
    for first, *others in groups:
        yield from (f"{other} is {first}" for other in others)
    if len(firsts) == 2:
        yield f"{firsts[0]} is not {firsts[1]}"
    elif len(firsts) > 2:
        names = ", ".join(f"id({first})" for first in firsts)
        yield f"len({{{names}}}) == {len(firsts)}"


def sizes_of_one(program: torch.export.ExportedProgram, inputs: Mapping[str, Any]) -> list[str]:
    """Return the sizes of inputs that have to be 1."""
    found: list[str] = []
    leaves = pytree.tree_leaves_with_path(inputs)
    for (path, leaf), node in zip(leaves, _placeholders(program), strict=True):
        for dim in range(leaf.dim() if isinstance(leaf, Tensor) else 0):
            is_tested = f"L{pytree.keystr(path)}.size()[{dim}] == 1" in program._guards_code
            size = node.meta["val"].shape[dim]
            if is_tested or (type(size) is int and size == 1):  # a symbol would be tested now
                found.append(f"{path[0].key}{pytree.keystr(path[1:])}.size({dim})")
    return found


def _placeholders(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    """Return the nodes of the inputs of a program, among them those that are no tensors."""
    own = (InputKind.USER_INPUT,)
    specs = program.graph_signature.input_specs
    nodes = program.graph.find_nodes(op="placeholder")
    return [node for node, spec in zip(nodes, specs, strict=True) if spec.kind in own]


def arguments_of(args: Any, kwargs: Any, compares: bool) -> list[list[Any]]:
    """Return the properties that inputs of an ONNX file share with the exported inputs.

    They are for each argument its place, its text if it is not a tensor, and the number of the
    first argument that is the same object, if that matters.
    """
    rows: list[list[Any]] = []
    firsts: dict[int, int] = {}
    for path, leaf in pytree.tree_leaves_with_path((args, kwargs)):
        is_tensor = isinstance(leaf, Tensor)
        first = firsts.setdefault(id(leaf), len(rows)) if is_tensor and compares else len(rows)
        rows.append([pytree.keystr(path), None if is_tensor else repr(leaf), first])
    return rows


def require_constant(calls: Sequence[Mapping[str, Any]]) -> None:
    """Require that numbers and texts are the same in the arguments of all calls."""
    rows = [dict(pytree.tree_leaves_with_path(inputs)) for inputs in calls]
    for number, row in enumerate(rows[1:], 2):
        for path, leaf in row.items():
            first = rows[0].get(path, leaf)
            numbers = type(leaf) in DTYPES and type(first) in DTYPES
            if numbers and (type(leaf) is not type(first) or repr(leaf) != repr(first)):
                raise ExportError(
                    f"{path[0].key}{pytree.keystr(path[1:])} is {first!r} in input 1 and "
                    f"{leaf!r} in input {number}, but numbers are constants of a program: pass "
                    f"torch.tensor({leaf!r}), or export once for each"
                )


# Files other than `.pt2` have no Python: conditions on sizes become operations on tensors


def conditions_in_files(
    program: torch.export.ExportedProgram,
    inputs: Mapping[str, Any],
    facts: Collection[Fact],
    above: int,
    empty: Collection[str],
) -> dict[str, str]:
    """Return the conditions that a file checks which has no Python, with their texts.

    They are those on open sizes, and that several inputs are one object, by its values: expressions
    of tensors in which the first input is called `_i0`. All runtimes check dtypes, and sizes that
    are fixed.
    """
    if Fact.MEMORY in facts:
        raise ExportError(
            "the model asks how a tensor lies in memory (stride, storage_offset, is_contiguous, "
            "is_conj or is_neg), which only a .pt2 file can check"
        )
    fixed: set[str] = set()
    checks = list(program._guards_code)
    same: dict[int, str] = {}
    nodes = _placeholders(program)
    for (path, leaf), node in zip(pytree.tree_leaves_with_path(inputs), nodes, strict=True):
        if not isinstance(leaf, Tensor):
            continue
        name = f"L{pytree.keystr(path)}"
        sizes = [f"{name}.size()[{dim}]" for dim in range(leaf.dim())]
        fixed |= {s for s, n in zip(sizes, node.meta["val"].shape, strict=True) if type(n) is int}
        checks += [f"{size} > {above}" for size in sizes if size not in empty]
        first = same.setdefault(id(leaf), name)
        if first != name and Fact.IDENTITY in facts:
            checks += [f"{s} == {s.replace(name, first, 1)}" for s in sizes]
            checks.append(f"{name} is {first}")
    found: dict[str, str] = {}
    for check in checks:
        if all(size in fixed for size in _SIZE.findall(check)) and " is " not in check:
            continue
        text = _ARGUMENT.sub(r"\1", check)
        body = _ARGUMENT.sub(lambda match: f"_i{[*inputs].index(match[1])}", check)
        found[_as_tensors(_parse(body), text)] = text
    return found


_ARGUMENT = re.compile(r"\bL\['(\w+)'\]")
_SIZE = re.compile(r"L\['\w+'\][^ ()]*\.size\(\)\[\d+\]")


def _parse(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _as_tensors(node: ast.expr, text: str) -> str:
    """Return a condition on sizes as an operation on tensors; `text` is for messages."""
    match node:
        case ast.Constant() | ast.Name():
            return ast.unparse(node)
        case ast.Call(func=ast.Name("max" | "min" as name), args=[ast.Constant(limit), inner]):
            bound = "min" if name == "max" else "max"
            return f"({_as_tensors(inner, text)}).clamp({bound}={limit!r})"
        case ast.Subscript(value=ast.Call()):  # of `size`
            return f"torch.scalar_tensor({ast.unparse(node)}, dtype=torch.int64)"
        case ast.Subscript():
            return ast.unparse(node)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return f"({_as_tensors(inner, text)}).logical_not()"
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return f"-({_as_tensors(inner, text)})"
        case ast.BinOp(left=left, op=op, right=right):
            terms = [_parse(_as_tensors(term, text)) for term in (left, right)]
            return ast.unparse(ast.BinOp(terms[0], op, terms[1]))
        case ast.BoolOp(op=op, values=values):
            sign = " & " if isinstance(op, ast.And) else " | "
            return sign.join(f"({_as_tensors(value, text)})" for value in values)
        case ast.Compare(left=left, ops=[ast.Is()], comparators=[right]):
            one, other = ast.unparse(left), ast.unparse(right)
            return f"(({one} == {other}) | (({one} != {one}) & ({other} != {other}))).all()"
        case ast.Compare(left=left, ops=ops, comparators=others):
            terms = [_parse(_as_tensors(term, text)) for term in (left, *others)]
            pairs = zip(terms, ops, terms[1:], strict=False)
            return " & ".join(f"({ast.unparse(ast.Compare(a, [op], [b]))})" for a, op, b in pairs)
    raise ExportError(
        f"the program requires {text}, which only a .pt2 file can check: export it with inputs of "
        "fixed sizes"
    )
