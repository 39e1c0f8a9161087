"""The README's example runs and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text().split("## Use")[1]
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)
    code = "".join(body for language, body in blocks if language == "python")
    shown = "".join(body for language, body in blocks if language == "").split("python -m")[0]
    (tmp_path / "refine.py").write_text(code)
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "refine.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = done.stdout.replace(f"{tmp_path}/", "")
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()


def test_the_documents_link_to_files_that_exist() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
