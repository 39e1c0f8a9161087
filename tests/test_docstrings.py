"""What is public has a docstring with an example, which says all that there is to give."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import bendtrace as bt
from bendtrace import _public

PUBLIC_MODULES = (*_public.MODULES, *(f"compat.{name}" for name in _public.COMPAT))

# Classes that nobody makes by hand, and how one comes by them: their docstrings tell what they
# have, not what their constructors take.
HANDED_OUT = {
    "Activations": "BendedModule.get_activations returns one",
    "Bisection": "bisect returns one",
    "Difference": "diff returns one",
    "Insertion": "BendedModule.interject returns one",
    "ModelHistory": "log_forward_pass and load return one",
    "Trace": "trace returns one",
    "compat.torchlens.Trace": "compat.torchlens.trace returns one",
    "distributed.Agreement": "agree and agreement return one",
    "flow.FlowSteps": "Trace.flow_steps is one",
    "harvesting.Column": "Harvest has one for each node",
    "hooks.HookFunction": "HookManager makes them",
    "hooks.HookHandle": "HookManager makes them",
    "node_selector.CandidateGraph": "selectors that look ahead are given one",
    "workflows.ActivationCache": "run_with_cache returns one",
    "workflows.BendingSession": "bending_session returns one",
    "workflows.LatentEdit": "SplicedAutoencoder.edit returns one",
    "workflows.SparseAutoencoder": "load_autoencoder returns one",
    "workflows.SplicedAutoencoder": "splice_autoencoder returns one",
    "workflows.Steering": "steer returns one",
}


def _of_modules() -> Iterator[tuple[str, Any]]:
    for name in bt.__all__:
        if name not in _public.MODULES:
            yield name, getattr(bt, name)
    for module in PUBLIC_MODULES:
        found = importlib.import_module(f"bendtrace.{module}")
        for name in found.__all__:
            yield f"{module}.{name}", getattr(found, name)


def _is_documented_by_itself(thing: Any) -> bool:
    return inspect.isclass(thing) or inspect.isroutine(thing)


PUBLIC = dict(_of_modules())
THINGS = {name: thing for name, thing in PUBLIC.items() if _is_documented_by_itself(thing)}
MADE_BY_HAND = [
    name
    for name, thing in THINGS.items()
    if all(thing is not PUBLIC[handed_out] for handed_out in HANDED_OUT)
]
VALUES = sorted(set(PUBLIC) - set(THINGS))
MODULES = {
    name: importlib.import_module(f"bendtrace.{name}" if name else "bendtrace")
    for name in ("", *PUBLIC_MODULES)
}


def docstring_of(thing: Any) -> str:
    """Return the thing's own docstring: a class that has none would show that of its base."""
    return inspect.cleandoc(thing.__doc__ or "")


def section(docstring: str, name: str) -> str:
    """Return a section of a docstring in Google style, or nothing."""
    found = re.search(rf"^{name}:\n((?:    .*\n|\n)*)", docstring + "\n", re.MULTILINE)
    return "" if found is None else inspect.cleandoc(found[1])


def listed(docstring: str, name: str) -> list[str]:
    """Return what a section explains: the names at the beginning of its items."""
    return re.findall(r"^(\*{0,2}\w+):", section(docstring, name), re.MULTILINE)


def source_of(docstring: str) -> str:
    """Return the code of the examples in a docstring."""
    return "".join(e.source for e in doctest.DocTestParser().get_examples(docstring))


def parameters_of(thing: Any) -> list[str]:
    """Return what a function, or the constructor of a class, is given, with `*` and `**`.

    For a constructor that is somebody else's (of a module, tuple, exception, graph): nothing.
    """
    if inspect.isclass(thing):
        makers = (vars(cls).keys() & {"__init__", "__new__"} and cls for cls in thing.__mro__)
        if not next(filter(None, makers)).__module__.startswith("bendtrace"):
            return []
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    every = inspect.signature(thing).parameters.values()
    return [stars.get(one.kind, "") + one.name for one in every]


