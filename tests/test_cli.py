from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import bendtrace
from bendtrace import cli as runs
from bendtrace.cli import main

MODELS = """\
from __future__ import annotations

import random

import torch
from torch import nn

BUILT = []


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.mix = nn.Linear(3, 3)
        self.drop = nn.Dropout()
        BUILT.append(self)

    def forward(self, x, steps=1):
        print("forward is running")
        x = self.drop(self.norm(x))
        if x.sum() > 5:
            x = self.mix(x)
        return {"out": x, "steps": steps}


class Sized(nn.Module):
    def __init__(self, size):
        super().__init__()


def make(size=3) -> Gate:
    return Gate()


def plain_make():
    return Gate().eval()


def makes_nothing():
    return 3


def breaks():
    raise OSError("no weights")


def double(x, by=2):
    return x * by


def helper(x):
    return x @ torch.ones(7, 7)


def raises(x):
    return helper(x)


def baked(x):
    return x * (len(str(x.sum().item())) + hash(x.sum().item()) % 7)


def random_gain(x):
    return x * (torch.initial_seed() % 7)


gate = Gate().eval()
number = 3
"""


@dataclass
class Result:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=pytest.fail)

    @property
    def error(self) -> str:
        """The last line on stderr, without what leads every error."""
        assert self.status == 2
        assert self.out == ""
        last = self.err.splitlines()[-1]
        assert last.startswith("bendtrace: error: ")
        assert "bendtrace/" not in self.err.replace("bendtrace/show/example.py", "")
        return last.removeprefix("bendtrace: error: ")


Run = Callable[..., Result]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "100")
    Path("models.py").write_text(MODELS)

    def call(*argv: str) -> Result:
        capsys.readouterr()
        try:
            status = main(argv)
        except SystemExit as end:
            status = int(end.code or 0)
        return Result(status, *capsys.readouterr())

    before = set(sys.modules)
    yield call
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def traced(run: Run, *argv: str) -> Any:
    result = run("trace", *argv, "--json")
    assert result.status == 0, result.err
    return result.json


# The example


def test_the_example_shows_everything(run: Run) -> None:
    result = run()
    assert result.status == 0
    assert result.err == ""
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 90
    assert "TraceError: symbolically traced variables cannot be used as inputs" in result.out
    heads = [line for line in lines if line and line[0] != " "][1:]
    assert heads == ["Model", "Result", "Flow: 7 steps", "Calls", "torch.fx"]
    assert "while   torch.dist(new, x, inf) > self.tolerance  False" in result.out
    assert "while   torch.dist(new, x, inf) > self.tolerance  2 times" in result.out
    assert "if `x.max() > self.limit` at example.py:" in result.out
    assert "was False when traced and is True now" in result.out
    how = [line.split("] ")[1].split() for line in lines if " float32[" in line and "] " in line]
    assert how == [
        ["trace", "equal"],
        ["replay", "equal"],
        ["resume", "equal"],
        ["replay", "equal"],
        ["retrace", "equal"],
        ["replay", "equal"],
    ]
    assert "  6 of 6 calls equal to eager, bit for bit" in lines
    assert "  Stats(traces=3, replays=3, retraces=2, resumes=1, live=0)" in lines


@pytest.mark.parametrize("columns", [64, 80, 120])
def test_tables_fit_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = run().out
    below = out[out.index("\nFlow") :]
    assert max(map(len, below.splitlines())) <= columns


def test_a_difference_is_shown_and_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "same_bits", lambda a, b: False)
    result = run()
    assert result.status == 1
    assert result.out.count("DIFFERENT") == 6
    assert "  0 of 6 calls equal to eager, bit for bit" in result.out


# Models of one's own


def test_a_model_of_ones_own_is_traced_and_called_again(run: Run) -> None:
    given = [
        "--input",
        "randn(4, 3)",
        "--call",
        "x=4 * rand(6, 3); steps=2",
        "--call",
        "-ones(2,3)",
    ]
    result = run("trace", "models.py:Gate", "--eval", *given)
    assert result.status == 0
    assert "forward is running" in result.err.splitlines()
    lines = result.out.splitlines()
    assert "forward is running" not in lines
    assert lines[0] == "models.py:Gate, traced on x: float32[4, 3]"
    assert "  TraceError: symbolically traced variables" in result.out
    assert "  4 of 4 calls equal to eager, bit for bit" in lines


