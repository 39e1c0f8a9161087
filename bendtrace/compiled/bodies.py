"""Ops that follow each other as one compiled function, which segments call in place of them."""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from bendtrace.compiled.attempts import Failed, Quiet, State, now, unmark
from bendtrace.compiled.comparing import difference, laid_out
from bendtrace.compiled.settings import Settings
from bendtrace.compiled.shortcuts import Backend, Shortcuts
from bendtrace.recording.functions import name_of

__all__ = ["Body"]

_serials = itertools.count()
_WARM = 2  # calls before times are taken
_TIMED = 6  # calls of either kind whose times are taken
_MOST_FAILURES = 4  # in a row


class Body:
    """Ops that follow each other, compiled.

    It is called by the code of segments with what the ops need, and gives what they make; or None,
    for the ops to be carried out one by one. `seen` is told what that gave.

    Args:
        text: the source of a function of tensors and sizes.
        names: what the names in it stand for.
        settings: how to compile.
        targets: the functions that it calls.

    Attributes:
        text: as given.
        functions: the names of the functions that it calls.
        state: what became of it.
        reason: why it is not used, or its latest error.
        seconds: how long it took until a graph had been compiled.
        hits: how often it served.
        served: seconds of some calls of it.
        replayed: seconds of some calls of its ops one by one.
        is_unusable: whether it was the backend itself that failed.
    """

    def __init__(
        self, text: str, names: dict[str, Any], settings: Settings, targets: Sequence[Any]
    ) -> None:
        self.text = text
        self.functions = tuple(map(name_of, targets))
        self.state = State.MEASURED if settings.drop_slower else State.USED
        self.reason = ""
        self.seconds = 0.0
        self.hits = self.failures = 0
        self.is_unusable = False
        self.served: list[float] = []
        self.replayed: list[float] = []
        self._settings = settings
        self._names = names
        exec(compile(text, f"<bendtrace body {next(_serials)}>", "exec"), names)
        self._compilers: deque[Callable[..., Any]] = deque()
        self._backend: Backend | None = None
        self._function: Shortcuts | None = None
        self._confirmed = 0
        self._orders: dict[int, tuple[int, ...]] = {}
        self._pending = threading.local()
        self._compiling = threading.Lock()

    @property
    def graphs(self) -> int:
        """How many graphs were compiled."""
        return 0 if self._backend is None else self._backend.graphs

    @property
    def is_used(self) -> bool:
        """Whether calls are tried on it."""
        return self.state in (State.MEASURED, State.USED)

    @property
    def speed(self) -> float | None:
        """How many times faster it is than its ops one by one; None if that is not known."""
        if not self.served or not self.replayed:
            return None
        return min(self.replayed) / min(self.served)

    def __call__(self, *given: Any) -> Sequence[Tensor] | None:
        """Carry out the ops; None if that has to be done one by one."""
        pending = self._pending.__dict__
        pending.clear()
        is_measured = self.state is State.MEASURED
        if not self.is_used:
            return None
        begun = now(given) if is_measured else 0.0
        if is_measured and len(self.replayed) < len(self.served):
            pending["begun"] = begun, given
            return None
        try:
            made = self._run(given)
        except Exception as error:
            self._note(error)
            return None
        if made is None:
            return None
        if self.graphs != self._confirmed:
            pending["made"] = made, given
            return None
        if self._orders:
            made = [
                tensor if slot not in self._orders else laid_out(tensor, self._orders[slot])
                for slot, tensor in enumerate(made)
            ]
        self.hits += 1
        self.failures = 0
        if is_measured and self.hits > _WARM:
            self.served.append(now(given) - begun)
        return made

    def seen(self, *results: Tensor) -> None:
        """Learn from what the ops gave when they were carried out one by one."""
        pending = self._pending.__dict__
        if "made" in pending:
            made, given = pending.pop("made")
            self._confirm(made, results, [value for value in given if isinstance(value, Tensor)])
        elif "begun" in pending:
            begun, given = pending.pop("begun")
            self.replayed.append(now(given) - begun)
            if len(self.replayed) >= _TIMED and self.state is State.MEASURED:
                faster = min(self.served) < min(self.replayed)
                self.state = State.USED if faster else State.SLOWER

    def _run(self, given: Sequence[Any]) -> Sequence[Tensor] | None:
        if self._function is not None and self._confirmed:
            return self._called(given)
        if not self._compiling.acquire(blocking=False):
            return None  # another thread compiles
        begun = time.perf_counter()
        try:
            with warnings.catch_warnings(), Quiet():
                warnings.simplefilter("ignore")
                if self._function is None:
                    on_cpu = all(v.device.type == "cpu" for v in given if isinstance(v, Tensor))
                    self._compilers.extend(self._settings.compilers(on_cpu))
                    self._compile()
                while True:
                    try:
                        return self._called(given)
                    except Exception as error:
                        if not (Failed(error).is_final and self._compilers):
                            raise
                    self._compile()  # with what compiles where the first cannot
        finally:
            self.seconds += time.perf_counter() - begun
            self._compiling.release()

    def _compile(self) -> None:
        self._backend = Backend(self._compilers.popleft(), may_assume=False)
        function = torch.compile(
            self._names["body"], fullgraph=True, dynamic=self._settings.dynamic,
            backend=self._backend,
        )  # fmt: skip
        self._function = Shortcuts(function, self._backend)

    def _called(self, given: Sequence[Any]) -> Sequence[Tensor] | None:
        assert self._function is not None
        grad = torch.is_grad_enabled()
        try:
            result = self._function(*given)
        finally:
            if torch.is_grad_enabled() != grad:
                torch._C._set_grad_enabled(grad)
            if grad:  # what is kept for the backward pass is marked too
                unmark(given)
        assert result is not None
        made: Sequence[Tensor] = result[1]
        unmark(made)
        if self._settings.cuda_graphs:  # whose memory the next call writes to
            made = [tensor.clone() for tensor in made]
        return made

    def _confirm(
        self, made: Sequence[Tensor], results: Sequence[Tensor], known: Iterable[Tensor]
    ) -> None:
        """Use newly compiled graphs, if they gave what the ops gave one by one."""
        different, orders = difference(list(made), list(results), known)
        slots = {id(tensor): slot for slot, tensor in enumerate(made)}
        if different is None and not orders.keys() <= slots.keys():
            different = "a result is laid out in memory in another way"
        if different is not None:
            self._give_up(f"compiled, {different}")
            return
        self._orders = self._orders | {slots[key]: order for key, order in orders.items()}
        self._confirmed = self.graphs

    def _note(self, error: Exception) -> None:
        failed = Failed(error)
        self.failures += 1
        self.reason = failed.reason
        self.is_unusable = failed.is_of_backend
        if failed.is_final or self.failures >= _MOST_FAILURES:
            self._give_up(failed.reason)

    def _give_up(self, reason: str) -> None:
        self.state, self.reason = State.REFUSED, reason
