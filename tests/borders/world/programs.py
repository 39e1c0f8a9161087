"""Programs by hand: code that is reached by other ways than its name, and the world outside."""

# ruff: noqa: E501 - programs are read line by line

from __future__ import annotations

from tests.borders.world.world import Program

PROGRAMS: dict[str, Program] = {}


def _add(name: str, main: str, *steps: str, helper: str = "", **options: object) -> None:
    assert name not in PROGRAMS, name
    PROGRAMS[name] = Program(main, helper, ("", *(steps or ("", "", ""))), **options)  # type: ignore[arg-type]


_MODULE = "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
_STEPS = ("EXTRA[0] += 1", "", "EXTRA[0] += 1", "")
_BUMP = "EXTRA = [1]\ndef bump():\n    EXTRA[0] += 1\n    return EXTRA[0]\n"
_READ = "EXTRA = [1]\ndef bump():\n    return EXTRA[0]\n"

# Ways to come by a function, as an expression of the model's body; `bump` changes or reads.
_WAYS = {
    "getattr": ("class O:\n    def go_a(self): return bump()\nO_ = O()\nNAME = 'a'\n", "getattr(O_, 'go_' + NAME)()"),
    "globals": ("", "globals()['bu' + 'mp']()"),
    "vars_of": ("", "vars(helper)['read']()"),
    "getattr_module": ("", "getattr(helper, 're' + 'ad')()"),
    "registry": ("ACT = {'a': lambda: bump()}\n", "ACT['a']()"),
    "registry_deep": ("ACT = {'a': [{'b': (lambda: bump(),)}]}\n", "ACT['a'][0]['b'][0]()"),
    "registry_ordered": ("ACT = OrderedDict(a=lambda: bump())\n", "ACT['a']()"),
    "registry_object": ("class R:\n    def __init__(self): self.known = {'a': lambda: bump()}\n    def __getitem__(self, n): return self.known[n]\nACT = R()\n", "ACT['a']()"),
    "registered": ("ACT = {}\ndef register(f):\n    ACT[f.__name__] = f\n    return f\n@register\ndef one(): return bump()\n", "ACT['one']()"),
    "callable_object": ("class C:\n    def __call__(self): return bump()\nC_ = C()\n", "C_()"),
    "nested_class": ("class O:\n    class I:\n        def go(self): return bump()\n", "O.I().go()"),
    "made_in_forward": ("class O:\n    def __add__(self, o): return bump()\n", "O() + 1"),
    "made_radd": ("class O:\n    def __radd__(self, o): return bump()\n", "1 + O()"),
    "made_getitem": ("class O:\n    def __getitem__(self, o): return bump()\n", "O()[1]"),
    "made_iter": ("class O:\n    def __iter__(self): yield bump()\n", "[*O()][0]"),
    "made_len": ("class O:\n    def __len__(self): return bump()\n", "len(O())"),
    "made_bool": ("class O:\n    def __bool__(self): return bump() > 2\n", "(2 if O() else 1)"),
    "made_eq": ("class O:\n    def __eq__(self, o): return bump()\n", "(O() == 1)"),
    "made_hash": ("class O:\n    def __hash__(self): return bump()\n", "hash(O())"),
    "made_float": ("class O:\n    def __float__(self): return float(bump())\n", "float(O())"),
    "made_str": ("class O:\n    def __str__(self): return 'a' * bump()\n", "len(f'{O()}')"),
    "made_enter": ("class O:\n    def __enter__(self): return bump()\n    def __exit__(self, *a): pass\ndef use():\n    with O() as v: return v\n", "use()"),
    "made_contains": ("class O:\n    def __contains__(self, o): return bump() > 1\n", "(2 if 1 in O() else 1)"),
    "exception_init": ("class E(Exception):\n    def __init__(self): self.v = bump()\ndef use():\n    try: raise E()\n    except E as e: return e.v\n", "use()"),
    "exception_str": ("class E(Exception):\n    def __str__(self): return 'a' * bump()\ndef use():\n    try: raise E()\n    except E as e: return len(str(e))\n", "use()"),
    "enum_method": ("class K(enum.Enum):\n    A = 1\n    def go(self): return bump()\n", "K.A.go()"),
    "enum_by_value": ("class K(enum.Enum):\n    A = 1\n    def go(self): return bump()\n", "K(1).go()"),
    "enum_missing": ("class K(enum.Enum):\n    A = 1\n    @classmethod\n    def _missing_(cls, v):\n        cls.A.seen = bump()\n        return cls.A\n", "K(7).seen"),
    "int_enum": ("class K(enum.IntEnum):\n    A = 1\n    @property\n    def p(self): return bump()\n", "K.A.p"),
    "metaclass_property": ("class Meta(type):\n    @property\n    def p(cls): return bump()\nclass O(metaclass=Meta): pass\n", "O.p"),
    "metaclass_call": ("class Meta(type):\n    def __call__(cls): return bump()\nclass O(metaclass=Meta): pass\n", "O()"),
    "metaclass_getitem": ("class Meta(type):\n    def __getitem__(cls, i): return bump()\nclass O(metaclass=Meta): pass\n", "O[1]"),
    "class_getitem": ("class O:\n    def __class_getitem__(cls, i): return bump()\n", "O[1]"),
    "init_subclass": ("class O:\n    def __init_subclass__(cls): cls.v = bump()\ndef use():\n    class P(O): pass\n    return P.v\n", "use()"),
    "new": ("class O:\n    def __new__(cls):\n        s = super().__new__(cls)\n        s.v = bump()\n        return s\n", "O().v"),
    "singleton": ("class O:\n    one = None\n    def __new__(cls):\n        if cls.one is None: cls.one = super().__new__(cls)\n        return cls.one\n    def go(self): return bump()\n", "O().go()"),
    "partial": ("P = functools.partial(lambda a: bump(), 1)\n", "P()"),
    "partial_global": ("P = functools.partial(bump)\n", "P()"),
    "partialmethod": ("class O:\n    def _go(self, k): return bump()\n    go = functools.partialmethod(_go, 1)\n", "O().go()"),
    "singledispatch": ("@functools.singledispatch\ndef go(a): return 0\n@go.register\ndef _(a: int): return bump()\n", "go(1)"),
    "singledispatchmethod": ("class O:\n    @functools.singledispatchmethod\n    def go(self, a): return 0\n    @go.register\n    def _(self, a: int): return bump()\n", "O().go(1)"),
    "cached_property": ("class O:\n    @functools.cached_property\n    def p(self): return bump()\n", "O().p"),
    "wraps_torch": ("@functools.wraps(F.relu)\ndef mine(): return bump()\n", "mine()"),
    "wraps_numpy": ("@functools.wraps(np.sin)\ndef mine(): return bump()\n", "mine()"),
    "named_like_torch": ("def mine(): return bump()\nmine.__module__ = 'torch.nn.functional'\n", "mine()"),
    "class_like_torch": ("class Mine:\n    __module__ = 'torch.nn.modules.linear'\n    def go(self): return bump()\nM_ = Mine()\n", "M_.go()"),
    "map": ("", "[*map(lambda i: bump(), [1])][0]"),
    "sorted_key": ("", "sorted([0, 1], key=lambda i: bump())[0] + bump()"),
    "reduce": ("", "functools.reduce(lambda a, b: bump(), [1, 2])"),
    "attrgetter": ("class O:\n    @property\n    def p(self): return bump()\nO_ = O()\n", "operator.attrgetter('p')(O_)"),
    "methodcaller": ("class O:\n    def p(self): return bump()\nO_ = O()\n", "operator.methodcaller('p')(O_)"),
    "weakref": ("class O:\n    def p(self): return bump()\nO_ = O()\nW = weakref.ref(O_)\n", "W().p()"),
    "weak_values": ("class O:\n    def p(self): return bump()\nO_ = O()\nW = weakref.WeakValueDictionary(a=O_)\n", "W['a'].p()"),
    "exit_stack": ("def use():\n    out = []\n    with contextlib.ExitStack() as s: s.callback(lambda: out.append(bump()))\n    return out[0]\n", "use()"),
    "context_manager": ("@contextlib.contextmanager\ndef c(): yield bump()\ndef use():\n    with c() as v: return v\n", "use()"),
    "generator_function": ("def g(): yield bump()\n", "next(g())"),
    "closure_of_closure": ("def a():\n    def b():\n        def c(): return bump()\n        return c\n    return b\nC = a()()\n", "C()"),
    "eval": ("", "eval('bump()')"),
    "exec": ("def use():\n    d = {}\n    exec('v = f()', {'f': bump}, d)\n    return d['v']\n", "use()"),
    "class_method": ("class O:\n    @classmethod\n    def go(cls): return bump()\n", "O.go()"),
    "super_method": ("class B:\n    def go(self): return bump()\nclass O(B):\n    def go(self): return super().go()\n", "O().go()"),
    "dunder_getattribute": ("class O:\n    def __getattribute__(self, n): return bump()\n", "O().anything"),
    "dunder_missing": ("class D(dict):\n    def __missing__(self, k): return bump()\nD_ = D()\n", "D_['a']"),
    "default_factory": ("D_ = defaultdict(lambda: bump())\n", "D_[len(D_)]"),
    "dataclass_factory": ("@dataclasses.dataclass\nclass C:\n    v: int = dataclasses.field(default_factory=lambda: bump())\n", "C().v"),
    "dataclass_post": ("@dataclasses.dataclass\nclass C:\n    v: int = 0\n    def __post_init__(self): self.v = bump()\n", "C().v"),
    "sys_modules": ("import sys\n", "sys.modules[__name__].bump()"),
    "importlib": ("import importlib\n", "importlib.import_module(__name__).bump()"),
    "descriptor_set": ("class D:\n    def __set__(self, o, v): o.__dict__['w'] = bump()\n    def __get__(self, o, c=None): return o.__dict__['w']\nclass O:\n    v = D()\ndef use():\n    o = O()\n    o.v = 1\n    return o.v\n", "use()"),
    "operator_function": ("class O:\n    def __add__(self, o): return bump()\n", "operator.add(O(), 1)"),
    "custom_dict_method": ("class D(dict):\n    def get(self, k): return bump()\nD_ = D()\n", "D_.get(1)"),
    "tuple_method": ("class T(collections.namedtuple('T', 'a')):\n    def go(self): return bump()\nT_ = T(1)\n", "T_.go()"),
    "int_method": ("class I(int):\n    def go(self): return bump()\nI_ = I(1)\n", "I_.go()"),
    "str_method": ("class I(str):\n    def go(self): return bump()\nI_ = I('a')\n", "I_.go()"),
    "array_method": ("class I(np.ndarray):\n    def go(self): return bump()\nI_ = np.ones(1).view(I)\n", "I_.go()"),
    "tensor_method": ("class I(torch.Tensor):\n    def go(self): return bump()\nI_ = torch.ones(1).as_subclass(I)\n", "I_.go()"),
    "function_attribute": ("def f(): pass\nf.go = lambda: bump()\n", "f.go()"),
    "type_made": ("O = type('O', (), {'go': lambda self: bump()})\n", "O().go()"),
    "bound_method": ("class O:\n    def go(self): return bump()\nG = O().go\n", "G()"),
    "unbound_method": ("class O:\n    def go(self): return bump()\nG = O.go\n", "G(1)"),
    "method_wrapper": ("class O:\n    def __add__(self, o): return bump()\nG = O().__add__\n", "G(1)"),
}  # fmt: skip
for _name, (_define, _how) in _WAYS.items():
    _helper = "EXTRA = [1]\ndef read():\n    return EXTRA[0]\n"
    _helper_bump = "EXTRA = [1]\ndef read():\n    EXTRA[0] += 1\n    return EXTRA[0]\n"
    _model = f"{_define}\ndef model(x):\n    return x * ({_how})\n"
    _add(
        f"{_name}-reads", _READ + _model, *(f"{s}\nhelper.{s}" if s else s for s in _STEPS),
        helper=_helper,
    )  # fmt: skip
    _add(f"{_name}-changes", _BUMP + _model, helper=_helper_bump)

