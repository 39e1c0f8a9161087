"""Facts about code, judging by its instructions: the names that it uses, and what they mean."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch

from bendtrace.python.bytecode import catches_all, computed_lookups, global_uses, nested_codes
from bendtrace.python.internals import names_off
from bendtrace.python.sites import full_place_text
from bendtrace.watch.draws import CHANGING

# Names in code that may ask for attributes which are not there.
ASKING = frozenset(
    {
        "getattr", "hasattr", "vars", "dir", "__dict__", "AttributeError", "Exception",
        "BaseException", "suppress",
    }
)  # fmt: skip


class CodeFacts(NamedTuple):
    """Facts about the code of a function, with the functions nested in it."""

    names: frozenset[str]  # of globals, attributes and variables of the functions around it
    globals: frozenset[str]  # names of globals
    stores: frozenset[str]  # names of attributes that it assigns
    texts: frozenset[str]  # words of texts that it may look attributes up by, or assign them
    imports: frozenset[str]  # names of Python modules in its own import statements
    tells_numbers: bool  # whether it asks for the exact type of a number
    computes: bool  # whether it looks attributes up by names that it computes
    computes_outside: bool  # whether it does so in other objects than `self`


# What the instructions that `global_uses` yields do with a name.
_WHAT = {
    "IMPORT_NAME": "IMPORT",
    "STORE_ATTR": "ATTR",
    **{
        f"{how}_{where}": "GLOBAL"
        for how in ("LOAD", "STORE", "DELETE")
        for where in ("GLOBAL", "NAME")
    },
}


@functools.lru_cache(maxsize=8192)
def facts_in(code: types.CodeType) -> CodeFacts:
    """Return the facts about code; nested functions are included."""
    names: set[str] = set()
    words: set[str] = set()
    found: dict[str, set[str]] = {"GLOBAL": set(), "ATTR": set(), "IMPORT": set()}
    of_self: set[bool] = set()
    for inner in codes_in(code):
        names.update(inner.co_names, inner.co_freevars)
        if catches_all(inner):
            names.add("BaseException")
        if _MATCH_CLASS in inner.co_code[::2]:
            names.add("__match_args__")
        if not _LOOKING_UP.isdisjoint(inner.co_names):
            texts = (constant for constant in inner.co_consts if isinstance(constant, str))
            words.update(name for text in texts for name in text.split("."))
            of_self.update(computed_lookups(inner))
        for how, name in global_uses(inner):
            found[_WHAT[how]].add(name)
    names |= words
    # Tools that rewrite code add names such as `@pytest_ar`, which no source can contain.
    return CodeFacts(
        frozenset(filter(str.isidentifier, names)),
        frozenset(filter(str.isidentifier, found["GLOBAL"])),
        frozenset(found["ATTR"]),
        frozenset(filter(str.isidentifier, words)),
        frozenset(found["IMPORT"]),
        _tells_numbers(code),
        bool(of_self),
        False in of_self,
    )


_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
# Names in code that may look attributes up by texts.
_LOOKING_UP = frozenset(
    {
        "getattr", "hasattr", "setattr", "delattr", "vars", "dir", "__dict__", "__getattribute__",
        "attrgetter", "methodcaller", "getattr_static", "getmembers", "globals",
    }
)  # fmt: skip


_NUMBERS = frozenset({"int", "float", "bool"})
_COMPARES = frozenset({"COMPARE_OP", "CONTAINS_OP", "IS_OP"})


def _tells_numbers(code: types.CodeType) -> bool:
    """Return whether code compares `type(x)` with the type of a number."""
    if "type" in code.co_names and not _NUMBERS.isdisjoint(code.co_names):
        steps = list(dis.get_instructions(code))
        for position, step in enumerate(steps):
            if step.opname == "LOAD_GLOBAL" and step.argval == "type":
                # type(x) is int, type(x) in (int, float), int == type(x)
                near = steps[max(position - 3, 0) : position + 12]
                if any(s.opname in _COMPARES for s in near) and any(
                    s.opname == "LOAD_GLOBAL" and s.argval in _NUMBERS for s in near
                ):
                    return True
    return any(map(_tells_numbers, nested_codes(code)))


def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the outer names and attributes that code uses, nested functions included."""
    return facts_in(code).names


def other_names_in(function: types.FunctionType) -> Iterator[str]:
    """Yield the own names of functions that a function uses under other names.

    After `from torch import initial_seed as seed`, code that uses `seed` yields `initial_seed`.
    """
    space, code = function.__globals__, function.__code__
    functions = chain(
        (space[name] for name in facts_in(code).globals & space.keys()), cells_of(function)
    )
    for value in functions:
        if isinstance(value, _FUNCTIONS) and value.__name__ not in code.co_names:
            yield value.__name__


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def place_naming(name: str, functions: Iterable[types.FunctionType]) -> str:
    """Return the line where functions assign a name, or else where they use it; "" if nowhere."""
    mention = ""
    functions = tuple(functions) if name else ()
    for function in functions:
        for code in codes_in(function.__code__):
            if not _may_name(code, name):
                continue
            stores, line = _lines_naming(code, code.co_filename).get(name, (False, None))
            if line is not None:
                place = full_place_text(code.co_filename, line)
                if stores:
                    return place
                mention = mention or place
    if not mention:
        for function in functions:
            if name in other_names_in(function):
                code = function.__code__
                return full_place_text(code.co_filename, code.co_firstlineno)
    return mention