def test_json_tells_the_same_to_machines(run: Run) -> None:
    given = [
        "--input",
        "x=randn(4, 3)",
        "--call",
        "9 + rand(4, 3); steps=1",
        "--call",
        "9 * ones(3, 3)",
    ]
    told = traced(run, "models.py:Gate", "--eval", *given)
    assert list(told) == ["target", "fx_error", "trace", "calls", "stats", "why_live"]
    assert told["target"] == "models.py:Gate"
    assert told["fx_error"].startswith("TraceError: symbolically traced variables")
    assert [step["text"] for step in told["trace"]["flow_steps"]] == ["x.sum() > 5"]
    assert {node["op"] for node in told["trace"]["nodes"]} >= {"placeholder", "output", "get_attr"}
    assert [call["how"] for call in told["calls"]] == ["trace", "replay", "retrace", "resume"]
    assert [call["equal"] for call in told["calls"]] == [True] * 4
    assert told["calls"][2]["inputs"] == {"x": "float32[4, 3]", "steps": "1"}
    assert told["calls"][2]["mismatch"] == "other arguments than before"
    assert told["calls"][3]["given"] == "9 * ones(3, 3)"
    assert told["calls"][3]["mismatch"] == (
        "if `x.sum() > 5` at models.py:22 was False when traced and is True now"
    )
    assert told["stats"] == {"traces": 3, "replays": 1, "retraces": 2, "resumes": 1, "live": 0}
    assert told["why_live"] == []


def test_json_has_no_numbers_that_json_does_not_know(run: Run) -> None:
    told = traced(run, "models.py:double", "--input", "ones(2)", "--input", "inf")
    assert told["calls"][0]["inputs"] == {"x": "float32[2]", "by": "inf"}


@pytest.mark.parametrize("name", ["Gate", "make", "plain_make", "gate"])
@pytest.mark.parametrize("place", ["models.py", "models", "./models.py"])
def test_models_come_in_many_forms(run: Run, place: str, name: str) -> None:
    told = traced(run, f"{place}:{name}", "--input", "randn(4, 3)")
    assert told["trace"]["function"] == "Gate"
    assert {call["equal"] for call in told["calls"]} == {True}


def test_a_function_with_parameters_is_the_model(run: Run) -> None:
    told = traced(run, "models.py:double", "--input", "randn(4)", "--input", "by=3")
    assert told["trace"]["function"] == "double"
    assert told["fx_error"] is None


def test_a_file_of_a_package_may_import_its_neighbours(run: Run) -> None:
    Path("some_package").mkdir()
    Path("some_package/__init__.py").touch()
    Path("some_package/one.py").write_text("from .two import f")
    Path("some_package/two.py").write_text("def f(x): return x + 1")
    for place in ("some_package/one.py", "some_package.one"):
        assert traced(run, f"{place}:f", "--input", "ones(2)")["trace"]["function"] == "f"


def test_a_file_takes_the_place_of_no_module(run: Run) -> None:
    Path("json.py").write_text("def f(x): return x")
    assert traced(run, "json.py:f", "--input", "ones(2)")["target"] == "json.py:f"
    assert sys.modules["json"] is json


def test_training_changes_buffers_as_eager_does(run: Run) -> None:
    given = ["--input", "randn(4, 3)", "--call", "9 + randn(4, 3)"]
    told = traced(run, "models.py:plain_make", "--train", *given)
    assert "'training': True" in str(told["trace"]["nodes"])
    assert {call["equal"] for call in told["calls"]} == {True}
    told = traced(run, "models.py:plain_make", *given)
    assert "'training': False" in str(told["trace"]["nodes"])


@pytest.mark.parametrize(("option", "recorded"), [([], "grad=False"), (["--grad"], "grad=True")])
def test_autograd_records_if_told_to(run: Run, option: list[str], recorded: str) -> None:
    told = traced(run, "models.py:gate", "--input", "randn(4, 3)", *option)
    assert recorded in told["trace"]["nodes"][1]["context"]
    assert torch.is_grad_enabled()


def test_the_seed_decides_what_is_drawn(run: Run) -> None:
    def first(*options: str) -> Any:
        told = traced(run, "models.py:baked", "--input", "randn(3)", *options)
        return [step["value"] for step in told["trace"]["flow_steps"]]

    assert first() == first("--seed", "0") != first("--seed", "1")