# Within a module
_add(
    "mode_by_name",
    _MODULE + "        self.mode = 'a'\n    def go_a(self, x): return x * EXTRA[0]\n"
    "    def go_b(self, x): return x + EXTRA[0]\n"
    "    def forward(self, x): return getattr(self, 'go_' + self.mode)(x)\nEXTRA = [1]\nmodel = M()\n",
    *_STEPS, "model.mode = 'b'", "EXTRA[0] += 1", "", "EXTRA[0] += 1",
)  # fmt: skip
_add(
    "module_getattr",
    "EXTRA = [1]\n" + _MODULE + "    def __getattr__(self, name):\n"
    "        if name == 'scale': return EXTRA[0]\n        return super().__getattr__(name)\n"
    "    def forward(self, x): return x * self.scale\nmodel = M()\n", *_STEPS,
)  # fmt: skip
for _where, _wrap in {
    "spectral_norm": "nn.utils.spectral_norm(Mine())",
    "weight_norm": "nn.utils.weight_norm(Mine())",
    "parametrized": "nn.utils.parametrizations.spectral_norm(Mine())",
    "plain": "Mine()",
}.items():
    _add(
        f"layer_under_{_where}",
        "EXTRA = [1]\nclass Mine(nn.Linear):\n    def __init__(self): super().__init__(3, 3)\n"
        "    def forward(self, x): return super().forward(x) * EXTRA[0]\n"
        f"model = {_wrap}\n",
        *_STEPS,
    )
