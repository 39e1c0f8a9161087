"""Blocks under `torch.utils.checkpoint` without reentry: replayed, and done again as torch does."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn, set_checkpoint_early_stop

import bendtrace as bt
from bendtrace.errors import InterjectionError, NondeterminismError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.drop(self.down(torch.relu(self.up(x))))


class Gated(Block):
    """Asks for values and for sizes in the block, and lets go of what it asked about."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.down(torch.relu(self.up(x))))
        if y.shape[0] > 4:
            y = y * 2
        if y.mean() > 0.02:
            y = torch.tanh(y)
            for _ in range(3):
                y = y * 0.9
        else:
            y = y.exp()
        return self.norm(x) + y


class Looping(Block):
    def forward(self, x: Tensor) -> Tensor:
        rounds = 0
        while x.norm() > 4 and rounds < 5:
            x = self.drop(torch.sin(self.down(self.up(x))))
            rounds += 1
        return x


class Writing(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).mul_(0.5)
        y[:, 0] = 0
        z = y[:, :8].clone()
        z += x.detach()
        with torch.no_grad():
            scale = z.abs().mean()
        return self.drop(z) / scale


class Catching(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        try:
            y = y @ torch.eye(16 if x.sum() > 0 else 15)
        except RuntimeError:
            y = y.sin()
        return self.down(y)


class Printing(Block):
    def forward(self, x: Tensor) -> Tensor:
        print("mean", f"{float(x.detach().mean()):.3f}")
        return super().forward(x)


class Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(8) + torch.randn(1)


BLOCKS: dict[str, type[Block]] = {
    "plain": Block, "gated": Gated, "looping": Looping, "writing": Writing, "catching": Catching,
    "printing": Printing, "drawing": Drawing,
}  # fmt: skip


class Model(nn.Module):
    def __init__(self, block: type[Block], layers: int = 3, **settings: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if x.mean() > 0:
                x = x * 1.1
            x = checkpoint(block, x, use_reentrant=False, **self.settings)
        return x if x.sum() > 0 else x * 2


def stream(calls: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2 + i % 5, 8, generator=generator) * (1 + i % 3) for i in range(calls)]


def trained(
    model: Callable[..., Any], owner: nn.Module, x: Tensor, seed: int, backward: Any = None
) -> list[Tensor]:
    """Return all that a call and its backward pass give, and leave."""
    torch.manual_seed(seed)
    owner.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    if backward is None:
        out.square().sum().backward()
    else:
        backward(out, x, owner)
    grads = [p.grad.clone() for p in owner.parameters() if p.grad is not None]
    state = [value.clone() for value in owner.state_dict().values()]
    assert x.grad is not None
    return [out.detach(), x.grad, *grads, *state, torch.get_rng_state()]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for mine, its in zip(got, want, strict=True):
        assert torch.equal(mine, its) or (mine.isnan() & its.isnan()).any()


def assert_replayed(bended: bt.BendedModule[Any]) -> None:
    """Whether some calls are live because following them costs too much depends on the machine."""
    assert bended.stats.replays > 2
    assert not [reason for trace in bended.traces for reason in trace.why_live]


def pair(block: type[Block], **settings: Any) -> tuple[nn.Module, nn.Module, bt.BendedModule[Any]]:
    torch.manual_seed(0)
    model = Model(block, **settings)
    return copy.deepcopy(model), model, bt.BendedModule(model)


@pytest.mark.parametrize("name", BLOCKS)
def test_streams_are_replayed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    eager, model, bended = pair(BLOCKS[name])
    for seed, x in enumerate(stream(40)):
        want = trained(eager, eager, x, seed)
        said = capsys.readouterr().out
        assert_same(trained(bended, model, x, seed), want)
        assert capsys.readouterr().out == said
    assert_replayed(bended)


def twice(out: Tensor, x: Tensor, owner: nn.Module) -> None:
    loss = out.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def of_gradients(out: Tensor, x: Tensor, owner: nn.Module) -> None:
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    first.square().sum().backward()


def of_inputs(out: Tensor, x: Tensor, owner: nn.Module) -> None:
    out.square().sum().backward(inputs=[x])


@pytest.mark.parametrize("backward", [twice, of_gradients, of_inputs])
@pytest.mark.parametrize("block", [Block, Gated])
def test_each_way_of_going_back(block: type[Block], backward: Any) -> None:
    eager, model, bended = pair(block)
    for seed, x in enumerate(stream(12)):
        want = trained(eager, eager, x, seed, backward)
        assert_same(trained(bended, model, x, seed, backward), want)
    assert_replayed(bended)


@pytest.mark.parametrize(
    "settings",
    [
        {"preserve_rng_state": False},
        {"determinism_check": "none"},
        {"early_stop": False},
        {"debug": True},
    ],
    ids=str,
)
def test_settings(settings: dict[str, Any]) -> None:
    if settings == {"preserve_rng_state": False}:
        block: type[Block] = Writing  # a dropout draws other numbers the second time, as in eager
    else:
        block = Gated
    eager, model, bended = pair(block, **settings)
    for seed, x in enumerate(stream(12)):
        assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))
    assert_replayed(bended)


