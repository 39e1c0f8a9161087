"""The README's example runs and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _examples(text: str) -> tuple[str, str]:
    """Return the code of a document, and what it shows to be printed."""
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)
    code = "".join(body for language, body in blocks if language == "python")
    return code, "".join(body for language, body in blocks if language == "")


def _printed(code: str, folder: Path, name: str) -> list[str]:
    (folder / name).write_text(code)
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, name],
        cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.rstrip() for line in done.stdout.replace(f"{folder}/", "").splitlines()]


def test_the_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    code, shown = _examples((ROOT / "README.md").read_text().split("## Use")[1])
    shown = shown.split("python -m")[0]
    assert _printed(code, tmp_path, "refine.py") == shown.splitlines()
    assert (tmp_path / "refine.svg").read_text().startswith("<svg")


def test_the_examples_of_the_log_s_page_print_what_it_shows(tmp_path: Path) -> None:
    code, shown = _examples((ROOT / "docs" / "log.md").read_text())
    assert _printed(code, tmp_path, "log.py") == shown.splitlines()


def test_the_examples_of_the_page_on_insertions_print_what_it_shows(tmp_path: Path) -> None:
    code, shown = _examples((ROOT / "docs" / "insertions.md").read_text())
    assert _printed(code, tmp_path, "insertions.py") == shown.splitlines()


def test_the_examples_of_the_page_on_compiled_paths_print_what_it_shows(tmp_path: Path) -> None:
    code, shown = _examples((ROOT / "docs" / "compiled.md").read_text())
    assert _printed(code, tmp_path, "compiled.py") == shown.splitlines()


def test_the_documents_link_to_files_that_exist() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
