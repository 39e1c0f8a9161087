"""Modules that are imported when one of their attributes is first used.

networkx alone takes longer to import than all of this package, and most runs never ask for a graph.
So networkx, everything that only looks at finished runs, and what few models need are imported
through a proxy, here and in the modules that use them. The proxy imports the module at the first
attribute access:

    if TYPE_CHECKING:
        from bendtrace.show import viewer
    else:
        viewer = LazyModule("bendtrace.show.viewer")

This is the only kind of deferred import in this package, besides the public names themselves
(`_public.py`) and `LazyMethod`. It is for imports that take time, never to break a cycle.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Gives the context of an import. A recorder that is at work notes nothing of the code that runs in
# it, which may be a finder of the user's (see `Recorder.unwatched`).
around: Callable[[], AbstractContextManager[object]] = nullcontext


def imported(name: str) -> ModuleType:
    """Import a module if necessary, with the garbage collector paused, and return it.

    Objects made by an import stay alive. A garbage collection during the import would go through
    all of torch's objects, which takes as long as importing this package.
    """
    if name in sys.modules:
        return importlib.import_module(name)
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        with around():
            return importlib.import_module(name)
    finally:
        if is_collecting:
            gc.enable()


def required(name: str, use: str, packages: str = "", error: type[Exception] = ImportError) -> Any:
    """Return a module of an optional package, which is imported if necessary."""
    try:
        return imported(name)
    except ImportError as missing:
        package = name.partition(".")[0]
        text = f"{use} needs {package}: pip install {packages or package}"
        raise error(text) from missing


def required_pandas() -> Any:
    """Return the module pandas, which is an optional dependency."""
    return required("pandas", "a data frame")


class LazyModule(ModuleType):
    """A proxy that imports a module on first attribute access.

    The module takes the proxy's place among the globals of the code that asks: a proxy costs some
    microseconds each time, since Python looks for the attribute in the proxy first.

    Example:
        >>> fractions = LazyModule("fractions")
        >>> fractions.Fraction(2, 4)
        Fraction(1, 2)
    """

    def __getattr__(self, name: str) -> Any:
        module = imported(self.__name__)
        # The globals of the code that asks: each file that imports the proxy has a name for it.
        space = sys._getframe(1).f_globals
        for key, value in [*space.items()]:
            if value is self:
                space[key] = module
        return getattr(module, name)

    def __dir__(self) -> list[str]:
        return dir(imported(self.__name__))


class LazyMethod:
    """A descriptor that imports a function on first access and binds it as a method."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self._place = (owner, name)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        function = getattr(imported(self._module), self._name)
        setattr(*self._place, function)
        return function.__get__(instance, owner)


if TYPE_CHECKING:
    import networkx as networkx
    import tabulate as tabulate

    from bendtrace import errors as errors
else:
    errors = LazyModule("bendtrace.errors")
    networkx = LazyModule("networkx")
    tabulate = LazyModule("tabulate")
