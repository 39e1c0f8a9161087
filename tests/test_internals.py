"""Parts of torch that are not public are looked up safely, and each of them can be missing."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bendtrace.errors import BendtraceError
from bendtrace.python import internals
from bendtrace.python.internals import MissingInternal, internal
from tests.documents import ROOT, run_forked

PACKAGE = ROOT / "bendtrace"
FILES = sorted(PACKAGE.rglob("*.py"))
# Public, but deprecated: torch takes such things away without a private name saying so.
DEPRECATED = (
    "torch.jit", "torch.autograd.Variable", "torch.FloatTensor", "torch.nn.utils.weight_norm",
    "torch.nn.utils.spectral_norm",
)  # fmt: skip
# What Python has of every module, class and descriptor, whatever torch does.
OF_PYTHON = frozenset(
    {"__file__", "__future__", "__mro__", "__base__", "__new__", "__get__", "__set__"}
)


class Lookup(NamedTuple):
    """A call of `internal`: the path that it looks up, and what is switched off without it."""

    path: str
    part: str
    names: frozenset[str]


def reads(tree: ast.Module) -> Iterator[str]:
    """Yield what a module reads of torch while it is imported, as dotted paths."""
    names: dict[str, str] = {}

    def visit(node: ast.AST) -> Iterator[str]:
        inside: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            inside = [*getattr(node, "decorator_list", ()), *node.args.defaults]
            inside += [default for default in node.args.kw_defaults if default is not None]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            inside = [*node.orelse]
        elif isinstance(node, ast.AnnAssign):
            inside = [] if node.value is None else [node.value]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute):
            path, value = [node.attr], node.value
            while isinstance(value, ast.Attribute):
                path.insert(0, value.attr)
                value = value.value
            if isinstance(value, ast.Name) and value.id in names:
                yield ".".join([names[value.id], *path])
                return
        for child in inside:
            yield from visit(child)

    return visit(tree)


def is_internal(path: str) -> bool:
    """Whether a path leads past a private name, or to something that only Python functions have."""
    if path.startswith("torch.Tensor.__") and path.count(".") == 2:
        return False  # an operator of Python's
    parts = [part for part in path.split(".") if part.startswith("_") and part not in OF_PYTHON]
    return bool(parts) or any(path == old or path.startswith(f"{old}.") for old in DEPRECATED)


def lookups() -> Iterator[Lookup]:
    """Yield the calls of `internal` in the package."""
    for file in FILES:
        text = file.read_text("utf-8")
        if "internal(" not in text:
            continue  # each run of the tests imports this file, and parsing takes seconds
        tree = ast.parse(text)
        constants = {
            ast.unparse(node.targets[0]): node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
        }
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id == "internal":
                path, _, part, *names = [*node.args, *[ast.Constant("")] * 3][
                    : max(3, len(node.args))
                ]
                named = [
                    name
                    for given in names
                    for name in (
                        ast.literal_eval(constants[ast.unparse(given.value)])
                        if isinstance(given, ast.Starred)
                        else [ast.literal_eval(given)]
                    )
                ]
                yield Lookup(ast.literal_eval(path), ast.literal_eval(part), frozenset(named))


LOOKUPS = {lookup.path: lookup for lookup in lookups()}


@pytest.mark.more
def test_modules_read_internals_of_torch_only_by_looking_them_up() -> None:
    found = {
        f"{file.relative_to(PACKAGE)} reads {path}"
        for file in FILES
        for path in reads(ast.parse(file.read_text("utf-8")))
        if is_internal(path)
    }
    assert not found
    assert len(LOOKUPS) > 50


def test_the_sweep_sees_how_a_module_reads_them() -> None:
    code = """
import torch
import torch._ops
from torch import nn
from torch._C import _nn
class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    code = nn.Module._call_impl.__code__
@torch._disable_dynamo
def f(x=torch._C._data_address):
    return torch._C._not_read_at_import
