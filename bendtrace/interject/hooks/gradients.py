"""The gradients that pass through one call of a module, and nothing else.

Before the call, tensors that need a gradient are exchanged for others of the same storage, and
after it each output becomes the result of one more step of autograd, which changes nothing. All
that comes back to the outputs and leaves through the inputs then goes by these two places.

An output is not exchanged for a view, as torch's own backward hooks do: autograd refuses to change
such a view in place, and `nn.ReLU(inplace=True)` after a layer would be an error. It stays the
tensor that it is, and the step is entered into its history as if it were changed in place. That
does not do where several outputs have the same storage, nor for tensors that were there before
the call or cannot be changed in place; these do become views.

What an input was exchanged for has a history of its own from then on, although the two have the
same storage. So an input that the module changes in place is given the history of what it was
exchanged for; and if an output is (a view of) an input, changes in place after the call are
watched, since the other of the two does not learn of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from bendtrace.errors import InputError
from bendtrace.interject.hooks.inputs import Alias, Watch
from bendtrace.interject.hooks.steps import (
    NOT_NUMBERED,
    Gradients,
    Node,
    enter,
    leave_as_view,
    leave_in_place,
    overlaps_itself,
    rebase,
    root,
    storage,
)
from bendtrace.interject.hooks.structure import Exchange, tensors_of

if TYPE_CHECKING:
    from bendtrace.interject.hooks.handle import HookHandle

__all__ = ["CallGradients"]


class CallGradients:
    """Sees to the gradients of one call of a module, from before the call to all backward passes.

    Args:
        module: the module that is called.
        handles: the backward hooks that are active at the time of the call.
        inputs: the tensors that the module is given.
    """

    def __init__(
        self, module: nn.Module, handles: tuple[HookHandle, ...], inputs: list[Tensor]
    ) -> None:
        self._module = module
        self._handles = handles
        self._start: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._originals = _needing_gradients(inputs)
        self._places = [places for _, places in self._originals]
        self._shapes = [tensor.shape for tensor in inputs]
        self._entry: Node = None
        self._aliases: list[Alias] = []
        self._exchange = Exchange({})
        self._watches: list[tuple[int, Watch]] = []
        self._size_out = 0
        self._exits = 0
        self._passes: dict[int, _BackwardPass] = {}

    # The call

    def enter(self, given: Any) -> Any:
        """Return what to give to the module in place of `given`: the same values."""
        originals = [tensor for tensor, _ in self._originals]
        self._originals.clear()
        if not originals:
            return given
        inside, self._entry = enter(self, originals)
        self._aliases = [Alias(*pair) for pair in zip(originals, inside, strict=True)]
        self._exchange = Exchange(dict(zip(map(id, originals), inside, strict=True)))
        return self._exchange.into(given)

    def close(self, output: Any) -> dict[int, Tensor]:
        """Put back what was exchanged, and let inputs know how they were changed in place.

        Returns:
            By id of what the module was given: the input that is the same by now.

        Raises:
            InputError: if changes in place make it impossible to tell gradients apart.
        """
        self._exchange.undo()
        same: dict[int, Tensor] = {}
        for alias in self._aliases:
            original = alias.original()
            if original is None or not alias.is_written:
                continue
            if not (alias.has_history or alias.original_has_history):
                continue  # in a way that autograd does not know of, as it would not anyway
            if (
                alias.original_has_history
                or self._is_shared(alias)
                or self._is_used_otherwise(alias, output)
            ):
                raise InputError(
                    f"module {self._name!r} changes an input in place that it uses by other ways "
                    "than as this argument, so that the gradients that pass through its call "
                    "cannot be told from others: deactivate its backward hooks"
                )
            rebase(original, alias.inside)
            alias.is_rebased = True
            same[id(alias.inside)] = original
        return same

    def _is_shared(self, alias: Alias) -> bool:
        key = storage(alias.inside)
        return sum(storage(other.inside) == key for other in self._aliases) > 1

    def _is_used_otherwise(self, alias: Alias, output: Any) -> bool:
        """Whether an op of the call has used an input, not what it was exchanged for."""
        tensors = [*tensors_of(output), *(one.inside for one in self._aliases)]
        seen = {tensor.grad_fn for tensor in tensors} - {None, self._entry}
        waiting: list[Node] = list(seen)
        while waiting:
            for node, _ in waiting.pop().next_functions:
                if node is None or node in seen or node is self._entry:
                    continue
                if node in alias.nodes:
                    return True
                seen.add(node)
                if self._start <= node._sequence_nr() < NOT_NUMBERED:
                    waiting.append(node)
        return False

    def inside_of(self, inputs: list[Tensor], same: dict[int, Tensor]) -> list[Tensor]:
        """Return the inputs as the module had them: what they were exchanged for, if unchanged."""
        aliases = {id(alias.original()): alias.inside for alias in self._aliases}
        as_given = [aliases.get(id(tensor), tensor) for tensor in inputs]
        return [same.get(id(tensor), tensor) for tensor in as_given]

    def leave(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return what to give back in place of the outputs: mostly the very same tensors."""
        self._size_out = len(outputs)
        given = list(outputs)
        distinct = _needing_gradients(outputs)
        self._exits = len(distinct)
        sharing = Counter(storage(tensor) for tensor, _ in distinct)
        # A leaf must not be changed in place, nor, by whatever way, what has its storage.
        sharing.update(storage(alias.inside) for alias in self._aliases if alias.is_leaf)
        for tensor, places in distinct:
            if not (
                sharing[storage(tensor)] == 1
                and self._is_new(tensor)
                and not overlaps_itself(tensor)
                and leave_in_place(self, places, tensor)
            ):
                view = leave_as_view(self, places, tensor)
                for place in places:
                    given[place] = view
        for index, alias in enumerate(self._aliases):
            if storage(alias.inside) in sharing and not (alias.is_rebased or alias.is_leaf):
                self._watches.append((index, Watch(alias, self._name)))
        # So as not to keep tensors as long as autograd's graph.
        self._aliases.clear()
        self._exchange = Exchange({})
        return given

    def _is_new(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed in the call."""
        node: Node = root(tensor).grad_fn
        return node is not None and node._sequence_nr() >= self._start

    # Backward passes

    def left(self, places: Sequence[int], gradient: Tensor | None) -> None:
        """Note the gradient of an output; called in a backward pass."""
        task = torch._C._current_graph_task_id()
        found = self._passes.get(task)
        if found is None:
            found = self._passes[task] = _BackwardPass([None] * self._size_out)
            Variable._execution_engine.queue_callback(lambda: self._end(task))
        for place in places:
            found.gradients[place] = gradient
        found.arrived += 1
        if found.arrived == self._exits and not self._entry_is_to_come():
            self._call_hooks(found, None)

    def _entry_is_to_come(self) -> bool:
        if self._entry is None:
            return False
        try:
            return torch._C._will_engine_execute_node(self._entry)
        except RuntimeError:  # the outputs do not depend on inputs, and the node is gone
            return False

    def entered(self, gradients: Gradients) -> Gradients:
        """Return what to pass on as gradients of the inputs; called in a backward pass."""
        found = self._passes.get(torch._C._current_graph_task_id())
        if found is not None:  # else gradients of gradients, which do not come by the outputs
            gradients = self._call_hooks(found, gradients)
        for index, watch in self._watches:
            watch.passes(gradients[index])
        return gradients

    def _end(self, task: int) -> None:
        """Make up for hooks that still wait for the gradient of an output, or of the inputs."""
        self._call_hooks(self._passes.pop(task), None)

    def _call_hooks(self, found: _BackwardPass, entered: Gradients | None) -> Gradients:
        through = entered or ()
        if found.is_done or all(gradient is None for gradient in found.gradients):
            return through
        found.is_done = True
        grad_in: list[Tensor | None] = [None] * len(self._shapes)
        for places, gradient in zip(self._places, through, strict=False):
            for place in places:
                grad_in[place] = gradient
        before, grad_out = tuple(grad_in), tuple(found.gradients)
        after = before
        for handle in self._handles:
            if handle.active:
                after = self._call_hook(handle, after, grad_out, entered is not None)
        if after is before:
            return through
        return tuple(self._agreed(places, before, after) for places in self._places)

    def _call_hook(
        self, handle: HookHandle, grad_in: Gradients, grad_out: Gradients, can_change: bool
    ) -> Gradients:
        given = [gradient for gradient in (*grad_in, *grad_out) if gradient is not None]
        versions = [gradient._version for gradient in given]
        returned = handle.call(self._module, grad_in, grad_out)
        if [gradient._version for gradient in given] != versions:
            raise InputError(
                f"{handle.described} has changed a gradient in place, which others may use as "
                "well: return a tuple of new gradients of the inputs instead"
            )
        new = handle.checked(returned, grad_in, "gradients of the inputs", self._shapes)
        passing = {place for places in self._places for place in places}
        for place, (one, other) in enumerate(zip(grad_in, new, strict=True)):
            if one is not other and (place not in passing or not can_change):
                raise InputError(
                    f"{handle.described} returned another gradient for input {place}, "
                    "which passes no gradient on"
                )
        return new

    def _agreed(self, places: Sequence[int], before: Gradients, after: Gradients) -> Tensor | None:
        """The new gradient of a tensor, which may have been given in several places."""
        new = [after[place] for place in places if after[place] is not before[place]]
        if not new:
            return before[places[0]]
        first = new[0]
        if len(new) < len(places) or any(
            one is not first and (one is None or first is None or not torch.equal(one, first))
            for one in new
        ):
            raise InputError(
                f"inputs {places} of module {self._name!r} are the same tensor, but a backward "
                "hook returned different gradients for them"
            )
        return first

    @property
    def _name(self) -> str:
        return self._handles[0].module_name


class _BackwardPass:
    """What has come of one backward pass through one call."""

    def __init__(self, gradients: list[Tensor | None]) -> None:
        self.gradients = gradients
        self.arrived = 0
        self.is_done = False


def _needing_gradients(tensors: Iterable[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Return the different tensors that need a gradient, and in which places each is."""
    found: dict[int, tuple[Tensor, list[int]]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.requires_grad:
            found.setdefault(id(tensor), (tensor, []))[1].append(place)
    return list(found.values())