def _may_name(code: types.CodeType, name: str) -> bool:
    """Return whether a name occurs in code; instructions are much slower to read than this."""
    texts = [one for one in code.co_consts if type(one) is str]  # `-bb` forbids to compare bytes
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, texts
    return any(name in some for some in names)


def line_naming(name: str, code: types.CodeType) -> int:
    """Return the first line of code that has a name; the first of all if there is none."""
    lines = (_lines_naming(inner, inner.co_filename).get(name) for inner in codes_in(code))
    return next((found[1] for found in lines if found is not None), code.co_firstlineno)


@functools.lru_cache(maxsize=1024)  # a run that cannot be followed asks at each branch
def _lines_naming(code: types.CodeType, _file: str) -> dict[str, tuple[bool, int]]:
    """Return for each name in code whether it is assigned, and the first line that does so.

    Code compares equal to the same code in another file, hence the name of the file.
    """
    lines: dict[str, tuple[bool, int]] = {}
    line = 0
    for step in dis.get_instructions(code):
        line = (step.positions and step.positions.lineno) or line
        stores = step.opname.startswith(("STORE", "DELETE"))
        # Since Python 3.13, two local variables can be named by one instruction.
        two = isinstance(step.argval, tuple) and "FAST" in step.opname
        for name in step.argval if two else (step.argval,):
            if isinstance(name, str) and (stores and not lines.get(name, (False,))[0]):
                lines[name] = True, line
            elif isinstance(name, str):
                lines.setdefault(name, (False, line))
    return lines


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and the code of the functions nested in it."""
    yield code
    for inner in nested_codes(code):
        yield from codes_in(inner)


def functions_of(member: Any) -> list[types.FunctionType]:
    """Return the Python functions that a global or a member of a class calls."""
    if isinstance(member, property):
        parts = (member.fget, member.fset, member.fdel)
        return [part for part in parts if isinstance(part, types.FunctionType)]
    if isinstance(member, functools.singledispatchmethod):
        implementations = [member.func, *member.dispatcher.registry.values()]
        return [function for part in implementations for function in functions_of(part)]
    if isinstance(member, functools.partialmethod):
        member = member.func
    elif isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    elif isinstance(member, functools.cached_property):
        member = member.func
    if isinstance(member, functools._lru_cache_wrapper):
        member = member.__wrapped__
    return [member] if isinstance(member, types.FunctionType) else []


def cells_of(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values of the variables that a function takes from the functions around it."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # empty: the name is assigned later
            continue


# What neither the function mode nor an intercept sees, recognised by the names that code uses.


_GENERATORS = "reads or sets the state of a random generator past the tracer"
UNDETECTABLE = {
    "set_flush_denormal": "changes a setting of torch's that cannot be asked for",
    "geterr": "reads a setting of numpy's",
    **dict.fromkeys(("initial_seed", "default_generator", "default_generators"), _GENERATORS),
    **dict.fromkeys(
        ("DisableTorchFunction", "DisableTorchFunctionSubclass"), "switches function modes off"
    ),
    **dict.fromkeys(
        ("increment_version", "_increment_version", "_unsafe_preserve_version_counter"),
        "changes the version of a tensor, which torch does not report",
    ),
    **dict.fromkeys(
        (
            "_any_requires_grad", "_data_address", "_has_storage", "_is_alias_of",
            "_is_cow_tensor", "_non_sym_sizes", "_overlaps", "_storage_address", "_storage_id",
            "_use_count",
        ),
        "reads something of a tensor, which torch does not report",
    ),
}  # fmt: skip
_STATES = frozenset(
    {"get_state", "set_state", "clone_state", "graphsafe_set_state", "seed", "manual_seed"}
    | CHANGING
)


def undetectable_in(
    names: frozenset[str],
    stores: frozenset[str],
    functions: Iterable[types.FunctionType],
    has_generator: bool,
) -> Iterator[str]:
    """Yield a reason for each thing that the code may do and a replay would not.

    It uses the names and assigns the attributes. With `has_generator`, it holds, or is given, a
    random generator.
    """
    functions = tuple(functions)
    off = names_off()
    if "" in off:
        yield off[""]
    for name in sorted(names & off.keys()):
        yield f"{name} (see {place_naming(name, functions)}): {off[name]}"
    # Of GPUs there are no generators as long as this tuple, which is guarded, is empty.
    none = () if len(torch.cuda.default_generators) else ("default_generators",)
    for name in sorted((names & UNDETECTABLE.keys()).difference(none)):
        yield f"{name} (see {place_naming(name, functions)}) {UNDETECTABLE[name]}"
    if (has_generator or "Generator" in names) and "default_generator" not in names:
        for name in sorted(names & _STATES):
            yield f"{name} (see {place_naming(name, functions)}) {_GENERATORS}"
    for name in sorted(stores & {"real", "imag"}):
        yield f"an assignment to .{name} (see {place_naming(name, functions)}) is not seen"
