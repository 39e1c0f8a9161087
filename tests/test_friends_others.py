"""Packed sequences, graphs, diffusion, and boxes whose number depends on the data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bendtrace as bt
from tests.promise import assert_promise, bits, outcome
from tests.shares import some
from tools.hub.others import Detector, Graphs, Packed, Sampler, UNet, suppress
from tools.hub.steps import (
    Call,
    assert_changed_as_by_a_hook,
    assert_logged_and_drawn,
    assert_looked_at,
    assert_trains_alike,
)

# Each case takes seconds: the README's command leaves them out.
pytestmark = pytest.mark.more


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair(make: Any) -> tuple[Any, bt.BendedModule]:
    torch.manual_seed(0)
    eager = make().eval()
    torch.manual_seed(0)
    return eager, bt.BendedModule(make().eval())


# Recurrent networks with packed sequences


def texts(lengths: list[int], seed: int = 0) -> Call:
    def make() -> Any:
        tokens = torch.randint(1, 20, (len(lengths), max(lengths)), generator=seeded(seed))
        sizes = torch.tensor(lengths)
        tokens[torch.arange(max(lengths))[None] >= sizes[:, None]] = 0
        return (tokens, sizes), {}

    return make


TEXTS = [
    texts([5, 3, 7]), texts([5, 3, 7], 1), texts([7, 1, 2], 2), texts([2, 2]), texts([4]),
    texts([1, 6, 6, 3], 3), texts([5, 3, 7], 4),
]  # fmt: skip
KINDS = [("LSTM", True), ("LSTM", False), ("GRU", True), ("RNN", False)]


@pytest.mark.more
@pytest.mark.parametrize(("kind", "both"), some(KINDS, 3))
def test_packed_sequences_of_any_lengths(kind: str, both: bool) -> None:
    def make() -> nn.Module:
        return Packed(kind, both)

    for training in (False, True):
        bended = assert_promise(lambda: make().train(training), TEXTS)  # noqa: B023
        assert bended.stats.replays
    assert_trains_alike(make, TEXTS)
    assert_logged_and_drawn(lambda: make().eval(), TEXTS[0])
    eager, bended = pair(make)
    assert_looked_at(bended, eager, TEXTS)
    for where, change in (
        ("embedding", lambda value: value.flip(-1)),
        ("head", lambda value: value * 2),
        ("rnn", lambda value: (value[0]._replace(data=value[0].data * 0.5), value[1])),
    ):
        assert_changed_as_by_a_hook(bended, eager, where, change, TEXTS)


def test_lengths_that_do_not_fit_raise_what_the_model_raises() -> None:
    def wrong(lengths: list[int]) -> Call:
        return lambda: ((texts([5, 3])()[0][0], torch.tensor(lengths)), {})

    calls = [texts([5, 3]), wrong([5, 0]), wrong([6, 3]), wrong([5, 3, 2]), texts([5, 3], 1)]
    bended = assert_promise(lambda: Packed().eval(), calls)
    assert bended.stats.replays >= 1


# Graphs


def graph(nodes: int, edges: int, graphs: int = 1, seed: int = 0) -> Call:
    def make() -> Any:
        generator = seeded(seed)
        x = torch.randn(nodes, 4, generator=generator)
        ends = torch.randint(0, nodes, (2, edges), generator=generator)
        batch = torch.arange(nodes) * graphs // nodes
        return (x, ends, batch), {}

    return make


GRAPHS = [
    graph(6, 9), graph(6, 14, seed=1), graph(9, 5, 2, seed=2), graph(6, 0, seed=3),
    graph(4, 1, seed=4), graph(12, 40, 3, seed=5), graph(5, 0, 2, seed=6), graph(6, 9, seed=7),
]  # fmt: skip


@pytest.mark.more
def test_graphs_with_any_number_of_edges() -> None:
    for training in (False, True):
        bended = assert_promise(lambda: Graphs().train(training), GRAPHS)  # noqa: B023
        assert bended.stats.replays >= 2, bended.last_mismatch
        assert bended.stats.live == 0
    assert "edges.numel() == 0" in str(bended.tree)
    bended = assert_trains_alike(Graphs, GRAPHS)
    assert bended.stats.live == 0


@pytest.mark.more
def test_messages_of_a_graph_are_logged_and_changed() -> None:
    for call in (GRAPHS[0], GRAPHS[3]):
        assert_logged_and_drawn(lambda: Graphs().eval(), call)
    eager, bended = pair(Graphs)
    assert_looked_at(bended, eager, GRAPHS)
    for where in ("convs.1", "convs.2.score", "norm"):
        assert_changed_as_by_a_hook(bended, eager, where, lambda value: value * 0 + 1, GRAPHS)


def test_the_attention_along_edges_is_cut_as_by_hand() -> None:
    eager, bended = pair(Graphs)

    def by_hand(x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        """The model with its last layer written out, without messages from node 0."""
        if edges.numel() == 0:
            edges = torch.arange(x.shape[0]).expand(2, -1)
        source, target = edges
        x = F.relu(eager.norm(eager.convs[0](x, edges)))
        x = F.relu(eager.convs[1](x, edges))
        conv = eager.convs[2]
        h = conv.lin(x)
        messages = h[source]
        scores = F.leaky_relu(conv.score(torch.cat([messages, h[target]], -1))).squeeze(-1)
        most = torch.full((x.shape[0],), -1e9).scatter_reduce(0, target, scores, "amax")
        weights = (scores - most[target]).exp()
        total = torch.zeros(x.shape[0]).scatter_add_(0, target, weights)
        weights = weights / total[target].clamp(min=1e-9)
        weights = weights.masked_fill(source == 0, 0.0)
        x = F.relu(
            conv.own(x) + torch.zeros_like(h).index_add_(0, target, weights[:, None] * messages)
        )
        graphs = int(batch.max()) + 1
        sums = torch.zeros(graphs, 6).index_add_(0, batch, x)
        counts = torch.bincount(batch, minlength=graphs).clamp(min=1)
        return eager.head(sums / counts.unsqueeze(-1))

    for call in GRAPHS:
        bended(*call()[0])
    mine = {"source": GRAPHS[1]()[0][1][0]}
    with bended.interject("convs_2.div", lambda value: value.masked_fill(mine["source"] == 0, 0)):
        for _ in range(2):
            for call in GRAPHS:
                args, _ = call()
                ends = args[1] if args[1].numel() else torch.arange(len(args[0])).expand(2, -1)
                mine["source"] = ends[0]
                assert bits(bended(*args)) == bits(by_hand(*args))


# Diffusion


def step_of(batch: int, size: int, time: list[int], seed: int = 0) -> Call:
    def make() -> Any:
        return (torch.randn(batch, 3, size, size, generator=seeded(seed)), torch.tensor(time)), {}

    return make


STEPS = [
    step_of(2, 8, [1, 5]), step_of(2, 8, [9, 0], 1), step_of(1, 12, [3], 2),
    step_of(3, 16, [1, 2, 3], 3), step_of(2, 8, [4, 4], 4),
]  # fmt: skip


@pytest.mark.more
def test_a_step_of_diffusion_at_any_size() -> None:
    for training in (False, True):
        bended = assert_promise(lambda: UNet().train(training), STEPS)  # noqa: B023
        assert bended.stats.replays >= 3
        assert bended.stats.live == 0
    assert_trains_alike(UNet, STEPS)
    assert_logged_and_drawn(lambda: UNet().eval(), STEPS[0])
    eager, bended = pair(UNet)
    assert_looked_at(bended, eager, STEPS)
    for where in ("down.1", "attention", "time.2"):
        assert_changed_as_by_a_hook(bended, eager, where, lambda value: value * -1, STEPS)


def drawing(shape: tuple[int, ...], steps: int = 5, threshold: float = 3.0) -> Call:
    return lambda: ((shape,), {"steps": steps, "threshold": threshold})


# Whether an image has to be clamped depends on what was drawn.
DRAWINGS = [
    drawing((1, 3, 8, 8)), drawing((1, 3, 8, 8)), drawing((2, 3, 8, 8)),
    drawing((1, 3, 8, 8), 3), drawing((1, 3, 8, 8), threshold=0.5), drawing((1, 3, 8, 8)),
]  # fmt: skip


@pytest.mark.more
def test_a_sampler_draws_what_eager_draws() -> None:
    with torch.no_grad():
        bended = assert_promise(lambda: Sampler().eval(), DRAWINGS)
    assert bended.stats.live == 0
    assert bended.stats.replays >= 2
    assert "clean.abs().max() > threshold" in str(bended.tree)
    assert_logged_and_drawn(lambda: Sampler().eval(), DRAWINGS[0])
    eager, bended = pair(Sampler)
    assert_looked_at(bended, eager, DRAWINGS)


@pytest.mark.more
def test_single_steps_of_a_sampler_can_be_changed() -> None:
    """In step 2 of 5 the noise that the network sees is another."""
    eager, bended = pair(Sampler)
    count = [0]

    def third(module: Any, args: Any, out: Tensor) -> Tensor | None:
        count[0] += 1
        return out + 0.25 if count[0] == 3 else None

    hook = eager.unet.register_forward_hook(third)
    wanted = []
    for seed in range(3):
        count[0] = 0
        wanted.append(outcome(eager, DRAWINGS[0](), seed))
    hook.remove()
    with bended.interject("unet", lambda value: value + 0.25, passes=[2]) as handle:
        for _ in range(2):
            assert [outcome(bended, DRAWINGS[0](), seed) for seed in range(3)] == wanted
    assert handle.report().rows[0].passes == {2: 6}
    assert outcome(bended, DRAWINGS[0](), 0) == outcome(eager, DRAWINGS[0](), 0) != wanted[0]


@pytest.mark.more
def test_steering_a_sampler_with_gradients() -> None:
    eager, bended = pair(Sampler)
    steer = torch.zeros(1, 8, 1, 1, requires_grad=True)
    hook = eager.unet.middle.register_forward_hook(lambda module, args, out: out + steer)
    torch.manual_seed(4)
    (wanted,) = torch.autograd.grad(eager((1, 3, 8, 8)).square().sum(), steer)
    hook.remove()
    with bended.interject("unet.middle", lambda value: value + steer):
        for _ in range(2):
            torch.manual_seed(4)
            (given,) = torch.autograd.grad(bended((1, 3, 8, 8)).square().sum(), steer)
            assert bits(given) == bits(wanted)


# Detection


def images(batch: int, size: int, seed: int = 0, scale: float = 1.0) -> Call:
    return lambda: ((scale * torch.randn(batch, 3, size, size, generator=seeded(seed)),), {})


def with_targets(batch: int, counts: list[int], seed: int = 0) -> Call:
    def make() -> Any:
        generator = seeded(seed)
        low = [3 * torch.rand(count, 2, generator=generator) for count in counts]
        boxes = [torch.cat([corner, corner + 1.5], -1) for corner in low]
        return (torch.randn(batch, 3, 16, 16, generator=generator), boxes), {}

    return make


IMAGES = [
    images(1, 16), images(1, 16, 1), images(2, 16, 2), images(1, 24, 3), images(1, 16, 4, 0.0),
    images(1, 16, 5, 6.0), images(1, 16),
]  # fmt: skip
TARGETS = [
    with_targets(2, [1, 0]), with_targets(2, [2, 1], 1), with_targets(2, [0, 0], 2),
    with_targets(1, [3], 3), with_targets(2, [2, 1], 4),
]  # fmt: skip


@pytest.mark.more
def test_as_many_boxes_as_there_are() -> None:
    with torch.no_grad():
        bended = assert_promise(lambda: Detector().eval(), IMAGES * 2)
    assert bended.stats.live == 0
    # One path is recorded once more, since the numbers of boxes differ.
    assert bended.stats.replays >= len(IMAGES) - 1
    counts = {len(found["boxes"]) for call in IMAGES for found in bended(*call()[0])}
    assert len(counts) >= 3
    assert_logged_and_drawn(lambda: Detector().eval(), IMAGES[0])
    eager, bended = pair(Detector)
    assert_looked_at(bended, eager, IMAGES)


def test_a_detector_is_trained_with_any_number_of_boxes() -> None:
    bended = assert_trains_alike(Detector, TARGETS)
    assert bended.stats.live == 0


@pytest.mark.more
@pytest.mark.parametrize("bias", [-1.0, 0.3, 3.0])
def test_more_and_fewer_boxes_than_the_model_found(bias: float) -> None:
    """Scores are changed in front of the threshold, and so how often the suppression loops."""
    eager, bended = pair(Detector)

    def sharpened(value: Tensor) -> Tensor:
        return value * (1 + bias)

    plain = [outcome(eager, call(), 0)[0] for call in IMAGES]
    assert_changed_as_by_a_hook(bended, eager, "classes", sharpened, IMAGES)
    assert [outcome(bended, call(), 0)[0] for call in IMAGES] == plain


def test_suppression_is_that_of_a_plain_loop_over_pairs() -> None:
    """The helper itself, so that the tests above have something to look at."""
    generator = seeded(0)
    corner = 4 * torch.rand(20, 2, generator=generator)
    boxes = torch.cat([corner, corner + 1 + torch.rand(20, 2, generator=generator)], -1)
    scores = torch.rand(20, generator=generator)
    kept: list[int] = []
    for index in scores.argsort(descending=True).tolist():
        clear = True
        for other in kept:
            a, b = boxes[index].tolist(), boxes[other].tolist()
            wide = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
            tall = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
            union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - wide * tall
            clear = clear and wide * tall / union <= 0.3
        if clear:
            kept.append(index)
    assert bt.BendedModule(suppress)(boxes, scores, 0.3) == suppress(boxes, scores, 0.3) == kept
