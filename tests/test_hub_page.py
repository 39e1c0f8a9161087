"""The page on Hugging Face runs and prints what it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the test extra")
pytest.importorskip("peft", reason="needs peft")

ROOT = Path(__file__).parent.parent


def test_the_examples_of_the_page_print_what_it_shows(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "hugging_face.md").read_text()
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / "page.py").write_text("".join(body for kind, body in blocks if kind == "python"))
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = "".join(body for kind, body in blocks if kind == "")
    assert [line.rstrip() for line in done.stdout.splitlines()] == shown.splitlines()
    assert (tmp_path / "llama.svg").read_text().startswith("<svg")
