"""Choosing the calls that run the model itself, because following paths would cost more."""

from __future__ import annotations


class Floor:
    """Decides which calls run the model itself, without looking at what is known of it.

    Three kinds of calls cost more than the model. One along a path that is not known is recorded,
    or resumed, and costs some fifty times what the model costs; where such calls go on for ever,
    nothing is gained by them. One that is recorded in vain, since its like has to run live, costs
    as much. One that has to run live costs the model and the check that finds that out. Each kind
    has an account (`_Account`) from which its calls are paid, and to which calls along known paths
    add what they save. While one of them is empty, calls run the model itself, and are tried again
    from time to time.

    A hundred calls along unknown paths are free, and from then on one in two hundred calls; twenty
    may be recorded in vain, and one in twenty later. These waits are long, and double. Sixteen
    calls in a row may be live; the waits are short, and have a greatest length, since the reason
    may be gone any time.

    Attributes:
        unknown: calls along unknown paths so far.
        replays: calls along known paths so far.
        calls_to_wait: calls until paths are tried again; 0 while they are followed.
    """

    def __init__(self) -> None:
        self.unknown: int = 0
        self.replays: int = 0  # a number, since it costs each call something to count it
        self.calls_to_wait: int = 0
        self._paid = 0  # for so many of the replays, both accounts were paid
        self._waited: int | None = None  # how many there were at the end of a wait, until a call
        self._paths = _Account(100.0, 0.005, tuple(1 << n for n in range(9, 17)), 2.0, 1)
        self._vain = _Account(20.0, 0.05, tuple(1 << n for n in range(6, 17)), 2.0, 1)
        self._lives = _Account(16.0, 0.25, (2, 4, 8, 16, 30, 31, 32, 29), 1.0, 4)
        self._empty: _Account | None = None

    def take_call(self) -> bool:
        """Take a call from those to wait for; return whether it is for the model itself."""
        if not self.calls_to_wait:
            return False
        self.calls_to_wait -= 1
        if not self.calls_to_wait:
            assert self._empty is not None
            self._earn()
            self._empty.begin_trial()
            self._waited = self.replays
        return True

    @property
    def has_waited(self) -> bool:
        """True during the first call after a wait."""
        return self._waited == self.replays

    def count_path(self) -> None:
        """Count a call that led down an unknown path."""
        self.unknown += 1
        self._pay(self._paths)

    def count_vain(self) -> None:
        """Count a recorded call whose like has to run live."""
        self._pay(self._vain)

    def count_live(self) -> None:
        """Count a call that had to run live."""
        self._pay(self._lives)

    def _pay(self, account: _Account) -> None:
        self._waited = None
        self._earn()
        wait = account.pay()
        if wait > self.calls_to_wait:
            self.calls_to_wait, self._empty = wait, account

    def _earn(self) -> None:
        replays, self._paid = self.replays - self._paid, self.replays
        self._paths.earn(replays)
        self._vain.earn(replays)
        self._lives.earn(replays)

    @property
    def reason(self) -> str | None:
        """Why calls are for the model itself at present, if that is since paths do not repeat."""
        if not self.calls_to_wait or self._empty is not self._paths:
            return None
        return (
            f"the paths of the model do not repeat: {self.unknown} calls led down unknown ones; "
            f"known ones are tried again after {self.calls_to_wait} more calls"
        )


class _Account:
    """Pays for calls that cost more than the model.

    Args:
        free: what it holds at first, and at most.
        earned: what a call along a known path adds.
        waits: for how many calls none is made when it is empty: each time for the next number.
        trial: what it holds after a wait.
        last: how many of the last waits are repeated.
    """

    def __init__(
        self, free: float, earned: float, waits: tuple[int, ...], trial: float, last: int
    ) -> None:
        self._free = self._left = free
        self._earned = earned
        self._waits = waits
        self._trial = trial
        self._last = last
        self._next = 0

    def begin_trial(self) -> None:
        """Begin to pay again after a wait."""
        self._left = self._trial

    def earn(self, calls: int) -> None:
        """Add what calls along known paths save."""
        self._left = min(self._left + calls * self._earned, self._free)
        if self._left > self._trial + 1:  # the waits before count no more
            self._next = 0

    def pay(self) -> int:
        """Pay for a call; return for how many calls none is made now, 0 while something is left."""
        self._left -= 1
        if self._left > 0:
            return 0
        wait = self._waits[self._next]
        self._next += 1
        if self._next == len(self._waits):
            self._next -= self._last
        return wait