_add(
    "fx_leaf",
    "import torch.fx\nEXTRA = [1]\n@torch.fx.wrap\ndef leaf(x): return x * EXTRA[0]\n"
    "class M(nn.Module):\n    def forward(self, x): return leaf(x) + 1\n"
    "model = torch.fx.symbolic_trace(M())\n",
    *_STEPS,
)
_add("fx_global", "import torch.fx\nEXTRA = [1]\ndef scale(x): return x * EXTRA[0]\nclass T(torch.fx.Tracer):\n    pass\n"
     "g = torch.fx.Graph()\na = g.placeholder('x')\ng.output(g.call_function(scale, (a,)))\n"
     "model = torch.fx.GraphModule(nn.Module(), g)\n", *_STEPS)  # fmt: skip
_add(
    "torch_function_mode",
    "from torch.overrides import TorchFunctionMode\nEXTRA = [1]\nclass Mode(TorchFunctionMode):\n"
    "    def __torch_function__(self, f, types, args=(), kwargs=None):\n"
    "        out = f(*args, **(kwargs or {}))\n        return out * EXTRA[0] if f is torch.sin else out\n"
    "def model(x):\n    with Mode(): return torch.sin(x)\n",
    *_STEPS,
)
# State behind caches
_add("cache_singleton", "class O: pass\n@functools.cache\ndef get():\n    o = O()\n    o.v = 1\n    return o\n"
     "def model(x): return x * get().v\n", "get().v += 1", "", "get().v += 1", "")  # fmt: skip
_add("cache_list", "@functools.cache\ndef get(): return [1]\ndef model(x): return x * get()[0]\n",
     "get()[0] += 1", "", "get()[0] += 1", "")  # fmt: skip
_add(
    "cache_counts",
    "@functools.cache\ndef get(): return [1]\ndef model(x):\n    get()[0] += 1\n    return x * get()[0]\n",
)
_add("cache_of_size", "EXTRA = [1]\n@functools.lru_cache\ndef get(n): return n * EXTRA[0]\n"
     "def model(x): return x * get(x.shape[0])\n", *_STEPS)  # fmt: skip
_add("cache_on_class", "class O:\n    v = 1\n    @classmethod\n    @functools.cache\n    def get(cls): return cls()\n"
     "def model(x): return x * O.get().v\n", "O.get().v = 2", "", "O.get().v = 3", "")  # fmt: skip
_add("singleton_new", "class O:\n    one = None\n    def __new__(cls):\n        if cls.one is None:\n"
     "            cls.one = super().__new__(cls)\n            cls.one.v = 1\n        return cls.one\n"
     "def model(x): return x * O().v\n", "O().v += 1", "", "O().v += 1", "")  # fmt: skip
_add("singleton_counts", "class O:\n    one = None\n    def __new__(cls):\n        if cls.one is None:\n"
     "            cls.one = super().__new__(cls)\n            cls.one.v = 1\n        return cls.one\n"
     "def model(x):\n    O().v += 1\n    return x * O().v\n")  # fmt: skip
_add("helper_on_itself", "def model(x): return x * helper.read()\n", "", "", "",
     helper="def read():\n    read.n = getattr(read, 'n', 0) + 1\n    return read.n\n")  # fmt: skip
_add(
    "instance_counter",
    "class O:\n    made = 0\n    def __init__(self): O.made += 1\ndef model(x):\n    O()\n    return x * O.made\n",
)
_add(
    "registry_of_instances",
    "class O:\n    all = []\n    def __init__(self): O.all.append(self)\ndef model(x):\n    O()\n    return x * len(O.all)\n",
)
_add("bound_of_output", "def model(x): return (x * 2).sum().item\n")
_add("subclasses", "class O: pass\ndef model(x): return x * len(O.__subclasses__())\nKEPT = []\n",
     "KEPT.append(type('P', (O,), {}))", "", "KEPT.append(type('P', (O,), {}))", "")  # fmt: skip
_add("global_counts_in_helper", "def model(x): return x * helper.read()\n",
     helper="N = 0\ndef read():\n    global N\n    N += 1\n    return N\n")  # fmt: skip

# The world outside
_ENTROPY = {
    "default_rng": "float(np.random.default_rng().random())",
    "random_state": "float(np.random.RandomState().rand())",
    "random": "random.Random().random()",
    "system_random": "random.SystemRandom().random()",
    "uuid4": "uuid.uuid4().int % 1000",
    "uuid1": "uuid.uuid1().int % 1000",
    "urandom": "os.urandom(1)[0]",
    "secrets": "__import__('secrets').randbelow(9)",
}
for _name, _how in _ENTROPY.items():
    _add(
        f"entropy_{_name}", f"def model(x): return x * 0 if ({_how}) < 0 else x.sin()\n", reason=" "
    )
_CLOCKS = {
    "time": ("from time import time\n", "time()"),
    "perf_counter": ("from time import perf_counter as t\n", "t()"),
    "monotonic": ("import time\nG = [time.monotonic]\n", "G[0]()"),
    "now": ("", "datetime.datetime.now().year"),
    "today": ("", "datetime.date.today().year"),
    "utcnow": ("from datetime import datetime as d, timezone\n", "d.now(timezone.utc).year"),
    "localtime": ("import time\n", "time.localtime().tm_year"),
    "strftime": ("import time\n", "len(time.strftime('%Y'))"),
}
for _name, (_define, _how) in _CLOCKS.items():
    _add(f"clock_{_name}", f"{_define}\ndef model(x): return x * 0 if ({_how}) < 0 else x.sin()\n",
         reason=" ")  # fmt: skip
_FILE = "import tempfile, pathlib, shutil, glob\n__place__ = os.path.join(tempfile.mkdtemp(), 'there')\n"
for _name, _how in {
    "exists": "os.path.exists(__place__)",
    "isfile": "os.path.isfile(__place__)",
    "pathlib": "pathlib.Path(__place__).exists()",
    "listdir": "bool(os.listdir(os.path.dirname(__place__)))",
    "glob": "bool(glob.glob(__place__))",
    "access": "os.access(__place__, os.F_OK)",
    "stat": "_there()",
    "scandir": "any(os.scandir(os.path.dirname(__place__)))",
    "walk": "any(f for _, _, f in os.walk(os.path.dirname(__place__)))",
}.items():
    _more = "def _there():\n    try:\n        os.stat(__place__)\n        return True\n    except OSError: return False\n"
    _add(f"file_{_name}", f"{_FILE}{_more}def model(x): return x * 2 if {_how} else x.sin()\n",
         "open(__place__, 'w').close()", "", "os.remove(__place__)", "")  # fmt: skip
