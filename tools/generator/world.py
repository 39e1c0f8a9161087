"""The world around a program: state that people keep outside of modules.

Things of its own file, or of another one that it imports. Its code reads and changes them,
and somebody changes them between its calls.
"""

from __future__ import annotations

from typing import NamedTuple

from .scalars import small
from .statements import statement
from .writer import WIDTH, Tensor, Writer, gives

__all__ = ["Thing", "add_world"]


class Thing(NamedTuple):
    """A kind of thing, in which `{n}` is how code comes by it, and `{N}` its bare name.

    Attributes:
        made: statements that define it.
        reads: expressions of numbers.
        changes: statements by which code changes it; `{v}` is a number.
        steps: what is done to it between calls.
        told: an expression of what it holds by now; "" if asking would change it.
    """

    made: str
    reads: tuple[str, ...]
    changes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    told: str = ""


_BOX = """\
class Box{N}:
    rate = 0.5
    def __init__(self, v=1.0):
        self.v = v
    def value(self):
        return self.v * self.rate
    def __call__(self, x):
        self.v += 1
        return x + self.v
    def __float__(self):
        return float(self.v)
    def __mul__(self, other):
        return self.v * other
    v_a = 2.0
    v_b = 3.0
"""

THINGS: dict[str, Thing] = {
    "a number": Thing("{N} = 0.5", ("{n}",), (), ("{n} = 2.0", "{n} = {n} + 1"), "{n}"),
    "numbers that change": Thing(
        "{N} = types.SimpleNamespace(n=0, mean=0.0, items=[1, 0.5])",
        ("{n}.mean", "float({n}.n % 3 == 0)", "{n}.items[1]", "min(1.0, {n}.n / 4)"),
        (
            "{n}.n += 1",
            "{n}.mean = 0.9 * {n}.mean + {v}",
            "{n}.items[1] *= 1.5",
            "{n}.items[0] = {n}.n",
        ),
        ("{n}.n = 0", "{n}.mean = -0.0", "{n}.items[1] = 2"),
        "({n}.n, {n}.mean, {n}.items)",
    ),
    "what is only added to": Thing(
        "{N} = dict(a=[], b=collections.deque())",
        ("1.5",),
        ('{n}["a"].append({v})', '{n}["b"].extend([{v}, 0.5])'),
        ('{n}["a"].clear()', '{n}["b"].append(1)', '{n}["a"] = [2.0]'),
        '({n}["a"], list({n}["b"]))',
    ),
    "a counter": Thing(
        "{N} = collections.Counter(a=1)",
        ('{n}["a"]', "sum({n}.values())", "{n}.most_common(1)[0][1]"),
        ('{n}["a"] += 1', '{n}.update("ab")'),
        ('{n}["a"] = 3', "{n}.clear()"),
        "sorted({n}.items())",
    ),
    "a dict that makes its items": Thing(
        "{N} = collections.defaultdict(float)",
        ('{n}["a"]', "len({n})"),
        ('{n}["b"] += {v}',),
        ('{n}["a"] = 0.5', "{n}.default_factory = lambda: 2.0"),
        "sorted({n}.items())",
    ),
    "a queue": Thing(
        "{N} = collections.deque([1.0, 2.0], maxlen=3)",
        ("{n}[0]", "sum({n})", "len({n})"),
        ("{n}.append({v})", "{n}.rotate()"),
        ("{n}.append(0.5)", "{n}.clear(); {n}.append(1.5)"),
        "list({n})",
    ),
    "settings in settings": Thing(
        "{N} = types.SimpleNamespace(opt=types.SimpleNamespace(k=0.5), deep=[[[1.0]]])",
        ("{n}.opt.k", "{n}.deep[0][0][0]", "getattr({n}.opt, 'k', 0.0)"),
        ("{n}.opt.k += 1", "{n}.deep[0][0].append({v})"),
        ("{n}.opt.k = 2.0", "{n}.deep[0][0][0] = -1.0", "{n}.opt = types.SimpleNamespace(k=-1.5)"),
        "({n}.opt.k, {n}.deep)",
    ),
    "a dataclass": Thing(
        "@dataclasses.dataclass\n"
        "class Data{N}:\n"
        "    k: float = 1.0\n"
        "    more: list = dataclasses.field(default_factory=lambda: [1.0])\n"
        "{N} = Data{N}()",
        ("{n}.k", "{n}.more[-1]", "dataclasses.replace({n}, k=0.25).k"),
        ("{n}.k = {v}", "{n}.more.append({v})"),
        ("{n}.k = 3.0", "{n}.more[0] = 0.5"),
        "({n}.k, {n}.more)",
    ),
    "functions by name": Thing(
        "def twice{N}(v):\n    return v * 2\n{N} = {{'a': twice{N}, 'b': math.floor, 'name': 'a'}}",
        ('{n}["a"](1.5)', '{n}[{n}["name"]](2.5)'),
        ('{n}["name"] = "b"',),
        ('{n}["a"] = lambda v: v * 3', '{n}["name"] = "a"', "{n}.setdefault('c', abs)"),
    ),
    "an object": Thing(
        _BOX + "{N} = Box{N}()",
        (
            "{n}.v",
            "{n}.value()",
            "{n}(0.5)",
            "float({n})",
            "{n} * 2.0",
            "getattr({n}, 'v_' + 'ab'[{i} % 2])",
        ),
        ("{n}.v = {v}", "{n}.rate = {v}"),
        ("{n}.v = 4.0", "type({n}).rate = 0.25", "{n}.__class__.value = lambda self: 0.75"),
        "vars({n})",
    ),
    "a bound method": Thing(
        _BOX + "{N} = Box{N}().value",
        ("{n}()", "{n}.__self__.v"),
        ("{n}.__self__.v += 1",),
        ("{n}.__self__.v = 4.0", "type({n}.__self__).rate = 0.25"),
        "vars({n}.__self__)",
    ),
    "what only one is made of": Thing(
        "class {N}:\n    one = None\n    def __new__(cls):\n        if cls.one is None:\n"
        "            cls.one = super().__new__(cls)\n"
        "            cls.one.v = 1.0\n"
        "        return cls.one",
        ("{n}().v",),
        ("{n}().v += 1",),
        ("{n}().v = 0.5", "{n}.one = None"),
        "{n}.one and {n}.one.v",
    ),
    "a cached function": Thing(
        "rate{N} = [0.5]\n@functools.cache\ndef {N}(n):\n    return n * rate{N}[0]",
        ("{n}({i})", "{n}(2)", "{n}.cache_info().currsize"),
        (),
        ("{n}.cache_clear()", "{n}.__wrapped__.__globals__['rate{N}'][0] = 2.0"),
        "{n}.__wrapped__.__globals__['rate{N}']",
    ),
    "a generator": Thing(
        "{N} = (k * 0.5 for k in range(10**6))", ("next({n})",), ("next({n})",), ("next({n})",)
    ),
    "a count": Thing(
        "{N} = itertools.count(1)", ("next({n})",), ("next({n})",), ("next({n})",), "repr({n})"
    ),
    "a dict with attributes": Thing(
        "class Table{N}(dict):\n    scale = 1.0\n{N} = Table{N}(a=1.0)\n{N}.scale = 2.0",
        ("{n}['a'] * {n}.scale", "{n}.scale", "len({n})"),
        ("{n}.scale = {v}", "{n}['a'] += 1"),
        (
            "{n}.scale = 3.0",
            "{n}['a'] = 0.5",
            "type({n}).scale = 5.0",
            "del {n}.__dict__['scale']; {n}.scale = 1.5",
        ),
        "(dict({n}), vars({n}))",
    ),
    "a list with attributes": Thing(
        "class Row{N}(list):\n    pass\n{N} = Row{N}([1.0, 2.0])\n{N}.at = 0",
        ("{n}[{n}.at]", "sum({n})"),
        ("{n}.at = 1 - {n}.at", "{n}.append({v})"),
        ("{n}.at = 1", "{n}[0] = 0.5"),
        "(list({n}), {n}.at)",
    ),
    "a number with attributes": Thing(
        "class Num{N}(float):\n    pass\n{N} = Num{N}(1.5)\n{N}.extra = 2.0",
        ("{n} * {n}.extra", "{n}.extra"),
        ("{n}.extra += 1",),
        ("{n}.extra = 0.5",),
        "{n}.extra",
    ),
    "a descriptor": Thing(
        "held{N} = dict(v=1.0)\n"
        "class Lens{N}:\n"
        "    def __get__(self, owner, kind=None):\n"
        "        return held{N}['v']\n"
        "    def __set__(self, owner, value):\n        held{N}['v'] = value\n"
        "class Seen{N}:\n"
        "    v = Lens{N}()\n"
        "    @property\n"
        "    def w(self):\n"
        "        return held{N}['v'] + 1\n"
        "    def __getattr__(self, name):\n        return held{N}['v'] * 2\n{N} = Seen{N}()",
        ("{n}.v", "{n}.w", "{n}.unknown"),
        ("{n}.v = {v}",),
        ("{n}.v = 3.0", "type({n}).v = 0.25"),
        "{n}.w",
    ),
    "a partial": Thing(
        "def scaled{N}(v, k=1.0):\n    return v * k\n{N} = functools.partial(scaled{N}, k=2.0)",
        ("{n}(0.5)", "{n}.keywords['k']"),
        ("{n}.keywords['k'] = {v}",),
        ("{n}.keywords['k'] = 3.0",),
        "{n}.keywords",
    ),
    "a closure that counts": Thing(
        "def counting{N}():\n"
        "    n = 0\n"
        "    def tick():\n"
        "        nonlocal n\n"
        "        n += 1\n"
        "        return n\n"
        "    return tick\n"
        "{N} = counting{N}()",
        ("{n}()",),
        ("{n}()",),
        ("{n}()",),
        "{n}.__closure__[0].cell_contents",
    ),
    "a function with attributes": Thing(
        "def {N}(v=0.5):\n    {N}.calls = getattr({N}, 'calls', 0) + 1\n    return v + {N}.calls",
        ("{n}()", "getattr({n}, 'calls', -1)", "{n}.__defaults__[0]"),
        ("{n}.calls = 0",),
        ("{n}.calls = 5", "{n}.__defaults__ = (0.25,)"),
        "(vars({n}), {n}.__defaults__)",
    ),
    "random numbers of its own": Thing(
        "{N} = random.Random(0)",
        ("{n}.random()", "{n}.randint(1, 3)"),
        ("{n}.shuffle([1, 2])",),
        ("{n}.seed(3)",),
        "{n}.getstate()",
    ),
    "numpy's random numbers": Thing(
        "{N} = numpy.random.default_rng(0)",
        ("float({n}.random())",),
        (),
        ("{n}.random()",),
        "repr({n}.bit_generator.state)",
    ),
    "an array": Thing(
        "{N} = numpy.array([1.0, 2.0])",
        ("float({n}[0])", "float({n}.sum())"),
        ("{n}[0] += 1",),
        ("{n}[1] = 0.5",),
        "{n}.tolist()",
    ),
    "members": Thing(
        "class Mode{N}(enum.Enum):\n"
        "    A = 1.0\n"
        "    B = 2.0\n"
        "    def weight(self):\n"
        "        return self.value * getattr(self, 'extra', 1.0)\n"
        "{N} = types.SimpleNamespace(mode=Mode{N}.A)",
        ("{n}.mode.value", "{n}.mode.weight()", "float({n}.mode is type({n}.mode).A)"),
        ("{n}.mode = type({n}.mode).B",),
        ("{n}.mode = type({n}.mode).A", "type({n}.mode).A.extra = 3.0"),
        "{n}.mode.name",
    ),
    "attributes of a class": Thing(
        "class Meta{N}(type):\n    @property\n    def level(cls):\n        return cls.rate * 2\n"
        "class {N}(metaclass=Meta{N}):\n"
        "    rate = 0.5\n"
        "    class Inner:\n"
        "        v = 1.0\n"
        "    @classmethod\n"
        "    def of(cls, k):\n"
        "        return cls.rate * k\n"
        "    @staticmethod\n    def two():\n        return 2.0",
        ("{n}.rate", "{n}.level", "{n}.Inner.v", "{n}.of(3)", "{n}.two()"),
        ("{n}.rate = {v}", "{n}.Inner.v += 1"),
        ("{n}.rate = 2.0", "{n}.Inner.v = 0.5", "{n}.two = staticmethod(lambda: 3.0)"),
        "({n}.rate, {n}.Inner.v)",
    ),
    "a weak reference": Thing(
        _BOX + "kept{N} = Box{N}()\n{N} = weakref.ref(kept{N})",
        ("{n}().v", "{n}().value()"),
        ("{n}().v += 1",),
        ("{n}().v = 0.25",),
        "{n}().v",
    ),
    "a set": Thing(
        "{N} = {{'a', 'b'}}",
        ("len({n})", "float('a' in {n})"),
        ("{n}.add('c')", "{n}.discard('a')"),
        ("{n}.add('d')", "{n}.clear()"),
        "sorted({n})",
    ),
    "a function for each type": Thing(
        "@functools.singledispatch\n"
        "def {N}(v):\n"
        "    return 1.0\n"
        "@{N}.register\n"
        "def _int{N}(v: int):\n"
        "    return v * 2.0",
        ("{n}(2)", "{n}(0.5)", "{n}('a')"),
        (),
        ("{n}.register(float, lambda v: v * 5)", "{n}.register(str, len)"),
    ),
    "an error that counts": Thing(
        "seen{N} = dict(n=0)\n"
        "class {N}(Exception):\n"
        "    def __init__(self):\n"
        "        seen{N}['n'] += 1\n"
        "        super().__init__(seen{N}['n'])",
        ("{n}().args[0]",),
        ("{n}()",),
        ("{n}()",),
    ),
    "a context variable": Thing(
        "{N} = contextvars.ContextVar('{N}', default=1.0)",
        ("{n}.get()",),
        ("{n}.set({v})",),
        ("{n}.set(0.5)",),
        "{n}.get()",
    ),
    "an optimizer": Thing(
        "{N} = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.5)",
        ("{n}.param_groups[0]['lr']",),
        ("{n}.param_groups[0]['lr'] *= 0.5",),
        ("{n}.param_groups[0]['lr'] = 2.0",),
        "{n}.param_groups[0]['lr']",
    ),
    "a logger": Thing(
        "{N} = logging.Logger('{N}')",
        ("float({n}.isEnabledFor(20))", "{n}.level"),
        ("{n}.setLevel(10)",),
        ("{n}.setLevel(50)", "{n}.setLevel(20)"),
        "{n}.level",
    ),
    "names by computed strings": Thing(
        "{N} = 0.5", ("globals().get('{N}', 0.25)",), (), ("{n} = 2.0",), "{n}"
    ),
    "keywords in some order": Thing(
        "{N} = dict(m=2.0, k=3.0)\n"
        "def of{N}(**kw):\n"
        "    out = 0.0\n"
        "    for v in kw.values():\n"
        "        out = out * 0.5 + v\n"
        "    return out",
        ("sum(v * i for i, v in enumerate({n}.values()))", "next(iter({n}.values()))"),
        ("{n}['m'] = {n}.pop('m')",),
        ("{n}['k'] = {n}.pop('k')", "{n}['m'] = 0.5"),
        "list({n}.items())",
    ),
}

