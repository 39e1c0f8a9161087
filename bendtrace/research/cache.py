"""The values of nodes in a call of a model, as a dict by name."""

from __future__ import annotations

import itertools
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bendtrace.debug.calls import Call
from bendtrace.errors import InputError, NeverFiredWarning, NodePathError
from bendtrace.insert.activations import activations_text, as_html
from bendtrace.insert.insertion import Insertion
from bendtrace.insert.interjection import Inputs, Interjection, NodePass, takes
from bendtrace.insert.leaves import assemble, take_apart
from bendtrace.insert.registry import InsertionGroup, is_root
from bendtrace.insert.where import (
    Alias,
    Aliases,
    Stream,
    near_misses,
    require_equal,
    transformer_lens_aliases,
)
from bendtrace.log.capture import aligned_copy, lazily_copied, materialize, tensors_in
from bendtrace.log.entries import LayerEntry
from bendtrace.log.path_views import Candidate, NodeSelector
from bendtrace.module import BendedModule, bended_of
from bendtrace.python.checks import required_choice
from bendtrace.record.recorder import Recording
from bendtrace.watch.mode_queries import unseen
from bendtrace.watch.writes import storage_of

# The residual stream of a language model, taken apart: methods of TransformerLens's caches.

Position = int | slice | tuple[int, ...] | None
_Named = tuple[str, Any]  # a label, and the key of a value in the cache
_MOST = 0.05  # of the stream that rounding can make up


