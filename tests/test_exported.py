"""Models taken out of Python: equal to the model, or refused by line."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from torch import Tensor, nn

import bendtrace as bt
from bendtrace.cli import main
from bendtrace.errors import ExportError, InputError
from bendtrace.export.exporting import Exported, difference
from tests.export_models import MODELS, D
from tests.export_programs import made as random_program
from tests.shares import some

ONES = torch.ones(3)


def exported(model: Callable[..., Any], *inputs: Any, **options: Any) -> Exported:
    return bt.BendedModule(model).export(*inputs, **options)


def assert_equal(made: Callable[..., Any], model: Callable[..., Any], *args: Any) -> None:
    with torch.no_grad():
        assert difference(made(*args), model(*args)) is None


def higher_order(program: torch.export.ExportedProgram) -> list[str]:
    """Return the names of the control flow operators at the top of a program."""
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return [name for name in targets if name in ("cond", "while_loop")]


# What comes out is what the model gives


def test_a_branch_is_a_cond_and_a_loop_is_a_while_loop() -> None:
    def model(x: Tensor) -> Tensor:
        y = x + 1 if x.sum() > 0 else x - 1
        while y.norm() > 1:
            y = y / 2
        return y

    made = exported(model, ONES, -ONES, ONES * 9)
    assert "cond" in higher_order(made.program)
    assert "while_loop" in higher_order(made.program)
    for scale in (0.1, -3.0, 1000.0):
        assert_equal(made, model, torch.full((5,), scale))


@pytest.mark.more
def test_branches_in_a_loop_and_loops_in_a_branch() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 0:
            while x.norm() > 1:
                x = x * 0.5 if x[0] > x[1] else x * 0.7
                while x.max() > 2:
                    x = x - 1
        else:
            x = -x
        return x

    inputs = [torch.tensor(pair) for pair in ([9.0, 1], [1.0, 9], [-1.0, 0], [0.1, 0.2], [2.0, 5])]
    made = exported(model, *inputs)
    torch.manual_seed(0)
    for _ in range(50):
        assert_equal(made, model, torch.rand(2) * 20 - 1)


@pytest.mark.more
def test_a_loop_that_is_left_in_its_middle() -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.zeros(())
        while x.norm() > 1:
            x = x * 0.6
            if x[0] > 3:
                break
            steps = steps + 1
            if x[1] > 3:
                return x, -steps
        return x, steps

    torch.manual_seed(0)
    inputs = [torch.randn(2) * 8 for _ in range(50)]
    made = exported(model, *inputs)
    for _ in range(50):
        assert_equal(made, model, torch.randn(2) * 8)


def test_what_is_written_to_in_a_branch_is_as_it_would_be() -> None:
    def model(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        if x[0] > 0:
            out[1] = x[0]
            out.add_(1)
        part = out[1:]
        if x[1] > 0:
            out = out * 2
        return out + part.sum()

    inputs = [torch.tensor(p) for p in ([1.0, 1, 1], [-1.0, 1, 1], [1.0, -1, 1], [-1.0, -1, 1])]
    made = exported(model, *inputs)
    for x in inputs:
        assert_equal(made, model, x * 3)


def test_a_write_to_shared_memory_behind_a_question_is_refused_by_line() -> None:
    def model(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        part = out[1:]
        if x[0] > 0:
            part.add_(1)
        return out + part.sum()

    with pytest.raises(ExportError, match=r"`part.add_\(1\)` at .*test_exported.py:\d+: .*copy"):
        exported(model, ONES, -ONES)


@pytest.mark.more
def test_numbers_out_of_tensors_are_computed_with_as_in_python() -> None:
    def model(x: Tensor, table: Tensor) -> tuple[Any, ...]:
        n, share = int(x.argmax()), x[0].item()
        m = (n + 3) * 2 - n // 2
        if share / 3 > 0.2 and m % 3 != 1:
            x = x * share
        return x + m, table[n], m, share, n == 1

    torch.manual_seed(0)
    inputs = [(torch.rand(3), torch.randn(3, 2)) for _ in range(50)]
    made = exported(model, *inputs)
    for _ in range(50):
        assert_equal(made, model, torch.rand(3), torch.randn(3, 2))


@pytest.mark.more
def test_an_int_that_picks_a_module_is_a_switch() -> None:
    made = exported(
        MODELS["top-1 experts"].model(), *itertools.islice(MODELS["top-1 experts"].stream(1), 50)
    )
    assert higher_order(made.program).count("cond") >= 2


def test_sizes_stay_open_unless_a_guard_fixes_them() -> None:
    def model(x: Tensor) -> Tensor:
        return x.view(x.shape[0] * x.shape[1]) * (2 if x.sum() > 0 else 3)

    made = exported(model, torch.ones(2, 3), -torch.ones(4, 5))
    assert_equal(made, model, torch.ones(7, 6))

    def fixed(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] == 3 and x.sum() > 0 else x

    made = exported(fixed, ONES, -ONES)
    with pytest.raises((RuntimeError, AssertionError)):
        made(torch.ones(4))


def test_other_dtypes_than_those_exported_raise() -> None:
    made = exported(lambda x: x + 1 if x.sum() > 0 else x, ONES, -ONES)
    with pytest.raises((RuntimeError, AssertionError)):
        made(ONES.double())


def test_parameters_keep_their_names_and_are_the_models_own() -> None:
    model = MODELS["solver"].model()
    made = exported(model, *itertools.islice(MODELS["solver"].stream(1), 5))
    assert sorted(made.program.state_dict) == ["f.bias", "f.weight"]
    assert torch.equal(made.program.state_dict["f.weight"], model.f.weight)


def test_keyword_inputs_dicts_and_dict_outputs() -> None:
    def model(x: Tensor, *, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": x + batch["a"]} if x.sum() > 0 else {"y": x - batch["a"]}

    inputs = [{"x": ONES * s, "batch": {"a": ONES}} for s in (1, -1)]
    made = exported(model, *inputs)
    out = made(x=ONES * 4, batch={"a": ONES})
    assert list(out) == ["y"]
    assert torch.equal(out["y"], ONES * 5)


def test_numbers_among_the_inputs_stay_as_they_were() -> None:
    def model(x: Tensor, n: int, *rest: Tensor, scale: float = 2.0) -> Tensor:
        return x * n + sum(rest) if x.sum() > 0 else x * scale

    inputs = [bt.workflows.Call((s * ONES, 3, ONES, ONES), {"scale": 0.5}) for s in (1, -1)]
    made = exported(model, *inputs)
    assert torch.equal(made(ONES * 2, 3, ONES, ONES, scale=0.5), ONES * 8)
    for args, scale in (((ONES, 4, ONES, ONES), 0.5), ((ONES, 3, ONES, ONES), 0.25)):
        with pytest.raises(InputError, match="was exported with"):
            made(*args, scale=scale)


@pytest.mark.more
@pytest.mark.parametrize(
    ("seed", "is_counted"),
    some(itertools.product(range(40), [False, True]), chosen=[(1, False), (3, True)]),
)
def test_random_programs_are_equal_or_raise(seed: int, is_counted: bool, tmp_path: Path) -> None:
    model = random_program(seed, is_counted)
    torch.manual_seed(seed)
    try:
        inputs = [(torch.randn(3), torch.randn(3)) for _ in range(20)]
        made = exported(model, *inputs, to=tmp_path / "model.pt2")
    except ExportError as error:
        if "a loop is entered in its middle" not in str(error):
            raise  # no other refusal is right here
        return
    for x, y in inputs:
        assert difference(made(x, y), model(x, y)) is None
    messages = set()
    for number in range(20):
        x, y = torch.randn(3) * (1 + number % 3), torch.randn(3)
        try:
            given = made(x, y)
        except RuntimeError as error:
            messages.add(str(error))
        else:
            assert difference(given, model(x, y)) is None
    assert messages <= {one.message for one in made.unseen}


# What was never seen


def test_an_unseen_side_raises_an_error_that_names_the_question() -> None:
    def model(x: Tensor) -> Tensor:
        if x.sum() > 100:
            raise ValueError("too large")
        return x * 2

    made = exported(model, ONES)
    assert [one.seen for one in made.unseen] == [(False,)]
    with pytest.raises(RuntimeError, match=r"`x.sum\(\) > 100` at .*:\d+ was always False"):
        made(ONES * 99)
    assert "never taken" in str(made)


@pytest.mark.more
def test_unseen_sides_in_loops_and_branches_raise_behind_them() -> None:
    def model(x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x * 0.5
            if x[0] < 0:
                x = x * 0.1
        return x

    made = exported(model, ONES * 8, ONES * 0.1)
    assert_equal(made, model, ONES * 50)
    with pytest.raises(RuntimeError, match=r"`x\[0\] < 0` at .* was always False"):
        made(-ONES * 8)


def test_unseen_sides_can_be_refused() -> None:
    bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x)
    with pytest.raises(ExportError, match="never took some sides"):
        bended.export(ONES, unseen="error")
    assert bended.export(ONES, -ONES, unseen="error").unseen == ()


def test_an_int_that_no_input_had_raises() -> None:
    def model(x: Tensor) -> Tensor:
        return x * [1.0, 2.0, 3.0][int(x.argmax())]

    made = exported(model, torch.tensor([1.0, 0, 0]), torch.tensor([0.0, 1, 0]))
    assert_equal(made, model, torch.tensor([0.0, 3, 0]))
    with pytest.raises(RuntimeError, match="was always 0 or 1"):
        made(torch.tensor([0.0, 0, 1]))


def test_what_explore_finds_closes_sides() -> None:
    bended = bt.BendedModule(lambda x: x * 2 if x.sum() > 25 else x)
    found = bended.explore(torch.zeros(3), {"x": (0.0, 10.0)})
    assert bended.export(((torch.zeros(3),), {}), *found.inputs, unseen="error").unseen == ()


# What is refused


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


def draws(x: Tensor) -> Tensor:
    return x + torch.rand(3)


def writes(x: Tensor) -> Tensor:
    x.add_(1)
    return x


def as_float(x: Tensor) -> Tensor:
    return x * (1.0 if float(x.sum()) in (1.0, 2.0) else 2.0)


def two_kinds(x: Tensor) -> Any:
    return x if x.sum() > 0 else None


def grows(x: Tensor) -> Tensor:
    while x.sum() < 5:
        x = torch.cat([x, x[:1]])
    return x


def numpy_inside(x: Tensor) -> Tensor:
    return x * float(x.numpy().mean())


REFUSED = {
    "state": (Counts(), (ONES,), "sets self.calls"),
    "random numbers": (
        draws,
        (ONES,),
        r"`torch.rand\(3\)` at .*test_exported.py:\d+: rand may draw",
    ),
    "writing to an input": (
        writes,
        (ONES,),
        r"`x.add_\(1\)` at .*: the model writes to an argument",
    ),
    "a float in Python": (as_float, (ONES,), "Python reads 3.0 from a tensor"),
    "two kinds": (two_kinds, (ONES, -ONES), "one side continues with"),
    "a size that grows": (grows, (ONES, ONES * 0.3), "grows|size|while_loop|torch.export"),
    "numpy": (numpy_inside, (ONES,), "numpy is not torch's"),
    "sizes that decide": (
        lambda x: x * 2 if x.shape[0] > 3 else x,
        (torch.ones(2), torch.ones(5)),
        r"input 2 is not of the same kind .*`x.shape\[0\] > 3`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    model, inputs, words = REFUSED[name]
    path = tmp_path / "model.pt2"
    with pytest.raises(ExportError, match=words):
        exported(model, *inputs, to=path)
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_a_clear_error(tmp_path: Path) -> None:
    bended = bt.BendedModule(lambda x: x * 2)
    with pytest.raises(InputError, match="no paths are known"):
        bended.export()
    with pytest.raises(InputError, match="unseen is"):
        bended.export(ONES, unseen="guess")
    with pytest.raises(InputError, match="has to end with"):
        bended.export(ONES, to=tmp_path / "model.bin")
    with pytest.raises(InputError, match="there is no folder"):
        bended.export(ONES, to=tmp_path / "missing" / "model.pt2")
    with pytest.raises(InputError, match="input 2 has other positional or keyword"):
        bended.export(ONES, {"x": ONES})
    with pytest.raises(ExportError, match="with input 1, the model raises"):
        bended.export(None)
    assert list(tmp_path.iterdir()) == []


def test_without_inputs_what_calls_have_shown_is_exported() -> None:
    """The calls that took new paths, as they were given then."""

    def model(x: Tensor, gain: int = 2) -> Tensor:
        while x.norm() > 1:
            x = x / 2
        return x * gain if x.sum() > 0 else -x

    bended = bt.BendedModule(model)
    inputs = [torch.randn(3, generator=torch.Generator().manual_seed(n)) * n for n in range(40)]
    for x in inputs:
        bended(x)
        x.zero_()  # which the example does not become
    made = bended.export()
    assert 2 < made.compared < 20
    for n in range(40):
        assert_equal(made, model, torch.randn(3) * n)
    large = torch.ones(1 << 19)
    bended(large, gain=3)
    assert any(note.startswith("without 1 of the calls") for note in bended.export().notes)


def test_a_program_that_differs_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from bendtrace.export.writer import ProgramWriter

    written = ProgramWriter.write

    def wrong(*args: Any) -> Any:
        made = written(*args)
        text = made.text.replace(".add(c", ".sub(c").replace(".add(1)", ".sub(1)")
        assert text != made.text
        return type(made)(**{**vars(made), "text": text})

    monkeypatch.setattr(ProgramWriter, "write", wrong)
    with pytest.raises(ExportError, match="with input 1, the program's output differs"):
        exported(lambda x: x.add(1), ONES)


# Files


RUN = """
import sys, torch
assert "bendtrace" not in sys.modules
program = {load}
inputs, wanted = torch.load({data!r})
for args, want in zip(inputs, wanted):
    with torch.no_grad():
        given = program(*args)
    given = given if isinstance(given, (tuple, list)) else [given]
    for one, other in zip(given, want):
        assert torch.allclose(one, other, rtol=0, atol={off}), (one, other)