_add("file_imported", "from os.path import exists\n" + _FILE + "def model(x): return x * 2 if exists(__place__) else x\n",
     "open(__place__, 'w').close()", "", "os.remove(__place__)", "")  # fmt: skip
_add("cwd", "HERE = os.getcwd()\nimport tempfile\ndef model(x): return x * 2 if os.getcwd() == HERE else x\n",
     "os.chdir('/')", "", "os.chdir(HERE)", "")  # fmt: skip
_add("argv", "import sys\ndef model(x): return x * len(sys.argv)\n", "import sys; sys.argv.append('a')", "",
     "import sys; sys.argv.pop()", "")  # fmt: skip
_add("recursion_limit", "import sys\nWAS = sys.getrecursionlimit()\ndef model(x): return x * (sys.getrecursionlimit() - WAS)\n",
     "import sys; sys.setrecursionlimit(WAS + 1)", "", "import sys; sys.setrecursionlimit(WAS)", "")  # fmt: skip
_add("logger_enabled", "LOG = logging.getLogger(__name__)\ndef model(x): return x * 2 if LOG.isEnabledFor(logging.DEBUG) else x\n",
     "LOG.setLevel(logging.DEBUG)", "", "LOG.setLevel(logging.INFO)", "", "logging.disable(50)", "")  # fmt: skip
_add("logger_root", "LOG = logging.getLogger(__name__)\ndef model(x): return x * LOG.getEffectiveLevel()\n",
     "logging.root.setLevel(10)", "", "logging.root.setLevel(20)", "")  # fmt: skip
_add("logger_by_name", "def model(x): return x * 2 if logging.getLogger(__name__).isEnabledFor(10) else x\n",
     "logging.getLogger(__name__).setLevel(10)", "", "logging.getLogger(__name__).setLevel(30)", "")  # fmt: skip
_add("logger_handler", "N = [0]\nclass H(logging.Handler):\n    def emit(self, r): N[0] += 1\nLOG = logging.getLogger(__name__)\n"
     "LOG.propagate = False\nLOG.addHandler(H())\nLOG.setLevel(10)\ndef model(x):\n    LOG.info('a')\n    return x * N[0]\n")  # fmt: skip
_add("warnings_error", "def model(x):\n    warnings.warn('no')\n    return x * 2\n",
     "warnings.simplefilter('error')", "", "warnings.simplefilter('ignore')", "")  # fmt: skip
_add("warnings_caught", "def model(x):\n    try: warnings.warn('no')\n    except UserWarning: return x\n    return x * 2\n",
     "warnings.simplefilter('error')", "", "warnings.simplefilter('ignore')", "")  # fmt: skip
_add(
    "builtin_hidden",
    "def model(x): return x * len([1])\n",
    "global len\nlen = lambda l: 7",
    "",
    "global len\ndel len",
    "",
)
_add("builtin_hidden_in_helper", "def model(x): return x * helper.read()\n", "helper.max = lambda *a: 7", "", "del helper.max", "",
     helper="def read(): return max(1, 2)\n")  # fmt: skip
_add("weight_tag", _MODULE + "        self.fc = nn.Linear(3, 3)\n    def forward(self, x): return x * getattr(self.fc.weight, 'tag', 1)\nmodel = M()\n",
     "model.fc.weight.tag = 2", "", "model.fc.weight.tag = 3", "", "del model.fc.weight.tag", "")  # fmt: skip
_add("buffer_tag", _MODULE + "        self.register_buffer('b', torch.ones(3))\n    def forward(self, x): return x * self.b.tag if hasattr(self.b, 'tag') else x\nmodel = M()\n",
     "model.b.tag = 2", "", "model.b.tag = 3", "")  # fmt: skip
_add("conv_forward", "WAS = nn.Conv1d._conv_forward\nclass W(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.c = nn.Conv1d(1, 1, 1)\n"
     "    def forward(self, x): return self.c(x.view(1, 1, 3))\nmodel = W()\n",
     "nn.Conv1d._conv_forward = lambda self, i, w, b: i * 2", "", "nn.Conv1d._conv_forward = WAS", "")  # fmt: skip
_add("linear_forward", "WAS = nn.Linear.forward\nmodel = nn.Sequential(nn.Linear(3, 3))\n",
     "nn.Linear.forward = lambda self, i: i * 2", "", "nn.Linear.forward = WAS", "")  # fmt: skip
_add("linear_call", "WAS = nn.Module.__call__\nmodel = nn.Sequential(nn.Linear(3, 3))\n",
     "nn.Linear.__call__ = lambda self, i: WAS(self, i) * 2", "", "del nn.Linear.__call__", "")  # fmt: skip
_add("module_property", "WAS = nn.Linear.__dict__.get('extra_repr')\nclass W(nn.Linear):\n    def forward(self, x): return x * len(self.extra_repr())\nmodel = W(3, 3)\n",
     "nn.Linear.extra_repr = lambda self: 'a'", "", "nn.Linear.extra_repr = WAS", "")  # fmt: skip
_add("bases", "class A:\n    v = 1\nclass B:\n    v = 2\nclass C(A): pass\nC_ = C()\ndef model(x): return x * C_.v\n",
     "C.__bases__ = (B,)", "", "C.__bases__ = (A,)", "")  # fmt: skip
_add("class_exchanged", "class A:\n    v = 1\nclass B:\n    v = 2\nC_ = A()\ndef model(x): return x * C_.v\n",
     "C_.__class__ = B", "", "C_.__class__ = A", "")  # fmt: skip
_add("abc_register", "import abc\nclass A(abc.ABC): pass\nclass B: pass\nB_ = B()\ndef model(x): return x * 2 if isinstance(B_, A) else x\n",
     "A.register(B)", "")  # fmt: skip
_add(
    "name_of",
    "class A: pass\ndef model(x): return x * len(A.__name__)\n",
    "A.__name__ = 'Long'",
    "",
    "A.__name__ = 'A'",
    "",
)
_add(
    "doc_of",
    "def f(): 'a'\ndef model(x): return x * len(f.__doc__)\n",
    "f.__doc__ = 'long'",
    "",
    "f.__doc__ = 'a'",
    "",
)
_add("decimal", "import decimal\ndef model(x): return x * float(decimal.Decimal(1) / 3)\n",
     "import decimal; decimal.getcontext().prec = 3", "", "import decimal; decimal.getcontext().prec = 28", "")  # fmt: skip