def test_early_stop_of_all_checkpoints_is_asked_in_each_call() -> None:
    eager, model, bended = pair(Drawing)
    for seed, x in enumerate(stream(12)):
        with set_checkpoint_early_stop(seed % 2 == 0):
            assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))
    assert bended.stats.replays


def test_under_autocast() -> None:
    eager, model, bended = pair(Gated)
    for seed, x in enumerate(stream(20)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            want = trained(eager, eager, x, seed)
            got = trained(bended, model, x, seed)
        assert_same(got, want)
    assert_replayed(bended)


def test_without_gradients_nothing_is_checkpointed() -> None:
    eager, _, bended = pair(Gated)
    with torch.no_grad():
        for seed, x in enumerate(stream(12)):
            torch.manual_seed(seed)
            want = eager(x)
            torch.manual_seed(seed)
            assert torch.equal(bended(x), want)
    assert_replayed(bended)
    assert not bended.traces[0]._recording.tape.blocks


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.times = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.times += 1
        self.seen.append(len(x))
        return super().forward(x)


class Nested(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False) * 2  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("block", "settings", "reason"),
    [
        (Counting, {}, "changes state outside of it"),
        (Nested, {}, "a block under saved_tensors_hooks"),
        (Block, {"context_fn": lambda: noop_context_fn()}, "a block under saved_tensors_hooks"),
    ],
    ids=["changes state", "nested", "contexts"],
)
def test_what_runs_live(block: type[Block], settings: dict[str, Any], reason: str) -> None:
    eager, model, bended = pair(block, **settings)
    for seed, x in enumerate(stream(4)):
        assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))
    assert bended.stats.live == 4
    assert reason in str(bended.traces[0].why_live)
    if block is Counting:
        for mine, its in zip(model.blocks, eager.blocks, strict=True):
            assert (mine.times, mine.seen) == (its.times, its.seen)


def test_a_side_that_changes_state_is_an_error_where_it_is_first_taken_in_a_replay() -> None:
    class Rarely(Counting):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 1e3:
                self.times += 1
            return Block.forward(self, x)

    eager, model, bended = pair(Rarely, layers=1)
    for seed, x in enumerate(stream(6)):
        assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))
    with pytest.raises(NondeterminismError, match="changes state outside of it, in a call"):
        trained(bended, model, torch.full((2, 8), 1e3), 0)


def test_an_error_in_a_block_leaves_torch_as_it_was() -> None:
    class Raising(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y @ torch.eye(8) if len(x) != 4 else y @ torch.eye(9)

    eager, model, bended = pair(Raising)
    for seed, x in enumerate(stream(20)):
        if len(x) == 4:
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                trained(eager, eager, x, seed)
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                trained(bended, model, x, seed)
            y = torch.ones(3, requires_grad=True)
            saved = y.exp().grad_fn
            assert saved is not None
            assert isinstance(saved._saved_result, Tensor)
        else:
            assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))