TENSORS: dict[str, Thing] = {
    "tensors by name": Thing(
        "{N} = dict(w=torch.ones(4), more=[torch.zeros(4)])",
        ('{n}["w"]', '{n}["more"][-1]'),
        ('{n}["w"] = {t}', '{n}["w"].add_(1)', '{n}["more"].append({t})'),
        ('{n}["w"] = torch.full((4,), 0.5)', '{n}["w"].mul_(2)'),
        "{n}",
    ),
    "an object with a tensor": Thing(
        "class Bank{N}:\n"
        "    shared = torch.ones(4)\n"
        "    def __init__(self):\n"
        "        self.t = torch.zeros(4)\n"
        "    def read(self):\n"
        "        return self.t + self.shared\n"
        "{N} = Bank{N}()",
        ("{n}.t", "{n}.shared", "{n}.read()"),
        ("{n}.t = {t}", "{n}.t = {n}.t + 1"),
        ("{n}.t = torch.ones(4)", "type({n}).shared = torch.full((4,), 2.0)", "{n}.t.fill_(0.25)"),
        "vars({n})",
    ),
    "a cached tensor": Thing(
        "@functools.lru_cache(maxsize=4)\ndef {N}(n):\n    return torch.arange(4.0) * n",
        ("{n}({i})", "{n}(2)"),
        (),
        ("{n}.cache_clear()",),
    ),
    "a layer": Thing(
        "torch.manual_seed(1)\n{N} = nn.Linear(4, 4)",
        ("{n}.bias.detach()", "{n}.weight[0].detach()"),
        (),
        ("{n}.bias.fill_(0.5)", "{n}.weight.requires_grad_(False)"),
        "{n}.bias.detach()",
    ),
}


