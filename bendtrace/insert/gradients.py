"""The gradients that pass through one call of a module, and no others.

Before the call, each input tensor that needs a gradient is replaced by a tensor with the same
storage. After the call, each output gets one more autograd step that changes nothing. All gradients
that enter through the outputs and leave through the inputs then pass these two points.

An output is not replaced by a view, as torch's own backward hooks do: autograd refuses to change
such a view in place, and `nn.ReLU(inplace=True)` after a layer would be an error. The output stays
the same tensor, and the step is added to its history as if the tensor were changed in place. This
is impossible if several outputs share their storage, and for tensors that existed before the call
or cannot be changed in place; these do become views.

The replacement of an input then has another history, although both share their storage. So an
input that the module changes in place receives the history of its replacement. If an output is an
input or a view of one, later in-place changes of either are watched, since autograd does not pass
them on to the other.

At a node of a recorded run (`writes=False`) torch refuses in-place changes of the inputs. An output
that no step can be added to keeps its history and is watched by a tensor hook: the ops recorded
after the node continue with that very tensor.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from bendtrace.errors import InputError, InterjectionError
from bendtrace.insert.interjection import Interjection, NodePass
from bendtrace.insert.leaves import describe
from bendtrace.python.internals import internal, keeps_version
from bendtrace.tape.captured import requires_grad
from bendtrace.tape.tape import meta_of

# `queue_callback` runs a function when the whole backward pass has ended. Hooks on nodes cannot:
# the last one of a call may never run, if its gradient is not needed (DDP uses it, too; 2.13).
_engine = internal("torch.autograd.Variable._execution_engine")


Receiver = tuple[Interjection, NodePass, Callable[[NodePass], object] | None]


class ChecksGradients(Interjection):
    """An interjection with its own messages for invalid gradients that it returns."""

    def checked_gradients(
        self,
        result: Any,
        before: Gradients,
        passing: frozenset[int],
        shapes: Sequence[Sequence[int]],
    ) -> Gradients:
        """Return the gradients to pass on, for what `backward` returned.

        It was given those before. `passing` are the indices of the inputs that pass a gradient on.
        """
        raise NotImplementedError


class CallGradients:
    """Manages the gradients of one call of a module, from before the call to all backward passes.

    The receivers are interjections whose `backward` is called, the node pass that each sees, and a
    callback for afterwards. If the node `writes`, it may change inputs in place; if not, torch
    refuses it. With `apart`, a tensor that is passed in several positions has a separate gradient
    for each; if not, it is one tensor for the node as well, with the sum of the gradients. With
    `keeps_casts`, tensors are left alone of which autocast keeps a cast.
    """

    def __init__(
        self,
        receivers: Sequence[Receiver],
        inputs: list[Tensor],
        writes: bool = True,
        apart: bool = False,
        keeps_casts: bool = False,
    ) -> None:
        # True if all of `receivers` are hooks: then the gradients of outputs are those of the
        # values that forward hooks returned.
        self.of_hooks: bool = all(isinstance(what, ChecksGradients) for what, _, _ in receivers)
        self._receivers = receivers
        self._backwards = [what._backward_of_call() for what, _, _ in receivers]
        self._writes = writes
        # Each thread numbers the nodes of autograd in the order in which it makes them: those of
        # the call have this number or a later one.
        self._start: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self._inputs = inputs
        self._originals = _needing_gradients(inputs)
        if keeps_casts:
            self._originals = [pair for pair in self._originals if not _has_cast(pair[0])]
        if apart:
            self._originals = [(tensor, [i]) for tensor, found in self._originals for i in found]
        self._places = [places for _, places in self._originals]
        self._shapes = [meta_of(tensor).shape for tensor in inputs]
        self._entry: Node = None
        self._aliases: list[InputReplacement] = []
        self._watches: list[tuple[int, Watch]] = []
        self._size_out = 0
        self._exits = 0
        self._passes: dict[int, _BackwardPass] = {}

    # The call

    def enter(self) -> list[Tensor]:
        """Return the replacements of the inputs: the same values in other tensors."""
        originals, given = [tensor for tensor, _ in self._originals], list(self._inputs)
        self._originals, self._inputs = [], []  # so as not to keep them
        if not originals:
            return given
        inside, self._entry = enter(self, originals, self._writes)
        self._aliases = [InputReplacement(*pair) for pair in zip(originals, inside, strict=True)]
        for places, tensor in zip(self._places, inside, strict=True):
            for place in places:
                given[place] = tensor
        return given

    def close(self, outputs: list[Tensor]) -> dict[int, Tensor]:
        """Pass on to the inputs how they were changed in place.

        Return, by id of each replacement, the input with the same value now. Raise `InputError` if
        in-place changes make it impossible to separate the gradients.
        """
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
                or self._is_used_otherwise(alias, outputs)
            ):
                raise InputError(
                    f"module {self._name!r} changes an input in place that it also uses in "
                    "other ways than as this argument, so that the gradients through its call "
                    "cannot be separated from others: deactivate its backward hooks"
                )
            rebase(original, alias.inside)
            alias.is_rebased = True
            same[id(alias.inside)] = original
        return same

    def _is_shared(self, alias: InputReplacement) -> bool:
        key = storage(alias.inside)
        return sum(storage(other.inside) == key for other in self._aliases) > 1

    def _is_used_otherwise(self, alias: InputReplacement, outputs: list[Tensor]) -> bool:
        """Return whether an op of the call has used an input itself, instead of its replacement."""
        tensors = [*outputs, *(one.inside for one in self._aliases)]
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
        """Return the inputs as the module saw them: their replacements, if unchanged."""
        aliases = {id(alias.original()): alias.inside for alias in self._aliases}
        as_given = [aliases.get(id(tensor), tensor) for tensor in inputs]
        return [same.get(id(tensor), tensor) for tensor in as_given]

    def leave(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the replacements of the outputs: mostly the very same tensors."""
        self._size_out = len(outputs)
        given = list(outputs)
        distinct = _needing_gradients(outputs)
        self._exits = len(distinct)
        sharing = Counter(storage(tensor) for tensor, _ in distinct)
        # A leaf must not be changed in place, nor any tensor that shares its storage.
        sharing.update(storage(alias.inside) for alias in self._aliases if alias.is_leaf)
        for tensor, places in distinct:
            is_single = sharing[storage(tensor)] == 1 and not overlaps_itself(tensor)
            can_step = is_single and self._is_new(tensor) and (self._writes or self.of_hooks)
            if can_step and leave_in_place(self, places, tensor):
                continue
            if not self._writes:  # what is recorded goes on with the node's own tensor, as it is
                tensor.register_hook(functools.partial(self.output_gradient, places))
                continue
            view = leave_as_view(self, places, tensor)
            for place in places:
                given[place] = view
        for index, alias in enumerate(self._aliases if self._writes else ()):
            if storage(alias.inside) in sharing and not (alias.is_rebased or alias.is_leaf):
                self._watches.append((index, Watch(alias, self._name)))
        # So as not to keep tensors as long as autograd's graph.
        self._aliases.clear()
        return given

    def _is_new(self, tensor: Tensor) -> bool:
        node: Node = root(tensor).grad_fn
        return node is not None and node._sequence_nr() >= self._start

    # Backward passes

    def output_gradient(self, places: Sequence[int], gradient: Tensor | None) -> None:
        """Record the gradient of an output; called in a backward pass."""
        task = torch._C._current_graph_task_id()
        found = self._passes.get(task)
        if found is None:
            found = self._passes[task] = _BackwardPass([None] * self._size_out)
            _engine.queue_callback(lambda: self._end(task))
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

    def input_gradients(self, gradients: Gradients) -> Gradients:
        """Return the gradients to pass on for the inputs; called in a backward pass."""
        found = self._passes.get(torch._C._current_graph_task_id())
        if found is not None:  # else gradients of gradients, which do not reach the outputs
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
        passing = () if entered is None else (one for places in self._places for one in places)
        after, can_change = before, frozenset(passing)
        for (what, at, note), backward in zip(self._receivers, self._backwards, strict=True):
            result = backward(at, after, grad_out)
            if result is not None:
                after = self._checked(what, at, result, after, can_change)
            if note is not None:
                note(at)
        if after is before:
            return through
        return tuple(self._agreed(places, before, after) for places in self._places)

    def _agreed(self, places: Sequence[int], before: Gradients, after: Gradients) -> Tensor | None:
        """Return the new gradient of a tensor, which may have been passed in several positions."""
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

    def _checked(
        self,
        what: Interjection,
        at: NodePass,
        result: Any,
        before: Gradients,
        passing: frozenset[int],
    ) -> Gradients:
        """Return the gradients that an interjection returned (see `checked_gradients`).

        Raise `InterjectionError` if these are not valid gradients of the inputs.
        """
        if isinstance(what, ChecksGradients):
            return what.checked_gradients(result, before, passing, self._shapes)
        expected = ""
        if isinstance(result, Tensor) and len(before) == 1:
            result = (result,)
        if not isinstance(result, (tuple, list)) or len(result) != len(before):
            expected, got = f"{len(before)} gradients, one for each input", result
        else:
            for i, (new, old) in enumerate(zip(result, before, strict=True)):
                if new is None or new is old:
                    continue
                got = new
                if i not in passing:
                    expected = f"None for input {i}, which has no gradient"
                elif not isinstance(new, Tensor):
                    expected = f"a tensor or None for input {i}"
                elif meta_of(new).shape != self._shapes[i]:
                    expected = f"shape {self._shapes[i]} for input {i}"
                else:
                    continue
                break
        if not expected:
            return tuple(result)
        shown = f"shape {meta_of(got).shape}" if isinstance(got, Tensor) else describe(got)
        raise InterjectionError(
            f"{what.label} at {at.path or '<root>'}: process_backward has to return "
            f"{expected}, but it returned {shown}",
            at.path,
        )

    @property
    def _name(self) -> str:
        return self._receivers[0][1].path


