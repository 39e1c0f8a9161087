"""The values of nodes in a call of a model, as a dict by name."""

from __future__ import annotations

import itertools
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.calls import Call, bended_of
from bendtrace.errors import InputError, NeverFiredWarning, NodePathError
from bendtrace.history.copies import copied, lazily_copied, materialize, tensors_in
from bendtrace.history.entries import LayerEntry
from bendtrace.interject.activations import as_html, as_text
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.registry import InsertionGroup, is_root
from bendtrace.interject.structure import assemble, take_apart
from bendtrace.interject.where import (
    Alias,
    Aliases,
    near_misses,
    require_equal,
    transformer_lens_aliases,
)
from bendtrace.module import BendedModule
from bendtrace.paths.candidates import Candidate, NodeSelector
from bendtrace.recording.recorder import Recording
from bendtrace.torch_rules.mode_queries import unseen
from bendtrace.torch_rules.writes import storage_of
from bendtrace.workflows.residual import ResidualParts


class ActivationCache(ResidualParts):
    """The values of nodes in one call, by node path and by other names.

    Keys are node paths (`transformer.h_0.mlp`), with the number of the pass if there were several
    (`relu:2`), followed by `.input` for the input of a module; and the requested aliases. Qualified
    names followed by `.output` or `.input` (`transformer.h.0.output`) and all aliases find their
    values as well. So do TransformerLens's short names: `"resid_post", 0` for
    `blocks.0.hook_resid_post`, `"normalized", -1, "ln2"` for the last layer. Methods with
    TransformerLens's names take the residual stream of a GPT-2 or a Llama apart.

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
        self.aliases: Aliases = Aliases() if aliases is None else aliases
        self._names = dict(names)

    def passes(self, name: str) -> list[Any]:
        """Return the values of a node in all of its passes, in order."""
        return [self[key] for key in ([name] if name in self else self._names.get(name, []))]

    def to(self, device: torch.device | str) -> ActivationCache:
        """Return a cache with all tensors on a device.

        Example:
            >>> import torch, bendtrace as bt
            >>> _, cache = bt.workflows.run_with_cache(torch.nn.ReLU(), torch.ones(2))
            >>> cache.to("meta")["relu"].device
            device(type='meta')
        """
        moved = {}
        for name, value in self.items():
            shape, found = take_apart(value)
            parts = [part.to(device) if isinstance(part, Tensor) else part for part in found]
            moved[name] = assemble(shape, parts)
        return ActivationCache(moved, self._names, self.aliases)

    def __missing__(self, name: Any) -> Any:
        full = self.aliases.full_name(name)
        if full is not None:
            return self[full]
        keys = self._names.get(name, []) if isinstance(name, str) else []
        if len(keys) == 1:
            return self[keys[0]]
        if keys:
            raise NodePathError(
                f"{name!r} ran several times: name one of {', '.join(map(repr, keys))}",
                name,
                tuple(keys),
            )
        alias = self.aliases.get(name)
        if alias is not None:
            if alias.where not in self and alias.where not in self._names:
                why = f", which this cache does not have ({alias.why})" if alias.why else ""
                raise NodePathError(f"{name!r} stands for {alias.where!r}{why}", name, tuple(self))
            return _picked(self[alias.where], alias)
        if isinstance(name, str):
            require_equal(self.aliases, name)
        hint = near_misses(str(name), [*self, *self._names, *self.aliases])
        raise NodePathError(f"{name!r} is not in this cache; {hint}", str(name), tuple(self))

    def __repr__(self) -> str:
        return as_text(type(self).__name__, self)

    def _repr_html_(self) -> str:
        return as_html(self)


def run_with_cache(
    model: Callable[..., Any],
    inputs: Any,
    names_filter: Any = None,
    *,
    aliases: Mapping[str, str | Alias] | None = None,
    detach: bool = True,
) -> tuple[Any, ActivationCache]:
    """Call a model, and return its output and the values of its nodes.

    The name is that of TransformerLens.

    Args:
        model: a module, a function or a `BendedModule`, whose insertions stay active.
        inputs: its inputs; see `Call.of`.
        names_filter: the values to keep: None for all that contain a tensor; a name, or several; a
            compiled regular expression that matches names in full, or a predicate of a name. The
            names of a node are its path (`transformer.h_0.mlp`); for calls of modules also the
            qualified name followed by `.output` or `.input`; and aliases. The input of a module is
            its first argument.
        aliases: other names for nodes: a mapping to paths, or to an `Alias`. None uses those of
            TransformerLens if the model is a GPT-2 or a Llama of Hugging Face
            (`transformer_lens_aliases`).
        detach: whether to keep snapshots, which share memory with the tensors until one of them is
            written to. Otherwise the tensors themselves are kept, with their graph.

    Returns:
        The output, and an `ActivationCache`.

    Raises:
        NodePathError: a name matches no node; for names of TransformerLens without an equal here,
            the message says why.
        InputError: an argument is invalid.

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
    # The model's own Python could write to shared memory by its address, as through numpy arrays.
    # Whether it does is known from the first run on.
    group = InsertionGroup(bended)
    runs = group.known_runs()
    is_lazy = bool(runs) and not any(map(_hands_out, runs))
    wanted = _Wanted(bended, group, known, _Clock(fixed, is_lazy))
    wanted.read(names_filter)
    wanted.insert()
    try:
        output = call.to(bended)
    except NodePathError as error:
        raise wanted.explained(error) from None
    finally:
        wanted.close()
    for tensor in tensors_in((output, call.args, dict(call.kwargs))):
        materialize(tensor)  # the caller's tensors are ordinary ones
    if is_lazy and fixed is not None:
        for run in (run for insertion in wanted.group.insertions for run in insertion.runs):
            if reasons := _hands_out(run):
                raise InputError(
                    f"this call took a new path, on which {reasons[0]}: the kept values may "
                    "have been changed there. The next call makes copies on this path"
                )
    found = wanted.cache()
    if not found:
        warnings.warn(
            NeverFiredWarning(f"this call reached no node of names_filter={names_filter!r}"),
            stacklevel=2,
        )
    return output, found