class _Placed(NamedTuple):
    thing: Thing
    name: str
    way: str  # how code comes by it

    def text(self, form: str, **parts: str) -> str:
        return form.format(n=self.way, N=self.name, **parts)

    def step(self, form: str) -> str:
        owner = "world" if self.way.startswith("world.") else "here"
        return form.format(n=f"{owner}.{self.name}", N=self.name)


def add_world(w: Writer) -> tuple[str, str, list[str], list[str]]:
    """Give a program some things around it.

    Returns:
        What defines those in the file that it imports, and in its own; what can be done to them
        between calls; expressions of what they hold.
    """
    sources: dict[str, list[str]] = {"world": [], "here": []}
    steps: list[str] = []
    told: list[str] = []
    for _ in range(1 + w.below(3)):
        of_tensors = w.chance(4)
        things = TENSORS if of_tensors else THINGS
        thing = things[w.pick(list(things))]
        name = w.fresh("thing")
        file = w.pick(("here", "world", "both"))
        way = f"world.{name}" if file == "world" else name
        placed = _Placed(thing, name, way)
        (w.tensor_things if of_tensors else w.things).append(placed)
        made = thing.made.format(N=name)
        sources["here" if file == "here" else "world"].append(made)
        if file == "both":
            sources["here"].append(f"from random_world import {name}")
        steps += [placed.step(step) for step in thing.steps]
        if thing.told:
            told.append(placed.step(thing.told))
    return "\n".join(sources["world"]), "\n".join(sources["here"]), steps, told