@pytest.mark.more
def test_memory_is_that_of_eager_with_checkpoints() -> None:
    """Of each block, only its input is alive between the passes."""

    def alive(model: Callable[..., Any], x: Tensor) -> int:
        gc.collect()
        before = {id(thing) for thing in gc.get_objects() if type(thing) is Tensor}
        out = model(x)
        gc.collect()
        things = [thing for thing in gc.get_objects() if type(thing) is Tensor]
        held = sum(t.nbytes for t in things if id(t) not in before)
        del things
        out.sum().backward()
        return held

    eager, _, bended = pair(Block)
    x = stream(1)[0].requires_grad_()
    for _ in range(3):
        bended(x).sum().backward()
    assert bended.stats.replays
    assert alive(bended, x) <= alive(eager, x)


def test_the_graph_lets_go_of_all() -> None:
    _, _, bended = pair(Gated)
    x = stream(1)[0].requires_grad_()
    for _ in range(3):
        out = bended(x)
        ref = weakref.ref(out)
        out.sum().backward()
        del out
        assert ref() is None


# With something inserted


def doubled(value: Tensor) -> Tensor:
    return value * 2 + 0.1


def native(model: nn.Module, path: str) -> None:
    """Put a hook that changes the output of a module: torch calls it again with the block."""
    model.get_submodule(path).register_forward_hook(lambda m, args, out: doubled(out))


@pytest.mark.parametrize("path", ["blocks.1", "blocks.0.up", "blocks.2.drop", ""])
@pytest.mark.parametrize("name", ["plain", "gated", "looping", "drawing"])
@pytest.mark.parametrize("known", [0, 8])
def test_what_is_inserted_is_done_again(name: str, path: str, known: int) -> None:
    eager, model, bended = pair(BLOCKS[name])
    for seed, x in enumerate(stream(known)):
        assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))
    native(eager, path)
    handle = bended.interject(path, doubled)
    for seed, x in enumerate(stream(30)):
        assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))
    assert_replayed(bended)
    handle.remove()


def test_an_op_inside_is_reached_and_an_observer_sees_it_once() -> None:
    eager, model, bended = pair(Gated)
    for block in eager.blocks:
        block.up.register_forward_hook(lambda m, args, out: out)
    seen: list[int] = []

    class Looks(bt.Interjection):
        observes = True

        def after(self, at: Any, given: Any, value: Any) -> None:
            seen.append(at.number)

    bended.interject("blocks.1.up", Looks())
    bended.interject("blocks.1.relu", torch.sigmoid)

    for block, place in zip(eager.blocks, range(3), strict=True):
        if place == 1:
            block.down.register_forward_pre_hook(lambda m, args: (torch.sigmoid(args[0]),))
    for seed, x in enumerate(stream(20)):
        assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))
    assert seen == [0] * 20
    assert_replayed(bended)


