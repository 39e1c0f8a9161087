"""Values that are printed, or are in the message of an assertion: a replay does so anew."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bendtrace as bt
from tests.promise import bits
from tests.registry.calls import args, case


def ramp(scale: float) -> Tensor:
    return torch.linspace(-1, 2, 3) * scale


RAMPS = [args(lambda scale=scale: (ramp(scale),)) for scale in (1, 2, 3, 1, 50, -2, 1000, 3)]
# A model whose text is a part of the path.
path = case(*RAMPS)


def screen(function: Any) -> Any:
    """Register a model all of whose calls but the first are replays."""
    raising = 2 if function.__name__ == "asserted" else 0

    def check(bended: bt.BendedModule) -> None:
        assert bended.stats.replays == 7 - raising, bended.stats

    return case(*RAMPS, served=check)(function)


def shown(call: Callable[..., Any], x: Tensor) -> Any:
    """Return what a call gives or raises, and what it writes to the screen."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            given: Any = bits(call(x))
        except AssertionError as error:
            given = str(error)
    return given, out.getvalue(), err.getvalue()


@screen
def values(x: Tensor) -> Tensor:
    print("value", x.sum(), x.sum().item(), x.shape, [x, x.shape[0]], {"a": (x,)}, sep="|")
    return x * 2


@screen
def formatted(x: Tensor) -> Tensor:
    print(f"{x.mean():.3f} of {x.shape} {x.shape[0]:>4} {x!r} {x.sum().item():8.3f}|{x.device!s}")
    return x * 2


@screen
def by_a_name(x: Tensor) -> Tensor:
    message = f"mean {x.mean()}"
    if x.shape[0] == 3:
        print(message, file=sys.stderr)
    print("again:", message, f"<{message}>")
    return x * 2


@screen
def put_together(x: Tensor) -> Tensor:
    print("a " + str(x.sum().item()) + " b", end="!\n", flush=True)
    print("{:.2f}".format(x.max()))  # noqa: UP032
    print("%s" % x.min())  # noqa: UP031
    return x * 2


@screen
def before_it_is_written_to(x: Tensor) -> Tensor:
    y = x.clone()
    print(f"{y}", y.add_(1))
    return y


@screen
def unused(x: Tensor) -> Tensor:
    message = f"{x.sum()}"  # noqa: F841
    return x * 2


@screen
def constants(x: Tensor) -> Tensor:
    print("hello", nn.ReLU, 3)
    print()
    return x * 2


@screen
def asserted(x: Tensor) -> Tensor:
    torch._assert((x < 100).all(), f"{x} is too large")
    torch._assert(x.shape[0] == 3, message=f"{x.shape[0]} is another size")
    return x * 2


@path
def asserted_and_caught(x: Tensor) -> Any:
    try:
        torch._assert((x < 8).all(), f"{x.max()} is too large")
    except AssertionError as error:
        return x, str(error)
    return x * 2, None


@path
def used_as_well(x: Tensor) -> Tensor:
    text = f"{x.sum():.0f}"
    print(text)
    return x * len(text)


@path
def by_percents(x: Tensor) -> Tensor:
    print("%s and %5.1f" % (x.min(), x.max()))  # noqa: UP031
    return x * 2


@path
def padded(x: Tensor) -> Tensor:
    text = f"{x.sum()}"
    print(f"{text:>30}|")
    return x * 2


@path
def of_a_width_of_its_own(x: Tensor) -> Tensor:
    print(f"{3:{int(x.abs().sum()) + 1}}|")
    return x * 2


@path
def to_a_file(x: Tensor) -> Tensor:
    file = io.StringIO()
    print(f"{x.sum():.0f}", x.sum().item(), file=file)
    return x * len(file.getvalue())


@path
def seen_by_another(x: Tensor) -> Any:
    text = f"{x.sum()}"

    def later() -> str:
        return text

    print(text)
    return x * len(later())


class Verbose:
    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __str__(self) -> str:
        return f"{self.value.sum()}".rjust(30, ".")


@path
def of_an_object(x: Tensor) -> Tensor:
    print(Verbose(x))
    return x * 2


def shadowed() -> Callable[..., Any]:
    said: list[str] = []

    def print(text: str) -> None:
        said.append(text)

    def model(x: Tensor) -> Any:
        print(f"{x.sum():.0f}")
        return x * len(said.pop())

    model.__name__ = "shadowed"
    return model


path(shadowed())


