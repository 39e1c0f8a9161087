"""What the pages show is what their code prints, and what they link to is there."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT, blocks, is_run, name_of, needs, printed, shown_in
from tests.environments import modules_of, modules_outside
from tests.shares import some

# Pages that another test runs, in their own way.
ELSEWHERE = {
    "docs/distributed.md": "tests/test_distributed.py, on two processes",
}
# Files that a page's code says it makes.
MADE = {
    "docs/comparisons.md": "reader.svg", "docs/hugging_face.md": "llama.svg",
    "docs/pictures.md": "gpt2.svg", "docs/tutorial.md": "early_exit.svg",
}  # fmt: skip
# The first that a newcomer sees; `--all` runs every page.
BRIEF = {ROOT / "README.md", ROOT / "docs" / "tutorial.md"}
RUN = [page for page in PAGES if is_run(page) and name_of(page) not in ELSEWHERE]


@pytest.mark.parametrize("page", some(RUN, chosen=BRIEF), ids=name_of)
def test_the_examples_of_the_page_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    named = needs(page.read_text("utf-8"))
    try:
        hidden = modules_outside(named)
    except PackageNotFoundError as error:
        pytest.skip(f"the page needs {error.name}")
    assert printed(page, tmp_path, hidden) == shown_in(page)
    imported = set((tmp_path / "modules").read_text("utf-8").split())
    assert [name for name in named if not modules_of(name) & imported] == []
    made = MADE.get(name_of(page))
    assert made is None or (tmp_path / made).read_text().startswith("<svg")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_page_links_to_files_that_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not target.startswith(("http", "mailto:")):
            # Where the documentation is built, the notebooks are copied to.
            place = re.sub(r"^(\.\./)?notebooks/", r"\1../notebooks/", target)
            assert (page.parent / place).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_code_of_the_page_fits_beside_the_contents(page: Path) -> None:
    lines = [line for mark, text in blocks(page) if mark for line in text.splitlines()]
    assert [line for line in lines if len(line) > 88] == []


# What the words of the design are not to be called, outside of code and of what others say.
WORDS = {
    r"re-trac\w+": "retrace", r"trace-tree|tree of traces": "trace tree",
    r"traced (numbers?|ints?|floats?|bools?)\b": "traced scalar", r"flow-steps?": "flow step",
    r"guard failures?|failed guards?": "divergence", r"node-paths?|nodepaths?\b": "node path",
    r"interven\w+": "interjection", r"live mode": "live run", r"analyzers?": "analyser",
    r"replay mode": "replay", r"trace points?|tracepoints?": "flow step or node",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_page_uses_the_words_of_the_design(page: Path) -> None:
    if "coming_from" in page.parts or page.name == "comparisons.md":
        return  # which say what others call it
    text = re.sub(
        r"^```.*?^```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for other, word in WORDS.items():
        found = re.search(other, text, re.IGNORECASE)
        assert found is None, f"{found[0]!r} should be {word!r}"


def test_a_page_cannot_import_what_it_does_not_name(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Frames\n\n```python\nimport pandas\n```\n", "utf-8")
    with pytest.raises(AssertionError, match="No module named 'pandas'"):
        printed(page, tmp_path, modules_outside(needs(page.read_text("utf-8"))))
    says = "The code on this page also needs `pip install pandas safetensors`."
    assert needs(f"# Frames\n\n{says}\n\nA frame") == ["pandas", "safetensors"]


def test_no_page_is_left_out() -> None:
    assert {name_of(page) for page in PAGES} >= {*ELSEWHERE, *MADE}
    assert all((ROOT / name).exists() for name in MADE)
    assert len(RUN) > 20
