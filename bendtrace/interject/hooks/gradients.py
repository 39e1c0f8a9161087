"""The gradients that pass through one call of a module, and nothing else.

Before the call, tensors that need a gradient are exchanged for others of the same storage, and
after it each output becomes the result of one more step of autograd, which changes nothing. All
that comes back to the outputs and leaves through the inputs then goes by these two places.

An output is not exchanged for a view, as torch's own backward hooks do: autograd refuses to change
such a view in place, and `nn.ReLU(inplace=True)` after a layer would be an error. It stays the
tensor that it is, and the step is entered into its history as if it were changed in place. That
does not do where several outputs have the same storage, nor for those that were there before the
call; these do become views.

What an input was exchanged for has a history of its own from then on, although the two have the
same storage. So an input that the module changes in place is given the history of what it was
exchanged for; and if an output is (a view of) an input, changes in place after the call are
watched, since the other of the two does not learn of them (see `_Watch`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from bendtrace.errors import InputError
from bendtrace.interject.hooks.structure import Exchange, tensors_of

if TYPE_CHECKING:
    from bendtrace.interject.hooks.handle import HookHandle

__all__ = ["CallGradients"]

Gradients = tuple[Tensor | None, ...]
Node = Any  # the nodes of autograd's graph have no common class


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
        self._originals = _by_identity(inputs)
        self._places = [places for _, places in self._originals]
        self._shapes = [_shape(tensor) for tensor in inputs]
        self._size_out = 0
        self._exits = 0
        self._passes: dict[int, _BackwardPass] = {}
        self._entry: Node = None
        self._aliases: list[_Alias] = []
        self._exchange = Exchange({})
        self._watches: list[tuple[int, _Watch]] = []

    # The call

    def enter(self, given: Any) -> Any:
        """Return what to give to the module in place of `given`: the same values."""
        originals = [tensor for tensor, _ in self._originals]
        self._originals.clear()
        if not originals:
            return given
        inside: tuple[Tensor, ...] = _Entry.apply(*originals)
        self._entry = inside[0].grad_fn
        self._entry.call = weakref.ref(self)  # what leads from the outputs to here holds it
        self._aliases = [_Alias(*pair) for pair in zip(originals, inside, strict=True)]
        self._exchange = Exchange({id(alias.original()): alias.inside for alias in self._aliases})
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
            if original is None or alias.inside._version == alias.version:
                continue
            changed_inside = alias.inside.grad_fn is not self._entry
            changed_outside = _root(original).grad_fn is not alias.node
            if not (changed_inside or changed_outside):
                continue  # in a way that autograd does not know of, as it would not anyway
            if changed_outside or self._is_shared(alias) or self._is_used_otherwise(alias, output):
                raise InputError(
                    f"module {self._name!r} changes an input in place that it uses by other ways "
                    "than as this argument, so that the gradients that pass through its call "
                    "cannot be told from others: deactivate its backward hooks"
                )
            _in_place(_Rebase, original, alias.inside)
            alias.is_rebased = True
            same[id(alias.inside)] = original
        return same

    def _is_shared(self, alias: _Alias) -> bool:
        key = _storage(alias.inside)
        return sum(_storage(other.inside) == key for other in self._aliases) > 1

    def _is_used_otherwise(self, alias: _Alias, output: Any) -> bool:
        """Whether an op of the call has used an input, not what it was exchanged for."""
        ends = {alias.node, alias.own_node}
        tensors = [*tensors_of(output), *(one.inside for one in self._aliases)]
        seen = {tensor.grad_fn for tensor in tensors} - {None, self._entry}
        waiting: list[Node] = list(seen)
        while waiting:
            for node, _ in waiting.pop().next_functions:
                if node is None or node in seen or node is self._entry:
                    continue
                if node in ends:
                    return True
                seen.add(node)
                if self._start <= node._sequence_nr() < _NOT_NUMBERED:
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
        distinct = _by_identity(outputs)
        self._exits = len(distinct)
        sharing = Counter(_storage(tensor) for tensor, _ in distinct)
        for tensor, places in distinct:
            left = self._exit(tensor, places, sharing[_storage(tensor)] == 1)
            for place in places:
                given[place] = left
        for index, alias in enumerate(self._aliases):
            if not alias.is_rebased and _storage(alias.inside) in sharing:
                self._watches.append((index, _Watch(alias, self._name)))
        # So as not to keep tensors as long as autograd's graph.
        self._aliases.clear()
        self._exchange = Exchange({})
        return given

    def _exit(self, tensor: Tensor, places: list[int], is_alone: bool) -> Tensor:
        node = _root(tensor).grad_fn
        is_new = node is not None and node._sequence_nr() >= self._start
        _made.exits.append((self, places))
        try:
            if is_alone and is_new and not _overlaps_itself(tensor):
                try:
                    return _in_place(_Exit, tensor)
                except RuntimeError:
                    pass  # one of several views made at once: torch does not change it in place
            view: Tensor = _ExitView.apply(tensor)
            return view
        finally:
            _made.exits.pop()

    # Backward passes

    def left(self, places: list[int], gradient: Tensor | None) -> None:
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
        task = torch._C._current_graph_task_id()
        found = self._passes.get(task)
        if found is not None:  # else gradients of gradients, which do not come by the outputs
            gradients = self._call_hooks(found, gradients)
        for index, watch in self._watches:
            watch.through[task] = gradients[index]
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

    def _agreed(self, places: list[int], before: Gradients, after: Gradients) -> Tensor | None:
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


class _Alias:
    """An input, and what the module was given for it.

    Attributes:
        inside: what the module was given.
        version: how often what the two share had been changed in place before the call.
        own_node: what had computed the input.
        node: the same of what the input is a view of, if it is one.
    """

    def __init__(self, original: Tensor, inside: Tensor) -> None:
        self.original = weakref.ref(original)  # while the call runs, the caller has it
        self.inside = inside
        self.version = inside._version
        self.own_node: Node = original.grad_fn
        self.node: Node = _root(original).grad_fn
        self.is_rebased = False
        if getattr(original, "__dict__", None):
            inside.__dict__.update(original.__dict__)


class _Watch:
    """Notices that an input, or an output that is (a view of) it, is changed in place later.

    The history of the one does not show what is done to the other. No harm is done if the input
    is not there any more by then, or if nothing else uses it.
    """

    def __init__(self, alias: _Alias, name: str) -> None:
        self._name = name
        # It has the count of changes of the two, and none of their memory.
        self._probe = alias.inside.detach()
        self._probe.data = self._probe.new_empty(0)
        self._version = self._probe._version
        self._was_changed: bool | None = None  # unknown as long as the input is there
        self.through: dict[int, Tensor | None] = {}
        original = alias.original()
        assert original is not None  # the caller has it
        root = _root(original)
        self._is_leaf = root.is_leaf
        self._root = weakref.ref(root, self._ends)
        root.register_hook(self._check)

    def _changed(self) -> bool:
        return self._probe._version != self._version

    def _ends(self, root: Any) -> None:
        self._was_changed = self._changed()

    def _check(self, gradient: Tensor) -> None:
        """See to it that a changed input gets no gradient but that through the call."""
        through = self.through.pop(torch._C._current_graph_task_id(), None)
        if not (self._changed() if self._was_changed is None else self._was_changed):
            return
        is_all = through is not None and torch.equal(through.flatten(), gradient.flatten())
        if self._is_leaf or not is_all:
            raise InputError(
                f"module {self._name!r} returns its input, or a view of it, which was changed in "
                "place after the call while the input was used elsewhere, so that the gradients "
                "that pass through the call cannot be told from others: deactivate its backward "
                "hooks"
            )


def _by_identity(tensors: Iterable[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Tell where each tensor is that needs a gradient."""
    found: dict[int, tuple[Tensor, list[int]]] = {}
    for place, tensor in enumerate(tensors):
        if tensor.requires_grad:
            found.setdefault(id(tensor), (tensor, []))[1].append(place)
    return list(found.values())