@gives(float, lambda w, wanted: w.things, weight=3)
def number_of_world(w: Writer, wanted: type) -> str:
    placed = w.pick(w.things)
    return f"float({placed.text(w.pick(placed.thing.reads), i=w.write(int))})"


@gives(Tensor, lambda w, wanted: w.tensor_things and wanted == Tensor("f", (WIDTH,)), weight=3)
def tensor_of_world(w: Writer, wanted: Tensor) -> str:
    placed = w.pick(w.tensor_things)
    return placed.text(w.pick(placed.thing.reads), i=w.write(int))


@statement(lambda w: w.things, weight=4, effect=True)
def scaled_by_world(w: Writer) -> None:
    placed = w.pick(w.things)
    read = f"float({placed.text(w.pick(placed.thing.reads), i=small(w))})"
    kind = w.type("f")
    text = w.pick(("({a}) * {r}", "({a}) + {r}", "({a}) if {r} > 0.75 else ({a}) * 2"))
    text = text.format(a=w.statement_expression(kind), r=read)
    w.line(f"{w.define(kind)} = {text}")


@statement(lambda w: any(p.thing.changes for p in w.things), weight=3, effect=True)
def change_world(w: Writer) -> None:
    placed = w.pick([p for p in w.things if p.thing.changes])
    w.line(placed.text(w.pick(placed.thing.changes), v=w.statement_expression(float)))


@statement(lambda w: any(p.thing.changes for p in w.tensor_things), weight=3, effect=True)
def change_tensors_of_world(w: Writer) -> None:
    placed = w.pick([p for p in w.tensor_things if p.thing.changes])
    form = w.pick(placed.thing.changes)
    w.line(placed.text(form, t=w.statement_expression(Tensor("f", (WIDTH,)))))