try:
    program(torch.full((3,), 500.0))
except RuntimeError as error:
    assert "x.sum() > 100" in str(error), error
else:
    raise AssertionError("the unseen side passed")
"""


def halved(x: Tensor) -> Tensor:
    if x.sum() > 100:
        x = x * 0
    while x.norm() > 1:
        x = x * 0.5 if x[0] > 0 else x * 0.25
    return x


def run_elsewhere(path: Path, load: str, off: float) -> None:
    """Run a file in a process that has neither the model nor this library."""
    torch.manual_seed(1)
    inputs = [(torch.randn(3) * 20,) for _ in range(30)]
    inputs = [args for args in inputs if float(args[0].sum()) < 100]
    data = path.parent / "data.pt"
    torch.save((inputs, [(halved(*args),) for args in inputs]), data)
    code = RUN.format(load=load.format(str(path)), data=str(data), off=off)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=path.parent, timeout=300
    )
    assert done.returncode == 0, done.stderr


INPUTS = [torch.tensor(v) for v in ([9.0, 1, 1], [-9.0, 1, 1], [0.1, 0, 0])]


@pytest.mark.more
def test_a_saved_program_runs_where_the_model_is_not(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    made = exported(halved, *INPUTS, to=path)
    assert str(path) in str(made)
    run_elsewhere(path, "torch.export.load({!r}).module()", 0.0)


@pytest.mark.all
def test_a_compiled_package_runs_where_the_model_is_not(tmp_path: Path) -> None:
    path = tmp_path / "model.aoti.pt2"
    exported(halved, *INPUTS, to=path)
    run_elsewhere(path, "torch._inductor.aoti_load_package({!r})", 1e-5)


@pytest.mark.more
def test_an_onnx_file_is_run_by_onnxruntime(tmp_path: Path) -> None:
    for extra in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(extra)
    from bendtrace.export import OnnxProgram

    path = tmp_path / "model.onnx"
    exported(halved, *INPUTS, to=path)
    program = OnnxProgram(path)
    for scale in (0.1, 3.0, 20.0):
        with torch.no_grad():
            assert torch.allclose(program(INPUTS[1] * scale)[0], halved(INPUTS[1] * scale))
    with pytest.raises(RuntimeError, match=r"x.sum\(\) > 100"):
        program(torch.full((3,), 500.0))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(
        InputError, match=r"needs onnxscript: pip install onnx onnxruntime onnxscript$"
    ):
        exported(halved, *INPUTS, to=tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_the_rows_of_the_examples_have_the_width_of_the_models() -> None:
    assert next(MODELS["gated"].stream(0))[0].shape[1] == D


# The command line


SOURCE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 3)

    def forward(self, x):
        while x.norm() > 1:
            x = self.fc(x) * 0.3 if x.sum() > 0 else x * 0.5
        return x
"""


