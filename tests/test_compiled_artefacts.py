"""Compiled code that is kept in a directory, for other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bendtrace as bt
from bendtrace.engine import compile_settings as module
from bendtrace.engine.compile_settings import Artefacts
from bendtrace.errors import CompileWarning, InputError
from tests.documents import ROOT

FACTS: dict[str, Any] = {"mode": None}


@pytest.fixture(autouse=True)
def _the_variable_is_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/as it was")
    yield
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/as it was"


def compiled(directory: Path, text: str = "code", settings: dict[str, Any] = FACTS) -> list[str]:
    """Compile something in a directory; return what was there before, and what became of it."""
    kept = Artefacts(str(directory), settings)
    with kept.used(text):
        own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        found = sorted(p.relative_to(own).as_posix() for p in own.rglob("*") if p.is_file())
        for name in ("ab/cab.cpp", "ab/cab.so", "locks/cab.lock", "fxgraph/x/pickled"):
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).write_text(f"{name} of {text}")
    kept.warn()
    return [*found, *kept.notes]


def entry(directory: Path) -> Path:
    (found,) = directory.iterdir()
    return found


def test_sources_and_libraries_are_found_again_and_nothing_pickled_is(tmp_path: Path) -> None:
    (note,) = compiled(tmp_path)
    assert note.endswith(": compiled")
    *files, note = compiled(tmp_path)
    assert files == ["ab/cab.cpp", "ab/cab.so"]
    assert note.endswith(f": taken from {tmp_path}")
    assert (entry(tmp_path) / "ab/cab.so").read_text() == "ab/cab.so of code"


def test_other_sources_and_settings_have_entries_of_their_own(tmp_path: Path) -> None:
    compiled(tmp_path)
    assert compiled(tmp_path, "other") == [compiled(tmp_path / "new", "other")[0]]
    (note,) = compiled(tmp_path, settings={"mode": "max-autotune"})
    assert "what was kept is for others: settings" in note
    assert "max-autotune" in note


def test_another_version_of_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(tmp_path)
    was = torch.__version__
    monkeypatch.setattr(torch, "__version__", "9.9")
    (note,) = compiled(tmp_path)
    assert f"torch {was!r} then, '9.9' now" in note


def spoiled(at: Path, how: str) -> None:
    manifest = at / "bendtrace.json"
    if how == "a damaged library":
        (at / "ab/cab.so").write_text("something else")
    elif how == "a missing file":
        (at / "ab/cab.cpp").unlink()
    elif how == "half a manifest":
        manifest.write_text(manifest.read_text()[:50])
    elif how == "no manifest":
        manifest.unlink()
    elif how == "another manifest":
        manifest.write_text(json.dumps({"format": "something"}))
    elif how == "a file":
        for path in sorted(at.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        at.rmdir()
        at.write_text("not a directory")
    elif how == "a changed name":
        manifest.write_text(manifest.read_text().replace("ab/cab.so", "../../cab.so"))


@pytest.mark.parametrize(
    "how",
    [
        "a damaged library", "a missing file", "half a manifest", "no manifest",
        "another manifest", "a file", "a changed name",
    ],
)  # fmt: skip
def test_what_is_damaged_is_refused_in_words_and_made_anew(tmp_path: Path, how: str) -> None:
    compiled(tmp_path)
    spoiled(entry(tmp_path), how)
    with pytest.warns(CompileWarning, match="is not used, and made anew: "):
        (note,) = compiled(tmp_path)
    assert "cannot be used" in note
    assert compiled(tmp_path)[:2] == ["ab/cab.cpp", "ab/cab.so"]
    assert entry(tmp_path).is_dir()


def test_a_manifest_never_leads_out_of_its_entry(tmp_path: Path) -> None:
    for name in ("../a/b.so", "/a/b.so", "a/../../b.so", "a/.b/c.so", "b.so", "a/b.pkl", "C:/a.so"):
        assert not module._names_file_inside(name), name
    assert module._names_file_inside("ab/cab.main.so")


def test_what_cannot_be_kept_is_told_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file in the way")
    (_, note) = compiled(tmp_path / "taken")
    assert "not kept" in note
    assert (tmp_path / "taken").read_text() == "a file in the way"


def test_an_error_while_compiling_leaves_no_entry(tmp_path: Path) -> None:
    kept = Artefacts(str(tmp_path / "new"), FACTS)
    with pytest.raises(ValueError, match="broken"), kept.used("code"):
        raise ValueError("broken")
    assert not (tmp_path / "new").exists()


def test_who_is_second_leaves_what_the_first_has_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes compile the same; one is done while the other has not looked yet."""
    kept = Artefacts(str(tmp_path), FACTS)
    with kept.used("code"):
        own = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        (own / "ab").mkdir()
        (own / "ab/cab.so").write_text("of the slower one")
        inner = Artefacts(str(tmp_path), FACTS)
        inner._keep(*_faster(inner, tmp_path / "faster"))
    assert compiled(tmp_path)[0].startswith("ab/")
    assert len(list(tmp_path.glob("path-*"))) == 1
    assert not list(tmp_path.glob("draft-*"))


