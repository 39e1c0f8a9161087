"""Modules that are imported when one of their attributes is first used.

networkx alone takes longer to import than all of this package, and most runs never ask for a
graph. So it, and what only looks at finished runs, stands here and in the modules that use it as
a stand-in, which imports the module at the first attribute:

    if TYPE_CHECKING:
        from bendtrace.view import viewer
    else:
        viewer = LazyModule("bendtrace.view.viewer")

That is the only way of importing later in this package, besides the public names themselves
(`_public.py`). It is for what takes time, never to break a cycle.
"""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["LazyMethod", "LazyModule", "imported", "networkx", "required_pandas", "tabulate"]


def imported(name: str) -> ModuleType:
    """Return a module, imported if it was not before, with the garbage collector paused.

    What an import makes, stays. Python would look for garbage among it, and go through all objects
    of torch's in doing so, which takes as long as importing this package.

    Args:
        name: full name of the module.
    """
    if name in sys.modules or not gc.isenabled():
        return importlib.import_module(name)
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.enable()


def required_pandas() -> Any:
    """Return the module pandas, which is an extra.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return imported("pandas")
    except ImportError as error:
        raise ImportError("tables need pandas: pip install 'bendtrace[pandas]'") from error


class LazyModule(ModuleType):
    """Stands for a module, and imports it when an attribute is asked for.

    Args:
        name: full name of the module.

    Example:
        >>> fractions = LazyModule("fractions")
        >>> fractions.Fraction(2, 4)
        Fraction(1, 2)
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(imported(self.__name__), name)

    def __dir__(self) -> list[str]:
        return dir(imported(self.__name__))


class LazyMethod:
    """A function of a module that becomes a method of a class when it is asked for.

    Args:
        module: full name of the module.
        name: name of the function; its first argument is what it is called on.
    """

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
    import networkx
    import tabulate
else:
    networkx = LazyModule("networkx")
    tabulate = LazyModule("tabulate")
