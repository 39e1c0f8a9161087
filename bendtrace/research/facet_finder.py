"""Finds facets, the parts of values that have a meaning, by their use in a recorded run."""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bendtrace._trace import Trace
from bendtrace.errors import InputError
from bendtrace.log.nodes import NodePath
from bendtrace.python.checks import required_kind
from bendtrace.tape.tape import Op, OpKind, Ref, TensorMeta, map_refs

# Ops that only move elements, and those that only change their dtype.
_MOVES = frozenset(
    "view reshape transpose permute unsqueeze squeeze split chunk unbind getitem __getitem__ "
    "tensor_split flatten unflatten movedim moveaxis swapaxes swapdims select narrow expand "
    "split_with_sizes view_as reshape_as expand_as repeat repeat_interleave t".split()
)
_KEEPS = frozenset("contiguous clone to float half bfloat16 double type type_as detach".split())
_PROJECTS = frozenset("linear addmm matmul mm bmm __matmul__ baddbmm conv1d".split())
_PRODUCTS = frozenset("matmul bmm __matmul__ baddbmm".split())
_SCALES = frozenset(
    "mul div true_divide add sub masked_fill where dropout softmax __mul__ __truediv__ __add__ "
    "mul_ div_ add_ clamp float to half bfloat16 type type_as contiguous view reshape".split()
)
# Gates of torch's fused cells, in the order of their rows.
_GATES = {"lstm": "ifgo", "lstm_cell": "ifgo", "gru": "rzn", "gru_cell": "rzn"}


def facets(trace: Trace) -> Facets:
    """Find the parts of values that have a meaning, by their use in the run.

    No name of a model or module is looked at. Found are:

    - of each attention (`scaled_dot_product_attention`, or a softmax between two products) the
      parts of the projections that become its queries, keys and values, by head: "q", "k", "v",
      before rotations and norms; and "z", what the heads returned, where it is projected again;
    - of LSTM and GRU, torch's own or written in Python, gates and states. In torch's own, the gates
      are rows of the weights, since the values are computed inside one op;
    - of a mixture of experts: its "router", the score of each expert; "experts", parameters with
      one matrix for each; and "expert.0" and so on, the outputs of modules in a list.

    Args:
        trace: the trace of a run.

    Returns:
        The facets. Their positions do not depend on batch sizes or lengths, so they hold for other
        inputs as well.

    Raises:
        InputError: `trace` is not a trace.

    Example:
        >>> import torch, bendtrace as bt
        >>> class Attention(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.qkv = torch.nn.Linear(4, 12)
        ...     def forward(self, x):
        ...         q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2)
        ...                    for part in self.qkv(x).chunk(3, -1))
        ...         return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> bended, x = bt.BendedModule(Attention()), torch.ones(1, 3, 4)
        >>> q, k, v = bt.workflows.facets(bended.trace(x))
        >>> q, k.part(1).slice
        (<facet q of qkv.linear in 2 parts>, (Ellipsis, slice(6, 8, None)))
        >>> q.value(bended.get_activations(q.path, args=(x,))).shape
        torch.Size([1, 3, 2, 2])
        >>> with bended.patch({v.path: bt.patches.ZeroPatch(slice=v.part(0).slice)}):
        ...     bended(x)[0, 0].abs().sum()
        tensor(0., grad_fn=<SumBackward0>)
    """
    required_kind("facets are found in a run, bt.trace(model, x)", trace, Trace)
    return Facets(dict.fromkeys(_Finder(trace).all()))