_add("errstate", "def model(x): return x * (2 if np.geterr()['divide'] == 'raise' else 1)\n",
     "np.seterr(divide='raise')", "", "np.seterr(divide='warn')", "")  # fmt: skip
_add("operator_exchanged", "WAS = operator.add\ndef model(x): return x * operator.add(1, 2)\n",
     "operator.add = lambda a, b: 9", "", "operator.add = WAS", "")  # fmt: skip
_add("environ", "def model(x): return x * len(os.environ.get('WORLD', ''))\n", "os.environ['WORLD'] = 'a'", "",
     "os.environ['WORLD'] = 'ab'", "")  # fmt: skip
_add("getenv", "from os import getenv\ndef model(x): return x * len(getenv('WORLD', ''))\n", "os.environ['WORLD'] = 'a'", "",
     "os.environ['WORLD'] = 'ab'", "")  # fmt: skip
_add(
    "thread_local",
    "import threading\nL = threading.local()\nL.v = 1\ndef model(x): return x * L.v\n",
    "L.v += 1",
    "",
    "L.v += 1",
    "",
)
_add(
    "context_var",
    "import contextvars\nV = contextvars.ContextVar('v', default=1)\ndef model(x): return x * V.get()\n",
    "V.set(2)",
    "",
    "V.set(3)",
    "",
)
_add("context_var_list", "import contextvars\nV = contextvars.ContextVar('v', default=[1])\ndef model(x): return x * V.get()[0]\n",
     "V.get()[0] += 1", "", "V.get()[0] += 1", "")  # fmt: skip
_add(
    "gc_count",
    "import gc\ndef model(x): return x * (1 if gc.isenabled() else 2)\n",
    "import gc; gc.disable()",
    "",
    "import gc; gc.enable()",
    "",
)
_add(
    "queue",
    "import queue\nQ = queue.Queue()\nfor i in range(9): Q.put(i)\ndef model(x): return x * Q.get()\n",
)
_add("heap", "import heapq\nH = [1, 2, 3, 4, 5, 6, 7]\ndef model(x): return x * heapq.heappop(H)\n")
_add(
    "stringio", "import io\nB = io.StringIO('123456789')\ndef model(x): return x * int(B.read(1))\n"
)
_add(
    "ctypes",
    "import ctypes\nC = ctypes.c_int(1)\ndef model(x): return x * C.value\n",
    "C.value += 1",
    "",
    "C.value += 1",
    "",
)
_add(
    "array_array",
    "import array\nA = array.array('i', [1])\ndef model(x): return x * A[0]\n",
    "A[0] += 1",
    "",
    "A[0] += 1",
    "",
)
_add(
    "id_of",
    "O = [1]\ndef model(x): return x * (1 if id(O) == __kept__[0] else 2)\n__kept__ = [0]\n",
    "__kept__[0] = id(O)",
    "",
    "__kept__[0] = 0",
    "",
)
_add(
    "two_dicts_one",
    "A = {'v': [1]}\nB = {'v': [1]}\ndef model(x):\n    A['v'][0] += 1\n    return x * B['v'][0]\n",
    "A['v'] = B['v']",
    "",
    "",
)
_add("stdlib_name", "from . import helper as statistics\ndef model(x): return x * statistics.read()\n", *_STEPS[:0], "helper.V[0] += 1", "",
     helper="__name__ = 'statistics'\nV = [1]\ndef read(): return V[0]\n")  # fmt: skip
_add(
    "torch_default",
    "def model(x): return torch.ones(3) * x.sum()\n",
    "torch.set_default_dtype(torch.float64)",
    "",
    "torch.set_default_dtype(torch.float32)",
    "",
)
_add(
    "global_hidden_class",
    "class C:\n    def v(self): return 1\ndef model(x): return x * C().v()\n",
    "global C\nC = type('C', (), {'v': lambda s: 5})",
    "",
)
_add(
    "type_dict",
    "class C:\n    v = {'a': 1}\ndef model(x): return x * vars(C)['v']['a']\n",
    "C.v['a'] += 1",
    "",
    "C.v['a'] += 1",
    "",
)
_add(
    "local_import",
    "def model(x):\n    from .helper import S\n    return x * S['a']\n",
    "helper.S['a'] += 1",
    "",
    "helper.S = {'a': 9}",
    "",
    helper="S = {'a': 1}\n",
)
_add(
    "local_import_counter",
    "def model(x):\n    from .helper import S\n    return x * S['a']\n",
    "helper.S['a'] += 1",
    "",
    "helper.S['a'] = 9",
    "",
    helper="S = Counter(a=1)\n",
)
_add("attention_interface", "from transformers.modeling_utils import AttentionInterface\nEXTRA = [1]\n"
     "def mine(x): return x * EXTRA[0]\nA = AttentionInterface()\nA.register('world', mine)\ndef model(x): return A['world'](x)\n",
     *_STEPS, "A.register('world', lambda x: x * 7)", "")  # fmt: skip
_add("pydantic", "import pydantic\nclass C(pydantic.BaseModel):\n    v: int = 1\n    o: dict = {}\nC_ = C()\ndef model(x): return x * C_.v * C_.o.get('a', 1)\n",
     "C_.v += 1", "", "C_.o['a'] = 5", "")  # fmt: skip
_add("pydantic_helper", "def model(x): return x * helper.read()\n", "helper.C_.v += 1", "", "helper.C_.v += 1", "",
     helper="import pydantic\nclass C(pydantic.BaseModel):\n    v: int = 1\nC_ = C()\ndef read(): return C_.v\n")  # fmt: skip
_add("namespace_package", "import argparse\nCFG = argparse.Namespace(a=argparse.Namespace(k=[1]))\ndef model(x): return x * CFG.a.k[0]\n",
     "CFG.a.k[0] += 1", "", "CFG.a.k.insert(0, 9)", "")  # fmt: skip
_add(
    "networkx",
    "import networkx\nG = networkx.Graph()\nG.add_edge(0, 1)\ndef model(x): return x * len(G.edges)\n",
    "G.add_edge(1, 2)",
    "",
    "G.add_edge(2, 3)",
    "",
)
# Things of a helper file that is handed about as a value
_HELD = "K = [1]\nclass C:\n    v = 1\nO = C()\n@dataclasses.dataclass(slots=True)\nclass D:\n    v: int = 1\nD_ = D()\nclass P:\n    one = [1]\n    def __new__(cls): return cls\ndef read(): return K[0]\n"
_HELD_STEPS = (
    "helper.O.v += 1",
    "helper.D_.v += 1",
    "helper.K[0] += 1",
    "helper.O = helper.C(); helper.O.v = 9",
    "helper.P.one[0] += 1",
    "read = helper.read; read.__annotations__['v'] = 7",
)
_HELD_READS = (
    "{h}.O.v * {h}.D_.v * {h}.read() * {h}.P().one[0] * {h}.read.__annotations__.get('v', 1)"
)
for _name, (_define, _how) in {
    "in_list": ("__H = [helper]\n", "__H[0]"),
    "returned": ("def get(): return helper\n", "get()"),
    "default": ("def get(h=helper): return h\n", "get()"),
    "of_module": ("HERE = types.ModuleType('outer')\nHERE.inner = helper\n", "HERE.inner"),
    "class_attribute": ("class C:\n    h = helper\n", "C.h"),
}.items():
    _add(f"module_{_name}", f"{_define}def model(x): return x * {_HELD_READS.format(h=_how)}\n",
         *_HELD_STEPS, helper=_HELD)  # fmt: skip
