"""What comes before the first output, in fresh processes that take turns."""

from __future__ import annotations

import compileall
import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bendtrace
from tools.benchmarks.timing import summary

__all__ = ["cold", "imports", "packages", "run_python", "version_of"]

_IMPORT = """
import json, resource, sys, time
import torch
before, begun, cpu = len(sys.modules), time.perf_counter(), time.process_time()
{what}
took, cpu = time.perf_counter() - begun, time.process_time() - cpu
print(json.dumps({{"seconds": took, "cpu": cpu, "modules": len(sys.modules) - before}}))
"""

_COLD = """
import json, time
begun = time.perf_counter()
import torch
torch.set_num_threads(1)
after_torch = time.perf_counter()
from tools.benchmarks.models import case_of, inputs_of
case = case_of({case!r})
model, args = case.model(), inputs_of(case)
made = time.perf_counter()
with torch.no_grad():
{what}
done = time.perf_counter()
print(json.dumps({{"seconds": done - made, "torch": after_torch - begun}}))
"""

# What a script does to get the first output of a model.
_FIRST = {
    "eager": "out = model(*args)",
    "bended": "import bendtrace as bt\nout = bt.BendedModule(model)(*args)",
    "bended, inductor": (
        "import bendtrace as bt\nbended = bt.BendedModule(model, backend='inductor')\n"
        "out = [bended(*args) for _ in range(3)]"
    ),
    "torch.fx": "out = torch.fx.symbolic_trace(model)(*args)",
    "torch.export": "out = torch.export.export(model, args).module()(*args)",
    "torch.compile": "out = torch.compile(model)(*args)",
    "torchlens": "import torchlens\nout = torchlens.trace(model, list(args))",
    "nnsight": (
        "from nnsight import NNsight\nwrapped = NNsight(model)\n"
        "with wrapped.trace(*args):\n    out = wrapped.output.save()"
    ),
}

_COMPILING = ("bended, inductor", "torch.compile")

_PACKAGES = ("torch", "bendtrace", "torchlens", "nnsight")

# Packages defer what they can until it is first used: what a script needs is the second of each.
_IMPORTS = {
    "bendtrace": "import bendtrace",
    "bendtrace, used": "import bendtrace\nbendtrace.BendedModule, bendtrace.trace",
    "torchlens": "import torchlens",
    "torchlens, used": "import torchlens\ntorchlens.trace",
    "nnsight": "import nnsight",
    "nnsight, used": "import nnsight\nnnsight.NNsight",
}


def run_python(code: str, **environment: str) -> Any:
    """Run code in a fresh process and return what its last line of output says as JSON.

    Raises:
        RuntimeError: if it fails; the last line of the error.
    """
    with tempfile.TemporaryDirectory() as folder:
        # From a file: nnsight reads the source of what it runs.
        script = os.path.join(folder, "script.py")
        with open(script, "w") as file:
            file.write(code)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", script], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        )  # fmt: skip
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _compile() -> None:
    """Compile the package to bytecode, as pip does with what it installs."""
    compileall.compile_dir(Path(bendtrace.__file__).parent, quiet=1)


def imports(rounds: int, peers: bool = True) -> dict[str, Any]:
    """Time `import` of packages after torch was imported.

    Returns:
        For each package seconds (wall and processor time) and modules beyond torch, and `installs`,
        the number of distributions that it needs.
    """
    _compile()
    found: dict[str, list[Any]] = {}
    for _ in range(rounds):
        for name, code in _IMPORTS.items():
            package = name.split(",")[0]
            if importlib.util.find_spec(package) is None:
                continue
            if peers or package == "bendtrace":
                found.setdefault(name, []).append(run_python(_IMPORT.format(what=code)))
    made: dict[str, Any] = {}
    for name in _IMPORTS:
        package, listed = name.split(",")[0], found.get(name)
        if listed is None:
            there = importlib.util.find_spec(package) is not None
            made[name] = {"reason": "not measured" if there else "not installed"}
            continue
        made[name] = {
            **summary([one["seconds"] for one in listed]).json(),
            "cpu": statistics.median(one["cpu"] for one in listed),
            "modules": listed[0]["modules"],
            "installs": len(packages(package)),
        }
    return made


def packages(name: str) -> set[str]:
    """Return the distributions that installing one brings, itself and torch's left out."""
    return _needed(name) - _needed("torch") - {name}


def _needed(name: str) -> set[str]:
    found, waiting = set(), [name]
    while waiting:
        at = waiting.pop().lower().replace("_", "-")
        if at in found:
            continue
        try:
            required = importlib.metadata.requires(at) or []
        except importlib.metadata.PackageNotFoundError:
            if at != name:
                continue  # of another platform, or of an extra
            required = []
        found.add(at)
        for line in required:
            wanted, _, marker = line.partition(";")
            if "extra" not in marker:
                waiting.append(_distribution(wanted))
    return found


def _distribution(line: str) -> str:
    name = line.strip()
    for mark in " <>=!~[(":
        name = name.split(mark)[0]
    return name


def cold(case: str, rounds: int, ways: list[str] | None = None) -> dict[str, Any]:
    """Time, in fresh processes, from a model that is made to its first output, imports included."""
    _compile()
    found: dict[str, list[float]] = {}
    reasons: dict[str, str] = {}
    listed = [name for name in _FIRST if ways is None or name in ways]
    for number in range(rounds):
        for name in listed:
            if name in reasons or (number and name in _COMPILING):  # which takes long enough
                continue
            package = name if name in _PACKAGES else None
            if package and importlib.util.find_spec(package) is None:
                reasons[name] = "not installed"
                continue
            what = "\n".join(f"    {line}" for line in _FIRST[name].splitlines())
            with tempfile.TemporaryDirectory() as caches:  # compiled before would not be cold
                try:
                    one = run_python(
                        _COLD.format(case=case, what=what), TORCHINDUCTOR_CACHE_DIR=caches
                    )
                except RuntimeError as error:
                    reasons[name] = str(error)
                    continue
            found.setdefault(name, []).append(one["seconds"])
    return {
        name: summary(found[name]).json() if name in found else {"reason": reasons[name]}
        for name in listed
    }


def version_of(name: str) -> str:
    """Return the version of a distribution."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