def test_the_command_line_writes_a_file_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(SOURCE)
    path = tmp_path / "net.pt2"
    target = f"{tmp_path / 'net.py'}:Net"
    options = ["export", target, "--input", "x=randn(2, 3) * 5", "--repeat", "10"]
    assert main([*options, "--to", str(path)]) == 0
    out, _ = capsys.readouterr()
    assert "equal to the model, bit by bit, for 10 inputs" in out
    assert "net.pt2" in out
    assert torch.export.load(path).module()(x=torch.ones(5, 3)).shape == (5, 3)


COUNTED = """
import torch

def net(x):
    step, scales = 0, [0.5, 0.25, 0.125]
    while x.norm() > 1:
        x = x * scales[step % 3]
        step += 1
    return x
"""


def test_the_progress_bar_starts_again_where_a_counter_has_to_stay_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, int, int]] = []

    class Bar(tqdm.tqdm):  # type: ignore[type-arg]
        def update(self, n: float | None = 1) -> bool | None:
            self.n += n
            shown.append((self.desc, self.n, self.total))
            return None

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    (tmp_path / "net.py").write_text(COUNTED)
    options = ["--input", "x=randn(3) * 5", "--repeat", "3", "--to", str(tmp_path / "net.pt2")]
    assert main(["export", f"{tmp_path / 'net.py'}:net", *options]) == 0
    assert [step.split(":")[0] for step, _, _ in shown].count("record") > 3
    assert all(number <= total for _, number, total in shown)
    assert shown[-1][1:] == (8, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no inputs"),
        (["--input", "randn(2)", "--repeat", "0"], "--repeat takes"),
        (["--input", "zeros(2, 3)", "--unseen", "error"], "never took some sides"),
        (["--input", "y=randn(2)"], "unexpected keyword"),
    ],
)
def test_the_command_line_refuses_in_one_line(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(SOURCE)
    path = tmp_path / "out.pt2"
    target = f"{tmp_path / 'net.py'}:Net"
    assert main(["export", target, *options, "--to", str(path)]) == 2
    assert words in capsys.readouterr().err.replace("missing a required", "unexpected keyword")
    assert not path.exists()


def test_what_torch_refuses_is_said_once_and_nothing_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def sliced(x: Tensor) -> Tensor:
        best = x[x > 0].argmax()
        if len(x[x > 0]) > 5:
            return x
        return x[x > 0][best : best + 2].view(2, 1)

    with pytest.raises(ExportError, match=r"best \+ 2.*: a size or an index depends on values"):
        bt.BendedModule(sliced).export(
            torch.tensor([1.0, 3.0, 2.0, -1.0, -1.0, -1.0]), torch.ones(6)
        )
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")


def test_a_side_that_each_round_has_is_listed_once() -> None:
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def rounds(x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x).tanh()
            if x.max() > 5:
                break
        return x

    made = bt.BendedModule(rounds).export(ONES)
    assert len(made.unseen) == 3
    (line,) = [line for line in repr(made).splitlines() if "x.max() > 5" in line]
    assert line.endswith("(3 times)")


def test_a_list_of_inputs_says_to_unpack_it() -> None:
    with pytest.raises(ExportError, match="for several calls, unpack it"):
        bt.BendedModule(nn.Linear(3, 3)).export([ONES, ONES])


def by_rank_of_input(x: Tensor) -> Tensor:
    return x * 2 if x[None].squeeze(1).ndim == 1 else x * 3


def test_a_size_that_decides_how_many_dimensions_there_are_is_a_condition() -> None:
    made = bt.BendedModule(by_rank_of_input).export(torch.ones(3), torch.ones(4))
    for size in (2, 3, 5):
        assert_equal(made, by_rank_of_input, torch.randn(size))
    with pytest.raises(AssertionError, match=r"Guard failed: x.size\(\)\[0\] != 1"):
        made(torch.ones(1))
    made = bt.BendedModule(lambda x: x[None].squeeze(1) * 3).export(torch.ones(3), torch.ones(4))
    for size in (1, 2, 5):  # nobody asks
        assert_equal(made, lambda x: x[None].squeeze(1) * 3, torch.randn(size))


@pytest.mark.parametrize(
    "squeezed",
    [
        lambda x: x[None, x > 0].squeeze(1),
        lambda x: torch.squeeze(x[None, x > 0]),
        lambda x: torch.corrcoef(x[None, x > -9][:, :2] + x[x > 0].sum()),
    ],
    ids=["dim", "all", "corrcoef"],
)
def test_values_that_decide_how_many_dimensions_there_are_are_refused(
    squeezed: Callable[[Tensor], Tensor],
) -> None:
    def model(x: Tensor) -> Tensor:
        return x * 2 if squeezed(x).ndim < 2 else x * 3

    refusal = r"how many dimensions \w+ gives depends on values, and .*ndim.* asks for it"
    with pytest.raises(ExportError, match=refusal):
        bt.BendedModule(model).export(torch.tensor([3.0, 1, 1]), torch.tensor([2.0, 1, -3]))
