"""graphpatch: `PatchableGraph`, and all patches by name.

>>> import torch, bendtrace as bt
>>> gp = bt.compat.graphpatch
>>> pg = gp.PatchableGraph(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()), torch.ones(2))
>>> with pg.patch({"sub_0.output": gp.ZeroPatch(slice=0)}):
...     print(pg(torch.zeros(2)))
tensor([0., 0.])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bendtrace import patches
from bendtrace.module import BendedModule
from bendtrace.patches import *  # noqa: F403
from bendtrace.paths.view import Node, Tree

__all__ = ["PatchableGraph"]
__all__ += patches.__all__
__all__.sort()


class PatchableGraph(BendedModule):
    """A model that was run once on an example, so that its values are known by path.

    The class and its `graph` have their names from graphpatch. It is called like the model, and is
    traced and replayed like any `BendedModule`. The example is an ordinary call of the model: it
    draws random numbers and updates buffers, such as those of a batch norm in training mode. To
    avoid that, put the model in eval mode or seed it first.

    Args:
        model: a module; a plain function works too.
        *example_args: positional arguments of the example.
        **example_kwargs: keyword arguments of the example.

    Raises:
        InputError: `model` cannot be called.
        Exception: whatever the model raises, unchanged.

    Example:
        >>> import torch, bendtrace as bt
        >>> pg = bt.PatchableGraph(torch.nn.Linear(2, 3), torch.ones(4, 2))
        >>> pg.graph
        <root>: Graph(5)
        ├─input: Tensor(4, 2)
        ├─weight: Tensor(3, 2)
        ├─bias: Tensor(3)
        ├─linear: Tensor(4, 3)
        └─output: Tensor(4, 3)
        >>> pg.graph.bias._shape
        torch.Size([3])
    """

    _untraced = BendedModule._untraced | {"_example"}
    _example: Tree

    def __init__(
        self, model: Callable[..., Any], /, *example_args: Any, **example_kwargs: Any
    ) -> None:
        super().__init__(model)
        recording = self.trace(*example_args, **example_kwargs).recording
        self._keep(self._known.run(recording).tree)

    @property
    def graph(self) -> Node:  # type: ignore[override]
        """The tree of the example: it prints, completes, and leads to every value by its path.

        Example:
            >>> import torch, bendtrace as bt
            >>> model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.ReLU())
            >>> pg = bt.PatchableGraph(model, torch.ones(1, 2))
            >>> pg.graph.sub_1.relu
            relu: Tensor(1, 2)
            >>> with pg.patch({pg.graph.sub_1.relu: bt.patches.ZeroPatch()}):
            ...     pg(torch.ones(1, 2))
            tensor([[0., 0.]])
        """
        return self._example.root

    def _keep(self, example: Tree) -> None:
        object.__setattr__(self, "_example", example)
        self._known.examples.append(example)

    def _carried(self, memo: dict[int, Any] | None) -> dict[str, Any]:
        return {**super()._carried(memo), "example": self._example.to_dict()}

    def _take_over(self, carried: dict[str, Any]) -> None:
        super()._take_over(carried)
        self._keep(Tree.from_dict(carried["example"]))

    def __repr__(self) -> str:
        return f"PatchableGraph({self._model!r}, {self.stats})"
