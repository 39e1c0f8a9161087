"""The public names and the modules that define them; each is imported on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bendtrace.python.lazy import imported

# Public modules, which are names by themselves.
MODULES = (
    "analysis",
    "bends",
    "compat",
    "distributed",
    "errors",
    "export",
    "flow",
    "graph",
    "harvesting",
    "hooks",
    "node_selector",
    "patches",
    "rewriting",
    "testing",
    "workflows",
)
# The words of other libraries, in `compat`.
COMPAT = ("graphpatch", "tacklebox", "torchbend", "torchlens", "torchwatcher")
PLACES = {
    "Activations": "bendtrace.insert.activations",
    "BendedModule": "bendtrace.module",
    "BendtraceError": "bendtrace.errors",
    "Bisection": "bendtrace.debug.bisect",
    "Difference": "bendtrace.show.difference",
    "Domain": "bendtrace.debug.search",
    "Explanation": "bendtrace.engine.explain",
    "HookManager": "bendtrace.hooks",
    "Inputs": "bendtrace.insert.interjection",
    "Insertion": "bendtrace.insert.insertion",
    "Interjection": "bendtrace.insert.interjection",
    "LayerEntry": "bendtrace.log.entries",
    "ModelHistory": "bendtrace._trace",
    "NodePass": "bendtrace.insert.interjection",
    "PatchableGraph": "bendtrace.compat.graphpatch",
    "Report": "bendtrace.insert.insertion",
    "Stats": "bendtrace.engine.dispatcher",
    "Trace": "bendtrace._trace",
    "bisect": "bendtrace.debug.bisect",
    "diff": "bendtrace.show.difference",
    "harvest": "bendtrace.research.harvest",
    "load": "bendtrace._trace",
    "log_forward_pass": "bendtrace._trace",
    "opaque": "bendtrace.watch.intercepts",
    "show_model_graph": "bendtrace._trace",
    "trace": "bendtrace._trace",
}


def importer(names: dict[str, Any], places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a module that imports names on first use."""

    def __getattr__(name: str) -> Any:
        package = names["__name__"]
        if name in places:
            value = getattr(imported(places[name]), name)
        elif not name.startswith("_"):
            try:
                value = imported(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise  # the module is there, and lacks another
                raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        names[name] = value
        return value

    return __getattr__