def test_inputs_may_begin_with_a_minus(run: Run) -> None:
    told = traced(run, "models.py:double", "--input", "-ones(2)", "--call", "-2; by=-3")
    assert told["calls"][2]["inputs"] == {"x": "-2", "by": "-3"}


def test_inputs_may_come_from_a_file(run: Run) -> None:
    torch.save({"x": torch.ones(3), "by": torch.ones(1)}, "batch.pt")
    told = traced(run, "models.py:double", "--input", "batch.pt", "--call", "load('batch.pt')['x']")
    assert told["calls"][0]["inputs"] == {"x": "float32[3]", "by": "float32[1]"}
    assert told["calls"][2]["inputs"] == {"x": "float32[3]"}


def test_what_fx_gets_wrong_without_an_error_is_said(run: Run) -> None:
    told = traced(run, "models.py:baked", "--input", "randn(3)")
    assert told["fx_error"] == "no error, but a wrong result in call 1"


def test_live_calls_say_why(run: Run) -> None:
    given = ["models.py:random_gain", "--input", "ones(2)"]
    told = traced(run, *given)
    assert [call["how"] for call in told["calls"]] == ["trace", "live"]
    assert [call["equal"] for call in told["calls"]] == [True, True]
    (reason,) = told["why_live"]
    assert told["trace"]["why_live"] == [reason]
    line = 1 + MODELS[: MODELS.index("initial_seed")].count("\n")
    assert re.fullmatch(rf"initial_seed \(see \S*models.py:{line}\) reads or sets .*", reason)
    assert "initial_seed (see " in " ".join(run("trace", *given).out.split())


def test_graphs_and_long_tables_are_printed_with_full(run: Run) -> None:
    Path("long.py").write_text(
        "def f(x):\n    for _ in range(60): x = x + int(x.sum() > 9)\n    return x"
    )
    short = run("trace", "long.py:f", "--input", "ones(1)").out
    assert " more: --full shows them" in short
    assert re.search(r"Graph: \d+ nodes\n  --full prints them\n", short)
    assert "%add_59" not in short
    full = run("trace", "long.py:f", "--input", "ones(1)", "--full").out
    assert "%add_59" in full
    assert "--full" not in full


def test_a_function_is_a_factory_if_its_defaults_make_a_module(run: Run) -> None:
    Path("made.py").write_text(
        "from torch import nn, ones\n"
        "def with_defaults(size=3, *, bias=True): return nn.Linear(size, 2, bias=bias)\n"
        "def model(x=ones(3)): return x + 1\n"
        "def needs_inputs(x=None): return x + 1\n"
    )
    given = ["--input", "ones(3)"]
    linear = traced(run, "made.py:with_defaults", *given)
    assert linear["calls"][0]["inputs"] == {"input": "float32[3]"}
    for name in ("model", "needs_inputs"):
        assert traced(run, f"made.py:{name}", *given)["calls"][0]["inputs"] == {"x": "float32[3]"}


@pytest.mark.all
def test_a_pipe_that_closes_is_no_error() -> None:
    command = f"{sys.executable} -m bendtrace | head -1"
    root = Path(bendtrace.__file__).parents[1]
    done = subprocess.run(command, shell=True, cwd=root, capture_output=True, text=True)
    assert done.stdout == "AdaptiveBlock, traced on x: float32[2, 6]\n"
    assert done.stderr == ""