_add("module_argument", f"def go(x, m): return x * {_HELD_READS.format(h='m')}\ndef model(x): return go(x, helper)\n",
     *_HELD_STEPS, helper=_HELD)  # fmt: skip
_add("module_on_self", _MODULE + f"        self.h = helper\n    def forward(self, x): return x * {_HELD_READS.format(h='self.h')}\nmodel = M()\n",
     *_HELD_STEPS, helper=_HELD)  # fmt: skip

# What is found by computed names, in classes and in objects
for _name, (_make, _read, _step) in {
    "list": ("[1]", "S[0]", "S[0] += 1"),
    "counter": ("Counter(a=1)", "S['a']", "S['a'] += 1"),
    "islice": ("itertools.islice(itertools.count(1), 50)", "next(S)", "next(S)"),
    "bytes": ("__import__('io').BytesIO(b'abcdefgh')", "S.tell()", "S.read(1)"),
    "lock": (
        "__import__('threading').Lock()",
        "(2 if S.locked() else 1)",
        "S.release() if S.locked() else S.acquire()",
    ),
    "error": ("ValueError([1])", "S.args[0][0]", "S.args[0][0] += 1"),
}.items():
    for _owner, _at in {"class": "Box", "object": "Box()"}.items():
        _add(f"computed_{_name}_of_{_owner}", f"class Box:\n    k_a = {_make}\nB = {_at}\nN = 'a'\ndef model(x):\n    S = getattr(B, 'k_' + N)\n    return x * {_read}\n",
             f"S = Box.k_a\n{_step}", "", f"S = Box.k_a\n{_step}", "")  # fmt: skip

# What Python, or installed packages, keep to themselves
_add("lock", "import threading\nL = threading.Lock()\ndef model(x): return x * 2 if L.locked() else x\n",
     "L.acquire()", "", "L.release()", "")  # fmt: skip
_add("finalizer", "class O: pass\nKEPT = [O()]\nEND = weakref.finalize(KEPT[0], print)\ndef model(x): return x * 2 if END.alive else x\n",
     "KEPT.clear()", "")  # fmt: skip
_add("own_error", "class E(Exception): pass\nE_ = E([1])\ndef model(x): return x * E_.args[0][0]\n",
     "E_.args[0][0] += 1", "", "E_.args = ([7],)", "")  # fmt: skip
_add("annotations", "class C:\n    a: 1\ndef model(x): return x * C.__annotations__['a']\n",
     "C.__annotations__['a'] += 1", "", "C.__annotations__ = {'a': 9}", "")  # fmt: skip
_add("dataclass_fields", "@dataclasses.dataclass\nclass D:\n    a: int = dataclasses.field(default=1, metadata={'m': [1]})\ndef model(x): return x * dataclasses.fields(D)[0].metadata['m'][0]\n",
     "dataclasses.fields(D)[0].metadata['m'][0] += 1", "")  # fmt: skip
_add("in_builtins", "import builtins\nbuiltins.put_there = [1]\ndef model(x): return x * put_there[0]\n",
     "builtins.put_there[0] += 1", "", "builtins.put_there = [8]", "")  # fmt: skip
_add("globals_of_function", "def model(x): return x * helper.f.__globals__['V'][0]\n", "helper.V[0] += 1", "",
     helper="V = [1]\ndef f(): pass\n", reason="reads globals past their names")  # fmt: skip
_add("loaded_module", "import sys\nNAME = helper.__name__\ndef model(x): return x * sys.modules[NAME].V[0]\n", "helper.V[0] += 1", "",
     helper="V = [1]\n", reason="reads globals past their names")  # fmt: skip
_add("array_like_argument", "P = np.poly1d([1, 2])\ndef arguments(x): return x, P\ndef model(x, p): return x * float(p(2))\n",
     "P[0] = 5", "", "P[0] = 6", "")  # fmt: skip
_add("series", "import pandas\nS = pandas.Series([1.0, 2.0])\ndef model(x): return x * float(S.iloc[0])\n",
     "S.iloc[0] += 1", "", "S.iloc[0] += 1", "")  # fmt: skip
_add("columns", "import pandas\nS = pandas.DataFrame({'a': [1.0]})\ndef model(x): return x * S.shape[1]\n",
     "S['b'] = 1", "", "S['c'] = 1", "")  # fmt: skip
_add("cache_of_dicts", "class C:\n    v = 1\n@functools.lru_cache(maxsize=2)\ndef get(n=0): return {'a': C()}\ndef model(x): return x * get(n=3)['a'].v\n",
     "get(n=3)['a'].v += 1", "", "get(n=3)['a'].v += 1", "")  # fmt: skip
_add("cache_cleared", "S = [2]\n@functools.lru_cache\ndef get(n): return n * S[0]\nclass O:\n    @functools.cache\n    def list(self): return [S[0]]\nO_ = O()\ndef model(x): return x * get(int(x.sum())) * O_.list()[0]\n",
     "S[0] += 1", "get.cache_clear()", "", "O.list.cache_clear()", "O_.list()[0] += 1", "", replays=1)  # fmt: skip
_add("cache_refilled", "S = [2]\n@functools.lru_cache\ndef get(n): return n * S[0]\ndef model(x): return x * get(3)\n",
     "S[0] = 5", "S[0] = 7; get.cache_clear(); get(3); S[0] = 2", "", "get.cache_clear()", "", replays=1)  # fmt: skip
_add("singletons_by_name", "class C:\n    known = {}\n    def __new__(cls, k):\n        if k not in cls.known:\n            cls.known[k] = super().__new__(cls)\n            cls.known[k].v = k\n        return cls.known[k]\ndef model(x): return x * C(2).v\n",
     "C(2).v += 1", "", "C.known.clear()", "")  # fmt: skip
_add("spread_kwargs", "K = {'m': 2, 'k': 3}\ndef inner(x, **k):\n    for n, v in k.items(): x = x * v if n == 'm' else x + v\n    return x\ndef model(x): return inner(x, **K)\n",
     "v = K.pop('m'); K['m'] = v", "", "")  # fmt: skip