class ResidualParts(dict[str, Any]):
    """Values by name, with methods that take the residual stream apart.

    The methods need TransformerLens's names, and so a GPT-2 or a Llama (see
    `transformer_lens_aliases`). Stacks have a first axis for the parts, and then the axes of the
    stream: (parts, batch, positions, width). `layer=` stops before a layer; None and -1 stand for
    the end of the model. `pos_slice=` is a position, which drops the axis, or a slice.

    TransformerLens folds the weights of norms into the layers behind them. Here weights are the
    model's own, so that `apply_ln=True` also multiplies by the weight of the norm: the parts add up
    to the output of the norm without its bias, and their products with the unembedding to logits.

    Attributes:
        aliases: other names.
    """

    aliases: Aliases

    def accumulated_resid(
        self, layer: int | None = None, *, incl_mid: bool = False, apply_ln: bool = False,
        pos_slice: Position = None, mlp_input: bool = False, return_labels: bool = False,
    ) -> Any:  # fmt: skip
        """Return the residual stream before each layer, up to one of them.

        Args:
            layer: the layer to stop before.
            incl_mid: whether to add the stream between attention and MLP of each layer.
            apply_ln: whether to apply the norm of the layer.
            pos_slice: the positions.
            mlp_input: whether to go on to the input of the MLP of the layer.
            return_labels: whether to return labels as well.

        Returns:
            A stack, or the stack and a list of labels (`"0_pre"`, `"0_mid"`, `"final_post"`).

        Raises:
            InputError: the model or an argument does not fit.
            NodePathError: the cache lacks a value.
        """
        stream, number = self._layer_in_stream(layer)
        named: list[_Named] = []
        for i in range(number + 1):
            if i == stream.layers:
                named.append(("final_post", ("resid_post", i - 1)))
                break
            named.append((f"{i}_pre", ("resid_pre", i)))
            if (incl_mid and i < number) or (mlp_input and i == number):
                named.append((f"{i}_mid", ("resid_mid", i)))
        stack = torch.stack([self._part(key, pos_slice) for _, key in named])
        labels = [label for label, _ in named]
        return self._result(stack, labels, number, mlp_input, apply_ln, pos_slice, return_labels)

    def decompose_resid(
        self, layer: int | None = None, *, mlp_input: bool = False,
        mode: Literal["all", "attn", "mlp"] = "all", apply_ln: bool = False,
        pos_slice: Position = None, incl_embeds: bool = True, return_labels: bool = False,
    ) -> Any:  # fmt: skip
        """Return the summands that the embeddings and the layers add to the residual stream.

        Args:
            layer: the layer to stop before.
            mlp_input: whether to add the attention of that layer.
            mode: "attn" or "mlp" leaves out the other kind of layers.
            apply_ln: whether to apply the norm of the layer.
            pos_slice: the positions.
            incl_embeds: whether to include the embeddings.
            return_labels: whether to return labels as well.

        Returns:
            A stack, or the stack and a list of labels (`"embed"`, `"0_attn_out"`, `"0_mlp_out"`).

        Raises:
            InputError: the model or an argument does not fit, or the parts do not add up to the
                stream, as under dropout.
            NodePathError: the cache lacks a value.
        """
        required_choice("mode", mode, "all", "attn", "mlp")
        stream, number = self._layer_in_stream(layer)
        named: list[_Named] = [("embed", "hook_embed")] * incl_embeds
        if incl_embeds and stream.positions is not None:
            named.append(("pos_embed", stream.positions))
        for i in range(min(number + 1, stream.layers)):
            if mode != "mlp" and (i < number or mlp_input):
                named.append((f"{i}_attn_out", ("attn_out", i)))
            if mode != "attn" and i < number:
                named.append((f"{i}_mlp_out", ("mlp_out", i)))
        whole = self._part(stream.key(number, mlp_input), pos_slice)
        parts = [self._part(key, pos_slice).expand_as(whole) for _, key in named]
        if not parts:
            raise InputError(f"nothing comes before layer={layer} with mode={mode!r}")
        stack, labels = torch.stack(parts), [label for label, _ in named]
        if mode == "all" and incl_embeds:
            away = (stack.double().sum(0) - whole.double()).norm() / whole.double().norm()
            if not away <= _MOST:
                raise InputError(
                    f"the outputs of the layers differ from the residual stream by {away:.0%}: the "
                    "model changes values between its layers, as by dropout; call eval()"
                )
        return self._result(stack, labels, number, mlp_input, apply_ln, pos_slice, return_labels)

    def stack_head_results(
        self, layer: int | None = None, *, incl_remainder: bool = False, apply_ln: bool = False,
        pos_slice: Position = None, return_labels: bool = False,
    ) -> Any:  # fmt: skip
        """Return the summand of each head in the residual stream, with the present projections.

        Args:
            layer: the layer to stop before.
            incl_remainder: whether to add the rest of the stream as the last part.
            apply_ln: whether to apply the norm of the layer.
            pos_slice: the positions.
            return_labels: whether to return labels as well.

        Returns:
            A stack, or the stack and a list of labels (`"L0H0"`, ..., `"remainder"`).

        Raises:
            InputError: the model or an argument does not fit.
            NodePathError: the cache lacks a value.
        """
        stream, number = self._layer_in_stream(layer)
        if not number:
            raise InputError(f"there are no heads before layer={layer}")
        heads = [self[("result", i)].movedim(-2, 0) for i in range(number)]  # type: ignore[index]
        labels = [f"L{i}H{h}" for i, found in enumerate(heads) for h in range(len(found))]
        stack = _at(torch.cat(heads), pos_slice)
        if incl_remainder:
            rest = self._part(stream.key(number, False), pos_slice) - stack.sum(0)
            stack, labels = torch.cat([stack, rest[None]]), [*labels, "remainder"]
        return self._result(stack, labels, number, False, apply_ln, pos_slice, return_labels)

    def apply_ln_to_stack(
        self, residual_stack: Tensor, layer: int | None = None, *, mlp_input: bool = False,
        pos_slice: Position = None,
    ) -> Tensor:  # fmt: skip
        """Apply the norm of a layer to parts of the residual stream, with the scale of the whole.

        Args:
            residual_stack: the parts.
            layer: the layer; None and -1 for the norm at the end of the model.
            mlp_input: whether to apply the norm of the layer's MLP.
            pos_slice: the positions that the parts have.

        Returns:
            The parts, centred where the norm centres, scaled and multiplied by its weight.

        Raises:
            InputError: the model or an argument does not fit.
            NodePathError: the cache lacks a value.
        """
        stream, number = self._layer_in_stream(layer)
        norm = stream.final if number == stream.layers else stream.norms[number][mlp_input]
        whole = self._part(stream.key(number, mlp_input), pos_slice).float()
        parts, centres = residual_stack.float(), isinstance(norm, nn.LayerNorm)
        if centres:
            whole, parts = (each - each.mean(-1, keepdim=True) for each in (whole, parts))
        eps: Any = norm.eps if centres else norm.variance_epsilon
        scale = (whole.square().mean(-1, keepdim=True) + eps).sqrt()
        made: Tensor = parts / scale * norm.weight.detach().to(scale)  # type: ignore[operator]
        return made.to(residual_stack.dtype)

    def logit_attrs(
        self, residual_stack: Tensor, tokens: Any, incorrect_tokens: Any = None, *,
        pos_slice: Position = None,
    ) -> Tensor:  # fmt: skip
        """Return the shares of parts of the final residual stream in the logits of tokens.

        Args:
            residual_stack: the parts, without a norm applied.
            tokens: the number of a token, or a tensor with one for each example, or for each
                example and position.
            incorrect_tokens: tokens whose logits are subtracted.
            pos_slice: the positions that the parts have.

        Returns:
            A number for each part, example and position.

        Raises:
            InputError: the model or an argument does not fit.
            NodePathError: the cache lacks a value.

        Example:
            >>> import torch, transformers, bendtrace as bt
            >>> sizes = {"n_embd": 8, "n_head": 2, "n_layer": 2, "vocab_size": 9, "n_positions": 4}
            >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
            >>> tokens = torch.tensor([[3, 1, 4]])
            >>> out, cache = bt.workflows.run_with_cache(model, tokens)
            >>> parts, labels = cache.decompose_resid(pos_slice=-1, return_labels=True)
            >>> labels
            ['embed', 'pos_embed', '0_attn_out', '0_mlp_out', '1_attn_out', '1_mlp_out']
            >>> found = cache.logit_attrs(parts, tokens=5, pos_slice=-1)
            >>> found.shape, torch.allclose(found.sum(0), out.logits[:, -1, 5], atol=1e-5)
            (torch.Size([6, 1]), True)
        """
        stream, _ = self._layer_in_stream(None)
        if stream.unembed is None:
            raise InputError("the model has no unembedding, which makes logits of the stream")
        rows: Tensor = stream.unembed.weight.detach().to(residual_stack)  # type: ignore[operator]
        toward = rows[_numbers("tokens", tokens, len(rows), rows.device)]
        if incorrect_tokens is not None:
            wrong = _numbers("incorrect_tokens", incorrect_tokens, len(rows), rows.device)
            toward = toward - rows[wrong]
        parts = self.apply_ln_to_stack(residual_stack, pos_slice=pos_slice)
        if toward.dim() == 2 and parts.dim() == 4:
            toward = toward[:, None]  # the same for all positions
        return (parts * toward).sum(-1)

    def _layer_in_stream(self, layer: int | None) -> tuple[Stream, int]:
        """Return the stream, and the layer that an argument stands for."""
        stream = self.aliases.stream
        if stream is None:
            raise InputError(
                "the parts of the residual stream are known for GPT-2 and Llama, with "
                "TransformerLens's names (aliases=None in run_with_cache), and not in this cache"
            )
        number = stream.layers if layer is None or layer == -1 else layer
        if not 0 <= number <= stream.layers:
            raise InputError(f"layer={layer}, but the model has {stream.layers} layers")
        return stream, number

    def _part(self, key: Any, pos_slice: Position) -> Tensor:
        return _at(self[key], pos_slice)

    def _result(
        self, stack: Tensor, labels: list[str], layer: int, mlp_input: bool, apply_ln: bool,
        pos_slice: Position, return_labels: bool,
    ) -> Any:  # fmt: skip
        if apply_ln:
            stack = self.apply_ln_to_stack(stack, layer, mlp_input=mlp_input, pos_slice=pos_slice)
        return (stack, labels) if return_labels else stack


