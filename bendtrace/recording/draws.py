"""The generators of Python and numpy during a run: whether only its ops have moved them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from bendtrace.torch_rules.draws import global_generators, state_of


class Draws:
    """Compares the states of generators with those that the ops of a run have left.

    An op that draws is called by each replay, which draws the same.

    Args:
        held: the generators that the model holds, or is given.
    """

    def __init__(self, held: list[Any]) -> None:
        # The run may be the first to import numpy; what it has drawn before its first op is
        # unknown, as numpy's generator begins with a seed of the system's.
        self._generators = [*global_generators(), *held]
        self._states = [*map(state_of, self._generators)]
        self._moved: set[int] = set()

    def begin(self) -> None:
        """Note which generators have moved since the last op."""
        now = map(state_of, self._generators)
        differ = map(operator.ne, now, self._states)
        self._moved.update(n for n, is_moved in enumerate(differ) if is_moved)

    def end(self) -> None:
        """Take the states that an op has left."""
        self._states = [*map(state_of, self._generators)]

    def unseen(self) -> Iterator[Any]:
        """Yield the generators that something else has moved as well."""
        self.begin()
        yield from (self._generators[number] for number in sorted(self._moved))
        for generator in global_generators():
            if all(one is not generator for one in self._generators):
                yield generator
