from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bendtrace.cli import InputTexts, read_expression
from bendtrace.errors import InputError
from bendtrace.python.compare import same_bits


def made(*texts: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return InputTexts(texts).make()


def refusal(text: str) -> str:
    with pytest.raises(InputError) as caught:
        made(text)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("+2.5", 2.5),
        ("True", True),
        ("None", None),
        ("'a;b=c'", "a;b=c"),
        ("(1, [2, 'x'], {'k': (3,), 4: None})", (1, [2, "x"], {"k": (3,), 4: None})),
        ("-inf", -math.inf),
        ("nan", math.nan),
        ("float32", torch.float32),
        ("2 * 3 - 1", 5),
        ("zeros(2, 3)", torch.zeros(2, 3)),
        ("zeros((2, 3))", torch.zeros(2, 3)),
        ("ones([2], dtype=bool)", torch.ones(2, dtype=torch.bool)),
        ("ones(2, dtype=torch.bfloat16)", torch.ones(2, dtype=torch.bfloat16)),
        ("torch.ones(2, requires_grad=True)", torch.ones(2, requires_grad=True)),
        ("full((2,), -1.5)", torch.full((2,), -1.5)),
        ("arange(1, 7, 2)", torch.arange(1, 7, 2)),
        ("linspace(0, 1, 5)", torch.linspace(0, 1, 5)),
        ("eye(2, 3)", torch.eye(2, 3)),
        ("tensor([[1, 2], [3, 4]], dtype=int64)", torch.tensor([[1, 2], [3, 4]])),
        ("tensor([])", torch.tensor([])),
        ("4 * ones(2) / 2 + 1", torch.full((2,), 3.0)),
        ("-ones(1)", -torch.ones(1)),
        ("[zeros(1), (ones(1),)]", [torch.zeros(1), (torch.ones(1),)]),
    ],
)
def test_expressions_have_values(text: str, value: Any) -> None:
    assert same_bits(read_expression(text), value)


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("randn(2, 3)", lambda: torch.randn(2, 3)),
        ("rand((4,), dtype=float64)", lambda: torch.rand(4, dtype=torch.float64)),
        ("randint(3, 9, (2, 2))", lambda: torch.randint(3, 9, (2, 2))),
        ("randint(0, high=5, size=(3,))", lambda: torch.randint(0, 5, (3,))),
    ],
)
def test_random_inputs_are_those_of_torch(text: str, make: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    given = read_expression(text)
    torch.manual_seed(3)
    assert same_bits(given, make())


def test_names_make_keyword_arguments() -> None:
    args, kwargs = made("ones(1)", "mode='x=y'", " n = 3 ", "2")
    assert same_bits(args, (torch.ones(1), 2))
    assert kwargs == {"mode": "x=y", "n": 3}


def test_a_call_is_split_outside_of_strings() -> None:
    inputs = InputTexts.split("""x=ones(2); s='a;\\'b' ; t="c;"; 3;""")
    assert inputs.texts == ("x=ones(2)", "s='a;\\'b'", 't="c;"', "3")
    assert str(inputs) == """x=ones(2); s='a;\\'b'; t="c;"; 3"""
    assert InputTexts.split("  ").make() == ((), {})


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("__import__('os').system('touch owned')", "`__import__('os').system`"),
        ("__import__('os')", "`__import__`"),
        ("eval('1')", "`eval`"),
        ("open('owned', 'w')", "`open`"),
        ("(lambda: 1)()", "`lambda: 1`"),
        ("[x for x in [1]]", "`[x for x in [1]]`"),
        ("randn(2).numpy()", "`randn(2).numpy`"),
        ("randn.__globals__", "`randn.__globals__`"),
        ("''.__class__", "`''.__class__`"),
        ("torch.serialization.os.system('touch owned')", "`torch.serialization.os.system`"),
        ("torch.load('owned')", "it may be damaged"),
        ("f'{open}'", "`f'{open}'`"),
        ("2 ** 99999999", "`2 ** 99999999`"),
        ("(y := 3)", "`y := 3`"),
        ("1j", "`1j`"),
        ("b'x'", "`b'x'`"),
        ("...", "`...`"),
        ("rand(2)[0]", "`rand(2)[0]`"),
        ("randn(*[1])", "`*[1]`"),
        ("{**{}}", "`{**{}}`"),
        ("{rand(1): 1}", "`rand(1)`"),
        ("1 if 2 else 3", "`1 if 2 else 3`"),
        ("not 1", "`not 1`"),
        ("1 < 2", "`1 < 2`"),
    ],
)
def test_anything_else_is_refused_and_not_run(
    text: str, piece: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text == "torch.load('owned')":  # is our load, which wants another name
        piece = "its name has to end in one of .pt,"
    assert piece in refusal(text)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnadn(2)", "`rnadn` in `rnadn(2)` is not known: did you mean randn or"),
        ("empty(2)", "known names: arange, eye, full, linspace, ones, rand, randint, randn,"),
        ("ones(2, dtype=floot32)", "`floot32` in `ones(2, dtype=floot32)` is not known: did you"),
        ("ones(2, device='cpu')", "write ones(*size, dtype=..., requires_grad=...)"),
        ("ones(2, **{})", "write ones(*size, dtype=..., requires_grad=...)"),
        ("ones('a')", "`'a'` in `ones('a')`: only numbers and lists of numbers are allowed"),
        ("tensor([ones(1)])", "only numbers and lists of numbers are allowed"),
        ("full(2)", "cannot make `full(2)`: write full(size, fill_value,"),
        ("randn(-1)", "cannot make `randn(-1)`: Trying to create tensor with negative dimension"),
        ("tensor([[1], 2])", "cannot make `tensor([[1], 2])`: "),
        ("ones(2) + ones(3)", "cannot make `ones(2) + ones(3)`: The size of tensor a (2) must"),
        ("1 / 0", "cannot make `1 / 0`: division by zero"),
        ("'a' * 9", "`'a'` in `'a' * 9` is not a number or a tensor"),
        ("randn(2", "`randn(2` is not an expression: '(' was never closed"),
        ("1\0", "is not an expression: "),
        ("9" * 5000, "is not an expression: "),
        ("(" * 5000 + ")" * 5000, "`((("),
        ("-" * 50_000 + "1", "is nested too deeply"),
        ("", "an input is empty"),
        ("load(3)", '`load(3)`: write load("file.pt")'),
        ("load('a.txt')", "'a.txt': its name has to end in one of .pt, .pth, .bin, .ckpt, .safe"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    assert message in refusal(text)


def test_a_name_is_given_once() -> None:
    with pytest.raises(InputError, match="two inputs are called 'x'"):
        made("x=1", "x=2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    batch = {"x": torch.arange(3), "y": torch.ones(2)}
    torch.save(batch, "batch.pt")
    torch.save(torch.ones(2), "one.pth")
    torch.save([1, torch.ones(1)], "list.pt")
    save_file(batch, "batch.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", ["batch.pt", "batch.safetensors"])
def test_a_file_with_a_dict_gives_keyword_arguments(folder: Path, name: str) -> None:
    wanted = {"x": torch.arange(3), "y": torch.ones(2)}
    args, kwargs = made(name)
    assert args == ()
    assert same_bits(dict(sorted(kwargs.items())), wanted)
    assert same_bits(read_expression(f"load('{name}')['x'] + 1"), torch.arange(3) + 1)
    assert same_bits(made(f"d={name}")[1]["d"]["y"], torch.ones(2))


def test_a_file_with_a_tensor_gives_a_positional_argument(folder: Path) -> None:
    assert same_bits(made("one.pth"), ((torch.ones(2),), {}))
    assert same_bits(made(str(folder / "one.pth")), ((torch.ones(2),), {}))


def test_other_files_have_to_be_named(folder: Path) -> None:
    assert "contains a list; as the inputs it has to contain a tensor" in refusal("list.pt")
    assert same_bits(made("x=list.pt"), ((), {"x": [1, torch.ones(1)]}))
    assert same_bits(read_expression("load('list.pt')[1]"), torch.ones(1))


def test_missing_items_and_files_are_said_with_what_is_there(folder: Path) -> None:
    assert "has no item 'z'; it has 'x', 'y'" in refusal("load('batch.pt')['z']")
    assert "there is no file 'bacth.pt'; did you mean batch.pt" in refusal("bacth.pt")
    assert "there is no folder 'nowhere'" in refusal("nowhere/x.pt")


class Owner:
    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


def test_code_in_a_pickle_is_not_run(folder: Path) -> None:
    torch.save({"x": Owner()}, "zip.pt")
    Path("plain.pt").write_bytes(pickle.dumps(Owner()))
    for name in ("zip.pt", "plain.pt"):
        for text in (name, f"load('{name}')", f"x={name}"):
            assert f"'{name}' was not loaded: it contains other objects" in refusal(text)
    assert not Path("owned").exists()


@pytest.mark.parametrize("name", ["junk.pt", "junk.safetensors"])
@pytest.mark.parametrize("content", [b"", b"junk", b"PK\3\4junk" * 9])
def test_damaged_files_are_called_so(folder: Path, name: str, content: bytes) -> None:
    Path(name).write_bytes(content)
    assert "damaged" in refusal(name)


def test_without_safetensors_the_package_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = refusal("batch.safetensors")
    assert message.endswith("needs safetensors: pip install safetensors")
