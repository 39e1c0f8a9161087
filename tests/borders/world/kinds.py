"""Kinds of state, and places to keep it: programs are made of each kind in each place."""

# ruff: noqa: E501 - programs are read line by line

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from tests.borders.world.world import Program


class Kind(NamedTuple):
    """A kind of state.

    Attributes:
        make: an expression that makes it.
        read: an expression of `S` that gives a number.
        change: statements that change `S` as it is.
        define: definitions that it needs.
    """

    make: str
    read: str
    change: str
    define: str = ""


_POINT = """
class Point:
    factor = 2
    def __init__(self, value): self.value = value
    def scaled(self): return self.value * self.factor
    def __call__(self): return self.value + 1
"""
_SLOTS = """
class Slots:
    __slots__ = ("value",)
    def __init__(self, value): self.value = value
"""


_LARGE = "{i: i for i in range(600)}"


def _subclass(base: str, make: str) -> Kind:
    define = f"class Own({base}):\n    tag = 1\n"
    return Kind(f"Own({make})", "S.tag", "S.tag += 1", define)


KINDS = {
    "int_in_list": Kind("[1]", "S[0]", "S[0] += 1"),
    "dict": Kind("{'a': 1}", "S['a']", "S['a'] += 1"),
    "counter": Kind("Counter(a=1)", "S['a']", "S['a'] += 1"),
    "counter_update": Kind("Counter('a')", "S['a']", "S.update('a')"),
    "ordered": Kind("OrderedDict(a=1, b=2)", "next(iter(S.values()))", "S.move_to_end('a')\nS['b'] += 1\nS['a'] += 2"),
    "ordered_order": Kind("OrderedDict(a=1, b=2)", "next(iter(S.values()))", "S.move_to_end(next(iter(S)))"),
    "defaultdict": Kind("defaultdict(int, a=1)", "S['a'] + len(S)", "S['b' * len(S)] += 1"),
    "deque": Kind("deque([1])", "S[-1]", "S.append(len(S) + 1)"),
    "set": Kind("{1}", "len(S)", "S.add(len(S) + 1)"),
    "bytearray": Kind("bytearray(b'a')", "S[0]", "S[0] += 1"),
    "array": Kind("np.ones(2)", "float(S[0])", "np.add(S, 1, out=S)"),
    "object_array": Kind("np.array([[1], 2], dtype=object)", "S[0][0]", "S[0][0] += 1"),
    "point": Kind("Point(1)", "S.value", "S.value += 1", _POINT),
    "method": Kind("Point(1)", "S.scaled()", "S.value += 1", _POINT),
    "bound": Kind("Point(1).scaled", "S()", "S.__self__.value += 1", _POINT),
    "callable": Kind("Point(1)", "S()", "S.value += 1", _POINT),
    "class_of": Kind("Point(1)", "S.scaled()", "type(S).factor += 1", _POINT),
    "slots": Kind("Slots(1)", "S.value", "S.value += 1", _SLOTS),
    "namespace": Kind("types.SimpleNamespace(o=types.SimpleNamespace(k=1))", "S.o.k", "S.o.k += 1"),
    "dataclass": Kind(
        "Outer(Inner(1))", "S.inner.k", "S.inner.k += 1",
        "@dataclasses.dataclass\nclass Inner:\n    k: int\n"
        "@dataclasses.dataclass\nclass Outer:\n    inner: Inner\n",
    ),
    "deep": Kind("[[[[[[{'a': [1]}]]]]]]", "S[0][0][0][0][0][0]['a'][0]", "S[0][0][0][0][0][0]['a'][0] += 1"),
    "objects": Kind("[Point(1), Point(2)]", "sum(p.value for p in S)", "S[-1].value += 1", _POINT),
    "chain": Kind(
        "Node(Node(Node(Node(Node(Node(Node(Node(Node(Node(Node(1)))))))))))", "S.last().next",
        "S.last().next += 1",
        "class Node:\n    def __init__(self, n): self.next = n\n"
        "    def last(self):\n        n = self\n        while isinstance(n.next, Node): n = n.next\n        return n\n",
    ),
    "partial": Kind("functools.partial(Point.scaled, Point(1))", "S()", "S.args[0].value += 1", _POINT),
    "partial_keywords": Kind("functools.partial(max, 1, key=None, default=1) and functools.partial(dict, a=1)", "S()['a']", "S.keywords['a'] += 1"),
    "function": Kind("(lambda b: lambda: b[0])([1])", "S()", "S.__closure__[0].cell_contents[0] += 1"),
    "function_attribute": Kind("_tagged()", "S.tag", "S.tag += 1", "def _tagged():\n    def f(): pass\n    f.tag = 1\n    return f\n"),
    "default": Kind("(lambda b=[1]: b[0])", "S()", "S.__defaults__[0][0] += 1"),
    "iterator": Kind("iter(range(1, 99))", "next(S)", "next(S)"),
    "count": Kind("itertools.count(1)", "next(S)", "next(S)"),
    "count_next": Kind("itertools.count(1).__next__", "S()", "S()"),
    "cycle": Kind("itertools.cycle([1, 2, 3])", "next(S)", "next(S)"),
    "generator": Kind("(i for i in range(1, 99))", "next(S)", "next(S)"),
    "pop": Kind("[5, 4, 3, 2, 1, 0, 5, 4, 3, 2, 1, 0].pop", "S()", "S()"),
    "append": Kind("[deque([1]), None] and deque([1]).append", "S(1) or len(S.__self__)", "S(2)"),
    "random": Kind("random.Random(0)", "S.random()", "S.random()"),
    "random_bound": Kind("random.Random(0).random", "S()", "S()"),
    "default_rng": Kind("np.random.default_rng(0)", "float(S.random())", "S.random()"),
    "random_state": Kind("np.random.RandomState(0)", "float(S.rand())", "S.rand()"),
    "rng_bound": Kind("np.random.default_rng(0).random", "float(S())", "S()"),
    "dict_subclass": _subclass("dict", "a=1"),
    "list_subclass": _subclass("list", "[1]"),
    "set_subclass": _subclass("set", "[1]"),
    "tuple_subclass": _subclass("tuple", "[1]"),
    "int_subclass": _subclass("int", "1"),
    "float_subclass": _subclass("float", "1.5"),
    "str_subclass": _subclass("str", "'a'"),
    "deque_subclass": _subclass("deque", "[1]"),
    "ordered_subclass": _subclass("OrderedDict", "a=1"),
    "array_subclass": Kind(
        "np.ones(2).view(Own)", "S.tag", "S.tag += 1", "class Own(np.ndarray):\n    tag = 1\n"
    ),
    "dict_content": Kind("Own(a=1)", "S['a']", "S['a'] += 1", "class Own(dict): pass\n"),
    "list_content": Kind("Own([1])", "S[0]", "S[0] += 1", "class Own(list): pass\n"),
    "deque_content": Kind("Own([1])", "S[-1]", "S.append(len(S))", "class Own(deque): pass\n"),
    "enum": Kind(
        "Mode.A", "S.factor + S.scaled()", "S.factor += 1",
        "class Mode(enum.Enum):\n    A = 1\n    def scaled(self): return EXTRA['x'] * self.value\n"
        "Mode.A.factor = 1\nEXTRA = {'x': 1}\n",
    ),
    "enum_method": Kind(
        "Mode.A", "S.scaled()", "EXTRA['x'] += 1",
        "class Mode(enum.Enum):\n    A = 1\n    def scaled(self): return EXTRA['x'] * self.value\n"
        "EXTRA = {'x': 1}\n",
    ),
    "optimizer": Kind(
        "torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)",
        "S.param_groups[0]['lr']", "S.param_groups[0]['lr'] += 1",
    ),
    "scheduler": Kind(
        "torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), 1)",
        "S.last_epoch", "S.optimizer.step()\nS.step()",
    ),
    "distribution": Kind(
        "torch.distributions.Normal(torch.tensor(1.0), 2.0)", "S.mean", "S.loc = S.loc + 1"
    ),
    "scaler": Kind(
        "torch.amp.GradScaler('cpu')", "S.get_growth_interval()", "S.set_growth_interval(S.get_growth_interval() + 1)"
    ),
    "factory": Kind("defaultdict(int)", "S.copy()['b']", "S.default_factory = lambda n=S.copy()['b'] + 1: n"),
    "large_order": Kind(_LARGE, "next(iter(S.values()))", "first = next(iter(S))\nS[first] = S.pop(first)"),
    "large_ordered": Kind(f"OrderedDict({_LARGE})", "next(iter(S.values()))", "S.move_to_end(next(iter(S)))"),
    "large_key": Kind(_LARGE, "type(next(reversed(S))) is not int", "last = next(reversed(S))\nS[float(last)] = S.pop(last)"),
    "large_keys": Kind(
        "{Point(i): i for i in range(600)}", "next(iter(S)).value", "next(iter(S)).value += 1", _POINT
    ),
    "large_zero": Kind("[0j] * 600", "str(S[0]).count('-')", "S[0] = complex(0, -0.0)"),
    "large_dict": _subclass("dict", _LARGE),
    "large_list": _subclass("list", "[1.5] * 600"),
    "large_counter": _subclass("Counter", _LARGE),
    "large_factory": Kind(f"defaultdict(int, {_LARGE})", "S.copy()[-1]", "S.default_factory = lambda n=S.copy()[-1] + 1: n"),
    "user_dict": Kind("collections.UserDict(a=1)", "S['a']", "S['a'] += 1"),
    "chain_map": Kind("collections.ChainMap({}, {'a': 1})", "S['a']", "S['a'] += 1"),
    "proxy": Kind("types.MappingProxyType(BEHIND)", "S['a']", "BEHIND['a'] += 1", "BEHIND = {'a': 1}\n"),
    "weakref": Kind("(POINT, weakref.ref(POINT))[1]", "S().value", "S().value += 1", _POINT + "POINT = Point(1)\n"),
    "memory": Kind("memoryview(bytearray(b'a'))", "S[0]", "S[0] += 1"),
    "property": Kind(
        "Own()", "S.value", "S._hidden['x'] += 1",
        "class Own:\n    def __init__(self): self._hidden = {'x': 1}\n    value = property(lambda self: self._hidden['x'])\n",
    ),
    "getattr": Kind(
        "Own()", "S.anything", "EXTRA[0] += 1",
        "EXTRA = [1]\nclass Own:\n    def __getattr__(self, name):\n        if name[:2] == '__': raise AttributeError(name)\n        return EXTRA[0]\n",
    ),
    "descriptor": Kind(
        "Own()", "S.value", "EXTRA[0] += 1",
        "EXTRA = [1]\nclass Reads:\n    def __get__(self, owner, cls=None): return EXTRA[0]\n"
        "class Own:\n    value = Reads()\n",
    ),
    "metaclass": Kind(
        "Own", "S.value", "EXTRA[0] += 1",
        "EXTRA = [1]\nclass Meta(type):\n    @property\n    def value(cls): return EXTRA[0]\n"
        "class Own(metaclass=Meta): pass\n",
    ),
    "nested_class": Kind(
        "Own", "S.Inner.value", "S.Inner.value += 1",
        "class Own:\n    class Inner:\n        value = 1\n",
    ),
    "single_dispatch": Kind(
        "Own()", "S.go(1)", "EXTRA[0] += 1",
        "EXTRA = [1]\nclass Own:\n    @functools.singledispatchmethod\n    def go(self, a): return 0\n"
        "    @go.register\n    def _(self, a: int): return EXTRA[0]\n",
    ),
    "partialmethod": Kind(
        "Own()", "S.go()", "EXTRA[0] += 1",
        "EXTRA = [1]\nclass Own:\n    def _go(self, k): return EXTRA[0] * k\n"
        "    go = functools.partialmethod(_go, 2)\n",
    ),
    "operator": Kind(
        "Own()", "S + 1", "EXTRA[0] += 1",
        "EXTRA = [1]\nclass Own:\n    def __add__(self, other): return EXTRA[0] + other\n",
    ),
    "cached": Kind(
        "Own()", "S.value()", "S.k[0] += 1; type(S).value.cache_clear()",
        "class Own:\n    k = [1]\n    @functools.lru_cache\n    def value(self): return self.k[0]\n",
    ),
    "tensors": Kind("[torch.ones(1)]", "S[0]", "S[0] = S[0] + 1"),
    "deque_of_tensors": Kind("deque([torch.ones(1)])", "S[-1]", "S.append(S[-1] + 1)"),
    "counter_of_tensors": Kind("defaultdict(list, a=[torch.ones(1)])", "S['a'][-1]", "S['a'].append(S['a'][-1] + 1)"),
    "tensor_in_place": Kind("deque([torch.ones(1)])", "S[0]", "S[0].add_(1)"),
    "logger": Kind("logging.getLogger(__name__)", "S.level", "S.setLevel(S.level + 10)"),
    "named_tuple": Kind(
        "Pair(1, [1])", "S.b[0]", "S.b[0] += 1", "Pair = collections.namedtuple('Pair', 'a b')\n"
    ),
    "frozen_set_of": Kind("frozenset([Point(1)])", "next(iter(S)).value", "next(iter(S)).value += 1", _POINT),
    "keys_of": Kind("{Point(1): 0}", "next(iter(S)).value", "next(iter(S)).value += 1", _POINT),
}  # fmt: skip