def _faster(inner: Artefacts, own: Path) -> tuple[str, str, str, dict[str, str]]:
    (own / "ab").mkdir(parents=True)
    (own / "ab/cab.so").write_text("of the faster one")
    code = module.hashlib.sha256(b"code").hexdigest()
    name = module.hashlib.sha256(f"{code}{inner._facts}".encode()).hexdigest()[:16]
    return f"path-{name}", code, str(own), module._files_in(str(own))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_dir": "x"}, "give backend='inductor'"),
        ({"cache_dir": "x", "backend": "aot_eager"}, "give backend='inductor'"),
        ({"cache_dir": 3, "backend": "inductor"}, "cache_dir has to be a path, not 3"),
        ({"cache_dir": __file__, "backend": "inductor"}, "is no directory"),
    ],
)
def test_what_is_no_directory_is_refused_at_the_door(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        bt.BendedModule(torch.relu, **options)


def test_a_model_warns_of_what_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also though the warnings of compilers are hidden while it compiles."""

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_file = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], "ab", "cab.so")
        compiled_file.parent.mkdir(parents=True, exist_ok=True)
        compiled_file.write_text("code")
        return graph.forward

    def call() -> None:
        options: Any = {"drop_slower": False}
        bended = bt.BendedModule(
            torch.nn.Linear(3, 3), backend="inductor", backend_options=options, cache_dir=tmp_path
        )
        with torch.no_grad():
            for _ in range(3):
                bended(torch.ones(2, 3))

    monkeypatch.setattr(module.CompileSettings, "compilers", lambda self, on_cpu: (backend,))
    call()
    spoiled(entry(tmp_path), "a damaged library")
    with pytest.warns(CompileWarning, match="is not used, and made anew: "):
        call()


SCRIPT = """
import sys, torch, bendtrace as bt
import torch._inductor.cpp_builder as builder
runs = []
build = builder.CppBuilder.build
builder.CppBuilder.build = lambda *args, **kw: (runs.append(1), build(*args, **kw))[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
options = {"drop_slower": False, "options": {"compile_threads": 1}}
bended = bt.BendedModule(model, backend="inductor", backend_options=options, cache_dir=sys.argv[1])
x = torch.randn(2, 4)
with torch.no_grad():
    for _ in range(4):
        made = bended(x)
    torch.testing.assert_close(made, model(x))
print(len(runs), bended.compiled.hits, *bended.compiled.kept)
"""


@pytest.mark.all
def test_another_process_compiles_no_cpp(tmp_path: Path) -> None:
    said = []
    for _ in range(2):
        made = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True,
            cwd=ROOT, timeout=550, check=True,
        )  # fmt: skip
        said.append(made.stdout.split(maxsplit=2))
    (first, hits, how), (second, hits_then, how_then) = said
    assert int(first) > 0
    assert (second, hits, hits_then) == ("0", "2", "2")
    assert how.strip().endswith(": compiled")
    assert "taken from" in how_then
