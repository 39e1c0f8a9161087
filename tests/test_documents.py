"""What the pages show is what their code prints, and what they link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT, code_of, is_run, name_of, printed, shown_in

# Pages that another test runs, in their own way.
ELSEWHERE = {
    "docs/distributed.md": "tests/test_distributed.py, on two processes",
    "docs/pictures.md": "docs/make_pictures.py, whose models it is about",
}
# Files that a page's code says it makes.
MADE = {
    "README.md": "refine.svg", "docs/comparisons.md": "reader.svg",
    "docs/hugging_face.md": "llama.svg",
}  # fmt: skip
RUN = [page for page in PAGES if is_run(page) and name_of(page) not in ELSEWHERE]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_examples_of_the_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    for package in ("transformers", "peft"):
        if re.search(rf"^\s*(import|from) {package}\b", code_of(page), re.MULTILINE):
            pytest.importorskip(package, reason=f"the page needs {package}")
    assert printed(page, tmp_path) == shown_in(page)
    made = MADE.get(name_of(page))
    assert made is None or (tmp_path / made).read_text().startswith("<svg")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_page_links_to_files_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http", "mailto:")):
            assert (page.parent / target).exists(), target


def test_no_page_is_left_out() -> None:
    assert {name_of(page) for page in PAGES} >= {*ELSEWHERE, *MADE}
    assert all((ROOT / name).exists() for name in MADE)
    assert len(RUN) > 20
