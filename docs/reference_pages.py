"""The pages of the reference: one for each class that is public, or that a public name returns.

`.. public:: MODULE` on a page lists the classes of a module, each with a page of its own, and
describes its functions; `.. returned:: MODULE` lists the classes that these return.
`write_pages` makes the pages of the classes, from `__all__` and from the annotations of what
functions, methods and properties return.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from bendtrace import _public
from bendtrace.python.lazy import LazyMethod

MODULES = (
    "bendtrace",
    *(f"bendtrace.{name}" for name in _public.MODULES),
    *(f"bendtrace.compat.{name}" for name in _public.COMPAT),
)
# What methods return that only bendtrace itself calls.
INTERNAL = {
    "bendtrace.research.spectra", "bendtrace.research.probes", "bendtrace.insert.native",
    "bendtrace.log.nodes",
}  # fmt: skip
# Bases whose members are described elsewhere.
BASES = ("Module", "BaseException", "Exception", "UserWarning", "Mapping", "Sequence", "Enum",
         "DiGraph", "dict", "list", "tuple", "str")  # fmt: skip
_PROTOCOLS = ("__getitem__", "__iter__", "__enter__")
# Unions that are shown by name; the first page of the reference says what they hold.
ALIASES = ("Key", "Selectable", "What", "Where")
# The pages of classes of others, by the name that annotations have.
TORCH = "https://docs.pytorch.org/docs/stable/"
PYTHON = "https://docs.python.org/3/library/"
ELSEWHERE = {
    "torch.Tensor": f"{TORCH}tensors.html#torch.Tensor",
    "torch.dtype": f"{TORCH}tensor_attributes.html#torch.dtype",
    "torch.device": f"{TORCH}tensor_attributes.html#torch.device",
    "torch.fx.GraphModule": f"{TORCH}fx.html#torch.fx.GraphModule",
    **{
        f"{place}{name}": f"{TORCH}generated/{public}{name}.html#{public}{name}"
        for place, public, name in (
            ("torch.nn.modules.module.", "torch.nn.", "Module"),
            ("torch.nn.modules.linear.", "torch.nn.", "Linear"),
            ("torch.nn.parameter.", "torch.nn.parameter.", "Parameter"),
            ("torch.", "torch.", "Generator"),
        )
    },
    **{name: f"{PYTHON}functions.html#{name}" for name in ("bool", "float", "int", "object")},
    **{name: f"{PYTHON}stdtypes.html#{name}" for name in (
        "bytes", "dict", "frozenset", "list", "range", "set", "slice", "str", "tuple")},
    **{f"collections.abc.{name}": f"{PYTHON}collections.abc.html#collections.abc.{name}"
       for name in ("Callable", "Iterable", "Iterator", "Mapping", "Sequence")},
    "pathlib.Path": f"{PYTHON}pathlib.html#pathlib.Path",
    "typing.Any": f"{PYTHON}typing.html#typing.Any",
}  # fmt: skip


def names_of(module: str) -> list[str]:
    """Return the public names of a module that are not modules."""
    return [
        name
        for name in importlib.import_module(module).__all__
        if not isinstance(getattr(importlib.import_module(module), name), ModuleType)
    ]


@functools.cache
def _annotated(module: str) -> dict[str, Any]:
    """Return what annotations in a module can name, imports for type checkers included."""
    names = {**vars(builtins), **vars(sys.modules[module])}
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "bendtrace"
        ):
            source = importlib.import_module(str(node.module))
            for one in node.names:
                names.setdefault(
                    one.asname or one.name, getattr(source, one.name, None)
                )
    return names


def _classes_in(annotation: object, module: str) -> Iterator[type]:
    """Yield the classes of ours that an annotation in a module names."""
    for name in re.findall(r"\b[A-Z]\w*", str(annotation)):
        found = _annotated(module).get(name)
        if inspect.isclass(found) and found.__module__.startswith("bendtrace"):
            if found.__module__ not in INTERNAL:
                yield found


def returned_by(thing: Any) -> Iterator[type]:
    """Yield the classes that a function returns, or that a class has or returns."""
    for attribute in ("fget", "func", "__func__"):
        thing = getattr(thing, attribute, thing)
    if inspect.isfunction(thing):
        yield from _classes_in(thing.__annotations__.get("return"), thing.__module__)
    if not inspect.isclass(thing):
        return
    for base in thing.__mro__:
        if base.__module__.startswith("bendtrace"):
            for name, annotation in vars(base).get("__annotations__", {}).items():
                if not name.startswith("_"):
                    yield from _classes_in(annotation, base.__module__)
            for name, member in list(vars(base).items()):
                if isinstance(member, LazyMethod):
                    member = member.__get__(None, base)
                if not name.startswith("_") or name in _PROTOCOLS:
                    if not inspect.isclass(member):
                        yield from returned_by(member)


@functools.cache
def classes() -> dict[str, dict[str, type]]:
    """Return the classes that have a page, by module and by full name.

    A class that several modules have belongs to the first. A class that is only returned is
    listed, by the name of the file that has it, where the first name is that returns it.
    """
    found: dict[str, dict[str, type]] = {module: {} for module in MODULES}
    seen: set[int] = set()
    for module in MODULES:
        for name in names_of(module):
            thing = getattr(importlib.import_module(module), name)
            if inspect.isclass(thing) and id(thing) not in seen:
                seen.add(id(thing))
                found[module][f"{module}.{name}"] = thing
    for module in MODULES:
        contents = importlib.import_module(module)
        things = [getattr(contents, name) for name in names_of(module)]
        for thing in things:  # which grows
            for one in returned_by(thing):
                if id(one) not in seen:
                    seen.add(id(one))
                    things.append(one)
                    found[module][f"{one.__module__}.{one.__qualname__}"] = one
    return found


@functools.cache
def documented_as() -> dict[str, str]:
    """Return the name under which each class and function is described, by that of its file."""
    found = {}
    for module in reversed(MODULES):
        for name in names_of(module):
            thing = getattr(importlib.import_module(module), name)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                found[f"{thing.__module__}.{thing.__qualname__}"] = f"{module}.{name}"
    for names in classes().values():
        for name, thing in names.items():
            found[f"{thing.__module__}.{thing.__qualname__}"] = name
    return found


def write_pages(folder: Path) -> None:
    """Write a page for each class; those that stay the same are not built again."""
    folder.mkdir(exist_ok=True)
    former = set(folder.iterdir())
    described = {id(thing) for names in classes().values() for thing in names.values()}
    for names in classes().values():
        for full_name, thing in names.items():
            module, _, name = full_name.rpartition(".")
            others = [
                base.__name__ for base in thing.__mro__[1:] if id(base) in described
            ]
            page = (
                f"{name}\n{'=' * len(name)}\n\n"
                f".. currentmodule:: {module}\n\n.. autoclass:: {name}\n   :members:\n"
                f"   :show-inheritance:\n   :inherited-members: {', '.join([*others, *BASES])}\n"
                "   :exclude-members: in_degree, out_degree\n"  # of networkx
            )
            path = folder / f"{full_name}.rst"
            former.discard(path)
            if not path.exists() or path.read_text("utf-8") != page:
                path.write_text(page, "utf-8")
    for path in former:
        path.unlink()


def _table(title: str, names: list[str]) -> list[str]:
    if not names:
        return []
    entries = [f"   ~{name}" for name in names]
    return [
        ".. currentmodule:: None", "", f".. rubric:: {title}", "",
        ".. autosummary::", "   :toctree: api", "   :nosignatures:", "", *entries, "",
    ]  # fmt: skip


class Public(SphinxDirective):
    """The public names of a module, or some: its classes as a table, its functions in full."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the table, and the functions."""
        module = importlib.import_module(self.arguments[0])
        chosen = " ".join(self.content).split() or names_of(module.__name__)
        functions = [
            name for name in chosen if inspect.isfunction(getattr(module, name))
        ]
        full_names = [f"{module.__name__}.{name}" for name in chosen]
        lines = _table(
            "Classes",
            [name for name in full_names if name in classes()[module.__name__]],
        )
        if functions:
            lines += [".. rubric:: Functions", ""]
            lines += [
                f".. autofunction:: {module.__name__}.{name}" for name in functions
            ]
        return self.parse_text_to_nodes("\n".join(lines))


