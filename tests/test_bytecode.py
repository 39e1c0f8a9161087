"""Instructions that are read from bytes are those that `dis` tells."""

from __future__ import annotations

import collections
import dis
import inspect
import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from bendtrace.python import bytecode
from bendtrace.python.bytecode import computed_lookups, global_uses, has, instructions_of
from bendtrace.tape import plain_numbers
from bendtrace.watch import code_facts, environment, reachability

MODULES = (
    collections, dis, inspect, bytecode, code_facts, environment, reachability,
    torch.nn.functional, torch.nn.modules.module, torch.nn.modules.rnn, torch.overrides, types,
)  # fmt: skip


def codes() -> Iterator[types.CodeType]:
    for module in MODULES:
        for thing in vars(module).values():
            for member in (thing, *(vars(thing).values() if isinstance(thing, type) else ())):
                code = getattr(member, "__code__", None)
                if isinstance(code, types.CodeType):
                    yield from code_facts.codes_in(code)


def test_names_are_those_that_dis_tells() -> None:
    count = 0
    for code in codes():
        told = [
            (step.opname, step.argval)
            for step in dis.get_instructions(code)
            if step.opname in code_facts._WHAT
        ]
        assert list(global_uses(code)) == told, code
        count += len(told)
    assert count > 3000


def test_steps_are_those_that_dis_tells() -> None:
    for code in codes():
        told = [
            (step.opname, step.arg or 0)
            for step in dis.get_instructions(code)
            if step.opname not in ("EXTENDED_ARG", "CACHE")
        ]
        found = list(instructions_of(code))
        assert [name for name, _ in found] == [name for name, _ in told]
        takes = {name for name, number in dis.opmap.items() if number >= dis.HAVE_ARGUMENT}
        with_argument = [(name, argument) for name, argument in found if name in takes]
        assert with_argument == [pair for pair in told if pair[0] in takes]
        assert has(code, "IS_OP") == any(name == "IS_OP" for name, _ in told)


def test_arguments_that_need_more_than_a_byte_are_read() -> None:
    lines = [f"    name_{number} + x.other_{number}" for number in range(700)]
    namespace: dict[str, types.FunctionType] = {}
    exec("def many(x):\n" + "\n".join(lines) + "\n    x.last = 1\n", namespace)
    code = namespace["many"].__code__
    found = list(global_uses(code))
    assert ("LOAD_GLOBAL", "name_699") in found
    assert found[-1] == ("STORE_ATTR", "last")
    assert code_facts.names_in(code) >= {"name_699", "other_699", "last"}


@pytest.mark.parametrize("source", ["x is y", "y is x is None", "(x is True) is y"])
def test_code_that_compares_identity_is_told(source: str) -> None:
    assert bytecode.code_compares_identity(compile(source, "<test>", "eval"))


@pytest.mark.parametrize("source", ["x is None", "x == y", "x is not True"])
def test_code_that_compares_with_constants_is_told(source: str) -> None:
    assert not bytecode.code_compares_identity(compile(source, "<test>", "eval"))


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("x is True", True), ("x is not False", True), ("x is None", False), ("x == True", False),
        ("type(x)", True), ("(True, x is y)", False), ("x.device.type == 'cpu'", False),
    ],
)  # fmt: skip
def test_code_that_needs_plain_numbers_is_told(source: str, needs: bool) -> None:
    assert plain_numbers.needs_plain_numbers(compile(source, "<test>", "eval")) == needs


@pytest.mark.parametrize(
    ("source", "of_self"),
    [
        ("getattr(self, f'l{i}')", [True]), ("getattr(self, 'l{}'.format(i), None)", [True]),
        ("getattr(self, 'l' + str(i))(i)", [True]), ("getattr(self, self.names[i])", [True]),
        ("[getattr(self, n) for n in i]", [True]), ("getattr(self, 'l')", []),
        ("setattr(self, i, getattr(i, i))", [True, False]),
        ("getattr(self.l, i)", [False]), ("getattr(self[0], i)", [False]),
        ("getattr(self.l(), i)", [False]), ("getattr(self(i), i)", [False]),
        ("getattr(self(1)(2), i)", [False]), ("getattr(-self, i)", [False]),
        ("getattr((self, i)[1], i)", [False]), ("getattr(self if i else i, i)", [False]),
        ("map(getattr, self, i)", [False]), ("vars(self)[i]", [False]), ("getattr(i, i)", [False]),
    ],
)  # fmt: skip
def test_lookups_by_computed_names_are_told(source: str, of_self: list[bool]) -> None:
    namespace: dict[str, types.FunctionType] = {}
    exec(f"def looks(self, i):\n    return {source}\n", namespace)
    found = (computed_lookups(c) for c in code_facts.codes_in(namespace["looks"].__code__))
    assert [one for several in found for one in several] == of_self


def test_later_versions_of_python_are_asked_by_way_of_dis(monkeypatch: pytest.MonkeyPatch) -> None:
    read = [list(global_uses(code)) for code in codes()]
    monkeypatch.setattr(bytecode, "_KNOWN", False)
    assert [list(global_uses(code)) for code in codes()] == read


def test_a_model_that_stores_attributes_is_known_to() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            import math

            self.kept = x
            return x * math.pi

    found = reachability.reachable_from(Model)
    assert found.stores == {"kept"}
    assert {"kept", "math", "pi"} <= found.names
