"""One name for one thing: words that the library has given up do not come back."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.documents import ROOT

PACKAGE = ROOT / "bendtrace"
# What each is called now is in docs/glossary.md and docs/architecture.md.
RETIRED = {
    "_board",
    "Ambience", "ambience", "Beside", "Board", "BOUNDARY_CODES", "Lane", "Later",
    "LaterMethod", "Part", "PartKind", "Questions", "ReplayingModule", "Rests", "Sameness",
    "Settled", "StandIn", "StandIns", "Stamp", "Still", "Surroundings", "Through", "Walked", "Want",
    "Within", "World",
    "lane_for", "may_stand_in", "reach_of", "surroundings", "unseen_in",
}  # fmt: skip
RETIRED_FILES = {
    "agreement", "ambience", "beside", "board", "boundaries", "cheapest", "cuts", "dispatching",
    "exchanged", "folded", "given", "handing", "joint", "lane", "outside", "questions", "replaying",
    "rests", "sameness", "served", "serving", "settled", "stamps", "stand_in", "still",
    "surroundings", "through", "unseen", "walk", "walked", "world", "_later",
}  # fmt: skip
ELSEWHERE = {
    "Part": "research",  # a part of an activation
    "kept": "research/reading",  # `harvesting.Harvest.kept`, a public name
    "told_apart": "research",  # `harvesting.Path.told_apart`, a public name
}
# Participles, which name nothing without their context.
PARTICIPLES = {"told", "said", "meant", "settled", "there"}
# For locals, keys and attributes these are short and clear; a function or class says what it does.
OF_LOCALS = {"kept", "held", "made", "gone", "left"}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# `compat` repeats these class names of other libraries.
OF_OTHER_LIBRARIES = {
    "Analyser", "AnalyserEvaluation", "AnalyserList", "BendedModule", "BendingConfig",
    "BendingParameter", "Capture", "Covariance", "DeadReLU", "FeatureStatistics", "HookManager",
    "InterpolateActivation", "InterpolationFromCapture", "LinearProbe", "Op", "PerClassAnalyser",
    "PerClassVersusAnalyser", "Selector", "Variance",
}  # fmt: skip
# A docstring is a sentence with a subject that acts, or a noun: it defines nothing by a question.
DEFINES_BY_A_QUESTION = re.compile(r"(What|Whether|Which|How)\b")
RETIRED_PHRASES = re.compile(
    r"\b(anew|at once|that of|is told|are told|gone on with|came by|has no equal(?! value))\b"
)


def named_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that code defines or uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, DEFINITIONS):
            yield node.name
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield node.arg or ""
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs)):
            yield node.name or ""
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def test_no_file_has_a_name_that_was_given_up() -> None:
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert not names & RETIRED_FILES


@pytest.mark.parametrize("word", sorted(RETIRED))
def test_no_code_uses_a_word_that_was_given_up(word: str) -> None:
    has = re.compile(rf"\b{word}\b").search  # parsing all files takes seconds
    users = [path for path, text in texts().items() if has(text) and word in names_of(path)]
    assert [path for path in users if not allowed(path, word)] == []


def words_in(name: str) -> set[str]:
    """Return the words of a name: `NothingThere` has `nothing` and `there`."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def participles_in(path: str) -> set[str]:
    """Return the names in a file that are participles, or have one as a word."""
    found = {name for name in names_of(path) if words_in(name) & PARTICIPLES}
    for name in re.findall(r"^ *(?:async )?(?:def|class) (\w+)", texts()[path], re.M):
        if name.strip("_").lower() in OF_LOCALS:
            found.add(name)
    return {name for name in found if not allowed(path, name)}


def test_no_name_is_a_participle() -> None:
    found = {path: names for path in texts() if (names := participles_in(path))}
    assert found == {}


def defined(*kinds: type[ast.stmt]) -> dict[str, list[str]]:
    """Return the files that define each top-level class or function, by its name."""
    found: dict[str, list[str]] = {}
    for path in texts():
        for kind, name in facts_of(path).defined:
            if kind in kinds:
                found.setdefault(name, []).append(path)
    return found


def test_each_class_has_a_name_of_its_own() -> None:
    shared = {}
    for name, paths in defined(ast.ClassDef).items():
        own = [path for path in paths if not path.startswith("compat/")]
        if len(own if name in OF_OTHER_LIBRARIES else paths) > 1:
            shared[name] = paths
    assert shared == {}


def test_each_file_has_a_name_of_its_own() -> None:
    found: dict[str, list[str]] = {}
    for path in texts():
        found.setdefault(Path(path).stem, []).append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {
        "__init__": found["__init__"]
    }


# Functions that are the same to their callers, or public names of several modules.
SHARED_FUNCTIONS = {
    "_",  # registered for a type
    "between", "data_frame", "find_nan", "hot_path", "load", "log_forward_pass", "save",
    "show_model_graph", "steer", "trace",
}  # fmt: skip


def test_functions_that_do_different_things_have_different_names() -> None:
    found = defined(ast.FunctionDef, ast.AsyncFunctionDef)
    assert {name for name, paths in found.items() if len({*paths}) > 1} == SHARED_FUNCTIONS


@pytest.mark.parametrize("name", sorted(OF_OTHER_LIBRARIES))
def test_a_name_of_another_library_is_repeated(name: str) -> None:
    assert len(defined(ast.ClassDef)[name]) > 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("_is_told", {"", "is", "told"}),
        ("NothingThere", {"nothing", "there"}),
        ("retold", {"retold"}),
    ],
)
def test_names_are_split_into_words(name: str, words: set[str]) -> None:
    assert words_in(name) == words


def allowed(path: str, word: str) -> bool:
    return word in ELSEWHERE and path.startswith(ELSEWHERE[word])


@functools.cache
def texts() -> dict[str, str]:
    files = PACKAGE.rglob("*.py")
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in files}


class Facts(NamedTuple):
    """The names and texts in a file, which takes some 20 ms to parse."""

    names: frozenset[str]
    defined: tuple[tuple[type[ast.stmt], str], ...]
    docstrings: tuple[tuple[str, str], ...]


@functools.cache
def facts_of(path: str) -> Facts:
    tree = ast.parse(texts()[path])
    documented = [n for n in ast.walk(tree) if isinstance(n, (ast.Module, *DEFINITIONS))]
    return Facts(
        frozenset(named_in(tree)),
        tuple((type(node), node.name) for node in tree.body if isinstance(node, DEFINITIONS)),
        tuple(
            (f"{path}: {getattr(node, 'name', '')}", text)
            for node in documented
            if (text := ast.get_docstring(node))
        ),
    )


def names_of(path: str) -> frozenset[str]:
    return facts_of(path).names


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the place of each docstring, and the docstring."""
    for path in texts():
        yield from facts_of(path).docstrings


def test_docstrings_define_by_nouns_and_sentences() -> None:
    wrong = [
        (place, found.partition("\n")[0])
        for place, found in docstrings()
        if DEFINES_BY_A_QUESTION.match(found)
    ]
    assert wrong == []


def test_docstrings_have_no_phrase_that_was_given_up() -> None:
    wrong = [
        (place, phrase[0])
        for place, found in docstrings()
        for phrase in RETIRED_PHRASES.finditer(found)
    ]
    assert wrong == []