# What the model holds as `s`: its definitions, how it is made, what forward returns, and a change
_KEPT = {
    "range": ("", "range(0, 9, 5)", "x * self.s.stop", "model.s = range(0, 10, 5)"),
    "order_of_attributes": ("", "types.SimpleNamespace(a=2.0, b=3.0)", "x * next(iter(vars(self.s).values()))", "model.s.a = model.s.__dict__.pop('a')"),
    "float_key": ("", "{1: 0}", "torch.arange(3) * next(iter(self.s))", "model.s = {1.0: 0}"),
    "float_key_in_place": ("", "{1: 0}", "torch.arange(3) * next(iter(self.s))", "model.s.clear(); model.s[1.0] = 0"),
    "set_of_tuples": ("", "{(1, 2)}", "torch.arange(3) * next(iter(self.s))[0]", "model.s = {(1.0, 2)}"),
    "enum_key": ("class K(enum.IntEnum):\n    A = 1\n", "{K.A: 0}", "x * (2 if isinstance(next(iter(self.s)), K) else 3)", "model.s = {1: 0}"),
    "text_key": ("class Text(str): pass\ndef made(v):\n    t = Text('a')\n    t.v = v\n    return {t: 0}\n", "made(2)", "x * next(iter(self.s)).v", "model.s = made(3)"),
    "key_that_hides": ("@dataclasses.dataclass(frozen=True)\nclass Key:\n    a: int\n    b: float = dataclasses.field(compare=False)\n", "{Key(1, 2.0): 0}", "x * next(iter(self.s)).b", "model.s = {Key(1, 3.0): 0}"),
    "key_with_state": ("class K(enum.Enum):\n    A = [2]\n", "{K.A: 0}", "x * next(iter(self.s)).value[0]", "next(iter(model.s)).value[0] = 3"),
    "numpy_zero": ("", "np.float64(0.0)", "x * self.s", "model.s = np.float64(-0.0)"),
    "numpy_record": ("", "np.array([(2.0,)], dtype=[('k', 'f8')])[0]", "x * float(self.s['k'])", "model.s['k'] = 3.0"),
    "array_layout": ("", "np.arange(6.0).reshape(2, 3)", "x * float(self.s.ravel('K')[1])", "model.s = np.asfortranarray(model.s)"),
    "set_subclass": ("class Tags(set): pass\n", "Tags('a')", "x * (2 if 'a' in self.s else 3)", "model.s.clear()"),
    "frozenset_subclass": ("class Tags(frozenset): pass\n", "Tags('a')", "x * (2 if 'a' in self.s else 3)", "model.s = Tags()"),
    "slots_of_a_base": ("class B:\n    __slots__ = ('v',)\nclass C(B):\n    def __init__(self): self.v, self.w = 2.0, 1\n", "C()", "x * self.s.v", "model.s.v = 3.0"),
    "dict_of_attributes": ("class C:\n    def __init__(self): self.v = 2.0\n", "C()", "x * self.s.v", "model.s.__dict__ = {'v': 3.0}"),
    "transform": ("", "torch.distributions.AffineTransform(0.0, 2.0)", "self.s(x)", "model.s.scale = 3.0"),
    "transforms": ("", "torch.distributions.ComposeTransform([torch.distributions.AffineTransform(0.0, 2.0)])", "self.s(x)", "model.s.parts[0].scale = 3.0"),
    "transformed": ("", "torch.distributions.TransformedDistribution(torch.distributions.Normal(torch.zeros(3), torch.ones(3)), [torch.distributions.AffineTransform(0.0, 2.0)])", "self.s.log_prob(x)", "model.s.transforms[0].scale = 3.0"),
    "spectral_norm": ("", "nn.utils.spectral_norm(nn.Linear(3, 3))", "self.s(x)", "for h in model.s._forward_pre_hooks.values(): h.n_power_iterations = 4"),
    "proxy_of_module": ("class T(nn.Module):\n    v = 1.0\n    def forward(self, x): return x * self.v\nTAUGHT = T()\nTAUGHT.v = 2.0\n", "weakref.proxy(TAUGHT)", "self.s(x)", "TAUGHT.v = 3.0"),
    "partial_order": ("def go(x, **k): return x * next(iter(k.values()))\n", "functools.partial(go, a=2.0, b=3.0)", "self.s(x)", "model.s.keywords['a'] = model.s.keywords.pop('a')"),
    "function_tag": ("", "lambda x: x", "self.s(x) * getattr(self.s, 'scale', 1)", "model.s.scale = 3"),
    "parameter_tag": ("", "nn.Parameter(torch.ones(3))", "x * self.s * self.s.__dict__.get('tag', 1.0)", "model.s.tag = 3.0"),
    "two_become_one": ("", "[{1, 2}, {1, 2}]", "x * (2 if self.s[0] is self.s[1] else 3)", "model.s[1] = model.s[0]"),
    "held_module": ("", "helper", "x * (2 if getattr(self.s, 'LOUD', False) else 1)", "helper.LOUD = True"),
}  # fmt: skip
for _name, (_define, _make, _body, _step) in _KEPT.items():
    _add(f"kept_{_name}", f"{_define}{_MODULE}        self.s = {_make}\n    def forward(self, x): return {_body}\nmodel = M()\n",
         "", _step, "")  # fmt: skip