def _indented(text: str, by: int) -> str:
    return textwrap.indent(text.rstrip(), " " * by) + "\n"


def _places(kind: Kind, changes: bool) -> Iterator[tuple[str, str, str, str]]:
    """Yield places, each with a main file, a helper, and how the state is come by from outside.

    Args:
        kind: what is kept there.
        changes: whether forward itself changes it.
    """
    define, make, read = kind.define, kind.make, f"({kind.read})"
    own = _indented(kind.change, 4) if changes else ""
    inner = _indented(own, 4) if changes else ""
    body = f"{own}    return x * {read}\n"
    method = (
        f"    def forward(self, x):\n        S = self.state\n{inner}        return x * {read}\n"
    )
    module = f"{define}\nclass Model(nn.Module):\n"
    holds = "    def __init__(self):\n        super().__init__()\n"
    yield "global", f"{define}\nS = {make}\ndef model(x):\n{body}", "", "S"
    helper = f"{define}\nS = {make}\ndef read():\n{own}    return {read}\n"
    yield "helper", "def model(x):\n    return x * helper.read()\n", helper, "helper.S"
    helper = f"{define}\nS = {make}\ndef read(S):\n{own}    return {read}\n"
    main = "from .helper import S, read\ndef model(x):\n    return x * read(S)\n"
    yield "imported", main, helper, "S"
    main = f"{module}    state = {make}\n{method}model = Model()\n"
    yield "class_attribute", main, "", "Model.state"
    main = f"{module}{holds}        self.state = {make}\n{method}model = Model()\n"
    yield "attribute", main, "", "model.state"
    main = main.replace(f"= {make}", f"= [0, ({make})]").replace("= self.state", "= self.state[1]")
    yield "in_list_on_self", main, "", "model.state[1]"
    main = f"{define}\ndef made():\n    S = {make}\n    def model(x):\n{_indented(body, 4)}"
    main += "    return model\nmodel = made()\n"
    yield "closure", main, "", "model.__closure__[0].cell_contents"
    main = f"{define}\ndef step(x, S={make}):\n{body}def model(x):\n    return step(x)\n"
    yield "default", main, "", "step.__defaults__[0]"
    main = f"{define}\nREG = {{'a': {{'b': ({make})}}}}\ndef model(x):\n    S = REG['a']['b']\n"
    yield "registry", main + body, "", "REG['a']['b']"
    main = f"{define}\nCFG = types.SimpleNamespace(opt=types.SimpleNamespace(s={make}))\n"
    yield "nested", f"{main}def model(x):\n    S = CFG.opt.s\n{body}", "", "CFG.opt.s"
    main = f"{define}\nG = {make}\ndef arguments(x): return x, G\ndef model(x, S):\n{body}"
    yield "argument", main, "", "G"


def programs() -> Iterator[tuple[str, Program]]:
    """Yield a program for each kind of state, in each place, changed in either way."""
    for name, kind in KINDS.items():
        for place, main, helper, path in _places(kind, changes=False):
            change = f"S = {path}\n{kind.change}\n"
            if helper:
                change = re.sub("EXTRA|BEHIND", r"helper.\g<0>", change)
            yield f"{name}-{place}-between", Program(main, helper, ("", change, "", change, ""))
        for place, main, helper, _ in _places(kind, changes=True):
            yield f"{name}-{place}-forward", Program(main, helper)
