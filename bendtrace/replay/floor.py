"""When to call the model itself, because the paths that it takes do not repeat.

A call along a path that is not known is traced, or resumed, and costs some fifty times what the
model costs. Where such calls go on for ever, nothing is gained by them. So a hundred of them are
free, and from then on one in two hundred calls: what known paths save pays for those. Where there
are more, calls run the model itself, and paths are tried again from time to time: each time after
twice as many calls, until most of them are known.
"""

from __future__ import annotations

__all__ = ["Floor"]

_FREE = 100.0  # unknown paths that cost nothing
_EARNED = 0.005  # what a call along a known path adds, of an unknown one
_FIRST, _LONGEST = 512, 1 << 16  # calls of the model itself before paths are tried again
_TRIED = 2.0  # unknown paths that end a trial
_RECOVERED = 3.0  # from here on, the trials before count no more


class Floor:
    """Counts known and unknown paths, and says which calls are for the model itself.

    Attributes:
        unknown: calls along unknown paths so far.
    """

    def __init__(self) -> None:
        self.unknown = 0
        self._left = _FREE
        self._waiting = 0  # calls until paths are tried again
        self._next = _FIRST

    def takes(self) -> bool:
        """Whether the next call is for the model itself."""
        if not self._waiting:
            return False
        self._waiting -= 1
        if not self._waiting:
            self._left = _TRIED
        return True

    def followed(self, is_known: bool) -> None:
        """Count a call that was served along a path, or led down an unknown one."""
        if is_known:
            self._left = min(self._left + _EARNED, _FREE)
            if self._left > _RECOVERED:
                self._next = _FIRST
            return
        self.unknown += 1
        self._left -= 1
        if self._left <= 0:
            self._waiting = self._next
            self._next = min(self._next * 2, _LONGEST)

    @property
    def reason(self) -> str | None:
        """Why calls are for the model itself at present; None if they are not."""
        if not self._waiting:
            return None
        return (
            f"the paths of the model do not repeat: {self.unknown} calls led down unknown ones; "
            f"known ones are tried again after {self._waiting} more calls"
        )
