"""Bends of several methods, their configurations, and versions of the weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from bendtrace import bends
from bendtrace.compat._torchbend_callbacks import BendingConfig, Lambda, flat_callbacks, name_by
from bendtrace.compat._torchbend_methods import DEFAULT, ModuleWithMethods
from bendtrace.compat._torchbend_names import At, Names, split
from bendtrace.errors import InputError, NeverFiredWarning
from bendtrace.interject.bends.bending import ORIGINAL, Bending, written
from bendtrace.interject.bends.catalogue import (
    Activation,
    BendHandle,
    BendSpec,
    Restoring,
    activation_table,
    compiled,
    near,
)
from bendtrace.interject.resolver import flat
from bendtrace.interject.where import Where
from bendtrace.paths.nodes import Text
from bendtrace.paths.view import Node
from bendtrace.torch_rules.owners import module_of


class BendingModule(ModuleWithMethods):
    """A model whose methods are bent together."""

    # Names

    def _names(self, fn: str) -> Names:
        return Names(self._part(fn, align=False)._known)

    def name_of_activation(self, path: str, fn: str = "forward") -> str:
        """Return the name of an activation by its node path."""
        return self._names(fn).at(path)[0]

    def weight_shape(self, name: str) -> torch.Size:
        """Return the shape of a weight."""
        return self.state_dict()[name].shape  # type: ignore[no-any-return]

    def activations(
        self, fn: str = "forward", op: Any = None, flt: Any = None, exclude: Any = None
    ) -> dict[str, Activation]:
        """Return the activations of a method by name, with their `op`, `shape` and `dtype`."""
        kept = {found.name for found in self._traced(fn).bending.activations(flt, exclude)}
        return {
            name: found
            for name, found in self._names(fn).by_name.items()
            if found.name.partition(":")[0] in kept and (op is None or found.op in set(flat([op])))
        }

    def activation_names(  # type: ignore[override]
        self, fn: str = "forward", flt: Any = None, exclude: Any = None, _with_bended: bool = True
    ) -> list[str]:
        """Return the names of the activations of a method; `conv_bended` is one after its bends."""
        names = list(self.activations(fn, flt=flt, exclude=exclude))
        bent = self.bended_activations(fn) if _with_bended else {}
        return names + [f"{name}_bended" for name in names if name in bent]

    def activation_shape(self, name: str, fn: str = "forward") -> torch.Size | None:
        """Return the shape of an activation."""
        found = self.activations(fn)
        known = name if name in found else name.removesuffix("_bended")
        if known not in found:
            raise InputError(f"{fn} has no activation {name!r}; {near(name, found)}")
        return found[known].shape

    def print_activations(  # type: ignore[override]
        self, fn: str = "forward", flt: Any = None, exclude: Any = None, out: Any = None
    ) -> Text:
        """Print a table of the activations of a method, and return it."""
        found = self.activations(fn, flt=flt, exclude=exclude)
        return written(activation_table(a._replace(name=k) for k, a in found.items()), out)

    def resolve_parameters(self, *patterns: Any) -> list[str]:
        """Return the names of the parameters that patterns match from the start."""
        expressions = [compiled(p) for p in patterns if isinstance(p, (str, re.Pattern))]
        return [n for n in self.weight_names if any(one.match(n) for one in expressions)]

    def resolve_activations(self, *patterns: Any, fn: str = "forward") -> list[str]:
        """Return the names of the known activations that patterns match from the start."""
        names, found = self._names(fn), dict[str, None]()
        for pattern in patterns:
            named, pattern = split(pattern)
            if named in (None, fn) and isinstance(pattern, (str, re.Pattern)):
                found.update((names.by_path[a.name], None) for _, a in names.matching(pattern))
        return list(found)

    def bendable_keys(
        self, *patterns: Any, fn: str = "forward", return_weights: bool = True,
        return_activations: bool = True,
    ) -> list[str]:  # fmt: skip
        """Return the names of the weights, and activations of a method, that patterns match."""
        weights = self.resolve_parameters(*patterns) if return_weights else []
        acts = self.resolve_activations(*patterns, fn=fn) if return_activations else []
        return weights + acts

    def _keys_of(self, bend: BendSpec, fn: str | None = None) -> list[str]:
        """Return the names of all that a bend of a configuration bends."""
        found = [] if bend.weights is False else self.resolve_parameters(*bend.where)
        for name in ([fn] if fn else self._methods()) if bend.activations else []:
            found += [f"{name}:{a}" for a in self.resolve_activations(*bend.where, fn=name)]
        return found

    # Bending

    def bend(
        self,
        callback: Any,
        *where: Where,
        fn: str | Sequence[str] | None = None,
        verbose: bool = False,
        bend_param: bool = True,
        bend_graph: bool = True,
        allow_none: bool = False,
        weights: bool | None = None,
        activations: bool = True,
    ) -> Bent:
        """Bend activations and weights from now on.

        It takes what `bendtrace.BendedModule.bend` takes. Patterns match the names of weights
        (unless `bend_param` is False) and activations (unless `bend_graph` is) from the start, and
        `encode:conv` those of activations of one method. `fn` names the methods in which
        activations are bent: without it, all that were traced or bent, and `forward`. Weights are
        bent in every method. `verbose` prints what is bent.

        Raises:
            InputError: nothing has such a name, or an argument is invalid.
        """
        if isinstance(callback, bends.BendingConfig) and not where:
            specs = list(callback)
        else:
            if callable(callback) and not isinstance(callback, (bends.Bend, type)):
                callback = Lambda(callback)
            if not isinstance(callback, bends.Bend) or not where:
                self._bending.bend(callback, *where)  # which raises
            by_name = None if bend_param and weights is not False else False
            by_path = bend_graph and activations
            specs = [BendSpec(callback, tuple(flat(where)), by_name, by_path)]
        fns = self._methods() if fn is None else list(flat([fn]))
        plans = [(spec, *self._placed(spec, fns, allow_none)) for spec in specs]
        if len(self._bending.versions.mixture) > 1 and any(patterns for _, patterns, _ in plans):
            raise InputError("a mixture of versions is in use: set a version to bend its weights")
        known = self.controllables
        for parameter in (p for spec in specs for p in spec.callback.parameters):
            if known.setdefault(parameter.name, parameter) is not parameter:
                raise InputError(f"another parameter already has the name {parameter.name!r}")
        handles: list[BendHandle] = []
        try:
            for spec, patterns, places in plans:
                name_by(spec.callback, self)
                one = spec.callback
                if patterns:
                    made = self._bending.bend(one, *patterns, weights=True, activations=False)
                    handles.append(made)
                for name, items in places.items():
                    bending = self._part(name).bending
                    several = [item for item in items if not isinstance(item, Node)]
                    for part in (several, *([i] for i in items if isinstance(i, Node))):
                        if part:  # a node that is one pass is inserted by itself
                            made = bending.bend(one, *part, weights=False, allow_none=allow_none)
                            handles.append(made)
        except Exception:
            for handle in handles:
                handle.remove()
            raise
        if verbose:
            for key in (key for spec, *_ in plans for key in self._keys_of(spec)):
                print(f"bending {key}")
        return Bent(handles)

    def _placed(
        self, spec: BendSpec, fns: list[str], allow_none: bool
    ) -> tuple[list[Any], dict[str, list[Any]]]:
        """Return the patterns that select weights, and what bends which method."""
        weights: list[Any] = []
        places: dict[str, list[Any]] = {}
        by_weight = spec.weights is not False and getattr(spec.callback, "weight_compatible", True)
        for given in spec.where:
            named, item = split(given)
            methods = fns if named is None else [named]
            if not isinstance(item, (str, re.Pattern)):
                for fn in methods:
                    places.setdefault(fn, []).append(item)
                continue
            found = bool(by_weight and named is None and self.resolve_parameters(item))
            weights += [item] if found else []
            for fn in methods if spec.activations else ():
                patterns = self._names(fn).patterns(item) or ([item] if allow_none else [])
                found = found or bool(patterns)
                places.setdefault(fn, []).extend(patterns)
            if not found and not allow_none:
                self._raise_unknown(item, methods, by_weight, spec.activations)
        return weights, {fn: items for fn, items in places.items() if items}

    def _raise_unknown(self, item: Any, methods: list[str], weights: bool, acts: bool) -> None:
        names = list(self.weight_names) if weights else []
        for fn in methods if acts else ():
            names += [a.name for a in self._names(fn).every if a.level != "inside"]
        text = item if isinstance(item, str) else item.pattern
        untraced = [fn for fn in methods if not self.is_traced(fn)]
        hint = f" (not traced yet: {', '.join(untraced)})" if untraced else ""
        hint = hint if methods else " (no method was traced yet)"
        raise InputError(
            f"nothing that can be bent matches {text!r}; {near(text, names)}{hint} "
            "(allow_none=True waits for a match in later runs)"
        )

    def reset(self, *what: Any, version: str | None = None) -> None:
        """Stop bending.

        Args:
            *what: callbacks, and names or patterns of bent values; without any, everything, and
                the named configurations are forgotten.
            version: a version of the weights to go to.

        Raises:
            InputError: nothing that is bent matches.
        """
        if not what:
            self.reset_bending()
            self._state |= {"configs": {}, "config": DEFAULT}
        for named, item in map(split, what):
            errors = []
            every = self._all() if named is None else {named: self._part(named).bending}
            for fn, bending in every.items():
                try:
                    for one in self._names(fn).keys(item, bending.bended_keys()):
                        bending.reset(one)
                except InputError as error:
                    errors.append(error)
            if len(errors) == len(every):
                raise errors[0]
        if version is not None:
            self.version = version

    def reset_bending(self) -> None:
        """Stop bending; named configurations stay."""
        for bending in self._all().values():
            bending.reset()

    @property
    def controllables(self) -> dict[str, bends.BendingParameter]:
        """The parameters of all callbacks, by name."""
        every = (p for callback in self.bending_callbacks for p in callback.parameters)
        return {parameter.name: parameter for parameter in every}

    def update(self, name: str | None = None, value: Any = None) -> None:
        """Set a parameter of the callbacks, or match the patterns again."""
        known = self.controllables
        if name is None:
            for bending in self._all().values():
                bending.update()
        elif name not in known or value is None:
            self._bending.update(name, value)  # which raises, or knows it
        else:
            known[name].value = value

    @property
    def bending_callbacks(self) -> list[bends.Bend]:
        """The callbacks, each once."""
        return list(dict.fromkeys(c for b in self._all().values() for c in b.callbacks))

    def _bent(self, bending: Bending, activations: bool) -> Iterator[tuple[str, bends.Bend]]:
        for source in bending._sources:
            if source.spec.activations is activations:
                for key in bending._keys(source):
                    yield key, source.spec.callback

    @property
    def bended_params(self) -> dict[str, list[bends.Bend]]:
        """The callbacks of each bent weight."""
        return _listed(self._bent(self._bending, False))

    def bended_activations(self, fn: str = "forward") -> dict[str, list[bends.Bend]]:
        """Return the callbacks of each bent activation of a method."""
        if fn not in self._all():
            return {}
        names = self._names(fn)
        bent = self._bent(self._part(fn, align=False).bending, True)
        return _listed((name, callback) for key, callback in bent for name in names.at(key))

    def bend_graph(self, fn: str = "forward") -> Graph:
        """Return the graph of a method, with a node `conv_bended` after each bent activation."""
        graph, names = self.graph(fn), self._names(fn)
        graph.owning_module = None  # which does not have the callbacks
        by_name = {node.name: node for node in graph.nodes}
        for name in self.bended_activations(fn):
            known = names.by_name.get(name)
            other = next((k for k, found in names.aliases.items() if found is known), name)
            node = by_name.get(name) or by_name.get(other)
            if node is None:
                raise InputError(f"the graph of {fn} has no node for {name!r}")
            with graph.inserting_after(node):
                given: dict[str, Any] = {"name": f"{fn}:{name}"}
                bent = graph.create_node("call_module", f"{name}_callback", (), given)
            bent.name = f"{name}_bended"
            node.replace_all_uses_with(bent)
            bent.args = (node,)
        return graph

    def bended_keys(self, fn: str = "forward") -> list[str]:
        """Return the names of the bent weights, and of the bent activations of a method."""
        return [*self.bended_params, *self.bended_activations(fn)]

    @contextmanager
    def capture(self, *callbacks: bends.Capture) -> Iterator[None]:
        """Make capturing callbacks keep the values they see, within a `with` statement."""
        every = [c for one in self.bending_callbacks for c in flat_callbacks(one)]
        found = [c for c in every if isinstance(c, bends.Capture)]
        for callback in callbacks:
            if all(callback is not other for other in found):
                raise InputError(f"{callback!r} does not capture anything of this model")
        with ExitStack() as stack:
            for callback in callbacks or found:
                stack.enter_context(callback.capture())
            yield

    # Configurations

    @property
    def config(self) -> str:
        """The name of the bends in use; "_default" for those without one."""
        return str(self._state["config"])

    @config.setter
    def config(self, name: str | None) -> None:
        self.set_config(DEFAULT if name is None else name)

    def bending_config(self, name: str | None = None) -> BendingConfig:
        """Return the active bends, or those saved under a name, as a configuration."""
        configs = self._state["configs"]
        if name is not None and name != self.config:
            if name not in configs:
                raise InputError(f"there is no configuration {name!r}; {near(name, configs)}")
            return BendingConfig(*configs[name])
        made = BendingConfig()
        for fn, bending in self._all().items():
            for spec in (source.spec for source in bending._sources):
                if spec.activations:
                    where = [f"{fn}:{w}" if isinstance(w, str) else At(fn, w) for w in spec.where]
                    made.append(replace(spec, where=tuple(where)))
                elif fn == "forward":
                    made.append(spec)
        return made

    def save_config_as(self, name: str, force: bool = False) -> None:
        """Save the active bends under a name."""
        if name in self._state["configs"] and not force:
            raise InputError(f"there is a configuration {name!r} already; force=True replaces it")
        self._state["configs"][name] = self.bending_config()

    def set_config(self, name: str) -> Restoring:
        """Bend by a named configuration, and by nothing else; a context manager that goes back."""
        before, left = self.config, self.bending_config()
        configs = {DEFAULT: BendingConfig(), **self._state["configs"], before: left}
        if name not in configs:
            raise InputError(f"there is no configuration {name!r}; {near(name, configs)}")
        self.reset_bending()
        try:
            self.bend(configs[name], allow_none=True)
        except Exception:
            self.reset_bending()
            self.bend(left, allow_none=True)
            raise
        self._state |= {"configs": configs, "config": name}
        return Restoring(lambda: self.set_config(before))

    # Versions of the weights

    @property
    def version(self) -> str:
        """The version of the weights in use; "_default" for the model's own."""
        return str(self._bending.versions).replace(ORIGINAL, DEFAULT)

    @version.setter
    def version(self, name: str | None) -> None:
        self.set_version(name)

    def set_version(self, name: str | None = None) -> Restoring:
        """Use a version of the weights, with its bends; a context manager that goes back."""
        return self._choose({_version(name): 1.0})

    def interpolate(self, *default: float, **weights: float) -> Restoring:
        """Use a mixture of versions: the share of the model's own, and of others by name.

        Raises:
            InputError: weights of these versions are bent, or there is no such version.
        """
        if len(default) > 1:
            raise InputError("interpolate() takes one positional argument: the model's own share")
        own = {ORIGINAL: default[0]} if default else {}
        return self._choose(own | {_version(name): share for name, share in weights.items()})

    def _choose(self, mixture: dict[str, Any]) -> Restoring:
        bending, bent = self._bending, self._state["bent"]
        sources, versions = bending._sources, bending.versions
        names = [DEFAULT, *versions.names[1:]]
        if unknown := [name for name in mixture if name not in versions]:
            raise InputError(f"there is no version {unknown[0]!r}; {near(unknown[0], names)}")
        chosen, before = versions.checked(mixture), versions.mixture
        if len(chosen) > 1 and (self.bended_params or any(bent.get(name) for name in chosen)):
            raise InputError("weights are bent: write(name) saves them as a version to mix")
        if len(before) == 1 and chosen.keys() != before.keys():
            bent[next(iter(before))] = [s for s in sources if not s.spec.activations]
        weights = bent.pop(next(iter(chosen)), []) if len(chosen) == 1 else []
        if chosen.keys() == before.keys():
            weights = [s for s in sources if not s.spec.activations]
        versions.mixture = chosen
        sources.set((*weights, *(s for s in sources if s.spec.activations)))
        return Restoring(lambda: self._choose(before))

    def write(self, version: str | None = None, force: bool = False, clear: bool = True) -> None:
        """Save the weights as they are bent now as a version, and use it."""
        if version is None:
            version, force = self.version, True
        if version == DEFAULT:
            raise InputError("the model's own weights are never written to: name a version")
        self._bending.add_version(version, force=force)
        if clear:
            self.reset()
        self.version = version

    def create_version(self, name: str, weights: Any, strict: bool = True) -> list[str]:
        """Save a state dict, or that of a model, as a version; return the names of foreign keys."""
        if not isinstance(weights, Mapping):
            owner = module_of(weights)
            if owner is None:
                raise InputError(f"weights are a state dict or a model, not {weights!r}")
            weights = owner.state_dict()
        known = self.state_dict(DEFAULT)
        foreign = [key for key in weights if key not in known]
        if strict and known.keys() != weights.keys():
            names = [*foreign, *(key for key in known if key not in weights)]
            raise InputError(f"version {name!r} differs in {names[:5]}: strict=False accepts that")
        used = self.bended_state_dict() | {k: v for k, v in weights.items() if k in known}
        self._bending.add_version(name, used, strict=strict, force=True)
        return foreign

    def state_dict(self, *args: Any, version: str | None = None, **kwargs: Any) -> Any:
        """Return the state dict of a version; None for the one in use, without its bends."""
        if args and isinstance(args[0], str):
            version, args = args[0], args[1:]
        own = super().state_dict(*args, **kwargs)
        if args or kwargs:  # torch asks for the model's own
            return own
        versions = self._bending.versions
        if version is None and len(versions.mixture) > 1:
            return own
        name = next(iter(versions.mixture)) if version is None else _version(version)
        return type(own)(own | versions.weights(name)) if name != ORIGINAL else own

    def bended_state_dict(self, version: str | None = None) -> dict[str, Tensor]:
        """Return the weights as a call uses them: of a version, and bent."""
        with Restoring(lambda: None) if version is None else self.set_version(version):
            kept = {key: value.detach().clone() for key, value in self.state_dict().items()}
            return kept | self._bending.bended_state_dict()

    def _take_over(self, carried: dict[str, Any]) -> None:
        super()._take_over(carried)
        for callback in self.bending_callbacks:
            name_by(callback, self)


class Bent(BendHandle):
    """A bend that is active until removed; as a context manager, it is removed at the end."""

    def __init__(self, handles: Sequence[BendHandle]) -> None:
        removers = {id(source): one._remove for one in handles for source in one._sources}
        sources = [source for one in handles for source in one._sources]
        super().__init__(sources, lambda source: removers[id(source)](source))

    def __exit__(self, kind: Any, *_: object) -> None:
        # A weight is bent in each method that reads it, which no single report knows of.
        of_weights = any(not source.spec.activations for source in self._sources)
        report = self.report()
        self.remove()
        if kind is None and not of_weights and not report.rows:
            text = f"{report.label} at {report.where} was never called"
            warnings.warn(NeverFiredWarning(text), stacklevel=2)


def _listed(pairs: Iterable[tuple[str, bends.Bend]]) -> dict[str, list[bends.Bend]]:
    found: dict[str, list[bends.Bend]] = {}
    for key, callback in pairs:
        found.setdefault(key, []).append(callback)
    return found


def _version(name: str | None) -> str:
    return ORIGINAL if name in (None, DEFAULT) else str(name)