class _Clock:
    """Takes snapshots, and numbers them in the order of time.

    Args:
        fixed: memory that is copied at once; None if nothing is copied.
        is_lazy: whether other memory is only copied when it is written to.
    """

    def __init__(self, fixed: set[int] | None, is_lazy: bool) -> None:
        self._fixed = fixed
        self._is_lazy = is_lazy
        self._numbers = itertools.count()

    @property
    def copies(self) -> bool:
        """Whether what it takes are copies."""
        return self._fixed is not None

    def taken(self, value: Any) -> tuple[int, Any]:
        """Return a number, and a snapshot of a value."""
        if self._fixed is None:
            return next(self._numbers), value
        shape, found = take_apart(value)
        with unseen(), torch.inference_mode(False), torch.no_grad():
            return next(self._numbers), assemble(shape, list(map(self._copied, found)))

    def _copied(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        assert self._fixed is not None
        shares = self._is_lazy and storage_of(item) not in self._fixed
        return lazily_copied(item.detach()) if shares else copied(item.detach())


class _Keeper(Interjection):
    """Keeps the outputs of nodes.

    Attributes:
        is_alias: whether it keeps the values only for aliases.
        insertions: where it is inserted.
        kept: for each node and pass the time and the value.
        modules: the modules that were called, by path.
    """

    observes = True
    late = True
    self_contained = True
    label = "run_with_cache"
    is_input = False

    def __init__(self, clock: _Clock, is_alias: bool) -> None:
        self.deferrable = clock.copies
        self.is_alias = is_alias
        self.insertions: list[Insertion] = []
        self.kept: dict[tuple[str, int], tuple[int, Any]] = {}
        self.modules: dict[str, nn.Module] = {}
        self.thread: int | None = threading.get_ident()
        self._clock = clock

    def after(self, at: NodePass, inputs: Inputs, output: Any) -> None:
        self._keep(at, output)

    def _keep(self, at: NodePass, value: Any) -> None:
        if threading.get_ident() != self.thread:  # of a call in another thread
            return
        path = at.path or "output"
        if at.module is not None:
            self.modules[path] = at.module
        self.kept[path, at.number] = self._clock.taken(value)


class _InputKeeper(_Keeper):
    late = False
    is_input = True
    after = Interjection.after

    def before(self, at: NodePass, inputs: Inputs) -> None:
        given = [*inputs, *inputs.kwargs.values()]
        if given:
            self._keep(at, given[0])


def _fixed(model: Any, call: Call) -> set[int]:
    """Return the memory that exists before the call: others know it by its address."""
    tensors = list(tensors_in((call.args, dict(call.kwargs))))
    if isinstance(model, nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
    with unseen():
        return {storage_of(tensor) for tensor in tensors}


def _hands_out(run: Recording) -> list[str]:
    """Return where a run gives the memory of tensors to code that cannot be watched."""
    return [reason for reason in run.tape.blockers if "content of a tensor" in reason]


def _picked(value: Any, alias: Alias) -> Any:
    return value if alias.pick is None else alias.pick(value)


@dataclass
class _Source:
    """A value to keep: `where` as `interject` takes it, and whether it is a module's input."""

    where: Any
    is_input: bool = False
    is_alias: bool = False
    allow_none: bool = False


class _Wanted:
    """The values of a call to keep, and the aliases that were asked for."""

    def __init__(
        self, bended: BendedModule, group: InsertionGroup, aliases: Aliases, clock: _Clock
    ) -> None:
        self.group = group
        self._model = bended.model
        self._aliases = aliases
        self._clock = clock
        self._sources: list[_Source] = []
        self._asked: dict[str, bool] = {}  # whether an alias has to be there
        self._keepers: dict[tuple[bool, bool], _Keeper] = {}

    def read(self, names_filter: Any) -> None:
        """Add the values that a filter means."""
        if names_filter is None:
            self._sources += [
                _Source(_anything, allow_none=True), _Source(_any_module, True, allow_none=True)
            ]  # fmt: skip
        elif isinstance(names_filter, re.Pattern):
            self._by(lambda name: names_filter.fullmatch(name) is not None)
        elif isinstance(names_filter, str):
            self._named(names_filter)
        elif isinstance(names_filter, (nn.Module, type, NodeSelector, LayerEntry)):
            self._sources.append(_Source(names_filter))
        elif callable(names_filter):
            self._by(names_filter)
        elif isinstance(names_filter, Iterable):
            listed = list(names_filter)
            if not listed:
                raise InputError("names_filter= is empty: name the values to keep")
            for name in listed:
                self.read(name)
        else:
            raise InputError(
                "names_filter= takes a name, several names, a regular expression or a function of "
                f"a name, not {names_filter!r}"
            )

    def _by(self, says: Callable[[str], Any]) -> None:
        for name, alias in self._aliases.items():
            if says(name):
                self._asked.setdefault(name, False)
                self._add(alias.where, is_alias=True, allow_none=True)

        def of_output(node: Candidate) -> bool:
            return any(map(says, _names_of(node, "output")))

        def of_input(node: Candidate) -> bool:
            return node.is_module and any(map(says, _names_of(node, "input")))

        self._sources += [
            _Source(of_output, allow_none=True), _Source(of_input, True, allow_none=True)
        ]  # fmt: skip

    def _named(self, name: str) -> None:
        if name in self._aliases:
            self._asked[name] = True
            self._add(self._aliases[name].where, is_alias=True)
        else:
            require_equal(self._aliases, name)
            self._add(name)

    def _add(self, name: str, **options: bool) -> None:
        """Add the value of a name that is no alias."""
        stem, _, part = name.rpartition(".")
        where: Any = name
        if name in ("input", "output"):
            where, part = is_root, name
        elif part in ("input", "output"):
            module = None
            if isinstance(self._model, nn.Module):
                modules = dict(self._model.named_modules(remove_duplicate=False))
                module = modules.get(stem)
                if module is not None and name in modules:
                    other = f"{stem!r}" if part == "output" else "a function"
                    raise NodePathError(
                        f"{name!r} is a module, and also the {part} of {stem!r}: write "
                        f"'{name}.output' for the module, {other} for the {part}",
                        name,
                    )
            if module is not None:
                where = module
            elif part == "input":
                where = _call_at(stem)
        self._sources.append(_Source(where, part == "input", **options))

    def insert(self) -> None:
        """Insert what keeps the values, around all other insertions.

        Inputs are kept after all other insertions have changed them if their keeper is innermost.

        Raises:
            NodePathError: a name matches no node.
        """
        for source in self._sources:
            kind = _InputKeeper if source.is_input else _Keeper
            key = source.is_input, source.is_alias
            keeper = self._keepers.setdefault(key, kind(self._clock, source.is_alias))
            try:
                made = self.group.make(source.where, keeper, allow_none=source.allow_none)
            except NodePathError as error:
                raise self.explained(error) from None
            keeper.insertions.append(made)
        first, last = (
            [made for keeper in self._keepers.values() if keeper.is_input == is_input
             for made in keeper.insertions]
            for is_input in (True, False)
        )  # fmt: skip
        self.group.put_around(first, last)

    def close(self) -> None:
        self.group.remove()
        for keeper in self._keepers.values():
            keeper.thread = None

    def explained(self, error: NodePathError) -> NodePathError:
        """Name the alias whose node is missing."""
        for name in self._asked:
            alias = self._aliases[name]
            if alias.where == error.path or f"no node {alias.where!r}" in str(error):
                why = f" ({alias.why})" if alias.why else ""
                return NodePathError(f"{name!r} stands for {alias.where!r}{why}: {error}", name)
        return error

    def cache(self) -> ActivationCache:
        everything = any(source.where is _anything for source in self._sources)
        values: dict[str, Any] = {}
        names: dict[str, dict[str, None]] = {}
        hidden = set()
        rows = [
            (time, keeper, path, number, value)
            for keeper in self._keepers.values()
            for (path, number), (time, value) in keeper.kept.items()
        ]
        totals = Counter((id(keeper), path) for _, keeper, path, *_ in rows)
        for _, keeper, path, number, value in sorted(rows, key=lambda row: row[0]):
            if everything and next(tensors_in(value), None) is None:
                continue  # of all, only those with a tensor in them
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
        found = ActivationCache(values, listed, self._aliases)
        for name, is_needed in self._asked.items():
            alias = self._aliases[name]
            try:
                values[name] = _picked(found[alias.where], alias)
            except NodePathError as error:
                if is_needed:
                    raise self.explained(error) from None
        left = {key: value for key, value in values.items() if key not in hidden}
        names_left = {name: keys for name, keys in listed.items() if not hidden & {*keys}}
        return ActivationCache(left, names_left, self._aliases)

    def _other_names(self, path: str, module: nn.Module | None, is_input: bool) -> Iterator[str]:
        suffix = "input" if is_input else "output"
        if path == "output":
            yield from ["input"] * is_input
            return
        if not is_input:
            yield path
        yield f"{path}.{suffix}"
        if module is None or not isinstance(self._model, nn.Module):
            return
        for name, other in self._model.named_modules(remove_duplicate=False):
            if other is module and name:
                yield f"{name}.{suffix}"
                if not is_input and name != path:
                    yield name


def _call_at(path: str) -> Callable[[Candidate], bool]:
    """Return a predicate for the call of a module at a node path."""

    def matches(node: Candidate) -> bool:
        return node.is_module and node.path == path

    matches.__qualname__ = f"{path}.input"  # the name in errors
    return matches


def _anything(node: Candidate) -> bool:
    return True


def _any_module(node: Candidate) -> bool:
    return node.is_module


def _names_of(node: Candidate, part: str) -> Iterator[str]:
    path = node.path or "output"
    yield path if part == "output" else f"{path}.{part}"
    if node.is_module and node.module_path:
        yield f"{node.module_path}.{part}"