# Errors


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("models", "'models' does not name a target: write a target as package.module:name"),
        ("modles:Gate", "there is no module 'modles'; did you mean models"),
        ("torch.nn.moduls:Linear", "there is no module 'moduls' in torch.nn; did you mean modules"),
        ("torch.nn.GELU:x", "there is no module 'GELU' in torch.nn; did you mean torch.nn:GELU?"),
        ("torch.nn.functional.gelu:x", "did you mean torch.nn.functional:gelu?"),
        ("a b:c", "'a b' is not a valid module name"),
        ("model.py:Gate", "there is no file 'model.py'; did you mean models.py?"),
        ("models.py:Gaet", "models.py has no 'Gaet'; did you mean Gate?"),
        ("models.py:thing", "models.py has no 'thing'; it has Gate, Sized, make, plain_make,"),
        ("models.py:Gate.froward", "models.py:Gate has no 'froward'; did you mean forward?"),
        ("models.py:gate.mix.x", "models.py:gate.mix has no 'x'"),
        ("models.py:number.x", "models.py:number has no 'x'"),
        ("models.py:Sized", "models.py:Sized cannot be called without arguments, it needs size:"),
        ("models.py:number", "models.py:number is of type int and cannot be called"),
        ("models.py:makes_nothing", "so it has to return a model; it returned int"),
        ("json:JSONDecoder", "json:JSONDecoder is a class, but not an nn.Module"),
    ],
)
def test_a_target_that_is_none_is_said_with_what_there_is(
    run: Run, target: str, message: str
) -> None:
    result = run("trace", target, "--input", "ones(2)")
    assert message in result.error
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--input", "y=ones(2)"], "models.py:double takes (x, by=2): missing a required argument"),
        ([], "models.py:double takes (x, by=2): missing a required argument: 'x'"),
        (["--input", "rnadn(2)"], "`rnadn` in `rnadn(2)` is not known: did you mean randn"),
        (["--input", "1", "--call", "open('x')"], "`open` in `open('x')` is not known"),
        (["--input", "__import__('os').system('touch owned')"], "is not allowed"),
        (["--input", "gone.pt"], "there is no file 'gone.pt'"),
        (["--input"], "argument --input: expected one argument"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--train", "--eval"], "argument --eval: not allowed with argument --train"),
    ],
)
def test_inputs_that_are_none_are_said(run: Run, given: list[str], message: str) -> None:
    assert message in run("trace", "models.py:double", *given).error
    assert not Path("owned").exists()


def test_inputs_are_read_before_the_model_is_imported(run: Run) -> None:
    Path("costly.py").write_text("open('imported', 'w').close()")
    assert "is not known" in run("trace", "costly.py:f", "--input", "no(2)").error
    assert not Path("imported").exists()


def test_an_error_of_the_model_comes_with_the_users_traceback(run: Run) -> None:
    result = run("trace", "models.py:raises", "--input", "ones(2, 3)")
    assert result.error.replace("mm: ", "") == (  # which torch 2.15 adds
        "models.py:raises, called with x: float32[2, 3], raised RuntimeError:"
        " mat1 and mat2 shapes cannot be multiplied (2x3 and 7x7)"
    )
    lines = result.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    frames = [line for line in lines if line.startswith("  File ")]
    assert [frame.rpartition(", in ")[2] for frame in frames] == ["raises", "helper"]


def test_an_error_of_a_module_shows_torch_only_from_the_users_code_on(run: Run) -> None:
    result = run("trace", "models.py:gate", "--input", "ones(2, 4)")
    assert "models.py:gate, called with x: float32[2, 4], raised RuntimeError" in result.error
    frames = [line for line in result.err.splitlines() if line.startswith("  File ")]
    assert 'models.py", line 21, in forward' in frames[0]
    assert all("torch" in frame for frame in frames[1:])


def test_an_error_of_the_example_shows_the_example(run: Run) -> None:
    result = run("trace", "bendtrace.show.example:AdaptiveBlock", "--input", "ones(2)")
    assert result.error.endswith("raised IndexError: tuple index out of range")
    frames = [line for line in result.err.splitlines() if line.startswith("  File ")]
    assert [frame.rpartition(", in ")[2] for frame in frames] == ["forward"]


def test_an_error_of_torchs_own_module_is_one_line(run: Run) -> None:
    result = run("trace", "torch.nn:GELU", "--input", "[1]")
    assert result.error.startswith(
        "torch.nn:GELU, called with input: [1], raised TypeError: gelu()"
    )
    assert len(result.err.splitlines()) == 1


def test_an_error_while_making_a_model_is_the_users(run: Run) -> None:
    result = run("trace", "models.py:breaks", "--input", "1")
    assert result.error == "making models.py:breaks raised OSError: no weights"
    assert result.err.count("  File ") == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise ValueError from KeyError('k')", "ValueError"),
    ],
)
@pytest.mark.parametrize("place", ["broken.py", "broken"])
def test_an_error_while_importing_is_the_users(
    run: Run, source: str, message: str, place: str
) -> None:
    Path("broken.py").write_text(source)
    result = run("trace", f"{place}:f", "--input", "1")
    assert result.error.startswith(f"importing {place} raised {message}")
    assert [line for line in result.err.splitlines() if "File" in line] == [
        line for line in result.err.splitlines() if "broken.py" in line and "File" in line
    ]
    assert "importlib" not in result.err