def unexplained(thing: Any) -> str:
    """Say what is wrong with what a docstring says of parameters; nothing if it is right."""
    docstring, wanted = docstring_of(thing), parameters_of(thing)
    args = listed(docstring, "Args")
    if args or not inspect.isclass(thing):
        return "" if args == wanted else f"Args has {args}, the signature {wanted}"
    # What errors and plain records have is what they are made of; also what a public base has.
    bases = [cls for cls in thing.__mro__ if cls in THINGS.values()]
    told = {one for cls in bases for one in listed(docstring_of(cls), "Attributes")}
    if issubclass(thing, Exception):
        told |= {"message", "reason", "texts"}  # which bendtrace makes their text of
    elif not dataclasses.is_dataclass(thing) and not hasattr(thing, "_fields"):
        told = set()
    missing = [one for one in wanted if one not in told]
    return f"nothing is said of {missing}" if missing else ""


def free_names(source: str) -> set[str]:
    """Return the names that some code uses without having made them."""
    used, made = set[str](), set(dir(builtins))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                made.add(name)
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                made.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                made |= {(one.asname or one.name).partition(".")[0] for one in names}
    return used - made


def inner_imports(source: str) -> list[str]:
    """Return what some code imports of bendtrace, but for `import bendtrace as bt`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{one.name} as {one.asname}" for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append(f"{node.module}.{node.names[0].name}")
    return [one for one in found if one.startswith("bendtrace") and one != "bendtrace as bt"]


def with_own_examples() -> Iterator[tuple[str, str]]:
    """Yield what is public and has a docstring: things, their methods, modules."""
    for name, module in MODULES.items():
        yield f"bendtrace.{name}", docstring_of(module)
    for name, thing in THINGS.items():
        yield name, docstring_of(thing)
        if not inspect.isclass(thing):
            continue
        for member in filter(lambda member: not member.startswith("_"), dir(thing)):
            found = getattr(thing, member, None)
            found = getattr(found, "fget", None) or getattr(found, "func", found)
            if inspect.isroutine(found):
                if (getattr(found, "__module__", None) or "").startswith("bendtrace"):
                    yield f"{name}.{member}", docstring_of(found)


@pytest.mark.parametrize("name", THINGS)
def test_everything_public_is_explained_in_one_line_and_shown(name: str) -> None:
    docstring = docstring_of(THINGS[name])
    first, _, rest = docstring.partition("\n")
    assert first.endswith("."), f"{name} begins with {first!r}"
    assert not rest or rest.startswith("\n"), f"{name} says more than one line in the first"
    assert ">>> " in section(docstring, "Example"), f"{name} has no example"


@pytest.mark.parametrize("name", MADE_BY_HAND)
def test_what_can_be_given_is_what_the_docstring_lists(name: str) -> None:
    wrong = unexplained(THINGS[name])
    assert not wrong, f"{name}: {wrong}"


def test_those_that_nobody_makes_by_hand_are_still_there_and_say_nothing_of_it() -> None:
    for name in HANDED_OUT:
        assert unexplained(PUBLIC[name]), f"{name} need not be among the exceptions"


@pytest.mark.parametrize("name", VALUES)
def test_values_are_named_by_their_module(name: str) -> None:
    module, _, value = name.rpartition(".")
    docstring = docstring_of(MODULES[module])
    assert f"`{value}`" in docstring, f"the docstring of {module} says nothing of {value}"


@pytest.mark.parametrize("name", MODULES)
def test_modules_show_what_they_are_for(name: str) -> None:
    assert docstring_of(MODULES[name]).partition("\n")[0].endswith(".")
    assert ">>> " in docstring_of(MODULES[name])


def test_examples_need_nothing_but_what_they_import() -> None:
    wrong = []
    for name, docstring in with_own_examples():
        source = source_of(docstring)
        if free := free_names(source):
            wrong.append(f"{name} uses {', '.join(sorted(free))}")
        wrong += [f"{name} imports {one}" for one in inner_imports(source)]
    assert not wrong, "\n".join(wrong)
