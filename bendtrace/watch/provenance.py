"""Where code and values come from: the user, an installed package, Python's library or torch."""

from __future__ import annotations

import functools
import gc
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bendtrace.python.lazy import LazyModule
from bendtrace.python.sites import PACKAGE, TORCH
from bendtrace.python.versions import TELLS_CHANGES, version_of
from bendtrace.tape.captured import module_name_of
from bendtrace.watch.code_facts import functions_of

if TYPE_CHECKING:
    from importlib import metadata
else:
    metadata = LazyModule("importlib.metadata")

# The user's code is followed, and what it holds is guarded. All other code is *finished*: it is
# taken to stay as it is. This is judged by names of modules and by files.


@functools.cache
def is_installed_module(module: str | None) -> bool:
    """Return whether a Python module belongs to the standard library, or to an installed package.

    Its functions are followed, but of the globals that they name only what may be data is scanned.
    """
    name = module or ""
    package = name.partition(".")[0]
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if package in ("torch", "numpy", "bendtrace"):
        return True
    if package in sys.stdlib_module_names:
        return name != "__main__" and (not file or _is_finished_file(file))
    return is_installed_file(file)


def is_installed_file(file: str) -> bool:
    """Return whether a file belongs to an installed package, wherever that is."""
    return _is_in_packages(file) or _is_of_library(file)


def _is_in_packages(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


@functools.lru_cache(maxsize=8192)
def _is_of_library(file: str) -> bool:
    """Return whether a file outside of the usual folders belongs to a package installed there.

    It may be behind a link, or the clone of a library that is installed in editable mode or found
    through PYTHONPATH. Code around the working directory or the main script is the user's.
    """
    if not os.path.isabs(file):
        return False
    if _is_in_packages(os.path.realpath(file)):
        return True
    folder, top = os.path.dirname(file), ""
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, top = os.path.split(folder)
    if not top or _works_in(folder):
        return False
    try:
        metadata.distribution(top)
    except (metadata.PackageNotFoundError, ValueError):
        return False
    return True


def _works_in(folder: str) -> bool:
    """Return whether the user works in the project that has its packages in a folder."""
    project = os.path.dirname(folder) if os.path.basename(folder) == "src" else folder
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    places = [os.getcwd(), *([os.path.dirname(os.path.abspath(main))] if main else [])]
    return any(os.path.commonpath([project, place]) == project for place in places)


_FINISHED = (sysconfig.get_path("stdlib") + os.sep, TORCH, PACKAGE)


@functools.lru_cache(maxsize=8192)
def _is_finished_file(file: str) -> bool:
    """Return whether a file belongs to the standard library, an installed package, or this one."""
    return is_installed_file(file) or file.startswith(("<frozen ", *_FINISHED))


def is_installed_space(space: Mapping[str, Any]) -> bool:
    """Return whether globals belong to a module of Python's library or of an installed package."""
    file = space.get("__file__")
    if isinstance(file, str):
        return _is_finished_file(file)
    return is_installed_module(space.get("__name__"))


def is_finished_code(code: types.CodeType, space: Mapping[str, Any]) -> bool:
    """Return whether code belongs to the standard library, an installed package, or this one.

    Args:
        code: the code.
        space: its globals.
    """
    if code.co_filename[:1] != "<":
        return _is_finished_file(code.co_filename)
    name = str(space.get("__name__", ""))  # of the module that compiled the text
    return (
        code.co_filename.startswith("<frozen ")
        or name.startswith("namedtuple_")
        or (is_installed_space(space) if name else False)
    )


def is_finished(function: types.FunctionType) -> bool:
    """Return whether a function belongs to Python's library, an installed package, or this one."""
    return is_finished_code(function.__code__, function.__globals__)


def calls_users_code(function: Any) -> bool:
    """Return whether a function is the user's, or a wrapper of a package around such a function."""
    if type(function) is not types.FunctionType:
        return False
    if not is_finished(function):
        return True
    inner = [getattr(function, "__wrapped__", None)]
    for cell in function.__closure__ or ():
        try:
            inner.append(cell.cell_contents)
        except ValueError:  # assigned later
            continue
    return any(
        callable(one)
        and not isinstance(one, type)
        and not is_installed_module(getattr(one, "__module__", None))
        for one in inner
    )


def is_finished_function(function: Any) -> bool:
    """Return whether something is a finished function that wraps none of the user's."""
    return type(function) is types.FunctionType and not calls_users_code(function)


def is_torchs(module: str | None) -> bool:
    """Return whether a module, by its name, belongs to torch."""
    return (module or "").split(".")[0] == "torch"


def is_unwrapped_torch_function(function: types.FunctionType) -> bool:
    """Return whether a function is torch's, and not a torch wrapper around the user's function."""
    return is_torchs(function.__module__) and function.__code__.co_filename.startswith(TORCH)


def is_users_module(module: types.ModuleType) -> bool:
    """Return whether the globals of a Python module may be data of the user's."""
    package = module.__name__.split(".")[0]
    return package not in ("torch", "numpy") and package not in sys.stdlib_module_names


def is_in_standard_library(module: types.ModuleType) -> bool:
    """Return whether a module is in Python's library, and a run replaces none of its functions."""
    name = module.__name__.partition(".")[0]
    return name in sys.stdlib_module_names and name not in ("time", "io", "__main__")


# Packages whose functions and types are taken to stay as they are, also as attributes.
CONSTANT = ("torch", "numpy")


def is_constant_namespace(space: Mapping[str, Any]) -> bool:
    """Return whether torch or numpy has a module or class, so that only its data is scanned."""
    name = space.get("__name__") or space.get("__module__")
    return isinstance(name, str) and name.partition(".")[0] in CONSTANT


def is_users_class(cls: type) -> bool:
    """Return whether a class that code names, or has an object of, is worth following."""
    return not is_installed_module(module_name_of(cls)) or _has_users_code(cls)


_with_users_code: weakref.WeakKeyDictionary[type, tuple[Any, bool]] = weakref.WeakKeyDictionary()


def _has_users_code(cls: type) -> bool:
    """Return whether a class whose `__module__` is installed has functions that the user wrote."""
    if TELLS_CHANGES:
        stamp = version_of(gc.get_referents(vars(cls))[0])
    else:
        stamp = [*map(id, vars(cls).values())]
    cached = _with_users_code.get(cls)
    if cached is None or cached[0] != stamp:
        cached = _with_users_code[cls] = stamp, _looks_for_users_code(cls)
    return cached[1]


def _looks_for_users_code(cls: type) -> bool:
    own = (function for member in vars(cls).values() for function in functions_of(member))
    return not all(map(_is_of_package, own))


def _is_of_package(function: types.FunctionType) -> bool:
    """Return whether a function is finished, or was compiled from text for a class of a package."""
    return is_finished(function) or (
        function.__code__.co_filename == "<string>" and is_installed_module(function.__module__)
    )