def test_what_only_fails_under_bendtrace_is_called_a_bug(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trace(*args: Any, **kwargs: Any) -> Any:
        raise IndexError("oh")

    monkeypatch.setattr(runs.BendedModule, "trace", trace)
    message = run("trace", "models.py:double", "--input", "ones(2)").error
    assert message.startswith("models.py:double runs, but not under bendtrace, which is a bug in")
    assert "IndexError: oh (test_cli.py:" in message


def test_a_model_that_cannot_be_copied_cannot_be_compared(run: Run) -> None:
    Path("locked.py").write_text(
        "import threading\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.lock = threading.Lock()\n"
        "    def forward(self, x): return x\n"
    )
    message = run("trace", "locked.py:Net", "--input", "1").error
    assert message.startswith("locked.py:Net cannot be copied, so there is nothing to compare with")


# The process


def python(*argv: str) -> subprocess.CompletedProcess[str]:
    root = Path(bendtrace.__file__).parents[1]
    command = [sys.executable, "-W", "error", "-m", "bendtrace", *argv]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.more
def test_python_m_bendtrace_succeeds() -> None:
    done = python()
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "6 of 6 calls equal to eager, bit for bit" in done.stdout


@pytest.mark.all
def test_python_m_bendtrace_fails_in_one_line() -> None:
    done = python("trace", "torch.nn:Gelu", "--input", "1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("bendtrace: error: torch.nn has no 'Gelu'; did you mean GELU")
    assert done.stderr.count("\n") == 1


def test_help_and_version(run: Run) -> None:
    assert run("--version").out == f"bendtrace {bendtrace.__version__}\n"
    assert "trace a model of your own" in run("--help").out
    told = run("trace", "--help").out
    for word in (
        "--input",
        "--call",
        "--json",
        "--seed",
        "--train",
        "--grad",
        "exit status",
        "load",
    ):
        assert word in told
    assert max(map(len, told.splitlines())) <= 100


def test_the_examples_of_the_help_text_work(run: Run) -> None:
    examples = run("trace", "--help").out.partition("examples\n")[2].splitlines()
    assert len(examples) == 2
    Path("model.py").write_text(MODELS.replace("class Gate", "class Net").replace("Gate", "Net"))
    for example in examples:
        words = shlex.split(example.replace("n=2", "steps=2"))
        assert words[:3] == ["python", "-m", "bendtrace"]
        assert run(*words[3:]).status == 0


# The search for inputs


@pytest.mark.parametrize(
    ("by", "name"), [("module", "outside"), ("op", "repeat_1_1"), ("line", "wide.py:2  wide = ")]
)
def test_cost_lists_what_takes_time_and_memory(run: Run, by: str, name: str) -> None:
    Path("wide.py").write_text("def net(x):\n    wide = x.repeat(1000)\n    return wide.sum()\n")
    done = run("cost", "wide.py:net", "--input", "x=ones(100)", "--by", by)
    assert done.status == 0
    assert done.out.split()[:6] == ["name", "ops", "time", "backward", "nbytes", "share"]
    assert f"\n{name}" in done.out
    assert "391.0 KB of values at most, at sum_1_2: repeat_1_1 (390.6 KB), input_1_0 (" in done.out


def test_explore_finds_inputs_that_take_other_sides(run: Run) -> None:
    Path("rare.py").write_text("def rare(x):\n    return x * 2 if x.sum() > 5.9 else x\n")
    done = run("explore", "rare.py:rare", "--input", "x=zeros(2, 3)", "--domain", "x=(-1.0, 1.0)")
    assert done.status == 0
    assert done.out.startswith("inputs found for 1 of 1 side never taken (2 runs of the model)")
    assert "x.sum() > 5.9" in done.out


@pytest.mark.parametrize(("options", "message"), [
    (("--domain", "x=3"), "--domain is NAME=(LEAST, GREATEST), not 'x=3'"),
    (("--domain", "x"), "--domain is NAME=(LEAST, GREATEST), not 'x'"),
    (("--domain", "y=(0, 1)"), "the inputs have no part 'y' to have a domain; there are: x"),
    ((), "no input may differ: name one, as in --domain"),
])  # fmt: skip
def test_explore_says_what_is_written_wrong(
    run: Run, options: tuple[str, ...], message: str
) -> None:
    assert message in run("explore", "models.py:double", "--input", "x=ones(2)", *options).error
