"""Following the content of tensors through numpy, from `x.numpy()` to a tensor or a question.

An array that a run gets from a tensor is the array that eager gets: no subclass, and no object
around it. So nothing tells what code does with it. But before each instruction of the user's code,
its operands can be seen (`python/results.py`). Where one of them is such an array, or a number of
numpy's that was computed from one, an object takes its place for this instruction only: in the
place of a function, or of the left operand. It records what the instruction does as an op
(`array_functions.py`), and gives the result, which is followed in turn. Lists and tuples may
hold arrays in between, as the arrays are known by identity.

Python's numbers and truth values have no identity. So what makes one of an array becomes a traced
scalar, or a question, immediately.

Everything else that receives such an array, or something that leads to one, cannot be followed,
and the run is live: there is a list of what can be, and none of what cannot.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from bendtrace.errors import NondeterminismError
from bendtrace.python import results, stacks
from bendtrace.python.computations import COMPUTING
from bendtrace.python.internals import internal
from bendtrace.python.sites import PACKAGE, TORCH, user_place
from bendtrace.record.array_functions import (
    ArrayFunction,
    address,
    array_of,
    content_of,
    is_content,
    is_in_memory,
    shares_unseen,
)
from bendtrace.record.encoding import plain_copy
from bendtrace.record.states import OperandProxy
from bendtrace.record.values import RunValues
from bendtrace.tape.captured import PLAIN_TYPES, Captured, CaptureKind, is_ndarray, module_name_of
from bendtrace.tape.plain_numbers import uses_torch
from bendtrace.tape.scalars import RETIRED, TRACED
from bendtrace.tape.structure import build_instance
from bendtrace.tape.tape import stands_for_number
from bendtrace.tape.watchers import call_silently
from bendtrace.watch import draws
from bendtrace.watch.functions import (
    CHOOSING,
    LEGACY,
    MAKES_FROM_ARRAYS,
    RANK_DEPENDS_ON_NUMBERS,
    RANK_DEPENDS_ON_SIZES,
    ClassCall,
    may_vary,
)
from bendtrace.watch.provenance import (
    calls_users_code,
    is_finished,
    is_finished_code,
    is_installed_module,
)
from bendtrace.watch.writes import storage_of


class Arrays:
    """The arrays of one run whose content comes from tensors.

    Args:
        writer: writes the tape of the run.
        values: knows the ops of tensors.
        errors: numpy's handling of errors before the run.

    Attributes:
        has_lost: whether code that cannot be followed has received one of them.
    """

    def __init__(self, values: RunValues, errors: dict[str, Any]) -> None:
        self._writer, self._values = values.writer, values
        self._recorder: Any = values.origin
        self._environment = values.environment
        self._known: dict[int, tuple[Any, Any]] = {}  # without a tensor: an open array
        self._holders: set[int] = set()  # of what leads to an open array
        self._contents: dict[int, bytes] = {}  # of open arrays, as ops have left them
        self._seen_storages: set[int] = set()  # of tensors that the model has
        self._is_on = False
        self._has_ended = False
        self.has_lost: bool = False
        self._follows_classes = False
        self._reason = ""
        self._codes: dict[CodeType, bool] = {}
        self._adopted = False
        self._errors = errors

    # The beginning and the end

    def begins_at(self, tensor: Any, frame: FrameType) -> bool:
        """Return whether the array of a tensor can be followed, which code has called for."""
        if self._has_ended or (not self._is_on and not results.can_exchange_operands()):
            return False
        if type(tensor) not in (Tensor, nn.Parameter) or not self._is_users(frame):
            return False
        called = results.c_function_called_by(frame)
        return called is Tensor.numpy or (
            type(called) is types.BuiltinFunctionType
            and called.__name__ == "numpy"
            and isinstance(called.__self__, Tensor)
        )

    def numpy(
        self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Return the array of a tensor, and follow it from here on."""
        self._reason = self._reason or (
            f"numpy at {user_place(frame)} passes the content of a tensor to code that cannot be "
            "watched"
        )
        with torch._C.DisableTorchFunction():
            found = self._recorder.array_op(content_of, (tensor, *args), kwargs, frame)
            self._seen_storages.add(storage_of(found))
            array = self._give(found, frame)
        if not self._is_on and not self._has_ended:
            self._begin(frame)
            if not self._is_on:
                self._deny()
        return array

    def follow_classes(self, frame: FrameType | None) -> None:
        """Record calls of torch's classes of old, such as `torch.FloatTensor`, by any name.

        Args:
            frame: the code that runs; None before the model does.
        """
        if self._has_ended or not (frame is None or self._is_users(frame)):
            return
        self._follows_classes = True
        if not self._is_on and results.can_exchange_operands():
            self._begin(frame)

    def follow_open(self, parts: list[Captured]) -> None:
        """Follow arrays whose content is an input of the run: their operations are ops.

        Each op is given the array itself, as it is there before the run (`Existing`). So what
        writes to it writes to the model's own array, in a replay as well, and no tensor stands for
        it. What is made of its content does have one.

        Args:
            parts: the arrays.
        """
        labels = ", ".join(part.label for part in parts)
        self._reason = (
            f"code that cannot be watched may read {labels}, whose content is another one in each "
            "call"
        )
        for part in parts:
            self._known[id(part.value)] = part.value, None
            if is_ndarray(part.value):
                self._contents[id(part.value)] = part.value.tobytes()
        for part in self._environment.parts:
            first, holder = part.value if part.kind is CaptureKind.ALIAS else part, part.parent
            while holder is not None and id(first.value) in self._known:
                if not isinstance(holder.value, nn.Module):
                    self._holders.add(id(holder.value))
                holder = holder.parent
        self._adopted = True
        if results.can_exchange_operands():
            self._begin(None)
        if not self._is_on:
            self._deny()

    def _is_open(self, value: Any) -> bool:
        return id(value) in self._contents

    def _check_contents(self) -> None:
        """Have the run be live if something has written to an open array that no op did."""
        if any(self._known[key][0].tobytes() != one for key, one in self._contents.items()):
            self._deny()

    def _begin(self, frame: FrameType | None) -> None:
        self._is_on = results.watch(self._start, self._step, self._fail)
        while self._is_on and frame is not None:
            self._enter(frame)
            frame = frame.f_back

    def end(self, is_over: bool = True) -> None:
        """Follow nothing any more.

        Args:
            is_over: whether the run is over, so that what no object has is gone.
        """
        if self._is_on:
            results.watch_no_more()
            self._is_on = False
            self._check_contents()
            self._put_content_back(_HELD_HERE if is_over else 0)
        self._has_ended = True

    def _put_content_back(self, most: int) -> None:
        """Give the model's own arrays the content that ops have written elsewhere.

        A resumed run has made them itself, and the state that it goes on from holds others.

        Args:
            most: arrays with more references are still there.
        """
        with torch._C.DisableTorchFunction():
            for array, tensor in self._known.values():
                if not is_ndarray(array) or tensor is None or tensor.is_meta:
                    continue
                content = array_of(tensor)
                if content is array or address(content) == address(array):
                    continue
                if sys.getrefcount(array) <= most:
                    continue
                if self._is_shared(tensor):
                    self._writer.gone_astray = NondeterminismError(
                        "a resumed run writes to an array of its own, in whose memory it has "
                        "other arrays or tensors: name the function around it with "
                        "bendtrace.opaque"
                    )
                array[...] = content

    def _is_shared(self, tensor: Tensor) -> bool:
        storage = storage_of(tensor)
        return storage in self._seen_storages or any(
            storage_of(other) == storage
            for _, other in self._known.values()
            if other is not tensor and other is not None
        )

    def close(self) -> None:
        """Let go of all arrays."""
        self.end()
        self._known.clear()

    def _deny(self, *values: Any) -> None:
        """Have the run be live: something has been done that cannot be followed."""
        with torch._C.DisableTorchFunction():
            for value in values:
                known = self._known.get(id(value))
                if known is not None and known[1] is not None:
                    self._values.ref(known[1])
        self.has_lost = True
        self._environment.lost_arrays = self._environment.open_arrays
        self._writer.tape.block(self._reason)
        self.end(is_over=False)

    # Arrays and numbers of numpy's that come from no tensor

    def draws_array(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> bool:
        """Return whether a draw of random numbers gives an array, or a number of numpy's.

        Its arguments decide, so it is tried, and the generator is put back.

        Args:
            function: the function that replays call to draw.
            args: the arguments that it receives.
            kwargs: likewise, by name.
            frame: the code that draws.
        """
        generator = draws.numpys_generator(function, args)
        given = [arg for arg in (*args, *kwargs.values()) if arg is not generator]
        if generator is None or "out" in kwargs or not self._can_take(given, frame):
            return False
        if self._reaches(given):
            return True
        put_back = draws.restorer_of(generator)
        try:
            found = call_silently(function, plain_copy(args), plain_copy(kwargs))
        except Exception:  # the same op as in a run in which it does not raise
            count = len(given) - len(kwargs)
            return "size" in kwargs or count > _BEFORE_SIZE.get(function.__name__, 2)
        finally:
            put_back()
        return is_content(found)

    def takes(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> bool:
        """Return whether the result of a function of numpy's on numbers can be followed."""
        given = [*args, *kwargs.values()]
        return self._can_take(given, frame) and _way_of(function) == _READ and "out" not in kwargs

    def _can_take(self, given: list[Any], frame: FrameType) -> bool:
        if self._has_ended or not (self._is_on or results.can_exchange_operands()):
            return False
        return self._is_users(frame) and all(map(self._is_argument, given))

    def call(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Any:
        """Record a call of one of these, and follow its result from here on."""
        self._reason = self._reason or (
            f"{function.__name__} at {user_place(frame)} gives an array of numpy's to code that "
            "cannot be watched"
        )
        if not self._is_on:
            self._begin(frame)
        found = self.carry_out(function, args, kwargs, frame, _READ)
        if not self._is_on:
            self._deny()
        self.has_lost = self.has_lost or (is_content(found) and id(found) not in self._known)
        return found

    # What the rest of the recorder asks

    def tensor_of(self, value: Any) -> Tensor | None:
        """Return the tensor that stands for an array; None if its content comes from no tensor."""
        known = self._known.get(id(value))
        return None if known is None else known[1]

    # Events

    def _enter(self, frame: FrameType) -> None:
        if self._is_users(frame):
            results.report_steps(frame)

    def _is_users(self, frame: FrameType) -> bool:
        code = frame.f_code
        known = self._codes.get(code)
        if known is None:
            is_package = is_finished_code(code, frame.f_globals)
            known = self._codes[code] = not is_package or (
                uses_torch(str(frame.f_globals.get("__name__")))
                and not code.co_filename.startswith((TORCH, PACKAGE))
            )
        return known

    def _start(self, frame: FrameType) -> None:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            self._enter(frame)

    def _step(self, frame: FrameType) -> None:
        instruction = results.instructions(frame.f_code).get(frame.f_lasti)
        if instruction is None:
            return
        try:
            self._look(frame, instruction)
        except Exception as error:
            if stacks.is_raised_by_signal(error):
                raise
            self._fail(f" ({type(error).__name__}: {error})")

    def _fail(self, why: str = "") -> None:
        self._environment.lost_arrays = self._environment.open_arrays
        self._writer.tape.block(self._reason + why)
        self.end(is_over=False)

    def _look(self, frame: FrameType, instruction: results.Instruction) -> None:
        places = stacks.frame_layout()
        assert places is not None
        where = results.addresses(frame, instruction, places)
        words = [stacks.pointer_at(address) for address in where]
        name = instruction.name
        if self._follows_classes and name in _CALLS:
            place = results.callee_place(words)
            called = stacks.object_at(words[place])
            if type(called) is LEGACY:
                stacks.put_on_stack(where[place], ClassCall(called))
                words[place] = stacks.pointer_at(where[place])
        if not self._known:
            return
        if self._contents and name in _CALLS:
            if _reads_objects(stacks.object_at(words[results.callee_place(words)])):
                self._deny()
                return
        direct = not self._known.keys().isdisjoint(words)
        if not direct and name not in _LOOKS_INSIDE:
            return
        values = [stacks.object_at(word) for word in words]
        if not direct and not self._reaches(values) and not _leaves_content_open(name, values):
            if self._adopted and any(map(self._is_view_of_known, values)):
                self._deny()
            return
        handle = _HANDLERS.get(name)
        if handle is None:
            self._deny(*values)
            return
        handle(self, frame, where, values, instruction)

    def _is_view_of_known(self, value: Any) -> bool:
        return is_ndarray(value) and id(value) not in self._known and id(value.base) in self._known

    def _reaches(self, values: list[Any]) -> bool:
        """Return whether one of some values is an array that is followed, or leads to one."""
        seen: set[int] = set()
        waiting = list(values)
        while waiting:
            value = waiting.pop()
            if id(value) in self._known:
                return True
            kind = type(value)
            if kind in PLAIN_TYPES or kind in TRACED or kind in RETIRED or id(value) in seen:
                continue
            if kind is types.BuiltinFunctionType and id(value.__self__) in self._known:
                return True
            if kind in _LEADS_NOWHERE or isinstance(value, (Tensor, nn.Module, type)):
                continue
            if kind in (list, tuple):
                seen.add(id(value))
                waiting += value
                continue
            if id(value) in self._holders:
                return True
            part = self._environment.find(value)
            # What is known by its identity may hold an open array, and says nothing of it.
            is_looked_into = part is not None and part.kind is not CaptureKind.IDENTITY
            if is_content(value) or (part is not None and not self._contents) or is_looked_into:
                continue
            if kind is types.FunctionType:
                if not value.__closure__ or is_finished(value):
                    continue
                waiting += value.__closure__
            elif module_name_of(kind).partition(".")[0] != "bendtrace":
                seen.add(id(value))
                if len(seen) > _MOST:
                    return True  # more than is looked through
                waiting += gc.get_referents(value)
        return False

    # Values

    def _give(self, found: Any, frame: FrameType) -> Any:
        """Return the result of an op as the model receives it."""
        if isinstance(found, Tensor):
            array = _placeholder(found) if found.is_meta else array_of(found)
            if array.dtype.kind == "b" and not array.ndim:
                # There are two such objects only, which do not say where they come from.
                truth = self._recorder.asks(Tensor.__bool__, found, frame)
                made = sys.modules["numpy"].array(truth)
                return made if is_ndarray(array) else made[()]
            self._known[id(array)] = array, found
            return array
        if type(found) in (tuple, list):
            return type(found)(self._give(item, frame) for item in found)
        if isinstance(found, tuple):
            return build_instance(type(found), [self._give(item, frame) for item in found], {})
        return found

    def _stand(self, value: Any) -> Any:
        """Return an argument with tensors instead of the arrays that are followed."""
        known = self._known.get(id(value))
        if known is not None:
            return value if known[1] is None else known[1]
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(map(self._stand, value))
        if kind is dict:
            return {key: self._stand(item) for key, item in value.items()}
        if kind is slice:
            return slice(*map(self._stand, (value.start, value.stop, value.step)))
        return value

    def _is_argument(self, value: Any) -> bool:
        """Return whether an op can be given a value."""
        kind = type(value)
        if kind in PLAIN_TYPES or kind in TRACED or id(value) in self._known:
            return True
        if kind is tuple or kind is list or kind is torch.Size:
            return all(map(self._is_argument, value))
        if kind is dict:
            return all(map(self._is_argument, value.values()))
        if kind is slice:
            return all(map(self._is_argument, (value.start, value.stop, value.step)))
        if is_ndarray(value):
            return not value.dtype.hasobject and not self._is_view_of_known(value)
        return (
            is_content(value)
            or _is_dtype(value)
            or (kind is type and is_installed_module(value.__module__))
        )

    def note_compared(self, values: tuple[Any, ...]) -> None:
        """Note what is on the stack while an operator is carried out."""
        self._recorder.note_compared(values)

    def carry_out(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        way: str,
    ) -> Any:
        """Do, as an op, what an instruction does.

        Args:
            function: what is called, or the function of an operator.
            args: what it is given.
            kwargs: likewise, by name.
            frame: the code.
            way: how it is recorded.
        """
        results.pause_watch()
        self._recorder.pause()
        try:
            with torch._C.DisableTorchFunction():
                return self._carry_out(function, args, kwargs, frame, way)
        finally:
            self._recorder.go_on()
            if self._is_on:
                results.resume_watch()

    def _carry_out(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        way: str,
    ) -> Any:
        if way == _ROWS:
            ways, last = _MOVING[function], len(_MOVING[function]) - 1
            placed = [self._moved(arg, ways[min(at, last)], frame) for at, arg in enumerate(args)]
            named = {
                name: self._moved(arg, _MOVING_NAMED.get(name, "i"), frame)
                for name, arg in kwargs.items()
            }
            return function(*placed, **named)
        if way == _INDICES:
            return function(*(self._index(arg, frame) for arg in args), **kwargs)
        if way == _LENGTH:
            sizes = self._sizes(args[0], frame)
            return sizes[0] if sizes else len(args[0])  # which raises an error
        if way == _TRUTH:
            return self._truth(args[0], frame)
        if way == _CLASS:
            for arg in args:
                if id(arg) in self._known and not self._is_open(arg):
                    self._op(_array_class_name, (arg,), {}, frame)
            return function(*args, **kwargs)
        if way == _ATTRIBUTE:
            array, name = args
            return self._attribute(array, name, frame)
        if way == _ITEM:
            container, key = args
            if type(container) in _SEQUENCES:
                return container[self._index(key, frame)]
        if way == _AT:
            function, args, way = _at_of(args[0]), args[1:], _WRITE
        writes = self._written(args, kwargs, way)
        if writes is not None and not self._may_write(writes, frame):
            self._deny(*args)
            return function(*args, **kwargs)
        found = self._op(function, args, kwargs, frame, writes)
        if way == _COMPARES and id(found) in self._known:
            return self._truth(found, frame)
        return None if way == _WRITE else found

    def _op(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: FrameType,
        writes: Any = None,
    ) -> Any:
        self._check_contents()
        name = str(getattr(function, "__name__", "") or type(function).__name__).strip("<>")
        if writes is not None and writes is not kwargs.get("out") and not name.startswith("__"):
            name += "_"
        has_tensors = any(isinstance(arg, Tensor) for arg in args)
        errors = sys.modules["numpy"].geterr()
        around = None if errors == self._errors else tuple(errors.items())
        target = ArrayFunction(function, name, writes is not None, has_tensors, around)
        stands = [*self._stands_in((args, kwargs))]
        read = [array for array in map(array_of, stands) if is_ndarray(array)]
        stand = None if writes is None else self._known[id(writes)][1]
        if stand is not None and not stand.is_meta:
            content, shares = array_of(stand), sys.modules["numpy"].may_share_memory
            read = [array for array in read if not shares(array, content)]
        before = [array.tobytes() for array in read]
        found = self._recorder.array_op(
            target, tuple(map(self._stand, args)), {k: self._stand(v) for k, v in kwargs.items()},
            frame,
        )  # fmt: skip
        if before != [array.tobytes() for array in read]:
            self._deny()
        if writes is not None:
            for key in self._contents:
                self._contents[key] = self._known[key][0].tobytes()
            if self._is_open(writes):
                return writes
            self._known[id(writes)] = writes, found
            return writes
        if isinstance(found, Tensor) and (has_tensors or function in MAKES_FROM_ARRAYS.values()):
            for stand in stands:
                if found.is_meta or storage_of(found) == storage_of(stand):
                    self._seen_storages.add(storage_of(stand))
            if shares_unseen(found, stands):
                self._deny()
            return found
        if name in RANK_DEPENDS_ON_SIZES | RANK_DEPENDS_ON_NUMBERS or (
            may_vary(target) and not any(function is one for one in CHOOSING)
        ):
            for tensor in found if isinstance(found, (tuple, list)) else (found,):
                if isinstance(tensor, Tensor):
                    self._recorder.asks(_NDIM, tensor, frame)
        return self._give(found, frame)

    def _stands_in(self, value: Any) -> Iterator[Tensor]:
        known = self._known.get(id(value))
        if known is not None and known[1] is not None and not known[1].is_meta:
            yield known[1]
        elif type(value) in (tuple, list):
            for item in value:
                yield from self._stands_in(item)
        elif type(value) is dict:
            for item in value.values():
                yield from self._stands_in(item)

    # Writing

    def _written(self, args: tuple[Any, ...], kwargs: dict[str, Any], way: str) -> Any:
        """Return the array that a call writes to; None if it writes to none."""
        if kwargs.get("out") is not None:
            return kwargs["out"]
        if way == _WRITE or (way == _IN_PLACE and is_ndarray(args[0])):
            return args[0]
        return None

    def _may_write(self, array: Any, frame: FrameType) -> bool:
        """Return whether an op may write to an array: no tensor of the model is in its memory."""
        if not is_ndarray(array):
            return False
        if id(array) not in self._known and not self._adopt(array, frame):
            return False
        tensor = self._known[id(array)][1]
        if tensor is None:
            return True  # `SharedArrays` sees whether a tensor is in its memory
        if tensor.is_meta:
            return True  # it has been written to before
        numpy = sys.modules["numpy"]
        storage = storage_of(tensor)
        return (
            is_in_memory(tensor)
            and storage not in self._seen_storages
            and not any(
                is_ndarray(other)
                and another is not None
                and not another.is_meta
                and storage_of(another) != storage
                and numpy.may_share_memory(array_of(another), array_of(tensor))
                for other, another in self._known.values()
            )
        )

    def _adopt(self, array: Any, frame: FrameType) -> bool:
        """Follow an array from here on that has had constant content so far."""
        if self._environment.find(array) is not None or array.base is not None:
            return False
        if not array.flags.owndata or array.dtype.hasobject:
            return False
        found = self._recorder.array_op(_ADOPTS, (array,), {}, frame)
        if not isinstance(found, Tensor):
            return False
        self._known[id(array)] = array, found
        self._adopted = True
        return True

    # Questions

    def _sizes(self, array: Any, frame: FrameType) -> Any:
        if self._is_open(array):
            return array.shape  # which is guarded
        return tuple(self._recorder.asks(_SHAPE, self._known[id(array)][1], frame))

    def _truth(self, array: Any, frame: FrameType) -> bool:
        tensor = self._known[id(array)][1]
        if not array.ndim and tensor is not None:
            return bool(self._recorder.asks(Tensor.__bool__, tensor, frame))
        found = self._op(bool, (array,), {}, frame)
        return bool(found)

    def _index(self, value: Any, frame: FrameType) -> Any:
        """Return a value with numbers of Python instead of numbers of numpy's."""
        if id(value) in self._known:
            return operator.index(self._op(operator.index, (value,), {}, frame))
        if type(value) is slice:
            return slice(*(self._index(v, frame) for v in (value.start, value.stop, value.step)))
        return value

    def _moved(self, value: Any, way: str, frame: FrameType) -> Any:
        """Return an argument of C code that moves objects around."""
        if way == "i":
            return self._index(value, frame)
        return self._rows(value, frame) if way == "r" else value

    def _rows(self, value: Any, frame: FrameType) -> Any:
        if id(value) not in self._known:
            return value
        if not value.ndim:
            return iter(value)  # which raises an error
        count = operator.index(self._sizes(value, frame)[0])
        return [self._op(operator.getitem, (value, k), {}, frame) for k in range(count)]

    def _attribute(self, array: Any, name: str, frame: FrameType) -> Any:
        tensor = self._known[id(array)][1]
        if name == "shape":
            return self._sizes(array, frame)
        if tensor is None and name in ("ndim", "size", "dtype"):
            return getattr(array, name)
        if name == "ndim":
            return self._recorder.asks(_NDIM, tensor, frame)
        if name == "size":
            return self._recorder.asks(Tensor.numel, tensor, frame)
        if name == "dtype":
            self._recorder.asks(_DTYPE, tensor, frame)
            return array.dtype
        return self._op(_GETTERS[name], (array,), {}, frame)

    # Instructions

    def _handle_call(self, frame: Any, where: list[int], values: list[Any], step: Any) -> None:
        place = results.callee_place(values)
        function, given = values[place], results.arguments(step, values)
        if given is None:
            return self._deny(*values)
        way = self._way(function, given)
        if way is None:
            return self._deny(*given)
        if way != _LEAVE:
            stacks.put_on_stack(where[place], ArrayCall(self, function, way))
        return None

    def _way(self, function: Any, given: list[Any]) -> str | None:
        """Return how a call is recorded; None if it cannot be followed."""
        kind = type(function)
        direct = [value for value in given if id(value) in self._known]
        if kind is ArrayCall or function is next or getattr(function, "is_draw", False):
            return _LEAVE
        try:
            if function in MAKES_FROM_ARRAYS:
                return _TENSOR if all(map(self._is_argument, given)) else None
            known = _BUILTINS.get(function)
        except TypeError:  # not hashable
            return None
        if known is not None:
            moves = known in (_ROWS, _CLASS, _LENGTH, _TRUTH)
            if moves and not direct:
                return _LEAVE
            if function is iter and len(given) > 1:
                return None  # C compares what comes with the second
            return known if moves or all(map(self._is_argument, given)) else None
        if kind is types.FunctionType and not is_finished(function):
            return _LEAVE
        if kind is types.MethodType:
            inner = function.__func__
            users = type(inner) is types.FunctionType and not is_finished(inner)
            return _LEAVE if users else None
        if kind is types.MethodDescriptorType and function.__objclass__ in _OF_CONTAINERS:
            keeps = _OF_CONTAINERS[function.__objclass__]
            is_key = function.__objclass__ is dict and self._reaches(given[1:2])
            if function is dict.update:  # whose items may be pairs, and so its keys in an array
                is_key = any(type(value) is not dict for value in given)
            return _LEAVE if function.__name__ in keeps and not is_key else None
        if function in _LOOKING and not direct:
            return _LEAVE
        try:
            if not all(map(self._is_argument, given)):
                return self._way_of_ufunc(function, given)
            return _way_of(function)
        except TypeError:
            return None

    def _way_of_ufunc(self, function: Any, given: list[Any]) -> str | None:
        numpy: Any = sys.modules["numpy"]
        is_method = type(function) is types.MethodDescriptorType
        if is_method and function.__objclass__ is numpy.ufunc and function.__name__ in _OF_UFUNCS:
            if _way_of(given[0]) is not None and all(map(self._is_argument, given[1:])):
                return _AT if function.__name__ == "at" else _READ
        return None

    def _handle_operator(self, frame: Any, where: list[int], values: list[Any], step: Any) -> None:
        left, right = values[0], values[-1]
        way = _COMPARES if step.text.startswith("bool(") else _READ
        direct = [value for value in values if id(value) in self._known]
        changes = step.name == "BINARY_OP" and "=" in step.text
        if type(left) in (list, dict) and changes:
            return None if not direct and type(right) in _SEQUENCES else self._deny(*values)
        if not direct and {type(left), type(right)} <= _SEQUENCES | {int}:
            if step.name == "BINARY_OP":
                return None  # lists are joined, which leaves the arrays in them as they are
            return self._deny(*values)
        if isinstance(left, Tensor):
            if changes or is_ndarray(right) or not is_content(right):
                return self._deny(*values)
            stacks.put_on_stack(where[0], ArrayOperand(self, left, _TENSOR))
        elif isinstance(right, Tensor) and is_content(left) and not is_ndarray(left):
            stacks.put_on_stack(where[0], ArrayOperand(self, left, _TENSOR))
        elif all(map(self._is_argument, values)):
            stacks.put_on_stack(where[0], ArrayOperand(self, left, way))
        else:
            self._deny(*values)
        return None

    def _handle_item(self, frame: Any, where: list[int], values: list[Any], step: Any) -> None:
        container, *keys = values
        key = keys[0] if len(keys) == 1 else slice(*keys)
        in_key = id(key) in self._known or self._reaches([key])
        if type(container) in _SEQUENCES:
            if in_key:
                stacks.put_on_stack(where[0], ArrayOperand(self, container, _ITEM))
        elif is_content(container) and self._is_argument(container):
            if not self._is_argument(key):
                return self._deny(*values)
            stacks.put_on_stack(where[0], ArrayOperand(self, container, _READ))
        elif isinstance(container, Tensor) and self._is_argument(key):
            stacks.put_on_stack(where[0], ArrayOperand(self, container, _TENSOR))
        elif in_key or type(container) is not dict:
            self._deny(*values)
        return None

    def _handle_assignment(
        self, frame: Any, where: list[int], values: list[Any], step: Any
    ) -> None:
        value, container, *keys = values
        key = keys[0] if len(keys) == 1 else slice(*keys)
        if is_ndarray(container):
            if not (self._is_argument(value) and self._is_argument(key)):
                return self._deny(*values)
            stacks.put_on_stack(where[1], ArrayOperand(self, container, _WRITE))
        elif type(container) not in (list, dict) or self._reaches([key]):
            self._deny(*values)
        elif type(key) is slice and id(value) in self._known:  # whose rows C would go through
            self._deny(*values)
        return None

    def _handle_deletion(self, frame: Any, where: list[int], values: list[Any], step: Any) -> None:
        if is_content(values[0]) or self._reaches([values[1]]):
            self._deny(*values)

    def _handle_one(self, frame: Any, where: list[int], values: list[Any], step: Any) -> None:
        if id(values[0]) in self._known:
            stacks.put_on_stack(where[0], ArrayOperand(self, values[0], _READ))

    def _handle_attribute(self, frame: Any, where: list[int], values: list[Any], step: Any) -> None:
        if id(values[0]) not in self._known:
            return None
        if step.name == "LOAD_METHOD" and step.value in _METHODS | _WRITING:
            return None
        if step.value not in _ATTRIBUTES:
            return self._deny(*values)
        stacks.put_on_stack(where[0], ArrayOperand(self, values[0], _READ))
        return None

    def _handle_store(self, frame: Any, where: list[int], values: list[Any], step: Any) -> None:
        """Let an array be kept that is in no memory of a tensor of the model's."""
        value = values[0]
        with torch._C.DisableTorchFunction():
            stands = self._stands_in(value)
            is_lent = any(storage_of(one) in self._seen_storages for one in stands)
        owner = values[1] if step.name == "STORE_ATTR" else None
        is_other = isinstance(owner, (Tensor, type, types.ModuleType)) or id(owner) in self._known
        if is_lent or is_other or not self._is_argument(value):
            self._deny(*values)

    def _handle_map(self, frame: Any, where: list[int], values: list[Any], step: Any) -> None:
        if self._reaches(values[::2]):  # keys, which are hashed
            self._deny(*values)

    def _handle_return(self, frame: Any, where: list[int], values: list[Any], step: Any) -> None:
        caller, places = frame.f_back, stacks.frame_layout()
        assert places is not None
        if caller is None or not self._is_users(caller):
            return self._deny(*values)
        if stacks.is_called_by_c(frame, caller, places):
            # Which it is where C calls functions for an instruction, as torch._dynamo has it.
            called = results.c_function_called_by(caller)
            if getattr(getattr(called, "__func__", called), "__code__", None) is not frame.f_code:
                self._deny(*values)
        return None


_MOST = 2000
_HELD_HERE = 3  # references to an array: by the table, by the loop over it, and by the count
# How calls, and operators, are recorded.
_LEAVE = "leave"  # not at all: code of the user's, or what moves objects around
_READ = "read"  # as an op that gives an array, or a number
_WRITE = "write"  # as an op that writes to its first argument
_IN_PLACE = "in place"  # likewise, if that is an array
_TENSOR = "tensor"  # as an op that gives a tensor of the model's
_ITEM, _ROWS, _INDICES = "item", "rows", "indices"
_LENGTH, _TRUTH, _CLASS, _ATTRIBUTE = "length", "truth", "class", "attribute"
_AT = "at"  # as an op that writes to its second argument, such as `np.add.at`
_COMPARES = "compares"  # as an op whose result's truth is asked by the same instruction

_LEADS_NOWHERE = frozenset(
    {
        types.ModuleType, types.CodeType, types.BuiltinFunctionType, types.MethodDescriptorType,
        types.WrapperDescriptorType, type(None), type(Ellipsis), FrameType,
    }
)  # fmt: skip
_SEQUENCES: frozenset[Any] = frozenset({list, tuple, range, str})
_SHAPE: Any = internal("torch.Tensor.shape.__get__", None)
_NDIM: Any = internal("torch.Tensor.ndim.__get__", None)
_DTYPE: Any = internal("torch.Tensor.dtype.__get__", None)

_OF_CONTAINERS: dict[Any, frozenset[str]] = {
    list: frozenset({"append", "extend", "insert", "pop", "copy", "clear", "reverse"}),
    dict: frozenset({"get", "items", "keys", "values", "pop", "setdefault", "update", "copy"}),
}
# C code that only moves objects around, and its arguments: "r" if their rows are gone through, "i"
# if they are whole numbers, "." if they are moved. The last letter is for all that follow.
_MOVING: dict[Any, str] = {
    **dict.fromkeys((list, tuple, zip, reversed, iter, itertools.chain, itertools.cycle), "r"),
    **dict.fromkeys((itertools.pairwise, itertools.product, itertools.zip_longest), "r"),
    **dict.fromkeys((enumerate, itertools.islice), "ri"),
    **dict.fromkeys((itertools.combinations, itertools.permutations), "ri"),
    list.extend: ".r", list.pop: ".i", list.insert: ".i.",
}  # fmt: skip
# What gives what an object holds, or says whether it does.
_LOOKING = (getattr, hasattr, callable, setattr)
_MOVING_NAMED = {"iterable": "r", "fillvalue": "."}  # other names are those of whole numbers
_BUILTINS: dict[Any, str] = {
    len: _LENGTH, bool: _TRUTH, range: _INDICES,
    **dict.fromkeys(_MOVING, _ROWS),
    **dict.fromkeys((isinstance, type), _CLASS),
    **dict.fromkeys((int, float, complex, abs, round, divmod, pow, any, all), _READ),
    **dict.fromkeys(CHOOSING, _READ),
    **dict.fromkeys(COMPUTING, _READ),
}  # fmt: skip
_METHODS = frozenset(
    {
        "all", "any", "argmax", "argmin", "argpartition", "argsort", "astype", "choose", "clip",
        "compress", "conj", "conjugate", "copy", "cumprod", "cumsum", "diagonal", "dot", "flatten",
        "item", "max", "mean", "min", "nonzero", "prod", "ravel", "repeat", "reshape", "round",
        "searchsorted", "squeeze", "std", "sum", "swapaxes", "take", "tolist", "trace",
        "transpose", "var", "view",
    }
)  # fmt: skip
_WRITING = frozenset({"fill", "partition", "put", "sort"})
_ATTRIBUTES = frozenset(
    {"shape", "ndim", "size", "dtype", "T", "real", "imag", "itemsize", "nbytes"}
)
_OF_UFUNCS = frozenset({"reduce", "accumulate", "outer", "reduceat", "at"})
_WRITING_FUNCTIONS = frozenset(
    {"copyto", "fill_diagonal", "place", "put", "put_along_axis", "putmask"}
)
# Functions of numpy that call others, read or write files, or make texts.
_REFUSED = frozenset(
    {
        "apply_along_axis", "apply_over_axes", "array2string", "array_repr", "array_str",
        "format_float_positional", "format_float_scientific", "frombuffer", "fromfile",
        "fromfunction", "fromiter", "frompyfunc", "load", "memmap", "nditer", "piecewise", "save",
        "savetxt", "savez", "savez_compressed", "shares_memory", "may_share_memory", "vectorize",
    }
)  # fmt: skip


def _getter(name: str) -> Callable[[Any], Any]:
    getter = operator.attrgetter(name)

    def attribute(array: Any) -> Any:
        return getter(array)

    attribute.__name__ = name
    return attribute


_GETTERS = {name: _getter(name) for name in ("T", "real", "imag", "itemsize", "nbytes")}


def _reads_objects(function: Any) -> bool:
    """Return whether a function reads all that an object holds, such as a module."""
    module = str(getattr(function, "__module__", ""))
    return module.partition(".")[0] in _READERS or module == "torch.serialization"


_READERS = frozenset(
    {
        "copy", "pickle", "_pickle", "dataclasses", "inspect", "json", "marshal", "gc", "pprint",
        "reprlib", "joblib", "cloudpickle", "dill",
    }
)  # fmt: skip


@functools.cache
def _at_of(ufunc: Any) -> Callable[..., None]:
    """Return `ufunc.at` as a function whose first argument is what it writes to."""

    def at(array: Any, *args: Any) -> None:
        ufunc.at(array, *args)

    at.__name__ = f"{ufunc.__name__}_at"
    return at


def _array_class_name(array: Any) -> str:
    return f"{type(array).__module__}.{type(array).__qualname__}"


def _array(array: Any) -> Any:
    return array


_array.__name__ = "array"
_ADOPTS = ArrayFunction(_array, "array", False, False, None)


def _placeholder(tensor: Tensor) -> Any:
    """Return a substitute for an array that nothing reads any more."""
    numpy: Any = sys.modules["numpy"]
    made = numpy.zeros(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return made[()] if stands_for_number(tensor) else made


# How many arguments stand before the size, where that is not two.
_BEFORE_SIZE = {
    **dict.fromkeys(("permutation", "permuted", "rand", "randn", "random", "random_sample"), 0),
    **dict.fromkeys(("choice", "exponential", "geometric", "poisson"), 1),
}


def _is_dtype(value: Any) -> bool:
    return isinstance(value, sys.modules["numpy"].dtype) and not value.hasobject


def _leaves_content_open(name: str, values: list[Any]) -> bool:
    """Return whether an instruction makes an array of memory as it finds it."""
    if name not in ("CALL", "CALL_KW"):
        return False
    numpy: Any = sys.modules["numpy"]
    called = values[results.callee_place(values)]
    return any(called is one for one in (numpy.empty, numpy.empty_like))


@functools.lru_cache(maxsize=1024)
def _way_of(function: Any) -> str | None:
    """Return how a call of a function of an installed package is recorded."""
    numpy: Any = sys.modules["numpy"]
    kind, name = type(function), str(getattr(function, "__name__", ""))
    if kind is types.MethodDescriptorType:
        owner = function.__objclass__
        if owner is numpy.ndarray or issubclass(owner, numpy.generic):
            return _READ if name in _METHODS else _WRITE if name in _WRITING else None
        return None
    if isinstance(function, type):
        return _READ if issubclass(function, numpy.generic) else None
    if kind is numpy.ufunc:
        is_pythons = all(set(one) <= set("O->") for one in function.types)
        return None if is_pythons else _READ
    module = str(getattr(function, "__module__", "") or "")
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or package in ("torch", "bendtrace", ""):
        return None
    if not is_installed_module(module) or module.startswith(("numpy.random", "numpy.ctypeslib")):
        return None
    if kind.__name__ not in _FUNCTIONS or calls_users_code(function):
        return None
    if package == "numpy" and name in _REFUSED:
        return None
    return _WRITE if package == "numpy" and name in _WRITING_FUNCTIONS else _READ


_FUNCTIONS = frozenset(
    {
        "function", "builtin_function_or_method", "_ArrayFunctionDispatcher",
        "cython_function_or_method",
    }
)  # fmt: skip


# What takes the place of operands, for one instruction.


class ArrayCall(OperandProxy):
    """Takes the place of a function that is given arrays."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the call, and do what the function does."""
        function = MAKES_FROM_ARRAYS.get(self.operand, self.operand)
        return self.arrays.carry_out(function, args, kwargs, sys._getframe(1), self.way)


class ArrayOperand(OperandProxy):
    """Takes the place of an operand: of the left one, or of the only one."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self._do(bool, sys._getframe(1), (), _TRUTH))

    def __iter__(self) -> Any:
        return self._do(iter, sys._getframe(1), (), _ROWS)

    def __getattr__(self, name: str) -> Any:
        return self._do(getattr, sys._getframe(1), (name,), _ATTRIBUTE)

    def _do(self, function: Any, frame: FrameType, others: tuple[Any, ...], way: str) -> Any:
        self.arrays.note_compared((self, *others))
        return self.arrays.carry_out(function, (self.operand, *others), {}, frame, way)


def _operator(name: str, way: str | None) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: ArrayOperand, *others: Any) -> Any:
        return self._do(function, sys._getframe(1), others, way or self.way)

    return method


_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
    "lshift", "rshift",
)  # fmt: skip
for _name in (*_OPERATORS, "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "invert", "getitem"):
    setattr(ArrayOperand, f"__{_name}__", _operator(f"__{_name}__", None))
for _name in _OPERATORS:
    setattr(ArrayOperand, f"__i{_name}__", _operator(f"__i{_name}__", _IN_PLACE))
setattr(ArrayOperand, "__setitem__", _operator("__setitem__", _WRITE))  # noqa: B010

_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
_HANDLERS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(_CALLS, Arrays._handle_call),
    "BINARY_OP": Arrays._handle_operator,
    "COMPARE_OP": Arrays._handle_operator,
    "BINARY_SUBSCR": Arrays._handle_item,
    "BINARY_SLICE": Arrays._handle_item,
    "STORE_SUBSCR": Arrays._handle_assignment,
    "STORE_SLICE": Arrays._handle_assignment,
    "DELETE_SUBSCR": Arrays._handle_deletion,
    "RETURN_VALUE": Arrays._handle_return,
    "BUILD_MAP": Arrays._handle_map,
    "MAP_ADD": Arrays._handle_map,
    "STORE_ATTR": Arrays._handle_store,
    "STORE_GLOBAL": Arrays._handle_store,
    "LOAD_ATTR": Arrays._handle_attribute,
    "LOAD_METHOD": Arrays._handle_attribute,
    **dict.fromkeys(
        (
            "UNARY_NEGATIVE", "UNARY_POSITIVE", "UNARY_INVERT", "UNARY_NOT", "GET_ITER",
            "UNPACK_SEQUENCE", "UNPACK_EX", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE", "TO_BOOL",
        ),
        Arrays._handle_one,
    ),
}  # fmt: skip
# Instructions that hand on what is in their operands, or keep it.
_LOOKS_INSIDE = frozenset(
    {
        *_CALLS, "BINARY_OP", "COMPARE_OP", "BINARY_SUBSCR", "BINARY_SLICE", "STORE_SUBSCR",
        "STORE_SLICE", "DELETE_SUBSCR", "RETURN_VALUE", "YIELD_VALUE", "CONTAINS_OP", "STORE_ATTR",
        "STORE_GLOBAL", "STORE_NAME", "FORMAT_VALUE", "FORMAT_WITH", "RAISE_VARARGS", "SEND",
        "BUILD_SET", "SET_ADD", "SET_UPDATE", "BUILD_INTERPOLATION", "BUILD_MAP", "MAP_ADD",
    }
)  # fmt: skip