def _at(value: Tensor, pos_slice: Position) -> Tensor:
    if pos_slice is None:
        return value
    return value[..., slice(*pos_slice) if isinstance(pos_slice, tuple) else pos_slice, :]


def _numbers(name: str, tokens: Any, count: int, device: torch.device) -> Tensor:
    """Return numbers of tokens as a tensor."""
    if isinstance(tokens, str):
        raise InputError(f"{name}= takes numbers of tokens, not {tokens!r}: use the tokenizer")
    found = torch.as_tensor(tokens, device=device)
    if found.is_floating_point() or not bool(((found >= 0) & (found < count)).all()):
        raise InputError(f"{name}= takes numbers of tokens from 0 to {count - 1}, not {tokens!r}")
    return found


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

        Raises:
            InputError: torch knows no such device.

        Example:
            >>> import torch, bendtrace as bt
            >>> _, cache = bt.workflows.run_with_cache(torch.nn.ReLU(), torch.ones(2))
            >>> cache.to("meta")["relu"].device
            device(type='meta')
        """
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise InputError(
                f"device= is a device of torch, such as 'cpu', not {device!r}"
            ) from error
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
            return _pick(self[alias.where], alias)
        if isinstance(name, str):
            require_equal(self.aliases, name)
        choices = [*self, *self._names, *self.aliases]
        if isinstance(name, tuple) and len(name) > 1:  # as TransformerLens shortens its names
            choices, name = [*self.aliases], f"blocks.{name[1]}.hook_{name[0]}"
        hint = near_misses(str(name), choices)
        raise NodePathError(f"{name!r} is not in this cache; {hint}", str(name), tuple(self))

    def __repr__(self) -> str:
        return activations_text(type(self).__name__, self)

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

    The name comes from TransformerLens.

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
        alias_map = transformer_lens_aliases(bended.model)
    else:
        alias_map = aliases if isinstance(aliases, Aliases) else Aliases(aliases)
    fixed = _fixed(bended.model, call) if detach else None
    # The model's own Python could write to shared memory by its address, as through numpy arrays.
    # Whether it does is known from the first run on.
    group = InsertionGroup(bended)
    runs = group.recorded_runs()
    is_lazy = bool(runs) and not any(map(_hands_out, runs))
    wanted = _Requests(bended, group, alias_map, _Clock(fixed, is_lazy))
    wanted.read(names_filter)
    wanted.insert()
    try:
        output = call.to(bended)
    except NodePathError as error:
        raise wanted.explained(error) from None
    finally:
        wanted.close()
    for tensor in tensors_in((output, *call)):
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

    Fixed memory is copied right away; if lazy, other memory only when it is written to.
    """

    def __init__(self, fixed: set[int] | None, is_lazy: bool) -> None:
        self._fixed = fixed
        self._is_lazy = is_lazy
        self._numbers = itertools.count()

    @property
    def copies(self) -> bool:
        """True if it takes copies."""
        return self._fixed is not None

    def stamp(self, value: Any) -> tuple[int, Any]:
        """Return a number, and a snapshot of a value."""
        if self._fixed is None:
            return next(self._numbers), value
        if takes(value):
            return next(self._numbers), value
        shape, found = take_apart(value)
        with unseen(), torch.inference_mode(False), torch.no_grad():
            return next(self._numbers), assemble(shape, list(map(self._copied, found)))

    def _copied(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        assert self._fixed is not None
        shares = self._is_lazy and storage_of(item) not in self._fixed
        return lazily_copied(item.detach()) if shares else aligned_copy(item.detach())


class _Keeper(Interjection):
    """Keeps the outputs of nodes."""

    observes = True
    late = True
    self_contained = True
    label = "run_with_cache"
    is_input = False

    def __init__(self, clock: _Clock, is_alias: bool) -> None:
        self.deferrable = clock.copies
        self.is_alias = is_alias  # whether it keeps the values only for aliases
        self.insertions: list[Insertion] = []  # where it is inserted
        # For each node and pass the time and the value.
        self.kept: dict[tuple[str, int], tuple[int, Any]] = {}
        self.modules: dict[str, nn.Module] = {}  # the modules that were called, by path
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
        self.kept[path, at.number] = self._clock.stamp(value)


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
    tensors = list(tensors_in(tuple(call)))
    if isinstance(model, nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
    with unseen():
        return {storage_of(tensor) for tensor in tensors}


def _hands_out(run: Recording) -> list[str]:
    """Return where a run gives the memory of tensors to code that cannot be watched."""
    return [reason for reason in run.tape.blockers if "content of a tensor" in reason]


def _pick(value: Any, alias: Alias) -> Any:
    return value if alias.pick is None else alias.pick(value)


class _Requests:
    """The values of a call to keep, and the aliases that were asked for."""

    def __init__(
        self, bended: BendedModule, group: InsertionGroup, aliases: Aliases, clock: _Clock
    ) -> None:
        self.group = group
        self._model = bended.model
        self._aliases = aliases
        self._clock = clock
        self._asked: dict[str, bool] = {}  # whether an alias has to be there
        self._keepers: dict[tuple[bool, bool], _Keeper] = {}
        self._takes_all = False

    def read(self, names_filter: Any) -> None:
        """Add the values that a filter means."""
        if names_filter is None:
            self._takes_all = True
            self._keep(_anything, allow_none=True)  # the same for all calls, which replay
            self._keep(_any_module, True, allow_none=True)
        elif isinstance(names_filter, re.Pattern):
            self._by(lambda name: names_filter.fullmatch(name) is not None)
        elif isinstance(names_filter, str):
            self._named(names_filter)
        elif isinstance(names_filter, (nn.Module, type, NodeSelector, LayerEntry)):
            self._keep(names_filter)
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
            return any(map(says, _names_of_node(node, "output")))

        def of_input(node: Candidate) -> bool:
            return node.is_module and any(map(says, _names_of_node(node, "input")))

        self._keep(of_output, allow_none=True)
        self._keep(of_input, True, allow_none=True)

    def _named(self, name: str) -> None:
        if name in self._aliases:
            self._asked[name] = True
            self._add(self._aliases[name].where, is_alias=True)
        else:
            require_equal(self._aliases, name)
            self._add(name)

    def _add(self, name: str, **options: bool) -> None:
        """Add the value of a name that is not an alias."""
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
        self._keep(where, part == "input", **options)

    def _keep(
        self, where: Any, is_input: bool = False, is_alias: bool = False, allow_none: bool = False
    ) -> None:
        """Keep the values at a location, as `interject` takes it, or the inputs of modules."""
        kind = _InputKeeper if is_input else _Keeper
        keeper = self._keepers.setdefault((is_input, is_alias), kind(self._clock, is_alias))
        try:
            made = self.group.make(where, keeper, allow_none=allow_none)
        except NodePathError as error:
            raise self.explained(error) from None
        keeper.insertions.append(made)

    def insert(self) -> None:
        """Insert the observers of the values, around all other insertions.

        Inputs are kept after all other insertions have changed them if their keeper is innermost.
        """
        first, last = (
            [made for keeper in self._keepers.values() if keeper.is_input == is_input
             for made in keeper.insertions]
            for is_input in (True, False)
        )  # fmt: skip
        self.group.surround(first, last)

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
            if self._takes_all and next(tensors_in(value), None) is None:
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
                values[name] = _pick(found[alias.where], alias)
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


def _names_of_node(node: Candidate, part: str) -> Iterator[str]:
    path = node.path or "output"
    yield path if part == "output" else f"{path}.{part}"
    if node.is_module and node.module_path:
        yield f"{node.module_path}.{part}"