def test_what_was_printed_is_not_printed_again_by_a_resumed_run() -> None:
    def model(x: Tensor) -> Tensor:
        print("sum", x.sum())
        y = x * 2 if x.sum() > 0 else x - 1
        print(f"then {y.sum():.2f}")
        return y

    bended = bt.BendedModule(model)
    for scale in (1, -1, 2, -2):
        assert shown(bended, ramp(scale)) == shown(model, ramp(scale))
    assert (bended.stats.resumes, bended.stats.replays) == (1, 2)


def test_what_is_printed_goes_to_what_the_stream_is_by_then(capsys: Any) -> None:
    def model(x: Tensor) -> Tensor:
        print("out", x[0].item())
        print("err", file=sys.stderr)
        return x * 2

    bended = bt.BendedModule(model)
    for _ in range(3):
        bended(ramp(1))
    captured = capsys.readouterr()
    assert captured.out == "out -1.0\n" * 3
    assert captured.err == "err\n" * 3


def test_something_inserted_changes_what_is_printed_after_it() -> None:
    def model(x: Tensor) -> Tensor:
        y = x.relu()
        print(f"{y.sum():.1f}", y.shape[0])
        return y

    bended = bt.BendedModule(model)
    assert shown(bended, ramp(1))[1] == "2.5 3\n"
    with bended.interject("relu", lambda value: value + 1):
        assert [shown(bended, ramp(1))[1] for _ in range(3)] == ["5.5 3\n"] * 3
    assert shown(bended, ramp(1))[1] == "2.5 3\n"


def test_printing_is_not_taken_for_a_layer() -> None:
    def model(x: Tensor) -> Tensor:
        print(f"{x.sum()}", x)
        return x.relu()

    with contextlib.redirect_stdout(io.StringIO()):
        log = bt.trace(model, ramp(1), save="all")
        assert "relu" in log.names
        assert log.validate()


# Streams that forward itself puts in the place of the screen


def into_a_buffer(x: Tensor) -> Tensor:
    buffer = io.StringIO()
    with contextlib.redirect_stdout(buffer):
        print("sum", x.sum(), f"{x.mean()}", x.sum().item())
    print("written", len(buffer.getvalue()), x.sum())
    return x * len(buffer.getvalue())


def errors_into_a_buffer(x: Tensor) -> Tensor:
    with contextlib.redirect_stderr(io.StringIO()) as buffer:
        print(x.sum(), file=sys.stderr)
    return x * len(buffer.getvalue())


def nowhere(x: Tensor) -> Tensor:
    with contextlib.redirect_stdout(None):
        print("nowhere", x.sum())
    print("screen", x.sum())
    return x * 2


def exchanged_by_hand(x: Tensor) -> Tensor:
    before, sys.stdout = sys.stdout, io.StringIO()
    try:
        print("x", x.sum())
        text = sys.stdout.getvalue()
    finally:
        sys.stdout = before
    return x * len(text)


def past_the_buffer(x: Tensor) -> Tensor:
    screen = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()) as buffer:
        print("screen", x.sum(), file=screen)
        print("buffer", x.sum())
    return x * len(buffer.getvalue())


def within_another(x: Tensor) -> Tensor:
    with contextlib.redirect_stdout(io.StringIO()) as outer:
        with contextlib.redirect_stdout(io.StringIO()) as inner:
            print(x.sum())
        print(inner.getvalue() * 2, end="")
    return x * len(outer.getvalue())


def one_for_the_other(x: Tensor) -> Tensor:
    with contextlib.redirect_stdout(sys.stderr):
        print("errors", x.sum())
    return x + 1


class Counting:
    def __init__(self) -> None:
        self.number = 0

    def write(self, text: str) -> None:
        self.number += len(text)


def into_an_object(x: Tensor) -> Tensor:
    counting = Counting()
    with contextlib.redirect_stdout(counting):
        print("x", x.sum())
    return x * counting.number


@pytest.mark.parametrize(
    "model",
    [into_a_buffer, errors_into_a_buffer, nowhere, exchanged_by_hand, past_the_buffer,
     within_another, one_for_the_other, into_an_object],
)  # fmt: skip
def test_what_forward_prints_into_a_stream_of_its_own(
    model: Callable[[Tensor], Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    bended = bt.BendedModule(model)
    for value in (1.0, 100.0, 1.0, 1e6, 100.0):
        x = torch.full((1,), value)
        wanted, shown = model(x), capsys.readouterr()
        assert torch.equal(bended(x), wanted)
        assert capsys.readouterr() == shown
    assert bended.stats.replays
