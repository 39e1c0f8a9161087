"""The suites: where programs come from."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import re
import signal
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tools.scoreboard.case import Case, Drive, Raised, Step, Wrap, seeded, tried
from tools.scoreboard.drawing import BATCH, programs_of

__all__ = ["SUITES", "Suite", "suite_of"]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Suite:
    """A suite.

    Attributes:
        name: its name.
        about: what the page says of it.
        names: returns the names of its cases; may take an option (a path, a number).
        case: makes a case of a name.
        quick: how many cases `--quick` takes.
        seconds: what a case may take.
        package: what has to be installed for it.
        spread: whether some of its cases are taken from all over it, or the first ones.
    """

    name: str
    about: str
    names: Callable[[Any], list[str]]
    case: Callable[[str, Any], Case]
    quick: int
    seconds: float = 60.0
    package: str = "torch"
    spread: bool = True

    def is_there(self, option: Any) -> str:
        """Say why it cannot be run; "" if it can."""
        try:
            importlib.import_module(self.package)
        except ModuleNotFoundError:
            return f"{self.package} is not installed"
        except Exception as error:  # built for another torch
            return f"{self.package} cannot be imported: {type(error).__name__}"
        if self.name == "ParityBench" and option is None:
            return "no checkout was given (--paritybench PATH)"
        return ""


# A model, in the general form


def _driven(
    make: Callable[[], Any], calls: Callable[[], list[tuple[str, Inputs]]], *, changes: bool = True
) -> Drive:
    """Return a program that calls a model on its inputs, changes it, and calls it again.

    Args:
        make: builds the model, the same each time.
        calls: makes the inputs of each call, and what is new about it.
        changes: whether to change parameters, the mode and the dtype afterwards.
    """

    def drive(wrap: Wrap) -> Iterator[Step]:
        model = seeded(make)
        call = wrap(model)
        made = calls()
        for kind, inputs in made:
            yield Step(kind, _called(call, inputs))  # type: ignore[arg-type]
        if not changes or not isinstance(model, nn.Module):
            return
        first = calls()[0][1]
        parameters = [p for p in model.parameters() if p.is_floating_point()]
        if parameters:
            with torch.no_grad():
                parameters[0].mul_(1.5)
            yield Step("change", _called(call, first))
        model.train(not model.training)
        yield Step("change", _called(call, calls()[0][1]))
        model.train(not model.training)
        if parameters:
            with contextlib.suppress(Exception):
                model.double()
            yield Step("change", _called(call, tree_map(_doubled, calls()[0][1])))

    return drive


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _called(call: Callable[..., Any], inputs: Inputs) -> Any:
    args, kwargs = inputs
    with torch.no_grad():
        out = tried(seeded, call, *args, **kwargs)
    return out, [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


# Ours


def _corpus_names(_: Any) -> list[str]:
    from tests.corpus import CASES

    return [case.name for case in CASES]


def _corpus(name: str, _: Any) -> Case:
    from tests.corpus import CASES

    case = next(case for case in CASES if case.name == name)

    def calls() -> list[tuple[str, Inputs]]:
        kinds = ["traced"] + ["inputs"] * (len(case.paths) - 1)
        return list(zip(kinds, (path() for path in case.paths.values()), strict=True))

    return Case("corpus", name, _driven(case.make, calls))


def _issue_names(_: Any) -> list[str]:
    from tests.registry.issues import ISSUES

    return [issue.name for issue in ISSUES]


def _issue(name: str, _: Any) -> Case:
    from tests.registry.issues import ISSUES

    found = next(issue for issue in ISSUES if issue.name == name)
    return Case("issues", name, found.drive, found.about, found.inductor)


def _random_names(option: Any) -> list[str]:
    return [f"{number // BATCH}-{number % BATCH}" for number in range(int(option or 2000))]


_drawn: dict[int, list[Any]] = {}


def _random(name: str, _: Any) -> Case:
    batch, place = map(int, name.split("-"))
    if batch not in _drawn:
        _drawn.clear()
        _drawn[batch] = programs_of(batch)
    program = _drawn[batch][place]

    def drive(wrap: Wrap) -> Iterator[Step]:
        from tools.generator.program import called_in_turn

        with program.modules(1) as (module,):
            for number, (call, value) in enumerate(called_in_turn(program, module, wrap)):
                output, *rest = value
                value = [Raised(output) if isinstance(output, Exception) else output, *rest]
                changed = bool(call.step) or (number and call.train != program.calls[0].train)
                kind = "traced" if not number else "change" if changed else "inputs"
                yield Step(kind, value)  # type: ignore[arg-type]

    return Case("random", name, drive)


# Other libraries


def _hub_names(_: Any) -> list[str]:
    from tools.hub.building import CHOSEN, types

    return [*CHOSEN, *(name for name in types() if name not in CHOSEN)]


def _hub(name: str, _: Any) -> Case:
    from tools.hub.building import build
    from tools.hub.inputs import guessed

    def calls() -> list[tuple[str, Inputs]]:
        made = [
            (kind, ((), guessed(build(name), seed)[1]))
            for kind, seed in (("traced", 0), ("inputs", 1))
        ]
        with contextlib.suppress(ValueError):  # of this size there are none
            made.append(("inputs", ((), guessed(build(name), 2, length=11)[1])))
        return made

    return Case("transformers", name, _driven(lambda: build(name), calls))


def _vision_names(_: Any) -> list[str]:
    from torchvision import models  # type: ignore[import-not-found]

    return [name for name in models.list_models() if "quantized" not in name]


def _vision(name: str, _: Any) -> Case:
    from torchvision import models

    def make() -> nn.Module:
        own = inspect.signature(models.get_model_builder(name)).parameters
        options = dict.fromkeys({"weights", "weights_backbone"} & {*own})  # nothing is downloaded
        made: nn.Module = models.get_model(name, **options)
        return made.eval()

    size = {"inception_v3": 96}.get(name, 64)

    def calls() -> list[tuple[str, Inputs]]:
        return [
            (kind, ((torch.randn(batch, 3, size, size),), {}))
            for kind, batch in (("traced", 1), ("inputs", 1), ("inputs", 2))
        ]

    return Case("torchvision", name, _driven(make, calls))


_LARGE = re.compile("giant|gigantic|enormous|huge|large|_[0-9]+b_|so400m|so150m")  # takes minutes


def _timm_names(_: Any) -> list[str]:
    import timm  # type: ignore[import-not-found]

    return [name for name in timm.list_models() if not _LARGE.search(name)]


_SMALL = 96  # pixels: most take these too, where they were made for 224


def _timm(name: str, _: Any) -> Case:
    import timm

    def made(**size: int) -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=4, **size)
        return model.eval()

    def sized() -> tuple[dict[str, int], tuple[int, ...]]:
        """The options of a model for small images, and their size; of its own, if there is none."""
        options: dict[str, int]
        for options in ({"img_size": _SMALL}, {}):
            with contextlib.suppress(Exception), torch.no_grad():
                made(**options)(torch.zeros(1, 3, _SMALL, _SMALL))
                return options, (3, _SMALL, _SMALL)
        return {}, made().default_cfg["input_size"]  # type: ignore[index, union-attr, return-value]

    options, size = sized()

    def calls() -> list[tuple[str, Inputs]]:
        return [(kind, ((torch.randn(1, *size),), {})) for kind in ("traced", "inputs")]

    return Case("timm", name, _driven(lambda: made(**options), calls))


# torch's own


def _op_names(_: Any) -> list[str]:
    from tests.sweep.ops import OPS, UNFILLED

    return [name for name in OPS if name not in UNFILLED]


def _op(name: str, _: Any) -> Case:
    from tests.sweep import ops

    op = ops.OPS[name]
    function = ops.calling(op.get_op(), clone=False)

    def calls() -> list[tuple[str, Inputs]]:
        drawn = ops.samples(op, 0, requires_grad=False)
        others = ops.samples(op, 1, requires_grad=False)
        both = [(s.args, s.kwargs) for pair in zip(drawn, others, strict=False) for s in pair]
        return [("inputs" if number else "traced", given) for number, given in enumerate(both)]

    return Case("op_db", name, _driven(lambda: function, calls))


def _module_names(_: Any) -> list[str]:
    from tests.sweep.modules import MODULES

    return list(MODULES)


def _torch_module(name: str, _: Any) -> Case:
    from tests.sweep import modules

    info = modules.MODULES[name]

    def drawn(seed: int) -> Any:
        return modules._inputs(info, seed, training=False)[0]

    def calls() -> list[tuple[str, Inputs]]:
        return [
            (kind, (tuple(given.args), dict(given.kwargs)))
            for kind, given in (
                ("traced", drawn(0).forward_input), ("inputs", drawn(1).forward_input)
            )
        ]  # fmt: skip

    return Case(
        "module_db", name, _driven(lambda: modules._made(info, drawn(0), training=False), calls)
    )


def _example_names(_: Any) -> list[str]:
    from torch._export.db.examples import all_examples

    return list(all_examples())


def _example(name: str, _: Any) -> Case:
    from torch._export.db.examples import all_examples

    example = all_examples()[name]

    def calls() -> list[tuple[str, Inputs]]:
        def of(how: Callable[[Tensor], Tensor]) -> Inputs:
            def changed(value: Any) -> Any:
                return how(value) if isinstance(value, Tensor) else value

            made: Inputs = tree_map(changed, (example.example_args, dict(example.example_kwargs)))
            return made

        return [
            ("traced", of(torch.Tensor.clone)),
            ("inputs", of(lambda t: ~t if t.dtype is torch.bool else -t)),
            ("inputs", of(lambda t: torch.cat([t, t]) if t.dim() else t + 1)),
        ]

    return Case("exportdb", name, _driven(lambda: copy.deepcopy(example.model), calls))


# ParityBench, from a checkout beside the project


_LONGEST = 0.5  # seconds that a call of a module may take in eager: some are very large


def _parity_names(option: Any) -> list[str]:
    files = sorted(Path(option, "generated").glob("test_*.py"))
    return [file.stem for file in files]


def _parity(name: str, option: Any) -> Case:
    """A file: each of its test cases is called twice, and once more in the other mode."""
    folder = str(Path(option).resolve())
    for place in (folder, str(Path(folder, "generated"))):
        if place not in sys.path:
            sys.path.insert(0, place)

    large: list[bool] = []  # whether each of its modules is left out; eager comes first

    def drive(wrap: Wrap) -> Iterator[Step]:
        sys.modules.pop(f"generated.{name}", None)  # what it holds may have been changed
        module = _imported(f"generated.{name}")
        for number, (cls, init, forward, *_) in enumerate(module.TESTCASES):
            if number < len(large) and large[number]:
                continue
            args, kwargs = init()
            model = seeded(cls, *args, **kwargs).eval()
            call = wrap(model)
            for kind in ("traced", "inputs", "change"):
                model.train(kind == "change")
                try:
                    with _at_most(_LONGEST) if number == len(large) else contextlib.nullcontext():
                        value = _called(call, seeded(forward))  # type: ignore[arg-type]
                except _TooLong:
                    large.append(True)
                    break
                if number == len(large):
                    large.append(False)
                yield Step(kind, value)
        if large and all(large):
            raise ValueError(f"all its modules take more than {_LONGEST} s a call")

    return Case("ParityBench", name, drive)


class _TooLong(BaseException):
    """A call takes too long: no error that a program may catch."""


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End a call after some seconds, once the operator that it is in returns."""

    def leave(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Absent(types.ModuleType):
    """Stands for a package that is not installed; generated files import many, and use few."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


def _imported(name: str) -> types.ModuleType:
    for _ in range(100):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name in sys.modules:
                raise
            sys.modules[error.name] = _Absent(error.name)
    raise ImportError(f"{name} imports too much that is not there")


SUITES = (
    Suite("issues", "Programs of our own after issues of others that tell of silently wrong "
          "results (`tests/registry/issues`).", _issue_names, _issue, 1000),
    Suite("corpus", "The small models of `tests/corpus`, whose Python branches on values.",
          _corpus_names, _corpus, 12),
    Suite("random", "Random programs of `tools/generator`: state, aliasing, writes, nested control "
          "flow, changes between calls.", _random_names, _random, 12, spread=False),
    Suite("op_db", "The operators of torch's own tests, with their sample inputs.",
          _op_names, _op, 12),
    Suite("module_db", "The modules of torch's own tests.", _module_names, _torch_module, 8),
    Suite("exportdb", "The examples of torch.export, also those that it cannot export.",
          _example_names, _example, 12),
    Suite("transformers", "All types of `AutoModel` of transformers, small, with random weights.",
          _hub_names, _hub, 1, 240.0, "transformers"),
    Suite("torchvision", "The models of torchvision, with random weights, on small images.",
          _vision_names, _vision, 1, 240.0, "torchvision"),
    Suite("timm", "The models of timm, with random weights, but for the largest.",
          _timm_names, _timm, 1, 240.0, "timm"),
    Suite("ParityBench", "Modules of GitHub, as ParityBench's generated files hold them; each file "
          "is a case. Run from a checkout beside the project. Modules that take more than half a "
          "second a call in eager are left out.", _parity_names, _parity, 4, 600.0),
)  # fmt: skip


def suite_of(name: str) -> Suite:
    """Return a suite by its name.

    Raises:
        ValueError: there is none.
    """
    for suite in SUITES:
        if suite.name == name:
            return suite
    raise ValueError(f"no suite is called {name!r}: there are {', '.join(s.name for s in SUITES)}")