@pytest.mark.parametrize("kind", ["before", "around", "patch", "passes", "parameter"])
def test_kinds_of_insertions(kind: str, request: pytest.FixtureRequest) -> None:
    stack = ExitStack()
    request.addfinalizer(stack.close)
    eager, model, bended = pair(Gated)
    inner = eager.blocks[1].up

    class Before(bt.Interjection):
        def before(self, at: Any, given: Any) -> Any:
            return (given[0] * 3,)

    if kind == "before":
        inner.register_forward_pre_hook(lambda m, args: (args[0] * 3,))
        bended.interject("blocks.1.up", Before())
    elif kind == "around":
        inner.register_forward_hook(lambda m, args, out: m.forward(args[0] * 2) + out)

        class Around(bt.Interjection):
            def instead(self, at: Any, node: Any, given: Any) -> Any:
                out = node(*given)
                return at.module.forward(given[0] * 2) + out

        bended.interject("blocks.1.up", Around())
    elif kind == "patch":
        inner.register_forward_hook(lambda m, args, out: out + torch.ones(16))
        stack.enter_context(bended.patch({"blocks.1.up": [bt.patches.AddPatch(torch.ones(16))]}))
    elif kind == "passes":
        native(eager, "blocks.1.up")
        bended.interject("blocks.1.up", doubled, passes=[0])
        bended.interject("blocks.2.up", doubled, passes=[1])
    else:
        inner.register_forward_hook(
            lambda m, args, out: nn.functional.linear(args[0], m.weight * 2, m.bias)
        )
        bended.interject("blocks.1.up.weight", lambda weight: weight * 2)
    for seed, x in enumerate(stream(20)):
        assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))
    assert_replayed(bended)


def test_a_call_goes_on_in_python_where_another_kind_of_tensor_comes_back() -> None:
    """Behind a dropout, where the call cannot begin again."""

    def strided(value: Tensor) -> Tensor:
        doubled = value * 2
        return doubled if len(value) != 4 else doubled.t().contiguous().t()

    eager, model, bended = pair(Block, early_stop=False)
    eager.blocks[1].down.register_forward_hook(lambda m, args, out: strided(out))
    bended.interject("blocks.1.down", strided)
    for seed, x in enumerate(stream(20)):
        assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))


def test_gradients_inside_are_refused() -> None:
    _, _, bended = pair(Block)

    class Backward(bt.Interjection):
        def backward(self, at: Any, gradients: Any, outer: Any) -> Any:
            return None

    bended.interject("blocks.1.up", Backward())
    with pytest.raises(InterjectionError, match=r"inside torch\.utils\.checkpoint"):
        bended(stream(1)[0].requires_grad_())
    with torch.no_grad():
        bended(stream(1)[0])


def test_a_block_in_which_nothing_is_done() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            same = checkpoint(lambda y: y, x * 2, use_reentrant=False)
            return same + checkpoint(lambda y: y, torch.ones(4), use_reentrant=False)

    model = Model()
    bended = bt.BendedModule(model)
    for seed in range(3):
        x, mine = (torch.full((4,), float(seed), requires_grad=True) for _ in range(2))
        out, wanted = bended(x), model(mine)
        assert torch.equal(out, wanted)
        out.sum().backward()
        wanted.sum().backward()
        assert x.grad is not None
        assert mine.grad is not None
        assert torch.equal(x.grad, mine.grad)
    assert bended.stats.replays


class Rows(nn.Module):
    """Gives its blocks elements of results: rows, a chunk, a state of a recurrent layer."""

    def __init__(self, sine: Callable[[Tensor], Tensor] = torch.sin) -> None:
        super().__init__()
        self.rnn, self.sine = nn.LSTM(8, 4), sine

    def forward(self, x: Tensor) -> Tensor:
        out, (_, state) = self.rnn(x[:, None])
        found = [checkpoint(self.sine, row, use_reentrant=False) for row in x]
        first, second = out[:, 0].chunk(2, 1)
        found.append(checkpoint(lambda v: self.sine(v) * second, first, use_reentrant=False))
        found.append(checkpoint(lambda: self.sine(state), use_reentrant=False))
        return torch.cat([value.flatten() for value in found])


@pytest.mark.parametrize("known", [0, 2])
def test_something_inserted_in_blocks_on_elements_of_results(known: int) -> None:
    eager, model = Rows(), Rows()
    model.load_state_dict(eager.state_dict())
    bended = bt.BendedModule(model)
    for seed, x in enumerate(stream(known)):
        assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))
    eager.sine = lambda value: doubled(torch.sin(value))
    bended.interject(torch.sin, doubled)
    for seed, x in enumerate(stream(4)):
        assert_same(trained(bended, model, x, seed), trained(eager, eager, x, seed))