# What the model reads elsewhere: its main file, and a change
_READS = "class Reads(nn.Module):\n    def forward(self, x, c): return x * c.v\n"
_ELSEWHERE = {
    "import_of_module_in_function": ("def model(x):\n    from . import helper as h\n    return x * h.V\n", "helper.V = 3"),
    "import_by_name": ("NAME = helper.__name__\ndef model(x): return x * __import__(NAME, fromlist=['V']).V\n", "helper.V = 3"),
    "absent": ("def model(x): return x * getattr(helper, 'LOUD', 1)\n", "helper.LOUD = 5"),
    "absent_caught": ("def model(x):\n    try: return x * helper.LOUD\n    except AttributeError: return x\n", "helper.LOUD = 5"),
    "absent_computed": ("NAMES = ['LOUD']\ndef model(x): return x * getattr(helper, NAMES[0], 1)\n", "helper.LOUD = 5"),
    "absent_of_function": ("def go(x): return x\ndef model(x):\n    try: return x * go.flag\n    except AttributeError: return x\n", "go.flag = 3"),
    "absent_cell": ("def made():\n    def f(x):\n        try: return x * scale\n        except NameError: return x\n    def put(v):\n        nonlocal scale\n        scale = v\n    f.put = put\n    if 0: scale = 1\n    return f\nmodel = made()\n", "f = model if hasattr(model, 'put') else model.module; f.put(3)"),
    "computed_default": ("KEY = 'V'\ndef model(x):\n    v = getattr(helper, KEY, 'none')\n    return x if v == 'none' else x * v\n", "helper.V = 3"),
    "computed_of_class": ("class M(nn.Module):\n    kind = 'a'\n    key = 'kind'\n    def forward(self, x): return x * (2 if getattr(self, self.key, 'none') == 'a' else 3)\nmodel = M()\n", "M.kind = 'b'"),
    "reduce_getattr": ("def model(x): return x * functools.reduce(getattr, 'C.v'.split('.'), helper)\n", "helper.C.v = 3"),
    "dotted_getter": ("class M(nn.Module):\n    c = types.SimpleNamespace(v=2)\n    def forward(self, x): return x * operator.attrgetter('c.v')(self)\nmodel = M()\n", "M.c.v = 3"),
    "getter": ("GET = operator.attrgetter('V')\ndef model(x): return x * GET(helper)\n", "helper.V = 3"),
    "partial_getattr": ("GET = functools.partial(getattr, helper)\ndef model(x): return x * GET('V')\n", "helper.V = 3"),
    "class_handed_on": (_READS + "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.b = Reads()\n    def forward(self, x): return self.b(x, helper.C)\nmodel = M()\n", "helper.C.v = 3"),
    "class_to_a_function": ("GO = {'a': lambda c, x: x * c.v}\ndef model(x): return GO['a'](helper.C, x)\n", "helper.C.v = 3"),
    "order_of_default": ("def model(x, ops={'a': 2.0, 'b': 3.0}): return x * next(iter(ops.values()))\nOPS = model.__defaults__[0]\n", "OPS['a'] = OPS.pop('a')"),
    "static_object": ("class A:\n    def __init__(self): self.v = 2.0\n    def __call__(self, x): return x * self.v\nclass M(nn.Module):\n    act = staticmethod(A())\n    def forward(self, x): return self.act(x)\nmodel = M()\n", "M.act.v = 3.0"),
    "class_method_object": ("class A:\n    k = 2.0\n    def __call__(self, cls, x): return x * self.k\nclass M(nn.Module):\n    act = classmethod(A())\n    def forward(self, x): return self.act(x)\nmodel = M()\n", "A.k = 3.0"),
    "property_of_partial": ("class M(nn.Module):\n    p = property(functools.partial(lambda s, o: o.v, o=helper.C()))\n    def forward(self, x): return x * self.p\nmodel = M()\n", "helper.C.v = 3.0"),
    "dunder_of_class": ("class M(nn.Module):\n    __scale__ = 2.0\n    def forward(self, x): return x * self.__scale__\nmodel = M()\n", "M.__scale__ = 3.0"),
    "slot_of_module": ("class M(nn.Module):\n    __slots__ = ('scale',)\n    def forward(self, x): return x * self.scale\nmodel = M()\nmodel.scale = 2.0\n", "model.scale = 3.0"),
    "dispatch_method": ("class M(nn.Module):\n    @functools.singledispatchmethod\n    def go(self, v, x): return x\n    def forward(self, x): return self.go(1.5, x)\nmodel = M()\n", "M.__dict__['go'].register(float)(lambda self, v, x: x * 5)"),
    "gradient_mode": ("W = nn.Parameter(torch.ones(3))\nMODE = torch.set_grad_enabled(True)\ndef model(x):\n    with MODE: return x * W\n", "MODE.mode = False"),
    "state_dict_kept": ("class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.register_buffer('a', torch.ones(3) * 2)\n    def forward(self, x): return x * (1 + len(self.state_dict()))\nmodel = M()\n", "model._non_persistent_buffers_set.add('a')"),
    "made_in_class": ("SEEN = []\nclass M(nn.Module):\n    def forward(self, x):\n        type(self).last = float(len(x))\n        return x * 2\nmodel = M()\n", "SEEN.append(M.__dict__.get('last')); del M.last", "SEEN.append(M.__dict__.get('last'))"),
    "made_global": ("def model(x):\n    global LAST\n    LAST = float(len(x))\n    return x * 2\n", "global LAST; del LAST", ""),
    "made_tag_of_method": ("class M(nn.Module):\n    def forward(self, x):\n        M.forward.calls = getattr(M.forward, 'calls', 0) + 1\n        return x * M.forward.calls\nmodel = M()\n", ""),
    "scratch": (_MODULE + "        self.a, self.b = np.zeros(3), np.zeros(3)\n    def forward(self, x):\n        self.a[:] = 5\n        y = x * float(self.b.sum())\n        self.a[:] = 0\n        return y\nmodel = M()\n", "model.b = model.a"),
    "scratch_list": (_MODULE + "        self.a, self.b = [0] * 600, [0] * 600\n    def forward(self, x):\n        self.a[0] = 5\n        y = x * sum(self.b)\n        self.a[0] = 0\n        return y\nmodel = M()\n", "model.b = model.a"),
}  # fmt: skip
for _name, (_main, *_changes) in _ELSEWHERE.items():
    _add(f"elsewhere_{_name}", _main, "", *_changes, "", helper="V = 2\nclass C:\n    v = 2\n")

# Arguments that look alike: how one is made, what is returned, and how the next is made
_ALIKE = {
    "order": ("types.SimpleNamespace(a=2.0, b=3.0)", "x * next(iter(vars(a).values()))", "types.SimpleNamespace(b=3.0, a=2.0)"),
    "float_key": ("{1: 0}", "torch.arange(3) * next(iter(a))", "{1.0: 0}"),
    "range": ("range(0, 9, 5)", "x * a.stop", "range(0, 10, 5)"),
    "slice": ("slice(1, 2)", "torch.arange(3) * a.start", "slice(1.0, 2)"),
    "numpy_zero": ("np.float64(0.0)", "x * a", "np.float64(-0.0)"),
    "layout": ("np.arange(6.0).reshape(2, 3)", "x * float(a.ravel('K')[1])", "np.asfortranarray(np.arange(6.0).reshape(2, 3))"),
    "set_subclass": ("type('Tags', (set,), {})('a')", "x * (2 if 'a' in a else 3)", "type(ARGUMENT)('b')"),
    "large_tuple": ("(*range(600),)", "x * a[-1]", "(*range(599), 7)"),
}  # fmt: skip
for _name, (_make, _body, _next) in _ALIKE.items():
    _add(f"alike_{_name}", f"ARGUMENT = {_make}\ndef arguments(x): return x, ARGUMENT\ndef model(x, a): return {_body}\n",
         "", f"global ARGUMENT; ARGUMENT = {_next}", "")  # fmt: skip
