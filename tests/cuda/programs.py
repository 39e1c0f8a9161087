"""Models of what there is on GPUs alone: casts, generators, streams, settings, memory, kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import bendtrace as bt
from tests.cuda.promising import Wrap, compared
from tests.cuda.rows import RIGHT, WRONG, Options, Row, without_cuda
from tests.promise import Inputs, assert_promise, bits

__all__ = ["PROGRAMS", "check", "names"]

Model = Callable[..., Any]
Step = Callable[[], object]
PROGRAMS: dict[str, Callable[[Options], Row]] = {}

_DEVICE = "cuda"
_seed = torch.cuda.manual_seed
_KEPT: list[Tensor] = []
_PARALLEL = nn.DataParallel(nn.Softmax(-1)) if torch.cuda.is_available() else nn.Softmax(-1)
_MUCH = 1 << 30  # bytes


def _x(seed: int = 0, *size: int, sign: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    drawn = torch.randn(size or (8, 16), generator=source, device="cpu")
    return (drawn.abs() * sign if sign else drawn).to(_DEVICE, dtype)


def _after(step: Step, *args: Any) -> Callable[[], Inputs]:
    """Inputs that are made after something else was done: once for each of two models."""

    def inputs() -> Inputs:
        step()
        return args, {}

    return inputs


def _plainly() -> None:
    """Do nothing before a call."""


def _several(*seeds: int, **options: Any) -> list[Callable[[], Inputs]]:
    return [lambda seed=seed: ((_x(seed, **options),), {}) for seed in seeds]


def program(
    *calls: Callable[[], Inputs],
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    replays: int = 1,
) -> Callable[[Model], Model]:
    """Add a model, or what makes one, with the inputs of its calls.

    Args:
        *calls: makes the inputs of each; by default two of one sign, one of the other, and again.
        mode: a context to call in.
        replays: how many calls must be replays at least.
    """
    given = calls or tuple(
        (lambda sign=sign: ((_x(1, sign=sign),), {})) for sign in (1.0, 1.0, -1.0, -1.0, 1.0)
    )

    def add(made: Model) -> Model:
        make: Callable[[], Model] = (
            (lambda: made().to(_DEVICE)) if isinstance(made, type) else (lambda: made)
        )
        name = made.__name__.strip("_").replace("_", " ")

        def check_it(options: Options) -> Row:
            def comparison(wrap: Wrap) -> dict[str, Any]:
                called = assert_promise(make, given, mode=mode, wrap=wrap)
                if not isinstance(called, bt.BendedModule):
                    return {}
                stats = called.stats
                said = f"{stats.replays} replays, not {replays}: {called.why_live}"
                assert stats.replays >= replays, said
                return {"replays": stats.replays, "live": stats.live}

            try:
                return compared(name, comparison)
            finally:
                _KEPT.clear()

        PROGRAMS[name] = check_it
        return made

    return add


def names(options: Options) -> list[str]:
    """Return the names of the programs."""
    return list(PROGRAMS)


def check(name: str, options: Options) -> Row:
    """Compare a model with its `BendedModule`, calls and gradients."""
    if not options.on_cuda:
        return without_cuda(name, "it is about one")
    return PROGRAMS[name](options)


# Casts and precision


@program()
class _autocast_in_forward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16 if x.sum() > 0 else torch.float16):
            y = self.layer(x)
        return self.last(y.float())


@program(mode=lambda: torch.autocast("cuda", torch.float16))
class _autocast_around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.softmax(self.layer(x), -1)
        return y * 2 if x.sum() > 0 else y - 1


@program(*_several(0, 0, 1, 2, dtype=torch.float16))
def _overflows(x: Tensor) -> Tensor:
    y = x * 6e4
    while torch.isinf(y).any():
        y = y / 2
        y = torch.where(torch.isinf(y), torch.zeros_like(y), y)
    return y


def _tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allowed


def _tf32_calls() -> list[Callable[[], Inputs]]:
    x = functools.partial(_x, 3, 256, 256)
    return [
        (lambda allowed=allowed: (_tf32(allowed), ((x(),), {}))[1])
        for allowed in (False, False, True, True, False)
    ]


@program(*_tf32_calls())
def _tf32_that_changes_between_calls(x: Tensor) -> Tensor:
    y = x @ x
    return y + 1 if y.sum() > 0 else y


@program(*_tf32_calls())
def _tf32_that_is_read(x: Tensor) -> Tensor:
    return x @ x * (2 if torch.backends.cuda.matmul.allow_tf32 else 3)


@program(*_several(0, 0, 1, 2), replays=0)
def _tf32_that_is_set(x: Tensor) -> Tensor:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    y = x.mT @ x
    torch.backends.cuda.matmul.allow_tf32 = before
    return y + x.mT @ x


# Random numbers


@program()
class _a_generator_of_its_own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator("cuda").manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, device=x.device, generator=self.generator)
        return x + noise if noise.sum() > x.sum() else x - noise


@program()
class _dropout_and_a_branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.layer(x))
        if y.sum().item() > 0:
            y = y + torch.randn_like(y)
        return self.drop(y)


@program(replays=0)
def _seeds_in_forward(x: Tensor) -> Tensor:
    torch.cuda.manual_seed(7)
    return x + torch.rand_like(x)


@program(replays=0)
def _seeds_by_another_name(x: Tensor) -> Tensor:
    _seed(7)
    return x + torch.rand_like(x)


@program(replays=0)
def _puts_the_generator_back(x: Tensor) -> Tensor:
    before = torch.cuda.get_rng_state()
    y = x + torch.rand_like(x)
    torch.cuda.set_rng_state(before)
    return y + torch.rand_like(x)


@program(replays=0)
def _forks_the_generators(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[x.device.index or 0]):
        y = x + torch.rand_like(x)
    return y + torch.rand_like(x)


@program(replays=0)
class _checkpoint_with_dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        y: Any = checkpoint(self.layer, x, use_reentrant=False)
        return y * 2 if x.sum() > 0 else y


# Kernels


def _heads(*seeds: int) -> list[Callable[[], Inputs]]:
    return [
        lambda seed=seed: ((_x(seed, 1, 2, 32, 32, dtype=torch.float16),), {}) for seed in seeds
    ]


@program(*_heads(0, 0, 1, 2), replays=0)
def _attention_with_a_kernel_of_choice(q: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if q.float().sum() > 0 else SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, q, q, is_causal=True)


@program(*_several(0, 0, 1, 2))
class _convolution_in_channels_last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = x[None, None].contiguous(memory_format=torch.channels_last)
        y = self.norm(self.layer(y))
        return y.relu() if y.is_contiguous(memory_format=torch.channels_last) else y


class _Doubles(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 * x.sign()


@program()
def _a_function_with_its_own_backward(x: Tensor) -> Any:
    y = _Doubles.apply(x)
    return y if x.sum() > 0 else y + 1


@program(*_several(0, 0, 1, 2))
def _adds_at_indices(x: Tensor) -> Tensor:
    places = (x[:, 0] * 3).long() % 8
    total = torch.zeros_like(x).index_add_(0, places, x)
    for place in places.unique().tolist():
        total[place] += 1
    return total


@program(*_several(0, 0, 1, 2), replays=0)  # flatten_parameters asks for addresses on a GPU
class _a_recurrent_network_of_cuDNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 8, 2, batch_first=True, dropout=0.2, bidirectional=True)

    def forward(self, x: Tensor) -> Any:
        self.layer.flatten_parameters()
        y, (hidden, _) = self.layer(x[None])
        return y * 2 if hidden.sum() > 0 else y


@program(*_heads(0, 0, 1, 2))
def _attention_with_dropout(q: Tensor) -> Tensor:
    y = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
    return y + 1 if y.float().mean() > 0 else y


@program(mode=lambda: torch.device("cuda"))
class _made_on_the_default_device(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.layer = layer.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x[None]) + torch.arange(16)
        return y if y.sum() > 0 else y + torch.ones(16)


@program()
def _data_parallel(x: Tensor) -> Any:
    return _PARALLEL(x) * (2 if x.sum() > 0 else 3)


# Devices


@program(*_several(0, 0, 1, 2))
def _to_the_cpu_and_back(x: Tensor) -> Tensor:
    host = x.cpu()
    order = host.argsort(0)
    return x[order[:, 0]] + torch.arange(8)[:, None].to(x.device) * (host[0, 0].item() > 0)


@program(*_several(0, 0, 1, 2))
def _pinned_memory(x: Tensor) -> Any:
    host = x.cpu().pin_memory()
    return host.to(x.device, non_blocking=True) * 2, host.is_pinned()


@program(*_several(0, 0, 1, 2))
def _asks_what_there_is(x: Tensor) -> Tensor:
    if torch.cuda.is_available() and x.is_cuda and x.device.index == torch.cuda.current_device():
        x = x * torch.cuda.device_count()
    major, _ = torch.cuda.get_device_capability(x.device)
    return x + major + torch.cuda.get_device_properties(x.device).multi_processor_count


@program(*_several(0, 0, 1, 2), replays=0)
def _legacy_constructors(x: Tensor) -> Any:
    y = torch.cuda.FloatTensor(2, 16).fill_(1.5)
    return y + x[torch.cuda.LongTensor([0, 2])], isinstance(x, torch.cuda.FloatTensor)


def _fill_memory(full: bool) -> None:
    _KEPT.clear()
    if full:
        _KEPT.append(torch.empty(2 * _MUCH, dtype=torch.uint8, device=_DEVICE))


@program(
    *[
        (lambda full=full: (_fill_memory(full), ((_x(0),), {}))[1])
        for full in (False, False, True, True, False)
    ],
    replays=0,
)
def _asks_how_much_memory_is_taken(x: Tensor) -> Tensor:
    return x * (2 if torch.cuda.memory_allocated() > _MUCH else 3)


@program(
    *[
        (lambda full=full: (_fill_memory(full), ((_x(0),), {}))[1])
        for full in (False, False, True, True, False)
    ],
    replays=0,
)
def _asks_for_statistics_of_memory(x: Tensor) -> Tensor:
    taken = torch.cuda.memory_stats()["allocated_bytes.all.current"]
    free, whole = torch.cuda.mem_get_info()
    return x * (2 if taken > _MUCH else 3) + (0 < free <= whole)


# Streams and waiting


@program(*_several(0, 0, 1, 2), replays=0)
def _waits_and_measures(x: Tensor) -> Tensor:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    y = x @ x.mT
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) >= 0
    return y


@program(*_several(0, 0, 1, 2), replays=0)
def _another_stream_in_forward(x: Tensor) -> Tensor:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x @ x.mT
    torch.cuda.current_stream().wait_stream(side)
    y.record_stream(torch.cuda.current_stream())
    return y + 1


@program(*_several(0, 0, 1, 2), replays=0)
def _marks_for_a_profiler(x: Tensor) -> Tensor:
    torch.cuda.nvtx.range_push("part")
    y = x * 2
    torch.cuda.nvtx.range_pop()
    torch.cuda.empty_cache()
    return y


@program(*_several(0, 0, 1, 2), replays=0)
def _handed_to_other_code(x: Tensor) -> Tensor:
    y = torch.from_dlpack(x)
    y.add_(1)
    return x + torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y))


# Programs that need more than calls


def _special(check_it: Callable[[], str]) -> Callable[[], str]:
    name = check_it.__name__.strip("_").replace("_", " ")

    def row(options: Options) -> Row:
        fault = check_it()
        return Row(name, WRONG if fault else RIGHT, fault)

    PROGRAMS[name] = row
    return check_it


def _gated() -> nn.Module:
    from tests.compiled.models import Gated

    torch.manual_seed(0)
    return Gated().to(_DEVICE)


def _unlike(pairs: Sequence[tuple[Any, Any]]) -> str:
    return "; ".join(
        f"call {n}: other bits" for n, (a, b) in enumerate(pairs) if bits(a) != bits(b)
    )


def _cast_between_calls(*casts: Any) -> str:
    """Call a model after each of some casts, twice, and its twin as well."""
    model, twin = _gated(), _gated()
    bended = bt.BendedModule(model)
    pairs = []
    for cast in casts:
        model.to(cast)
        twin.to(cast)
        pairs += [(bended(x), twin(x)) for x in [_x(0, 16, 8).to(cast)] * 2]
    return _unlike(pairs)


@_special
def _a_model_that_is_moved_between_calls() -> str:
    return _cast_between_calls("cuda", "cpu", "cuda")


@_special
def _a_model_that_changes_its_precision_between_calls() -> str:
    half, brain = torch.float16, torch.bfloat16
    return _cast_between_calls(torch.float32, half, brain, half, torch.float64)


@_special
def _many_calls_under_one_autocast() -> str:
    model, twin = _gated(), _gated()
    bended = bt.BendedModule(model)
    found: list[list[Any]] = []
    for call in (bended, twin):
        with torch.autocast("cuda", torch.bfloat16):
            outputs = [call(_x(seed, 16, 8)) for seed in (0, 0, 1, 2, 0)]
            sum(out.float().sum() for out in outputs).backward()
        found.append([*outputs, *(p.grad for p in call.parameters())])
    return _unlike(list(zip(*found, strict=True)))


def _captured(call: Model, x: Tensor) -> tuple[Any, Tensor]:
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            call(x)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        out = call(x)
    return graph, out


@_special
def _captured_in_a_CUDA_graph() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).to(_DEVICE).eval()
    bended, x = bt.BendedModule(model), _x(0)
    with torch.no_grad():
        captured = [_captured(call, x) for call in (bended, model)]
        if bended.stats.replays != 4:
            return f"the call in the graph is no replay: {bended.why_live}"
        pairs = []
        for seed in range(3):
            x.copy_(_x(seed))
            for graph, _ in captured:
                graph.replay()
            pairs.append(tuple(out.clone() for _, out in captured))
    return _unlike(pairs)


@_special
def _a_loop_of_training_with_a_scaler() -> str:
    losses = []
    for wrap in (bt.BendedModule, lambda model: model):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
        called = wrap(model.to(_DEVICE))
        optimizer = torch.optim.AdamW(called.parameters(), 1e-2, fused=True)
        scaler = torch.amp.GradScaler("cuda")
        seen = []
        for step in range(8):
            with torch.autocast("cuda", torch.float16):
                loss = called(_x(step)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(called.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append(loss.detach())
        losses.append([*seen, *(p.detach() for p in model.parameters())])
    return _unlike(list(zip(*losses, strict=True)))


@_special
def _patches_and_saves_on_the_device() -> str:
    model = _gated()
    bended, x = bt.BendedModule(model), _x(0, 16, 8)
    name = sorted(name for name, _ in model.named_modules() if name)[0]
    kept: list[Tensor] = []
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        kept.append(out)
        return out * 0.5

    def halve(out: Tensor) -> Tensor:
        seen.append(out)
        return out * 0.5

    faults = []
    for number in range(3):
        if bits(bended(x)) != bits(model(x)):
            faults.append(f"call {number}: other bits")
        handle = model.get_submodule(name).register_forward_hook(hook)
        wanted = model(x)
        handle.remove()
        with bended.interject(name, halve):
            given = bended(x)
        if bits(given) != bits(wanted) or bits(seen) != bits(kept):
            faults.append(f"call {number}: other bits with a patch at {name}")
    return "; ".join(faults)
