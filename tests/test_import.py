"""What `import bendtrace` brings along, and that all public names are there nevertheless."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import pickle
import pkgutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode

import bendtrace as bt
from bendtrace._public import COMPAT, MODULES, PLACES
from bendtrace.python.lazy import LazyModule, imported
from tests.documents import run_forked

# What takes long to import, and is not needed for tracing and replaying.
HEAVY = {"matplotlib", "networkx", "pandas", "scipy", "tabulate", "tqdm", "xml"}
# What only looks at finished runs, or serves insertions: rooms and files.
LOOKS_AT_RUNS = (
    "_trace", "analysis", "compat", "debug", "distributed", "export", "flow", "harvesting", "hooks",
    "insert", "log", "research", "show", "storage", "workflows",
    "engine.compiled_path", "engine.explain", "engine.speculation", "record.script",
)  # fmt: skip
USE = """
bended = bt.BendedModule(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
for _ in range(3):
    bended(torch.ones(1, 2))
assert bended.stats.replays == 2, bended.stats
"""


def fresh(code: str) -> set[str]:
    """Run code where torch is imported and no more; return the modules that it imported."""
    script = (
        "import sys, torch\nbefore = set(sys.modules)\nimport bendtrace as bt\n"
        f"{code}\nprint(*set(sys.modules) - before)"
    )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "script.py").write_text(script, "utf-8")
        assert not run_forked(folder, "script.py"), (folder / "stderr").read_text("utf-8")
        return set((folder / "stdout").read_text("utf-8").split())


def test_importing_loads_nothing_but_the_names() -> None:
    assert fresh("") == {
        "bendtrace", "bendtrace._public", "bendtrace.python", "bendtrace.python.lazy",
    }  # fmt: skip


@pytest.mark.all
def test_no_garbage_is_looked_for_while_it_is_imported_and_as_before_afterwards() -> None:
    for switch in ("enable", "disable"):
        loaded = fresh(
            f"import gc\ngc.{switch}()\nruns = []\ngc.callbacks.append(lambda *_: runs.append(1))\n"
            "seen = len(runs)\nbt.BendedModule\nassert len(runs) == seen, len(runs) - seen\n"
            f"assert gc.isenabled() is {switch == 'enable'}\n"
        )
        assert "bendtrace.module" in loaded


def test_garbage_is_looked_for_again_after_an_import_that_failed() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such"):
        imported("bendtrace.no_such")
    assert gc.isenabled()


def test_tracing_and_replaying_loads_no_graph_library_and_nothing_that_looks_at_runs() -> None:
    loaded = fresh(USE)
    assert "bendtrace.module" in loaded
    assert not {name for name in loaded if name.partition(".")[0] in HEAVY}
    looks = tuple(f"bendtrace.{name}" for name in LOOKS_AT_RUNS)
    assert [name for name in loaded if name.startswith(looks)] == []


# The lines of bendtrace that calls of a function may load: along one path, and along two.
MOST_LINES = {"torch.relu(x) * 2": 28_000, "x * 2 if x.sum() > 0 else x": 28_950}


@pytest.mark.parametrize("body", MOST_LINES)
def test_calls_load_few_lines(body: str) -> None:
    loaded = fresh(
        f"def model(x):\n    return {body}\n"
        "bended = bt.BendedModule(model)\n"
        "for n in (1, -1, 1, -1):\n    bended(torch.ones(2) * n)\n"
        "assert bended.stats.replays >= 2, bended.stats"
    )
    names = [name for name in loaded if name.partition(".")[0] == "bendtrace"]
    files = [Path(importlib.import_module(name).__file__ or "") for name in names]
    lines = sum(len(file.read_text("utf-8").splitlines()) for file in files)
    assert MOST_LINES[body] - 1000 < lines <= MOST_LINES[body]


# What is loaded when a run first needs it, and a model that does.
LOADED_IN_RUNS = {
    "record.arrays": "def model(x):\n    return torch.from_numpy(x.detach().numpy() * 2)",
    "record.array_functions": (
        "import numpy\ndef model(x):\n    return x + torch.from_numpy(numpy.ones(3, 'float32'))"
    ),
    "record.texts": "def model(x):\n    print(x.sum(), file=sys.stderr)\n    return x * 2",
    "record.checkpoints": (
        "from torch.utils.checkpoint import checkpoint\n"
        "def model(x):\n    return checkpoint(torch.sin, x * 2, use_reentrant=False)"
    ),
    "record.varying": (
        "def model(x):\n    table = {x.shape[0]: x * 2}\n    return table[x.shape[0]] + 1"
    ),
    "python.statements": (
        "def model(x):\n    try:\n        return x.view(3) * 2\n"
        "    except RuntimeError:\n        return x"
    ),
    "watch.growing": (
        "class Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.seen = []\n"
        "    def forward(self, x):\n        self.seen.append(1)\n        return x * 2\n"
        "model = Model()"
    ),
    "watch.readers": (
        "import types\nlimits = types.MappingProxyType({'most': 0.5})\n"
        "def model(x):\n    return x.clamp(max=limits['most'])"
    ),
    "engine.direct_calls": ("def model(x):\n    return torch.nn.functional.layer_norm(x, (3,))"),
}


@pytest.mark.each
@pytest.mark.parametrize("module", LOADED_IN_RUNS)
def test_what_a_run_loads_is_no_part_of_it(module: str) -> None:
    module, model = module.partition(",")[0], LOADED_IN_RUNS[module]
    fresh(
        f"{model}\nx = torch.linspace(0, 1, 3, requires_grad=True)\n"
        "wanted = model(x)\nbended = bt.BendedModule(model)\nbended.stats\n"
        f"assert 'bendtrace.{module}' not in sys.modules\n"
        "for _ in range(3):\n    assert torch.equal(bended(x), wanted)\n"
        f"assert 'bendtrace.{module}' in sys.modules\n"
        "assert (bended.stats.traces, bended.stats.replays) == (1, 2), bended.stats\n"
        "assert not bended.why_live, bended.why_live\n"
    )


@pytest.mark.all
def test_what_is_asked_for_is_loaded_then() -> None:
    loaded = fresh(f"{USE}\nassert len(bended.latest_trace.graph) == 6\nprint(bended.tree)")
    assert {"networkx", "bendtrace.log.mirror", "bendtrace.show.model_tree"} <= loaded


@pytest.mark.all
def test_inserting_at_a_path_loads_no_graph_library() -> None:
    insert = "bended.interject('sub_0.linear', lambda value: value * 2)\nbended(torch.ones(1, 2))"
    assert "networkx" not in fresh(USE + insert)


@pytest.mark.all
def test_what_other_libraries_put_on_tensors_is_in_nobody_s_way() -> None:
    fresh(f"class Odd:\n    __hash__ = None\n    __call__ = print\ntorch.Tensor.kept = Odd(){USE}")


def test_every_public_name_is_where_the_table_says() -> None:
    assert set(bt.__all__) == {*PLACES, *MODULES}
    for name in MODULES:
        assert getattr(bt, name).__name__ == f"bendtrace.{name}"
    for name, place in PLACES.items():
        assert getattr(bt, name).__module__ == place


@pytest.mark.parametrize("name", [*MODULES, *(f"compat.{name}" for name in COMPAT)])
def test_every_name_of_a_public_module_is_there_and_has_words_to_it(name: str) -> None:
    module = getattr(bt, name)
    assert module.__all__ == sorted(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None
        assert public in dir(module)
    assert module.__doc__


@pytest.mark.parametrize("module", [bt, bt.graph], ids=["bendtrace", "bendtrace.graph"])
def test_type_checkers_are_told_the_same_places(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    )
    told = {
        name.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert {*told} == {*module.__all__}
    for name, place in told.items():
        value = getattr(module, name)
        where = value.__name__ if isinstance(value, ModuleType) else f"{value.__module__}.{name}"
        assert where == f"{place}.{name}"


def test_there_are_few_names_to_choose_from() -> None:
    fresh("assert dir(bt) == sorted([*bt.__all__, '__version__']) and len(dir(bt)) < 43")


@pytest.mark.all
def test_the_names_are_listed_before_they_are_asked_for() -> None:
    fresh(
        "assert {*bt.__all__, '__version__'} <= set(dir(bt))\n"
        "from bendtrace import *\nassert callable(trace) and analysis.Mean"
    )


def test_modules_of_the_package_are_attributes_and_other_names_are_not() -> None:
    fresh(
        "from bendtrace.flow import FlowStep\nassert bt.flow.FlowStep is FlowStep\n"
        "from bendtrace.graph import to_fx\nassert bt.graph.to_fx is to_fx\n"
        "assert bt.tape.tape.Op"
    )
    assert not hasattr(bt, "__wrapped__")
    with pytest.raises(AttributeError, match="module 'bendtrace' has no attribute 'nonsense'"):
        _ = bt.nonsense
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        from bendtrace import nonsense  # noqa: F401


@pytest.mark.all
def test_what_was_pickled_is_found_in_a_fresh_process() -> None:
    data = pickle.dumps([bt.graph.NodeRef("relu"), bt.errors.InputError, bt.Trace, bt.graph.Graph])
    fresh(f"import pickle\nassert pickle.loads({data!r})[0] == bt.graph.NodeRef('relu')")


@pytest.mark.all
def test_methods_that_are_imported_later_are_methods() -> None:
    fresh(
        "import inspect\nassert 'rolled' in inspect.signature(bt.Trace.draw).parameters\n"
        "assert 'Write a log' in bt.ModelHistory.save.__doc__\n"
        "trace = bt.trace(torch.relu, torch.ones(2))\nassert trace.draw().svg.startswith('<svg')\n"
        "assert '<html' in trace.to_html()"
    )


def test_a_stand_in_has_what_the_module_has() -> None:
    stand_in = LazyModule("fractions")
    assert stand_in.Fraction(1, 2) == 0.5
    assert "Fraction" in dir(stand_in)
    with pytest.raises(AttributeError, match="module 'fractions' has no attribute 'nonsense'"):
        _ = stand_in.nonsense


class Seen(TorchFunctionMode):
    functions: list[Any] = []  # noqa: RUF012

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.all
def test_importing_within_a_run_is_no_part_of_it() -> None:
    """What is imported when a traced model first asks for it calls no torch function."""
    names = [
        module.name
        for module in pkgutil.walk_packages(bt.__path__, "bendtrace.")
        if not module.name.endswith("__main__") and "zarr" not in module.name
    ]
    fresh(
        "import importlib\nfrom typing import Any\n"
        f"from torch.overrides import TorchFunctionMode\n{inspect.getsource(Seen)}\n"
        "with Seen():\n"
        f"    for name in {names!r}:\n        importlib.import_module(name)\n"
        "assert not Seen.functions, Seen.functions"
    )
    fresh(
        "def model(x):\n    return x * 2 if bt.analysis and bt.graph.to_dot else x\n"
        "traced = bt.trace(model, torch.ones(2))\n"
        "assert not traced.why_live, traced.why_live\n"
        "assert [op.target for op in traced.ops[1:]] == [torch.Tensor.mul]"
    )
