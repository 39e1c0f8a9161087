"""A call of a model together with what its nodes gave in it, as a dict by name."""

from __future__ import annotations

import itertools
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.calls import Call, bended_of
from bendtrace.errors import InputError, NeverFiredWarning, NodePathError
from bendtrace.history.copies import copied, lazily_copied, materialize, tensors_in
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.structure import assemble, take_apart
from bendtrace.interject.where import near_misses
from bendtrace.module import BendedModule
from bendtrace.paths.candidates import Candidate, NodeSelector
from bendtrace.recording.recorder import Recording
from bendtrace.recording.writes import storage_of
from bendtrace.workflows.aliases import Alias, Aliases, transformer_lens_aliases

__all__ = ["ActivationCache", "run_with_cache"]

_SHOWN = 20
_GIVES = {"input": "is given", "output": "gives"}


class ActivationCache(dict[str, Any]):
    """What nodes gave in one call, by node path; and by the other names of the same.

    Keys are node paths (`transformer.h_0.mlp`), with the number of the pass where there were
    several (`relu:2`), and `.input` behind them for what a module was given; and the aliases that
    were asked for. Looked up it can also be by qualified names, with `.output` and `.input`
    behind them (`transformer.h.0.output`), and by aliases.

    Attributes:
        aliases: other names.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh())
        >>> out, cache = bt.workflows.run_with_cache(
        ...     model, torch.ones(2), aliases={"rectified": "0.output"}
        ... )
        >>> cache["sub_0"], cache["0.output"], cache["rectified"]
        (tensor([1., 1.]), tensor([1., 1.]), tensor([1., 1.]))
        >>> cache["output.input"].shape, torch.equal(cache["output"], out)
        (torch.Size([2]), True)
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        names: Mapping[str, list[str]],
        aliases: Aliases | None = None,
    ) -> None:
        super().__init__(values)
        self.aliases = Aliases() if aliases is None else aliases
        self._names = dict(names)

    def passes(self, name: str) -> list[Any]:
        """Return what a node gave in each of its passes, in order."""
        return [self[key] for key in self._keys_of(name)]

    def _keys_of(self, name: str) -> list[str]:
        if name in self:
            return [name]
        return self._names.get(name, [])

    def __missing__(self, name: str) -> Any:
        keys = self._names.get(name, []) if isinstance(name, str) else []
        if len(keys) == 1:
            return self[keys[0]]
        if keys:
            raise NodePathError(
                f"{name!r} was there several times: name one of {', '.join(map(repr, keys))}",
                name,
                tuple(keys),
            )
        alias = self.aliases.get(name)
        if alias is not None:
            return _picked(self[alias.where], alias)
        why = self.aliases.why_not(name) if isinstance(name, str) else ""
        if why:
            raise NodePathError(f"{name!r} has no equal in this model: {why}", name)
        hint = near_misses(str(name), [*self, *self._names])
        raise NodePathError(f"there is no {name!r} in this cache; {hint}", str(name), tuple(self))

    def __repr__(self) -> str:
        lines = [f"<ActivationCache: {len(self)} values>"]
        lines += [f"  {key}: {_shown(value)}" for key, value in list(self.items())[:_SHOWN]]
        if len(self) > _SHOWN:
            lines.append(f"  ... and {len(self) - _SHOWN} more")
        return "\n".join(lines)


def run_with_cache(
    model: Callable[..., Any],
    inputs: Any,
    names_filter: Any = None,
    *,
    aliases: Mapping[str, str | Alias] | None = None,
    detach: bool = True,
) -> tuple[Any, ActivationCache]:
    """Call a model, and return its output and what its nodes gave.

    The name is that of TransformerLens.

    Args:
        model: a module, a function or a `BendedModule`; what is inserted in it is called.
        inputs: what it is called with; see `Call.of`.
        names_filter: what is kept: None for all that has a tensor in it; a name, or several; a
            compiled regular expression, in full, or a function of a name that says yes or no. The
            names of a node are its path (`transformer.h_0.mlp`); for calls of modules also the
            qualified name with `.output` and with `.input` behind it, which mean what the
            module gave and was given; and aliases. A module's input is its first argument.
        aliases: other names for nodes: a mapping to paths, or to an `Alias`. None for those of
            TransformerLens where the model is a GPT-2 or a Llama of Hugging Face
            (`transformer_lens_aliases`).
        detach: whether to keep snapshots, which nothing changes any more, and whose memory is
            shared until somebody writes. Otherwise the tensors themselves, with their graph.

    Returns:
        The output, and an `ActivationCache`.

    Raises:
        NodePathError: there is nothing by a name; for names of TransformerLens that have no
            equal here it says why.
        InputError: nothing is meant, or something given makes no sense.

    Example:
        >>> import torch, bendtrace as bt
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> out, cache = bt.workflows.run_with_cache(model, torch.ones(1, 2))
        >>> sorted(cache)
        ['output', 'output.input', 'sub_0', 'sub_0.input', 'sub_0.linear', 'sub_1', 'sub_1.input',
         'sub_1.relu']
        >>> torch.equal(cache["1.output"], out), torch.equal(cache["1.input"], cache["0.output"])
        (True, True)
    """
    call, bended = Call.of(inputs), bended_of(model)
    if aliases is None:
        known = transformer_lens_aliases(bended.model)
    else:
        known = aliases if isinstance(aliases, Aliases) else Aliases(aliases)
    fixed = _fixed(bended.model, call) if detach else None
    # The model's own Python could write to what is shared by its address, as through numpy
    # arrays. Whether it does is known from the first run on.
    runs = bended._known.recordings()
    is_lazy = bool(runs) and not any(map(_hands_out, runs))
    wanted = _Wanted(bended, known)
    wanted.read(names_filter)
    keepers = wanted.keepers(fixed, is_lazy)
    first = [insertion for keeper in keepers for insertion in keeper.made if keeper.is_input]
    last = [insertion for keeper in keepers for insertion in keeper.made if not keeper.is_input]
    # Inputs are seen after all that is inserted has changed them if what keeps them is innermost.
    board = bended._board
    others = board.insertions
    board.remove(*others)
    board.add(*first, *others, *last)
    try:
        output = call.to(bended)
    except NodePathError as error:
        raise wanted.explained(error) from None
    finally:
        board.remove(*first, *last)
        for keeper in keepers:
            keeper.close()
    for tensor in tensors_in((output, call.args, dict(call.kwargs))):
        materialize(tensor)  # what the caller has in hand are ordinary tensors
    if is_lazy and fixed is not None:
        for run in (run for insertion in (*first, *last) for run in insertion.runs):
            if reasons := _hands_out(run):
                raise InputError(
                    f"this call went a new way, on which {reasons[0]}: what was kept may have "
                    "been changed there. Now that this is known, the next call makes copies"
                )
    found = wanted.cache(keepers)
    if not found:
        warnings.warn(
            NeverFiredWarning(
                f"this call came by nothing that names_filter={names_filter!r} means"
            ),
            stacklevel=2,
        )
    return output, found


class _Keeper(Interjection):
    """Keeps what nodes give, or what calls of modules are given first.

    Args:
        fixed: memory that is copied at once; None if nothing is copied.
        is_lazy: whether other memory is only copied once somebody writes.
        is_alias: whether it keeps what aliases stand for.
        clock: numbers in the order of time.
    """

    observes = True
    late = True
    self_contained = True
    label = "run_with_cache"
    is_input = False

    def __init__(
        self,
        fixed: set[int] | None,
        is_lazy: bool,
        is_alias: bool,
        clock: Iterator[int],
    ) -> None:
        self._is_lazy = is_lazy
        self.is_alias = is_alias
        self.times: dict[tuple[str, int], int] = {}
        self.made: list[Any] = []
        self.kept: dict[tuple[str, int], Any] = {}
        self.modules: dict[str, nn.Module] = {}
        self._fixed = fixed
        self._clock = clock
        self._thread: int | None = threading.get_ident()

    def close(self) -> None:
        """Keep nothing more."""
        self._thread = None

    def keep(self, at: NodePass, value: Any) -> None:
        """Keep a value, as it is now."""
        if threading.get_ident() != self._thread:  # of a call that somebody else makes
            return
        path = at.path or "output"
        if at.module is not None:
            self.modules[path] = at.module
        self.times[path, at.number] = next(self._clock)
        self.kept[path, at.number] = value if self._fixed is None else self._snapshot(value)

    def _snapshot(self, value: Any) -> Any:
        shape, found = take_apart(value)
        with torch.inference_mode(False), torch.no_grad():
            return assemble(shape, [self._copied(item) for item in found])

    def _copied(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        assert self._fixed is not None
        value = item.detach()
        shares = self._is_lazy and storage_of(item) not in self._fixed
        return lazily_copied(value) if shares else copied(value)


class _KeepsOutputs(_Keeper):
    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        """Keep what the node gave."""
        self.keep(at, output)


class _KeepsInputs(_Keeper):
    late = False
    is_input = True

    def before(self, at: NodePass, inputs: Inputs) -> None:
        """Keep the first thing that the module is given."""
        given = [*inputs, *inputs.kwargs.values()]
        if given:
            self.keep(at, given[0])


def _fixed(model: Any, call: Call) -> set[int]:
    """Return the memory that is there before the call: others know it by its address."""
    tensors = list(tensors_in((call.args, dict(call.kwargs))))
    if isinstance(model, nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
    return {storage_of(tensor) for tensor in tensors}


def _hands_out(run: Recording) -> list[str]:
    """Say where a run lets code that cannot be watched have the memory of tensors."""
    return [reason for reason in run.tape.blockers if "content of a tensor" in reason]


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


def _picked(value: Any, alias: Alias) -> Any:
    return value if alias.pick is None else alias.pick(value)


@dataclass(frozen=True)
class _Source:
    """One thing that is to be kept.

    Attributes:
        where: as `interject` takes it.
        is_input: whether it is what a module is given.
        is_alias: whether it is only wanted for what an alias stands for.
        allow_none: whether it is right that there is none.
    """

    where: Any
    is_input: bool = False
    is_alias: bool = False
    allow_none: bool = False


@dataclass
class _Wanted:
    """What is to be kept of a call.

    Attributes:
        bended: the model.
        aliases: other names.
        sources: what is to be kept.
        asked: aliases that were asked for; whether they have to be there.
    """

    bended: BendedModule
    aliases: Aliases
    sources: list[_Source] = field(default_factory=list)
    asked: dict[str, bool] = field(default_factory=dict)

    def read(self, names_filter: Any) -> None:
        """Find out what a filter means.

        Raises:
            InputError: it is none.
            NodePathError: there is nothing by a name in it.
        """
        if names_filter is None:
            self.sources += [_Source(_anything), _Source(_any_module, True, allow_none=True)]
        elif isinstance(names_filter, re.Pattern):
            self._by(lambda name: names_filter.fullmatch(name) is not None)
        elif isinstance(names_filter, str):
            self._named(names_filter)
        elif isinstance(names_filter, (nn.Module, type, NodeSelector)):
            self.sources.append(_Source(names_filter))
        elif callable(names_filter):
            self._by(names_filter)
        elif isinstance(names_filter, Iterable):
            listed = list(names_filter)
            if not listed:
                raise InputError("names_filter= is empty: say what is to be kept")
            for name in listed:
                self.read(name)
        else:
            raise InputError(
                "names_filter= takes a name, several names, a regular expression or a function of "
                f"a name, not {names_filter!r}"
            )

    def _by(self, says: Callable[[str], Any]) -> None:
        for name, alias in self.aliases.items():
            if says(name):
                self.asked.setdefault(name, False)
                self.sources.append(
                    replace(self._source(alias.where), is_alias=True, allow_none=True)
                )

        def of_output(node: Candidate) -> bool:
            return any(says(name) for name in _names_of(node, "output"))

        def of_input(node: Candidate) -> bool:
            return node.is_module and any(says(name) for name in _names_of(node, "input"))

        self.sources += [
            _Source(of_output, allow_none=True), _Source(of_input, True, allow_none=True)
        ]  # fmt: skip

    def _named(self, name: str) -> None:
        if name in self.aliases:
            self.asked[name] = True
            self.sources.append(replace(self._source(self.aliases[name].where), is_alias=True))
            return
        why = self.aliases.why_not(name)
        if why:
            raise NodePathError(f"{name!r} has no equal in this model: {why}", name)
        self.sources.append(self._source(name))

    def _source(self, name: str) -> _Source:
        """Return what a name is that is none of an alias."""
        if name in ("input", "output"):
            return _Source(_is_root, name == "input")
        model = self.bended.model
        stem, _, part = name.rpartition(".")
        if part in ("input", "output") and isinstance(model, nn.Module):
            modules = dict(model.named_modules(remove_duplicate=False))
            module = modules.get(stem)
            if module is not None and name in modules:
                raise NodePathError(
                    f"{name!r} is a module, and also what {stem!r} {_GIVES[part]}: write "
                    f"'{name}.output' for the one, "
                    + (
                        f"{stem!r} for the other"
                        if part == "output"
                        else "a function for the other"
                    ),
                    name,
                )
            if module is not None:
                return _Source(module, part == "input")
        if part == "input":
            return _Source(_Place(stem), True)
        return _Source(name)

    def keepers(self, fixed: set[int] | None, is_lazy: bool) -> list[_Keeper]:
        """Return what keeps it all, ready to be put in.

        Raises:
            NodePathError: there is nothing by a name.
        """
        found: dict[tuple[bool, bool], _Keeper] = {}
        clock = itertools.count()
        for source in self.sources:
            kind = _KeepsInputs if source.is_input else _KeepsOutputs
            key = source.is_input, source.is_alias
            keeper = found.setdefault(key, kind(fixed, is_lazy, source.is_alias, clock))
            try:
                made = self.bended._board.make(source.where, keeper, allow_none=source.allow_none)
            except NodePathError as error:
                raise self.explained(error) from None
            keeper.made.append(made)
        return list(found.values())

    def explained(self, error: NodePathError) -> NodePathError:
        """Say which alias it was that led nowhere."""
        for name in self.asked:
            alias = self.aliases[name]
            if alias.where == error.path or f"no node {alias.where!r}" in str(error):
                why = f" ({alias.why})" if alias.why else ""
                return NodePathError(f"{name!r} stands for {alias.where!r}{why}: {error}", name)
        return error

    def cache(self, keepers: list[_Keeper]) -> ActivationCache:
        """Return what was kept."""
        everything = any(source.where is _anything for source in self.sources)
        values: dict[str, Any] = {}
        names: dict[str, dict[str, None]] = {}
        hidden = set()
        rows = [(time, keeper, *key) for keeper in keepers for key, time in keeper.times.items()]
        totals = Counter((id(keeper), path) for _, keeper, path, _ in rows)
        for _, keeper, path, number in sorted(rows, key=lambda row: row[0]):
            value = keeper.kept[path, number]
            if everything and next(tensors_in(value), None) is None:
                continue  # of all, only what has a tensor in it
            shown = f"{path}:{number + 1}" if totals[id(keeper), path] > 1 else path
            key = f"{shown}.input" if keeper.is_input else shown
            if keeper.is_alias and key not in values:
                hidden.add(key)
            elif not keeper.is_alias:
                hidden.discard(key)
            values[key] = value
            for name in self._other_names(path, keeper.modules.get(path), keeper.is_input):
                names.setdefault(name, {})[key] = None
        listed = {name: list(keys) for name, keys in names.items()}
        found = ActivationCache(values, listed, self.aliases)
        for name, is_needed in self.asked.items():
            alias = self.aliases[name]
            try:
                value = found[alias.where]
            except NodePathError as error:
                if is_needed:
                    raise self.explained(error) from None
                continue
            values[name] = _picked(value, alias)
        left = {key: value for key, value in values.items() if key not in hidden}
        return ActivationCache(left, {n: k for n, k in listed.items() if not hidden & {*k}},
                               self.aliases)  # fmt: skip

    def _other_names(self, path: str, module: nn.Module | None, is_input: bool) -> Iterator[str]:
        suffix = "input" if is_input else "output"
        if path == "output":
            if is_input:
                yield "input"
            return
        if not is_input:
            yield path
        yield f"{path}.{suffix}"
        model = self.bended.model
        if module is None or not isinstance(model, nn.Module):
            return
        for name, other in model.named_modules(remove_duplicate=False):
            if other is module and name:
                yield f"{name}.{suffix}"
                if not is_input and name != path:
                    yield name


class _Place:
    """Says whether a node is the call of a module that has a path."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.__qualname__ = f"{path}.input"  # what errors call it

    def __call__(self, node: Candidate) -> bool:
        return node.is_module and node.path == self._path


def _anything(node: Candidate) -> bool:
    return True


def _any_module(node: Candidate) -> bool:
    return node.is_module


def _is_root(node: Candidate) -> bool:
    return node.path == ""


def _names_of(node: Candidate, part: str) -> Iterator[str]:
    path = node.path or "output"
    yield path if part == "output" else f"{path}.{part}"
    if node.is_module and node.module_path:
        yield f"{node.module_path}.{part}"