class _Finder:
    """Looks for facets in the ops of a run."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ops = trace.ops
        self.users: dict[int, list[int]] = defaultdict(list)
        for op in self.ops:
            for index in op.operands:
                self.users[index].append(op.index)

    def all(self) -> Iterator[Facet]:
        for op in self.ops:
            if op.kind is not OpKind.CALL or op.raised is not None:
                continue
            name = _target_name(op)
            if name == "scaled_dot_product_attention":
                q, k, v = map(_ref, _named_operands(op, "query key value"))
                yield from self.attention(op, q, k, v, op)
            elif name in ("softmax", "_softmax"):
                yield from self.products(op)
            elif name in _GATES:
                yield from self.fused_cell(op, _GATES[name])
            elif name in ("chunk", "split", "unbind", "tensor_split"):
                yield from self.cell(op)
            elif name == "topk":
                yield from self.experts(op)

    # Places

    def path(self, index: int) -> str:
        return NodePath(re.sub(r":\d+", "", self.trace._run.tree.path_of(index)))

    def facet(self, name: str, index: int, scope: Op, dim: int, groups: Any) -> Iterator[Facet]:
        path = self.path(index)
        if path:
            rows = None if groups is None else tuple(map(tuple, groups))
            yield Facet(name, path, scope.scope.path, dim, rows)

    def shape(self, index: int) -> tuple[int, ...] | None:
        meta = self.ops[index].meta
        return meta.shape if isinstance(meta, TensorMeta) else None

    def size(self, index: int) -> int:
        return torch.Size(self.shape(index) or ()).numel()

    # Attention

    def products(self, softmax: Op) -> Iterator[Facet]:
        """Yield the facets of an attention that is written as two products."""
        score = self.back(softmax, _SCALES, _PRODUCTS)
        total = self.forth(softmax, _SCALES, _PRODUCTS)
        if score is not None and total is not None:
            q, k = _factors(score)
            _, v = _factors(total)
            yield from self.attention(softmax, q, k, v, total)

    def back(self, op: Op, through: frozenset[str], wanted: frozenset[str]) -> Op | None:
        """Return the nearest op before this one that has one of the names, and as many elements."""
        size = self.size(op.index)
        for _ in range(16):
            before = [i for i in op.operands if self.size(i) == size]
            if not before:
                return None
            op = self.ops[before[0]]
            if _target_name(op) in wanted:
                return op
            if _target_name(op) not in through:
                return None
        return None

    def forth(self, op: Op, through: frozenset[str], wanted: frozenset[str]) -> Op | None:
        for _ in range(16):
            users = [self.ops[index] for index in self.users[op.index]]
            for user in users:
                if _target_name(user) in wanted and _factors(user)[0] == op.index:
                    return user
            users = [user for user in users if _target_name(user) in through]
            if not users:
                return None
            op = users[0]
        return None

    def attention(
        self, op: Op, q: int | None, k: int | None, v: int | None, result: Op
    ) -> Iterator[Facet]:
        heads = 0
        for name, index in (("q", q), ("k", k), ("v", v)):
            for facet in () if index is None else self.projected(name, index, op):
                heads = facet.parts if name == "q" else heads
                yield facet
        if heads:
            yield from self.returned(result, op, heads)

    def projected(self, name: str, end: int, op: Op) -> Iterator[Facet]:
        """Yield the part of a projection that becomes an operand of an attention."""
        reached, waiting, sources = {end}, [end], []
        while waiting:
            index = waiting.pop()
            if self.projects(self.ops[index]):
                sources.append(index)
                continue
            new = [i for i in self.ops[index].operands if i not in reached and self.shape_like(i)]
            reached.update(new)
            waiting += new
        if len(sources) != 1:
            return
        source = sources[0]
        maps = self.moved(source, reached)
        width = (self.shape(source) or (0,))[-1]
        used: set[int] = set()
        for index, places in maps.items():
            if isinstance(places, Tensor) and (
                index == end or any(i in reached and i not in maps for i in self.users[index])
            ):
                used |= set((places.flatten() % width).tolist())
        best: list[list[int]] | None = None
        for index in sorted(maps):
            places = maps[index]
            if isinstance(places, Tensor):
                groups = _groups(places, width)
                if groups is not None and {i for group in groups for i in group} == used:
                    best = groups if best is None or len(groups) > 1 else best
        if best is not None:
            yield from self.facet(name, self.last_like(source), op, -1, best)

    def projects(self, op: Op) -> bool:
        return _target_name(op) in _PROJECTS and any(map(self.is_weight, op.operands))

    def is_weight(self, index: int) -> bool:
        """Return whether a value is a matrix of the model, or a part of one."""
        while len(self.shape(index) or ()) >= 2:
            op = self.ops[index]
            if op.kind is OpKind.STATE:
                return True
            if _target_name(op) not in _MOVES | _KEEPS or not op.operands:
                return False
            index = op.operands[0]
            if isinstance(self.ops[index].meta, tuple) and self.ops[index].operands:
                index = self.ops[index].operands[0]  # a chunk of it
        return False

    def shape_like(self, index: int) -> bool:
        meta = self.ops[index].meta
        return isinstance(meta, TensorMeta) or (
            isinstance(meta, tuple) and any(isinstance(part, TensorMeta) for part in meta)
        )

    def last_like(self, index: int) -> int:
        """Return the value that has the same last dimension and rows: after a final `view`."""
        users = [self.ops[user] for user in self.users[index]]
        width = (self.shape(index) or (0,))[-1]
        if len(users) == 1 and _target_name(users[0]) in ("view", "reshape"):
            shape = self.shape(users[0].index) or ()
            if shape[-1:] == (width,) and users[0].scope is self.ops[index].scope:
                return users[0].index
        return index

    def moved(self, source: int, among: set[int]) -> dict[int, Any]:
        """Return the source of each element of a value whose elements were moved."""
        shape = self.shape(source) or ()
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        maps: dict[int, Any] = {source: numbers}
        for op in self.ops[source + 1 : max(among) + 1]:
            if op.index not in among or not any(index in maps for index in op.operands):
                continue
            made = self.placed(op, maps)
            if made is not None:
                maps[op.index] = made
        return maps

    def placed(self, op: Op, maps: Mapping[int, Any]) -> Any:
        name = _target_name(op)
        if name in _KEEPS:
            return maps.get(op.operands[0])
        if name not in _MOVES:
            return None
        missing = [i for i in op.operands if i not in maps and self.shape_like(i)]
        if missing and not name.endswith("_as"):
            return None

        def sample_of(ref: Ref) -> Any:
            return maps[ref.index] if ref.index in maps else self.ops[ref.index].meta

        try:
            return op.target(*map_refs(op.args, sample_of), **map_refs(op.kwargs, sample_of))
        except (TypeError, ValueError, RuntimeError, IndexError):
            return None

    def returned(self, result: Op, op: Op, heads: int) -> Iterator[Facet]:
        """Yield the heads' results: the last value before the projection."""
        shape = self.shape(result.index) or ()
        if len(shape) < 3 or shape[-3] % heads:
            return
        depth = shape[-1]
        maps = self.moved(result.index, {result.index, *self.followers(result.index)})
        merged = [
            index
            for index, places in maps.items()
            if isinstance(places, Tensor) and places.shape[-1] == heads * depth != depth
            and len(_grid(places)) == heads * depth
        ]  # fmt: skip
        if merged:
            places = _grid(maps[merged[-1]])
            row = shape[-2] * depth
            groups: list[list[int]] = [[0] * depth for _ in range(heads)]
            for position, number in enumerate(places):
                groups[number // row % heads][number % depth] = position
            yield from self.facet("z", merged[-1], op, -1, groups)

    def followers(self, index: int) -> Iterable[int]:
        found, waiting = set[int](), [index]
        while waiting:
            for user in self.users[waiting.pop()]:
                if user not in found and _target_name(self.ops[user]) in _MOVES | _KEEPS:
                    found.add(user)
                    waiting.append(user)
        return found

    # Gates and states

    def fused_cell(self, op: Op, names: str) -> Iterator[Facet]:
        for index in op.operands:
            shape = self.shape(index)
            if self.ops[index].kind is OpKind.STATE and shape and shape[0] % len(names) == 0:
                yield from self.gates(index, op, 0, shape[0], ("gate." + name for name in names))
        if isinstance(op.meta, TensorMeta):
            yield from self.facet("state.h", op.index, op, -1, None)
            return
        several = _target_name(op) in ("lstm", "gru")  # which return all steps, and the last states
        states = ["state.h", "state.h_n", "state.c_n"] if several else ["state.h", "state.c"]
        for user in self.users[op.index]:
            taken = self.ops[user]
            if taken.target is operator.getitem and taken.args[1] in range(len(states)):
                yield from self.facet(states[taken.args[1]], user, op, -1, None)

    def gates(
        self, index: int, op: Op, dim: int, size: int, names: Iterable[str]
    ) -> Iterator[Facet]:
        listed = list(names)
        width = size // len(listed)
        for number, name in enumerate(listed):
            positions = range(number * width, (number + 1) * width)
            yield from self.facet(name, index, op, dim, [positions])

    def cell(self, op: Op) -> Iterator[Facet]:
        """Yield gates and states of a cell that is written in Python."""
        parts: dict[int, int] = {}
        for user in self.users[op.index]:
            taken = self.ops[user]
            if taken.target is operator.getitem and isinstance(taken.args[1], int):
                parts[taken.args[1]] = user
        count = len(op.meta) if isinstance(op.meta, tuple) else 0
        shapes = {part.shape for part in op.meta} if count else set()
        whole = self.shape(op.operands[0])
        if count not in (3, 4) or len(parts) != count or len(shapes) != 1 or whole is None:
            return
        (shape,) = shapes
        dims = [d for d, size in enumerate(whole) if shape[d : d + 1] != (size,)]
        squashed = {n: self.squash(index) for n, index in parts.items()}
        if len(dims) != 1 or len(shape) != len(whole) or not any(squashed.values()):
            return
        names = [f"gate.{number}" for number in range(count)]
        states: dict[str, int] = {}
        if count == 4:
            self.lstm(squashed, names, states)
        elif sum(one is not None and one[0] == "sigmoid" for one in squashed.values()) < 2:
            return
        dim = dims[0] - len(whole)
        yield from self.gates(op.operands[0], op, dim, whole[dim], names)
        for name, index in states.items():
            yield from self.facet(name, index, op, -1, None)

    def squash(self, index: int) -> tuple[str, int] | None:
        for user in self.users[index]:
            if _target_name(self.ops[user]) in ("sigmoid", "tanh", "hardsigmoid"):
                return _target_name(self.ops[user]), user
        return None

    def lstm(
        self,
        squashed: Mapping[int, tuple[str, int] | None],
        names: list[str],
        states: dict[str, int],
    ) -> None:
        """Name the gates of an LSTM by the values that they are multiplied with."""
        inner = [n for n, one in squashed.items() if one is not None and one[0] == "tanh"]
        if len(inner) != 1 or None in squashed.values():
            return
        found = {"g": inner[0]}
        for number, one in squashed.items():
            if number == inner[0] or one is None:
                continue
            for user in self.users[one[1]]:
                if _target_name(self.ops[user]) not in ("mul", "__mul__"):
                    continue
                other = next((i for i in self.ops[user].operands if i != one[1]), one[1])
                if other == squashed[inner[0]][1]:  # type: ignore[index]
                    found["i"] = number
                elif _target_name(self.ops[other]) == "tanh":
                    found["o"] = number
                    states["state.c"] = self.ops[other].operands[0]
                    states["state.h"] = user
                else:
                    found["f"] = number
        if sorted(found) == ["f", "g", "i", "o"] and len(set(found.values())) == 4:
            for name, number in found.items():
                names[number] = f"gate.{name}"
        else:
            states.clear()

    # Experts

    def experts(self, op: Op) -> Iterator[Facet]:
        """Yield the router of a mixture of experts, and its experts."""
        shape = self.shape(op.operands[0])
        count = shape[-1] if shape else 0
        names = _SCALES | _KEEPS | {"softmax", "sigmoid", "log_softmax"}
        router: Op | None = None
        index = op.operands[0]
        for _ in range(16):
            made = self.ops[index]
            if self.projects(made):
                router = made
                break
            if _target_name(made) not in names or not made.operands:
                break
            index = made.operands[0]
        if router is None or count < 2 or (self.shape(router.index) or ())[-1:] != (count,):
            return
        ones = [(number,) for number in range(count)]
        around = op.scope
        while around.parent is not None and not self.has_experts(around.path, count):
            around = around.parent
        if not self.has_experts(around.path, count):
            return
        yield from self.facet("router", router.index, op, -1, ones)
        for state in self.stacked(around.path, count):
            yield from self.facet("experts", state.index, state, 0, ones)
        yield from self.listed(around.path, count)

    def has_experts(self, path: str, count: int) -> bool:
        return any(True for _ in self.stacked(path, count)) or any(
            True for _ in self.listed(path, count)
        )

    def stacked(self, path: str, count: int) -> Iterator[Op]:
        """Yield the parameters inside a module that have one matrix for each expert."""
        for op in self.ops:
            shape = self.shape(op.index)
            if op.kind is OpKind.STATE and shape and len(shape) == 3 and shape[0] == count:
                if f"{op.scope.path}.".startswith(f"{path}." if path else ""):
                    yield op

    def listed(self, path: str, count: int) -> Iterator[Facet]:
        """Yield the outputs of the modules of a list inside a module, one for each expert."""
        for call in self.trace.module_calls:
            owner, _, number = call.path.rpartition(".")
            if not number.isdigit() or not owner.startswith(path):
                continue
            model = self.trace.function
            inside = model.get_submodule(owner) if isinstance(model, torch.nn.Module) else None
            is_list = isinstance(inside, torch.nn.ModuleList) and len(inside) == count
            if is_list and isinstance(call.output, Ref):
                made = self.path(call.output.index)
                if made:
                    yield Facet(f"expert.{number}", made, owner, -1, None)


def _target_name(op: Op) -> str:
    return str(getattr(op.target, "__name__", "")) if op.kind is not OpKind.STATE else ""


def _ref(value: Any) -> int | None:
    return value.index if isinstance(value, Ref) else None


def _named_operands(op: Op, names: str) -> list[Any]:
    given = list(op.args) if isinstance(op.args, tuple) else []
    wanted = names.split()
    return given[: len(wanted)] + [op.kwargs.get(name) for name in wanted[len(given) :]]


def _factors(op: Op) -> tuple[int | None, int | None]:
    """Return the two factors of a product."""
    names = "input batch1 batch2" if _target_name(op) == "baddbmm" else "input other"
    if _target_name(op) == "bmm":
        names = "input mat2"
    one, other = list(map(_ref, _named_operands(op, names)))[-2:]
    return one, other


def _grid(places: Tensor) -> list[int]:
    """Return the elements along the last dimension of the first row."""
    return places.reshape(-1, places.shape[-1])[0].tolist()


def _groups(places: Tensor, width: int) -> list[list[int]] | None:
    """Return the positions in the last dimension of a value, by head of so wide a projection.

    `places` has the depth of a head as its last dimension, and says for each element of the value
    which one of the projection it is. None if the positions differ from row to row, or if a head
    has several dimensions.
    """
    features = places % width
    varying = [
        dim
        for dim, size in enumerate(features.shape)
        if size > 1 and bool((features != features.narrow(dim, 0, 1)).any())
    ]
    depth = features.dim() - 1
    if not varying or len(varying) > 2 or (depth not in varying and features.shape[-1] != 1):
        return None
    table = features
    for dim in range(features.dim()):
        if dim not in varying and dim != depth:
            table = table.narrow(dim, 0, 1)
    if not bool((features == table).all()):
        return None
    flat = table.flatten().tolist()
    if len(set(flat)) != len(flat):
        return None
    rows = table.reshape(-1, features.shape[-1])
    return rows.tolist()


# Facets: the parts of values that have a meaning, as places to look at and to change.


@dataclass(frozen=True)
class Facet:
    """A part of the value of a node: some positions along one dimension, in equal groups.

    Attributes:
        name: "q", "k", "v" and "z" of an attention, z being what its heads return; "gate.i" and the
            like; "state.h", "state.c"; "router", "experts", "expert.0".
        path: path of the node, or of the parameter.
        scope: qualified name of the module whose code uses the part.
        dim: the dimension.
        index: for each group, such as a head or an expert, its positions; None for all positions.

    Example:
        >>> import torch, bendtrace as bt
        >>> q = bt.workflows.Facet("q", "qkv", "", -1, ((0, 1), (2, 3)))
        >>> q.value(torch.arange(6.0)[None]), q.part(1).slice
        (tensor([[[0., 1.],
                 [2., 3.]]]), (Ellipsis, slice(2, 4, None)))
    """

    name: str
    path: str
    scope: str
    dim: int
    index: tuple[tuple[int, ...], ...] | None

    @property
    def parts(self) -> int:
        """The number of groups: of heads, or of experts."""
        return 1 if self.index is None else len(self.index)

    def part(self, *numbers: int) -> Facet:
        """Return the facet of some groups alone: the second head is `q.part(1)`.

        Args:
            *numbers: groups, counted from 0.

        Raises:
            InputError: there is no such group.
        """
        groups = self.index
        if groups is None or not all(-len(groups) <= number < len(groups) for number in numbers):
            raise InputError(f"{self.name} at {self.path!r} has {self.parts} parts, not {numbers}")
        return replace(self, index=tuple(groups[number] for number in numbers))

    @property
    def slice(self) -> Any:
        """The part as an index of the whole value, as patches take it: `slice=facet.slice`."""
        if self.index is None:
            return ...
        flat = [position for group in self.index for position in group]
        start, stop = flat[0], flat[-1] + 1
        where: Any = slice(start, stop) if flat == list(range(start, stop)) else flat
        if self.dim >= 0:
            return (*[slice(None)] * self.dim, where)
        return (..., where, *[slice(None)] * (-1 - self.dim))

    def value(self, saved: Any) -> Any:
        """Return the part of a value.

        Args:
            saved: the value of the node, or what contains it by path or by layer: the result of
                `get_activations`, or a trace that saved it.

        Returns:
            The part. Instead of the dimension it has two, for the groups and for the positions in
            one, if there are several groups. Gradients pass through it.

        Raises:
            InputError: the value is not there, or is too small.
        """
        return self._select(self._whole(saved, "tensor_contents"))

    def gradient(self, trace: Trace) -> Any:
        """Return the part of the gradient that a trace saved (`save_gradients=True`).

        Args:
            trace: the trace, after the backward pass.

        Raises:
            InputError: there is no gradient.
        """
        return self._select(self._whole(trace, "grad_contents"))

    def edited(self, whole: Tensor, new: Any) -> Tensor:
        """Return a copy of the value of the node with another part.

        With `interject`: `bended.interject(q.path, lambda x: q.edited(x, f(q.value(x))))`.

        Args:
            whole: the value of the node.
            new: the new part, of the shape that `value` returns, or what broadcasts to it.

        Raises:
            InputError: the value is too small.
        """
        part = self._select(whole)
        given = torch.as_tensor(new, dtype=whole.dtype, device=whole.device).expand(part.shape)
        if self.index is None:
            return given.clone()
        if self.parts > 1:
            dim = self.dim if self.dim >= 0 else whole.dim() + self.dim
            given = given.flatten(dim, dim + 1)
        made = whole.clone()
        made[self.slice] = given
        return made

    def _whole(self, saved: Any, field: str) -> Tensor:
        if isinstance(saved, Trace):
            entry = next((one for one in saved.entries if one.node_path == self.path), None)
            try:
                found = None if entry is None else getattr(entry, field)
            except (LookupError, ValueError) as error:
                raise InputError(f"the trace has not saved {self.path!r}: {error}") from error
        elif isinstance(saved, Mapping):
            if self.path not in saved:
                raise InputError(f"there is no {self.path!r} among these values: {list(saved)}")
            found = saved[self.path]
        else:
            found = saved
        if not isinstance(found, Tensor):
            raise InputError(f"{self.path!r} has no tensor here, but {found!r}")
        return found

    def _select(self, whole: Tensor) -> Tensor:
        if self.index is None:
            return whole
        last = max(map(max, self.index))
        dim = self.dim if self.dim >= 0 else whole.dim() + self.dim
        if not 0 <= dim < whole.dim() or whole.shape[dim] <= last:
            raise InputError(
                f"{self.name} reaches position {last} of dimension {self.dim} at {self.path!r}, "
                f"and this value has shape {tuple(whole.shape)}"
            )
        part: Tensor = whole[self.slice]
        if self.parts > 1:
            part = part.unflatten(dim, (self.parts, len(self.index[0])))
        return part

    def __repr__(self) -> str:
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return f"<facet {self.name} of {self.path or '<root>'}{parts}>"


class Facets(tuple[Facet, ...]):
    """The facets of a run, in order.

    Example:
        >>> import torch, bendtrace as bt
        >>> trace = bt.trace(torch.nn.LSTMCell(2, 3), torch.ones(1, 2))
        >>> bt.workflows.facets(trace).named("gate.f")
        <facet gate.f of weight_ih>
        <facet gate.f of weight_hh>
        <facet gate.f of bias_ih>
        <facet gate.f of bias_hh>
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no facets"

    def named(self, name: str, scope: str | None = None) -> Facets:
        """Return the facets with a name.

        Args:
            name: the name: "q", "gate.i", ...; "gate" stands for all gates.
            scope: qualified name of a module: only those in it.
        """
        return Facets(
            facet
            for facet in self
            if (facet.name == name or facet.name.startswith(f"{name}."))
            and (scope is None or f"{facet.scope}.".startswith(f"{scope}."))
        )
