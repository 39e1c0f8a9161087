"""What is published says what is true: its page, its requirements, its names for packages."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bendtrace as bt
from bendtrace.python.lazy import imported
from tests.documents import PAGES, ROOT, needs
from tests.environments import PROJECT, names_in

BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]
SOURCES = sorted((ROOT / "bendtrace").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REPOSITORY = PROJECT["urls"]["Homepage"]
BLOB = f"{REPOSITORY}/blob/main/"
RAW = f"{REPOSITORY.replace('github.com', 'raw.githubusercontent.com')}/main/"


def test_the_readme_links_to_files_of_the_repository_as_the_page_of_an_index() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    for change in BUILD["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        page = re.sub(change["pattern"], change["replacement"], page)
    pictures = re.findall(r'!\[[^\]]*\]\(([^)\s]+)|<img src="([^"]+)"', page)
    links = [link for link in re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)", page) if link[0] != "#"]
    assert pictures
    assert len(links) > 10
    for place, targets in ((RAW, [a or b for a, b in pictures]), (BLOB, links)):
        for target in targets:
            assert target.startswith("https://"), target
            if target.startswith(REPOSITORY.rpartition("/")[0]) or place == RAW:
                assert target.startswith(place), target
                assert (ROOT / target.removeprefix(place).partition("#")[0]).is_file(), target


def test_the_command_and_the_version_are_those_of_the_package() -> None:
    module, _, name = PROJECT["scripts"]["bendtrace"].partition(":")
    with pytest.raises(SystemExit) as ended:
        getattr(imported(module), name)(["--version"])
    assert ended.value.code == 0
    assert BUILD["version"]["path"] == "bendtrace/__init__.py"
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    about = dict(re.findall(r"^([\w-]+): (\S.*)$", citation, re.MULTILINE))
    assert about["version"] == bt.__version__
    assert (about["title"], about["license"]) == (PROJECT["name"], PROJECT["license"])
    assert about["repository-code"] == REPOSITORY
    assert about["abstract"] == ">-"
    assert PROJECT["description"] in " ".join(citation.split())
    assert f"- name: {PROJECT['authors'][0]['name']}\n" in citation


def test_the_workflow_runs_the_versions_of_python_that_are_claimed() -> None:
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    found = re.search(r"python: (\[.*\])", workflow)
    assert found is not None
    assert ast.literal_eval(found[1]) == claimed
    assert PROJECT["requires-python"] == f">={claimed[0]}"


def imported_by(path: Path) -> Iterator[str]:
    """Yield the packages that a file imports, at once or by name when it needs them."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(name), level=0):
                yield name
            case ast.Call(func=ast.Name(id=("required" | "imported" | "LazyModule")),
                          args=[ast.Constant(value=str(name)), *_]):  # fmt: skip
                yield name


@pytest.mark.more
def test_each_package_that_is_imported_is_required_or_an_extra() -> None:
    known = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    known |= names_in("all")
    # Results are made for treescope if it asks for them.
    known |= {"bendtrace", "treescope", *sys.stdlib_module_names}
    found = {name.partition(".")[0] for path in SOURCES for name in imported_by(path)}
    assert {name for name in found - known if canonicalize_name(name) not in known} == set()
    assert {"pandas", "zarr", "captum", "safetensors", "matplotlib"} <= found


def test_extras_are_in_all_and_texts_name_packages_that_are_in_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    own = extras.keys() - {"all", "bench", "test", "docs", "dev"}
    assert names_in("all") == set().union(*map(names_in, own))
    for path in [*SOURCES, *NOTEBOOKS, *PAGES]:
        assert "bendtrace[" not in path.read_text("utf-8"), path
    for page in PAGES:
        assert set(needs(page.read_text("utf-8"))) <= names_in("test"), page
    texts = "".join(path.read_text("utf-8") for path in [*NOTEBOOKS, *PAGES])
    commands = re.findall(r"`pip install ([\w >=.-]+)`", texts)
    known = names_in("test") | {"torch"}
    assert {name for command in commands for name in command.split()} - known == set()