kinds = [torch.jit.ScriptFunction for _ in range(2)]
"""
    assert sorted(filter(is_internal, reads(ast.parse(code)))) == [
        "torch._C._data_address", "torch._C._nn", "torch._disable_dynamo", "torch._ops",
        "torch.jit.ScriptFunction", "torch.nn.Module._call_impl.__code__",
        "torch.utils._python_dispatch.TorchDispatchMode",
    ]  # fmt: skip


@pytest.mark.parametrize("path", LOOKUPS)
def test_what_is_looked_up_is_there(path: str) -> None:
    missing = object()
    assert internal(path, missing) is not missing


def test_what_is_missing_is_exchanged_and_switches_off_its_part() -> None:
    assert internal("torch._C._no_such", 3) == 3
    assert not internals.is_off("a part")
    try:
        assert internal("torch._C._no_such", 4, "a part", "uses_it") == 4
        assert internals.is_off("a part")
        assert "uses_it" in internals.names_off()
        reason = "a part: torch has no torch._C._no_such, code that uses it runs live"
        assert internals.missing_features() == [reason]
        assert not internals.missing_features()
    finally:
        internals.switch_on("a part")


def test_what_is_missing_and_has_no_equivalent_says_so_where_it_is_used() -> None:
    tree = internal("torch.utils._no_such")
    for use in (lambda: tree.tree_map(1), lambda: tree(1)):
        with pytest.raises(BendtraceError, match=r"this needs torch\.utils\._no_such, which torch"):
            use()
    assert repr(tree) == "<missing: torch.utils._no_such>"
    assert isinstance(tree, MissingInternal)


SCRIPT = '''
import importlib, json, pathlib, pkgutil, warnings
import torch
import torch.utils.checkpoint
from torch import nn


def resolve(path):
    if path in PATHS:
        raise AttributeError(path)
    return resolve_name(path)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, x):
        y = self.fc(x).relu()
        if y.sum() > 1:
            y = self.drop(y) * x.shape[0]
        for row in y:
            if row.max() > 0.5:
                y = y + row
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.fc(y).float()
        return y + z


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def custom_functions(x):
    return Twice.apply(x) + 1 if x.sum() > 0 else x - Twice.apply(x)


def transforms(x):
    return torch.func.vmap(lambda row: row * row.sum())(x) + torch.func.grad(lambda y: y.sum())(x)


def constructors(x):
    y = nn.Parameter(torch.FloatTensor([1.0, 2.0, 3.0])) if hasattr(torch, "FloatTensor") else x
    return x * torch.tensor([x.shape[0]]) + y


CALLS = []


@torch.library.custom_op("bendtrace_internals::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(len(CALLS))
    return x * len(CALLS)


def operators(x):
    return noted(x.detach()) + torch.ops.aten.relu.default(x)


def checkpoints(x):
    return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False) + 1


def keeps(x):
    y = x * 2
    z = y.view(-1)
    y.add_(1)
    return y + z.view_as(y)


def normalized(x):
    y = nn.functional.layer_norm(x, (3,))
    y = nn.functional.leaky_relu(y) + nn.functional.pad(x, (1, 1))[:, 1:-1]
    return nn.functional.elu(y.split(1)[0]) + nn.functional.hardtanh(y)


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return out + 1 if getattr(function, "__name__", "") == "sin" else out


def sines(x):
    return x.sin() + torch.is_grad_enabled()


MODELS = [
    (kind, isinstance(kind, type))
    for kind in (
        Branches, custom_functions, transforms, constructors, operators, checkpoints, keeps,
        normalized, sines,
    )
]


def outcomes(call):
    """Return outputs and gradients of calls, also in settings and under a mode."""
    made = []

    def once(rows, scale):
        torch.manual_seed(rows)
        x = (torch.randn(rows, 3) * scale).requires_grad_()
        out = call(x)
        if out.requires_grad:
            out.sum().backward()
        made.extend([out.detach().clone(), x.grad, torch.rand(1)])

    for rows, scale in ((2, 1.0), (4, -1.0), (2, 1.0), (2, 1.0), (4, -1.0)):
        once(rows, scale)
    for around in (torch.no_grad, Mode, lambda: torch.autocast("cpu"), torch.inference_mode):
        for _ in range(2):
            with around():
                x = torch.ones(2, 3)
                made.append(call(x).clone())
    torch.use_deterministic_algorithms(True)
    once(2, 1.0)
    torch.use_deterministic_algorithms(False)
    once(2, 1.0)
    return made


def eager(kind, is_class):
    CALLS.clear()
    torch.manual_seed(0)
    return outcomes(kind() if is_class else kind)


def same(a, b):
    return (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


warnings.simplefilter("ignore", FutureWarning)
wanted = [(kind, is_class, eager(kind, is_class)) for kind, is_class in MODELS]
resolve_name, pkgutil.resolve_name = pkgutil.resolve_name, resolve

import bendtrace as bt
from bendtrace.python import internals

for file in sorted(pathlib.Path(bt.__file__).parent.rglob("*.py")):
    name = ".".join(file.relative_to(pathlib.Path(bt.__file__).parents[1]).with_suffix("").parts)
    if not name.endswith(("__main__", "record.self_test_models")) and not name.startswith(OPTIONAL):
        importlib.import_module(name.removesuffix(".__init__"))

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", bt.errors.IncompatibleVersionWarning)
    replays = {}
    for kind, is_class, values in wanted:
        CALLS.clear()
        torch.manual_seed(0)
        bended = bt.BendedModule(kind() if is_class else kind)
        given = outcomes(bended)
        pairs = list(zip(given, values, strict=True))
        wrong = [number for number, pair in enumerate(pairs) if not same(*pair)]
        assert not wrong, (kind, wrong, bended.why_live, bended.stats)
        replays[kind.__name__] = bended.stats.replays
model = Branches()
trace = bt.trace(model, torch.ones(2, 3), save="none")
record = trace.backward(trace.output.sum())
assert model.fc.weight.grad is not None
assert "Addmm" in str(record), record
log = bt.log_forward_pass(keeps, torch.ones(2, 3))
assert log["mul_1"].tensor_contents.sum() == 12, log["mul_1"]
print(json.dumps({
    "off": [*internals._off], "replays": replays,
    "warned": [str(one.message) for one in caught if "switched off" in str(one.message)],
}))
'''
# Modules that import packages of an extra.
OPTIONAL = ("bendtrace.harvesting", "bendtrace.workflows", "bendtrace.compat")


def without(paths: list[str], folder: Path) -> Any:
    """Return what models did where torch has no such parts."""
    script = f"PATHS, OPTIONAL = {paths!r}, {OPTIONAL!r}\n{SCRIPT}"
    (folder / "script.py").write_text(script, "utf-8")
    status = run_forked(folder, "script.py", ("torch", "torch._dynamo"))
    assert not status, (folder / "stderr").read_text("utf-8")
    return json.loads((folder / "stdout").read_text("utf-8").splitlines()[-1])


@pytest.fixture(scope="module")
def with_everything(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return without([], tmp_path_factory.mktemp("everything"))


@pytest.mark.more
def test_models_give_the_same_with_everything(with_everything: Any) -> None:
    assert with_everything["off"] == with_everything["warned"] == []
    assert all(number > 1 for name, number in with_everything["replays"].items()), with_everything


@pytest.mark.more
def test_models_give_the_same_and_replay_with_the_equivalents(
    tmp_path: Path, with_everything: Any
) -> None:
    report = without([lookup.path for lookup in LOOKUPS.values() if not lookup.part], tmp_path)
    assert report["off"] == report["warned"] == []
    # Scripts, old constructors and checkpoints are there in fact: what uses them is not followed.
    unfollowed = {"constructors": 0, "checkpoints": 0}
    assert {**report["replays"], **unfollowed} == {**with_everything["replays"], **unfollowed}


@pytest.mark.more
@pytest.mark.parametrize("path", [path for path, lookup in LOOKUPS.items() if lookup.part])
def test_models_give_the_same_without_a_part_of_torch(path: str, tmp_path: Path) -> None:
    lookup, report = LOOKUPS[path], without([path], tmp_path)
    assert lookup.part in report["off"]
    assert len(report["warned"]) == 1
    assert f"{lookup.part}: torch has no {path}" in report["warned"][0]
    if "vmap" in lookup.names:
        assert report["replays"]["transforms"] == 0 < report["replays"]["keeps"]
    if "" in lookup.names:
        assert not any(report["replays"].values())