class _BackwardPass:
    def __init__(self, gradients: list[Tensor | None]) -> None:
        self.gradients = gradients
        self.arrived = 0
        self.is_done = False


def _needing_gradients(tensors: Iterable[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Return the distinct tensors that need a gradient, and the positions of each."""
    found: dict[int, tuple[Tensor, list[int]]] = {}
    for place, tensor in enumerate(tensors):
        if requires_grad(tensor):
            found.setdefault(id(tensor), (tensor, []))[1].append(place)
    return list(found.values())


def _has_cast(tensor: Tensor) -> bool:
    """Return whether autocast keeps a cast of a tensor, which ops share: of weights, as a rule."""
    return (
        tensor.is_leaf
        and tensor.dtype is torch.float32
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )


class InputReplacement:
    """An input, and its replacement during the call."""

    def __init__(self, original: Tensor, inside: Tensor) -> None:
        # The input, which the caller still holds.
        self.original: Callable[[], Tensor | None] = weakref.ref(original)
        self.inside = inside  # the replacement: the same storage, with another history
        self._version = inside._version
        self._entry: Node = inside.grad_fn
        self._node: Node = root(original).grad_fn
        # The autograd nodes of the input and of its view base, if it is a view.
        self.nodes: set[Any] = {original.grad_fn, self._node} - {None}
        self.is_leaf: bool = root(original).is_leaf  # whether it is a leaf of the autograd graph
        self.is_rebased = False  # whether the input has received the history of its replacement
        if getattr(original, "__dict__", None):
            inside.__dict__.update(original.__dict__)

    @property
    def is_written(self) -> bool:
        """Return whether the storage was changed in place."""
        return self.inside._version != self._version

    @property
    def has_history(self) -> bool:
        """Return whether autograd has recorded a change of the replacement."""
        return self.inside.grad_fn is not self._entry

    @property
    def original_has_history(self) -> bool:
        """Return whether autograd has recorded a change of the input itself."""
        original = self.original()
        return original is not None and root(original).grad_fn is not self._node


class Watch:
    """Notices later in-place changes of an input, or of an output that is (a view of) it.

    The history of one tensor does not show changes of the other. This is harmless if the input no
    longer exists, or if nothing else uses it.
    """

    def __init__(self, alias: InputReplacement, name: str) -> None:
        self._name = name
        # It shares the change counter with the original, but none of its memory.
        self._probe = alias.inside.detach()
        self._probe.data = self._probe.new_empty(0)
        self._version = self._probe._version
        self._was_written: bool | None = None  # unknown as long as the input is there
        self._through: dict[int, Tensor | None] = {}
        original = alias.original()
        assert original is not None  # the caller has it
        self._root = weakref.ref(root(original), self._ends)
        root(original).register_hook(self._check)

    def _ends(self, root: Any) -> None:
        self._was_written = self._probe._version != self._version

    @property
    def _is_written(self) -> bool:
        if self._was_written is None:
            return self._probe._version != self._version
        return self._was_written

    def passes(self, gradient: Tensor | None) -> None:
        """Record the gradient that has passed through the call; called in a backward pass."""
        if self._is_written:
            self._through[torch._C._current_graph_task_id()] = gradient

    def _check(self, gradient: Tensor) -> None:
        """Make sure that a changed input gets no gradient other than that through the call."""
        if not self._is_written:
            return
        through = self._through.pop(torch._C._current_graph_task_id(), None)
        if through is None or not torch.equal(through.flatten(), gradient.flatten()):
            raise InputError(
                f"module {self._name!r} returns its input, or a view of it, which was changed "
                "in place after the call while the input was used elsewhere, so that the "
                "gradients through the call cannot be separated from others: deactivate its "
                "backward hooks"
            )


# Autograd steps that change nothing, but see the gradients that pass through them.
#
# They are added where a call of a module begins and ends. A recorder sees them as ops.

Gradients = tuple[Tensor | None, ...]
Node = Any  # the nodes of autograd's graph have no common class
# In what torch (2.13, 2.14) says where a tensor of a read-only entry, or a view of it, is written.
NOT_WRITABLE = "created inside a custom Function"
NOT_NUMBERED = 2**64 - 1  # the sequence number of what accumulates the gradients of leaves


def enter(
    traffic: CallGradients, tensors: Sequence[Tensor], writable: bool
) -> tuple[tuple[Tensor, ...], Node]:
    """Return tensors that share values and storage with others, and the step's autograd node.

    The traffic receives the gradients. If they are not writable, torch refuses to change them in
    place (`NOT_WRITABLE`).
    """
    step = _Entry if writable else _ReadOnlyEntry
    inside: tuple[Tensor, ...] = step.apply(*tensors)
    node: Node = inside[0].grad_fn
    # Not held strongly: what leads from the outputs to here holds it, and refers to this node.
    node.traffic = weakref.ref(traffic)
    return inside, node


def leave_in_place(traffic: CallGradients, places: Sequence[int], tensor: Tensor) -> bool:
    """Add a step to a tensor's own history; return False if torch refuses that."""
    _creation.exits.append((traffic, places))
    try:
        _in_place(_Exit, tensor)
    except RuntimeError:  # several views that were made at once cannot be changed in place
        return False
    finally:
        _creation.exits.pop()
    return True


def leave_as_view(traffic: CallGradients, places: Sequence[int], tensor: Tensor) -> Tensor:
    """Return a view that comes after a step; autograd refuses to change it in place."""
    _creation.exits.append((traffic, places))
    try:
        view: Tensor = _ExitView.apply(tensor)
    finally:
        _creation.exits.pop()
    return view


def rebase(tensor: Tensor, other: Tensor) -> None:
    """Give a tensor the history of another with the same storage.

    Raise `RuntimeError` if autograd refuses to change it in place.
    """
    _in_place(_Rebase, tensor, other)


class _StepCreation(threading.local):
    """Marks the step that is being created: as an argument, a recorder would record it."""

    def __init__(self) -> None:
        self.exits: list[tuple[CallGradients, Sequence[int]]] = []


_creation = _StepCreation()


class _Entry(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        # A detached tensor is not a view to autograd, so that it can be changed in place, and
        # shares the counter of such changes, so that they are noticed. Seen in torch 2.13;
        # test_hook_gradients.py would notice a change.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        traffic: CallGradients | None = ctx.traffic()
        return gradients if traffic is None else traffic.input_gradients(gradients)


class _ReadOnlyEntry(Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return tensors  # as views to autograd, of several of which none can be changed in place

    backward = staticmethod(_Entry.backward)


class _Exit(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        ctx.traffic, ctx.places = _creation.exits[-1]
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        ctx.traffic.output_gradient(ctx.places, gradient)
        return gradient


class _ExitView(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.traffic, ctx.places = _creation.exits[-1]
        return tensor.view_as(tensor)

    backward = staticmethod(_Exit.backward)


class _Rebase(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, other: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None, gradient


def _in_place(step: type[Function], tensor: Tensor, *others: Tensor) -> None:
    """Enter a step into a tensor's history.

    To autograd it is an in-place change, which would invalidate what ops have saved for their
    backward pass. Nothing is changed, so they may continue to use it.
    """
    with keeps_version(tensor):
        step.apply(tensor, *others)
    # A view looks up its history again if the change counter differs from the last look-up. It has
    # to do that now: at the next change the counter will be what it was in between.
    _: Node = tensor.grad_fn


# What steps can be entered into


def root(tensor: Tensor) -> Tensor:
    """Return the base of a view, or the tensor itself: in-place changes go into its history."""
    base = tensor._base if tensor._is_view() else None
    return tensor if base is None else base


def storage(tensor: Tensor) -> int:
    """Return a value that is equal for tensors with the same storage."""
    try:
        found: int = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # tensors that consist of others
        return id(tensor)
    return found


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether elements of a tensor may share memory, as after `expand` and `unfold`."""
    if not tensor._is_view() or tensor.is_sparse or tensor.is_nested:
        return False
    reach = 0  # the distance between elements of the dimensions so far
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
