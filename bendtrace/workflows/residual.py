"""The residual stream of a language model, taken apart: methods of TransformerLens's caches."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from bendtrace._checks import required_choice
from bendtrace.errors import InputError
from bendtrace.interject.where import Aliases, Stream

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
        stream, number = self._found(layer)
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
        """Return what the embeddings and the layers add to the residual stream.

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
        stream, number = self._found(layer)
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
        """Return what each head adds to the residual stream, with the present projections.

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
        stream, number = self._found(layer)
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
        stream, number = self._found(layer)
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
        """Return what parts of the final residual stream add to the logits of tokens.

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
        stream, _ = self._found(None)
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

    def _found(self, layer: int | None) -> tuple[Stream, int]:
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