def _root(tensor: Tensor) -> Tensor:
    """What a tensor is a view of, or itself: whose history changes in place go into."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def _shape(tensor: Tensor) -> Sequence[int] | None:
    try:
        return tensor.shape
    except RuntimeError:  # nested tensors have none
        return None


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether an element may be in several places, as after `expand` and `unfold`."""
    if not tensor._is_view() or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    reach = 0  # how far apart the elements are that the dimensions so far lead to
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _storage(tensor: Tensor) -> int:
    try:
        storage: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # tensors that consist of others
        return id(tensor)
    return storage


_NOT_NUMBERED = 2**64 - 1  # what accumulates the gradients of leaves


class _Made(threading.local):
    """What the step is of that is being made: no argument, or a recorder would look into it."""

    def __init__(self) -> None:
        self.exits: list[tuple[CallGradients, list[int]]] = []


_made = _Made()


class _Entry(Function):
    """Gives tensors with the values, and the storage, of others, which are not views of them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        # A detached tensor is no view to autograd, so that it can be changed in place, and shares
        # the count of such changes, so that they are noticed. Seen in torch 2.6 to 2.13;
        # test_hooks.py would notice a change.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call = ctx.call()
        return gradients if call is None else call.entered(gradients)


class _Exit(Function):
    """Changes nothing, in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        ctx.call, ctx.places = _made.exits[-1]
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.call.left(ctx.places, gradient)
        return gradient


class _ExitView(Function):
    """Gives a view, which autograd will not let be changed in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.places = _made.exits[-1]
        return tensor.view_as(tensor)

    backward = staticmethod(_Exit.backward)


class _Rebase(Function):
    """Gives a tensor the history of another of the same storage."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None, gradient


def _in_place(function: type[Function], tensor: Tensor, *others: Any) -> Tensor:
    """Enter a step into a tensor's history that leaves its values alone.

    To autograd it is a change in place, which would spoil what ops have saved for their backward
    pass. Nothing is changed, so they may go on to use it.
    """
    with _unsafe_preserve_version_counter(tensor):
        out: Tensor = function.apply(tensor, *others)
    # A view looks up its history again if the count of changes is another than when it did so
    # last. It has to do that now: at the next change the count will be what it was in between.
    _: Node = out.grad_fn
    return out