class Returned(SphinxDirective):
    """The classes that the names of a module return, and that have no public name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table."""
        module = self.arguments[0]
        public = {f"{module}.{name}" for name in names_of(module)}
        names = [name for name in classes()[module] if name not in public]
        return self.parse_text_to_nodes("\n".join(_table("What they return", names)))


def signature(
    app: Any,
    what: str,
    name: str,
    thing: Any,
    options: Any,
    args: str | None,
    returns: str | None,
) -> tuple[str, str] | None:
    """Leave out what the constructor of a class is given, if its docstring does not tell.

    Nobody calls such a constructor: other names return the objects.
    """
    told = re.search(r"^ *Args:", thing.__doc__ or "", re.MULTILINE)
    return ("", "") if what == "class" and args and not told else None


def link(app: Any, env: Any, node: Any, content: nodes.Node) -> nodes.Node | None:
    """Return a link for a name of ours by its file, or of torch or Python; or nothing."""
    target = node.get("reftarget", "")
    if target in ELSEWHERE:
        return nodes.reference(
            "", "", content, internal=False, refuri=ELSEWHERE[target]
        )
    if target in ALIASES:
        page = app.builder.get_relative_uri(node["refdoc"], "reference/index")
        return nodes.reference("", "", content, refuri=f"{page}#types")
    name = documented_as().get(target)
    if name is None or name == target or node.get("refdomain") != "py":
        return None
    found = env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], name, node, content
    )
    assert found is None or isinstance(found, nodes.Node)
    return found
