"""Backward hooks: they see the gradients that pass through one call of a module, and no others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import bendtrace as bt
from bendtrace.errors import InputError
from bendtrace.insert import native as station
from bendtrace.insert.leaves import all_tensors_in
from tests.hf_models import MODELS as HF_MODELS
from tests.hf_models import TinyModel
from tests.hooked import Function, Log, leaf, traces_of_hooks, values
from tests.promise import bits


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def manager() -> Iterator[bt.HookManager]:
    with bt.HookManager() as made:
        yield made
    assert not station._local.calls


def eager_gradients(model: nn.Module, call: Callable[[], Tensor]) -> dict[str, Any]:
    for parameter in model.parameters():
        parameter.grad = None
    call().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def full_hooks(model: nn.Module, call: Callable[[], Tensor]) -> list[tuple[str, Any, Any]]:
    """What torch's own backward hooks are given, where it can."""
    found: list[tuple[str, Any, Any]] = []
    handles = [
        module.register_full_backward_hook(lambda m, i, o, name=name: found.append((name, i, o)))
        for name, module in model.named_modules()
    ]
    call().backward()
    for handle in handles:
        handle.remove()
    return found


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


MODELS: list[Callable[[], nn.Module]] = [
    lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
    lambda: Residual(nn.Linear(4, 4), nn.Dropout(0.5).eval(), nn.Identity(), nn.Softmax(-1)),
    lambda: Residual(nn.Sequential(nn.LayerNorm(4), nn.ReLU()), nn.GELU()),
    lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
    lambda: nn.Sequential(nn.Unflatten(-1, (2, 2)), nn.Flatten(-2), nn.Linear(4, 4)),
]


@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_those_of_torchs_own_hooks(
    make: Callable[[], nn.Module], manager: bt.HookManager
) -> None:
    torch.manual_seed(0)
    model = make()
    x = leaf(2, 3, 4)

    def call() -> Tensor:
        return model(x * 1).pow(2).sum()

    wanted = full_hooks(model, call)
    assert len(wanted) >= 3
    plain = eager_gradients(model, call)
    found: list[tuple[str, Any, Any]] = []
    names = {name: module for name, module in model.named_modules()}
    manager.register_backward_hook(
        lambda m, i, o: found.append((manager.name_of(m), i, o)), **names
    )
    given = eager_gradients(model, call)
    assert [name for name, _, _ in found] == [name for name, _, _ in wanted]
    for (_, *ours), (_, *theirs) in zip(found, wanted, strict=True):
        for some, others in zip(ours, theirs, strict=True):
            # Torch counts positional arguments of any kind.
            torch.testing.assert_close(
                [g for g in some if g is not None], [g for g in others if g is not None]
            )
    for name, gradient in plain.items():
        torch.testing.assert_close(given[name], gradient)
    manager.remove_all_hooks()
    assert traces_of_hooks(model) == []
    assert bits(eager_gradients(model, call)) == bits(plain)


def pairs(x: Tensor) -> Tensor:
    """A complex tensor, of a real one of shape 4, 6."""
    return torch.view_as_complex((x * 2).view(4, 3, 2))


COMPUTED: dict[str, Callable[..., Any]] = {
    "a number": lambda x: x.sum(),
    "a slice": lambda x: (x * 2)[:, 1:3],
    "every second": lambda x: (x * 2)[:, ::2],
    "transposed": lambda x: (x * 2).t(),
    "the diagonal": lambda x: (x * 2).diagonal(),
    "strided": lambda x: (x * 2).as_strided((2, 2), (1, 3), 1),
    "as real": lambda x: torch.view_as_real(pairs(x)),
    "conjugated": lambda x: pairs(x).conj(),
    "the real part": lambda x: pairs(x).real,
    "the imaginary part": lambda x: pairs(x).imag,
    "of the input, conjugated": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj(),
    "of the input, a slice": lambda x: x[:, 1:3],
    "two": lambda x: ((x * 2)[:, :3], (x * 3)[:, 3:]),
    "the input and more": lambda x: (x, x * 2),
    "in place": lambda x: F.hardtanh(x, inplace=True),
    "of a view, in place": lambda x: F.hardtanh(x.view(-1), inplace=True),
    "of a part, in place": lambda x: x[:, 2:].mul_(x.detach()[:, 2:].clone()),
    "in place and transposed": lambda x: F.hardtanh_(x).mul_(2).t(),
}
# In-place changes of these are refused, by torch or by what it makes of the hooks' views.
UNCHANGEABLE: dict[str, Callable[..., Any]] = {
    "expanded": lambda x: (x * 2)[:1].expand(3, 6),
    "unfolded": lambda x: (x * 2).unfold(1, 3, 1),
    "the input, expanded": lambda x: x[:1].expand(3, 6),
    "unbound": lambda x: x.unsqueeze(0).unbind(1),
    "parts of one": lambda x: (lambda h: (h[:, :3], h[:, 3:]))(x * 2),
    "overlapping parts": lambda x: (lambda h: (h, h[:, :4], h.view(-1)))(x * 2),
    "the input and a part": lambda x: (x, x[0]),
}
LATER: dict[str, Callable[[Tensor], Tensor]] = {
    "used": lambda y: y * 1,
    "times 3": lambda y: y * 3,
    "changed in place": lambda y: y.mul_(3),
}


FOLLOWED = [
    (name, later)
    for name in [*COMPUTED, *UNCHANGEABLE]
    for later in LATER
    # What is refused with hooks or, as it was saved for the backward pass, without them.
    if later != "changed in place" or not ("in place" in name or name in UNCHANGEABLE)
]


@pytest.mark.parametrize(("name", "later"), FOLLOWED)
def test_the_gradients_of_inputs_follow_from_those_of_outputs(
    name: str, later: str, manager: bt.HookManager, log: Log
) -> None:
    function = {**COMPUTED, **UNCHANGEABLE}[name]
    module = Function(lambda self, x: function(x))
    manager.register_backward_hook(log.backward, module=module)

    def run(call: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, Any, list[Tensor]]:
        h = x * 1
        outputs = call(h)
        used = [LATER[later](output) for output in all_tensors_in(outputs)]
        torch.manual_seed(1)
        given = [torch.randn_like(output) for output in used]
        return all_tensors_in(outputs), used, given

    x = leaf(4, 6)
    _, used, given = run(module, x)
    torch.autograd.backward(used, given)
    grad_in, grad_out = log.gradients()
    # Without hooks, and the outputs cut off from what comes after.
    y = leaf(4, 6)
    outputs = all_tensors_in(function(y * 1))
    cut = [output.detach().requires_grad_() for output in outputs]
    wanted = torch.autograd.grad([LATER[later](part * 1) for part in cut], cut, given)
    torch.testing.assert_close(grad_out, wanted)
    torch.testing.assert_close(grad_in, torch.autograd.grad(outputs, [y], wanted))
    torch.testing.assert_close(x.grad, grad_in[0])


@pytest.mark.parametrize("name", UNCHANGEABLE)
def test_outputs_that_share_memory_are_not_to_be_changed_in_place(
    name: str, manager: bt.HookManager, log: Log
) -> None:
    module = Function(lambda self, x: UNCHANGEABLE[name](x))
    manager.register_backward_hook(log.backward, module=module)
    first = all_tensors_in(module(leaf(4, 6) * 1))[0]
    with pytest.raises(RuntimeError, match=r"being modified inplace|single memory location"):
        first.mul_(2)


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4)])
def test_a_relu_in_place_after_a_layer_and_hooked_itself(
    shape: tuple[int, ...], manager: bt.HookManager, log: Log
) -> None:
    # A linear layer gives a view for inputs of three dimensions, to which autograd is stricter.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    apart = copy.deepcopy(model)
    apart[1] = nn.ReLU()
    x, other = leaf(*shape), leaf(*shape)
    wanted = full_hooks(apart, lambda: apart(other).pow(2).sum())
    manager.register_backward_hook(log.backward, **dict(model.named_children()))
    model(x).pow(2).sum().backward()
    assert values([event[1:] for event in log.take()]) == values(wanted[:-1])  # all but the root
    assert bits([p.grad for p in model.parameters()]) == bits([p.grad for p in apart.parameters()])
    assert bits(x.grad) == bits(other.grad)


BEFORE_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "a tensor": lambda x: x * 1,
    "a view of one": lambda x: (x * 1)[1:],
    "a transposed one": lambda x: (x * 1).t(),
    "a linear layer's": lambda x: F.linear(x[None], torch.eye(3), torch.zeros(3)).squeeze(0),
}


@pytest.mark.parametrize("prepare", BEFORE_IN_PLACE.values(), ids=BEFORE_IN_PLACE)
def test_a_module_that_changes_its_input_in_place(
    prepare: Callable[[Tensor], Tensor], manager: bt.HookManager, log: Log
) -> None:
    def run(relu: nn.Module, x: Tensor) -> Tensor:
        h = prepare(x)
        y = relu(h)
        assert y is h
        return (y * 3 + h).sum()

    relu = nn.ReLU(inplace=True)
    x = leaf(4, 3)
    run(relu, x).backward()
    plain, x.grad = x.grad, None
    log.register(manager, relu=relu)
    run(relu, x).backward()
    assert bits(x.grad) == bits(plain)
    *_, (_, _, grad_in, grad_out) = log.take()
    h = prepare(leaf(4, 3))
    assert torch.equal(grad_out[0], torch.full_like(h, 4))
    assert torch.equal(grad_in[0], torch.where(h > 0, 4.0, 0.0))
    x.grad = None
    manager.register_backward_hook(lambda m, i, o: (i[0] * 0 + 7,), relu=relu)
    run(relu, x).backward()
    h = prepare(x)
    (wanted,) = torch.autograd.grad(h, x, torch.full_like(h, 7))
    assert bits(x.grad) == bits(wanted)


def test_a_module_that_changes_part_of_its_input_and_returns_something_else(
    manager: bt.HookManager, log: Log
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x[:, 0] = 0
        x.mul_(2)
        return x.sum()

    module = Function(forward)

    def run(x: Tensor) -> Tensor:
        h = x * 1
        out: Tensor = module(h)
        return out + h.pow(2).sum()

    x = leaf(2, 2)
    run(x).backward()
    plain, x.grad = x.grad, None
    manager.register_backward_hook(log.backward, module=module)
    run(x).backward()
    grad_in, grad_out = log.gradients()
    assert bits(x.grad) == bits(plain)
    assert bits(grad_in[0]) == bits(plain)
    assert grad_out[0].item() == 1


@pytest.mark.parametrize(
    "way", ["kept elsewhere", "given twice", "given in part before", "changed elsewhere"]
)
def test_in_place_changes_that_mix_gradients_up_are_refused(
    way: str, manager: bt.HookManager, log: Log
) -> None:
    def forward(self: Any, x: Tensor, other: Tensor | None = None) -> Tensor:
        if way == "given in part before":
            assert other is not None
            x, other = other, x
        if way == "kept elsewhere":
            other = self.kept
        if way == "changed elsewhere":
            self.kept.mul_(2)
        x.relu_()
        return x if other is None else x.sum() + other.sum()

    module = Function(forward)
    manager.register_backward_hook(log.backward, module=module)
    h = leaf(3) * 1
    module.kept = h
    with pytest.raises(
        bt.errors.InputError, match="'module' changes an input in place that it also uses in"
    ):
        module(*{"given twice": (h, h[:2]), "given in part before": (h[:2], h)}.get(way, (h,)))


def test_in_place_changes_that_torch_refuses_stay_refused(
    manager: bt.HookManager, log: Log
) -> None:
    relu = nn.ReLU(inplace=True)
    manager.register_backward_hook(log.backward, relu=relu)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        relu(leaf(3))
    with pytest.raises(RuntimeError, match="multiple views"):
        relu((leaf(4) * 1).chunk(2)[0])


ALIASES: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "dropout in eval mode": lambda: nn.Dropout(0.5).eval(),
    "flatten": lambda: nn.Flatten(0, 1),
    "container": lambda: nn.Sequential(nn.Identity()),
    "part": lambda: Function(lambda self, x: x[:1]),
}


@pytest.mark.parametrize("make", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("prepare", [lambda x: x * 1, nn.Linear(3, 3)], ids=["tensor", "view"])
def test_an_output_that_is_the_input_is_told_from_it(
    make: Callable[[], nn.Module],
    prepare: Callable[[Tensor], Tensor],
    manager: bt.HookManager,
    log: Log,
) -> None:
    module = make()
    manager.register_backward_hook(log.backward, module=module)
    h = prepare(leaf(2, 3, 3))
    h.retain_grad()
    out = module(h)
    ((out * 2).sum() + (h * 5).sum()).backward()
    grad_in, grad_out = log.gradients()
    assert torch.equal(grad_out[0], torch.full_like(out, 2))
    through = torch.zeros_like(h)
    through[: len(h) if out.numel() == h.numel() else 1] = 2
    assert torch.equal(grad_in[0], through)
    assert h.grad is not None
    assert torch.equal(h.grad, through + 5)


@pytest.mark.parametrize("make", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("prepare", [lambda x: x * 1, nn.Linear(3, 3)], ids=["tensor", "view"])
@pytest.mark.parametrize("input_is", ["gone", "there", "used before", "used after"])
def test_an_output_that_is_the_input_can_be_changed_in_place(
    make: Callable[[], nn.Module],
    prepare: Callable[[Tensor], Tensor],
    input_is: str,
    manager: bt.HookManager,
    log: Log,
) -> None:
    # Hugging Face's ResNet does it: a block ends in an identity, and then comes `+=`.
    module = make()

    def run(x: Tensor) -> Tensor:
        h: Tensor | None = prepare(x)
        used = h * 7 if input_is == "used before" else None
        y = module(h)
        if input_is in ("gone", "used before"):
            h = None
        y *= 3
        out: Tensor = (y * 2).sum()
        if input_is == "used after":
            assert h is not None
            out = out + h.sum()
        return out if used is None else out + used.sum()

    x = leaf(2, 3, 3)
    run(x).backward()
    plain, x.grad = x.grad, None
    manager.register_backward_hook(log.backward, module=module)
    if input_is == "used after":  # the input does not learn how its storage was changed
        with pytest.raises(
            bt.errors.InputError, match="returns its input, or a view of it, which was"
        ):
            run(x).backward()
        return
    run(x).backward()
    assert bits(x.grad) == bits(plain)
    grad_in, grad_out = log.gradients()
    assert (grad_out[0] == 6).all()
    assert grad_in[0].shape == x.shape
    assert grad_in[0].sum() == grad_out[0].sum()


def test_a_leaf_is_not_changed_by_way_of_the_output(manager: bt.HookManager, log: Log) -> None:
    module = nn.Identity()
    manager.register_backward_hook(log.backward, module=module)
    x = leaf(3)
    out = module(x)
    with pytest.raises(RuntimeError, match="being modified inplace"):
        out *= 2
    loss = (out + x * 2).sum()
    with torch.no_grad():
        x += 1  # as optimizers do
    loss.backward()
    assert log.gradients()[0][0].tolist() == [1, 1, 1]
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3, 3]


def test_activations_kept_by_a_forward_hook_stay_the_models_own(
    manager: bt.HookManager,
) -> None:
    kept: dict[str, Tensor] = {}
    linear = nn.Linear(3, 3)

    def keep(module: Any, inputs: Any, outputs: Any) -> None:
        kept[module.name] = outputs[0]

    def run(x: Tensor) -> Tensor:
        out = linear(x)
        kept.setdefault("linear", out)
        F.relu(out, inplace=True)  # changes what was kept, too
        return kept.pop("linear").pow(2).sum()

    for shape in [(2, 3), (2, 3, 3)]:
        x = leaf(*shape)
        run(x).backward()
        plain, x.grad = x.grad, None
        manager.register_forward_hook(keep, linear=linear)
        manager.register_backward_hook(lambda m, i, o: None, linear=linear)
        run(x).backward()
        assert bits(x.grad) == bits(plain)
        manager.remove_all_hooks()


def test_values_that_were_saved_for_backward_can_still_be_used(manager: bt.HookManager) -> None:
    # A step is entered into the history of each output, as if it were changed in place.
    for function in (torch.exp, torch.tanh, lambda x: torch.softmax(x, -1).transpose(0, 1)):
        module = Function(lambda self, x, function=function: function(x))
        x = leaf(2, 3)
        (wanted,) = torch.autograd.grad(module(x).pow(2).sum(), x)
        manager.register_backward_hook(lambda m, i, o: None, module=module)
        out = module(x)
        version = out._version
        (given,) = torch.autograd.grad(out.pow(2).sum(), x, retain_graph=True)
        assert (bits(given), out._version) == (bits(wanted), version)
        out.mul_(2)
        if function in (torch.exp, torch.tanh):
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        manager.remove_all_hooks()


def test_a_view_learns_of_changes_to_what_it_is_a_view_of(
    manager: bt.HookManager, log: Log
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.kept = x * 2
        return self.kept.view(-1)

    module = Function(forward)
    manager.register_backward_hook(log.backward, module=module)
    x = leaf(2, 2)
    out = module(x)
    module.kept.mul_(3)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[6, 6], [6, 6]]
    assert log.gradients()[1][0].tolist() == [3] * 4


def test_memory_is_freed_as_without_hooks(manager: bt.HookManager) -> None:
    # None of these saves its input, or its output, for the backward pass.
    model = nn.Sequential(nn.Identity(), Function(lambda self, x: x + 1), nn.Flatten())
    manager.register_backward_hook(
        lambda m, i, o: None, identity=model[0], plus=model[1], flatten=model[2]
    )
    h = leaf(2, 3) * 1
    storages = [StorageWeakRef(h.untyped_storage())]
    for layer in model:
        h = layer(h)
        storages.append(StorageWeakRef(h.untyped_storage()))
    loss = (h * 2).sum()
    del h
    assert [storage.expired() for storage in storages] == [True] * 4
    loss.backward()


def test_an_output_that_others_are_computed_from_counts_what_uses_it_outside(
    manager: bt.HookManager, log: Log
) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = x * 2
        return h, None, {"three": h * 3, "again": (h,), "part": h[0]}

    module = Function(forward)
    manager.register_backward_hook(log.backward, module=module)
    out = module(leaf(3))
    assert out[2]["again"][0] is out[0]
    (out[0] + out[2]["three"] * 10 + out[2]["again"][0] * 2 + out[2]["part"] * 5).sum().backward()
    grad_in, grad_out = log.gradients()
    h, three, again, part = grad_out
    assert [h.tolist(), three.tolist(), again.tolist()] == [[3] * 3, [10] * 3, [3] * 3]
    assert part.item() == 15
    assert grad_in[0].tolist() == [(3 + 30 + 15) * 2, 66, 66]


def test_what_forward_hooks_compute_from_inputs_is_part_of_the_call(
    manager: bt.HookManager, log: Log
) -> None:
    module = Function(lambda self, x, more: x.relu_() + more[0])
    manager.register_forward_hook(lambda m, i, o: (o[0] + i[0] * 5 + i[1] * 7,), module=module)
    manager.register_backward_hook(log.backward, module=module)
    x, more = torch.ones(2, requires_grad=True), leaf(2)
    out = module(x * 1, [more])
    (out.sum() + (more * 100).sum()).backward()
    grad_in, _ = log.gradients()
    assert [gradient.tolist() for gradient in grad_in] == [[6, 6], [8, 8]]
    assert x.grad is not None
    assert more.grad is not None
    assert (x.grad.tolist(), more.grad.tolist()) == ([6, 6], [108, 108])


def test_places_without_a_gradient_are_none(manager: bt.HookManager, log: Log) -> None:
    def forward(self: Any, x: Tensor, ids: Tensor, unused: Tensor, detached: Tensor) -> Any:
        return x * 2, ids, x.detach(), x * 3

    module = Function(forward)
    manager.register_backward_hook(log.backward, module=module)
    out = module(leaf(2), torch.tensor([1]), leaf(2), leaf(2).detach())
    out[0].sum().backward()
    grad_in, grad_out = log.gradients()
    assert grad_in[1:] == (None, None, None)
    assert grad_in[0].tolist() == [2, 2]
    assert grad_out[1:] == (None, None, None)
    assert grad_out[0].tolist() == [1, 1]


def test_without_a_gradient_of_an_input_the_hook_is_called_all_the_same(
    manager: bt.HookManager, log: Log
) -> None:
    embedding = nn.Embedding(5, 3)
    several = Function(lambda self, x: (self.weight * x, self.weight + x, self.weight))
    manager.register_backward_hook(log.backward, embedding=embedding, several=several)
    embedding(torch.tensor([1, 2])).sum().backward()
    grad_in, grad_out = log.gradients()
    assert grad_in == (None,)
    assert torch.equal(grad_out[0], torch.ones(2, 3))
    for used in (1, 3):
        out = several(torch.ones(2))
        assert log.events == []
        sum(part.sum() for part in out[:used]).backward()
        grad_in, grad_out = log.gradients()
        assert grad_in == (None,)
        assert [g is not None for g in grad_out] == [True, used == 3, used == 3]
    assert torch.equal(grad_out[2], torch.ones(2)), "not what the weight gets by other ways"


def test_no_backward_hook_without_gradients(manager: bt.HookManager, log: Log) -> None:
    linear = nn.Linear(2, 2)
    manager.register_backward_hook(log.backward, linear=linear)
    with torch.no_grad():
        assert not linear(leaf(2)).requires_grad
    with torch.inference_mode():
        linear(torch.ones(2))
    linear.requires_grad_(False)
    assert not linear(torch.ones(2)).requires_grad
    assert log.events == []


def test_each_call_has_its_own_gradients(manager: bt.HookManager, log: Log) -> None:
    linear = nn.Linear(2, 2)
    manager.register_backward_hook(log.backward, linear=linear)
    x = leaf(2)
    once = linear(x)
    twice = linear(once)
    (once * 3 + twice * 5).sum().backward()
    (_, _, in_2, out_2), (_, _, in_1, out_1) = log.take()
    assert out_2[0].tolist() == [5, 5]
    torch.testing.assert_close(in_2[0], out_2[0] @ linear.weight)
    torch.testing.assert_close(out_1[0], in_2[0] + 3)
    torch.testing.assert_close(in_1[0], out_1[0] @ linear.weight)


def test_several_forwards_before_one_backward(manager: bt.HookManager, log: Log) -> None:
    linear = nn.Linear(2, 2)
    manager.register_backward_hook(log.backward, linear=linear)
    outs = [linear(leaf(2)) * factor for factor in (1, 2, 3)]
    outs[1].sum().backward()
    assert [event[3][0].tolist() for event in log.take()] == [[2, 2]]
    (outs[0] + outs[2]).sum().backward()
    assert sorted(event[3][0].tolist() for event in log.take()) == [[1, 1], [3, 3]]


def test_a_tensor_that_is_given_twice_has_the_gradient_of_both_places(
    manager: bt.HookManager, log: Log
) -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    manager.register_backward_hook(log.backward, attention=attention)
    x = leaf(2, 3, 4)
    attention(x, x, x)[0].pow(2).sum().backward()
    grad_in, grad_out = log.gradients()
    assert len(grad_in) == 3
    assert len(grad_out) == 2
    assert all(torch.equal(gradient, x.grad) for gradient in grad_in)
    assert grad_out[1] is None


def test_backward_passes_that_are_repeated(manager: bt.HookManager, log: Log) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    manager.register_backward_hook(log.backward, linear=model[0], tanh=model[1])
    out = model(leaf(2)).sum()
    out.backward(retain_graph=True)
    first = log.take()
    out.backward()
    assert bits(log.take()) == bits(first)
    assert [event[1] for event in first] == ["tanh", "linear"]


def test_gradients_of_gradients(manager: bt.HookManager, log: Log) -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(2, 2), nn.ReLU(inplace=True)).double()
    manager.register_backward_hook(log.backward, **dict(model.named_children()))
    x = leaf(2).detach().double().requires_grad_()
    assert torch.autograd.gradcheck(model, x)
    assert torch.autograd.gradgradcheck(model, x)
    log.take()
    (gradient,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    assert [event[1] for event in log.events] == ["2", "1", "0"]
    assert all(event[3][0].requires_grad for event in log.take())
    gradient.pow(2).sum().backward()
    assert x.grad is not None
    given, x.grad = x.grad, None
    manager.remove_all_hooks()
    (gradient,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    torch.testing.assert_close(given, x.grad)


def test_gradients_of_some_tensors_only(manager: bt.HookManager, log: Log) -> None:
    linear = nn.Linear(2, 2)
    manager.register_backward_hook(log.backward, linear=linear)
    kept: list[Tensor] = []
    manager.register_forward_hook(lambda m, i, o: kept.append(i[0]), linear=linear)
    x = leaf(2)
    out = linear(x)
    torch.autograd.grad(out.sum(), linear.weight, retain_graph=True)
    grad_in, grad_out = log.gradients()
    assert grad_in == (None,)
    assert grad_out[0].tolist() == [1, 1]
    torch.autograd.grad(out.sum(), [kept[0], linear.weight], retain_graph=True)
    assert log.gradients()[1][0].tolist() == [1, 1]
    torch.autograd.grad(out.sum(), out, retain_graph=True)
    assert log.events == [], "nothing went through the module"
    torch.autograd.grad(out.sum(), x)
    assert log.gradients()[0][0].shape == (2,)


def test_new_gradients_are_passed_on(manager: bt.HookManager, log: Log) -> None:
    module = Function(lambda self, x, n, y: x * 2 + y * 3)
    manager.register_backward_hook(
        lambda m, i, o: (i[0] * 10, None, i[2]), hook_fn_name="ten", module=module
    )
    manager.register_backward_hook(log.backward, module=module)
    x, y = leaf(2), leaf(2)
    module(x, torch.ones(1), y).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert (x.grad.tolist(), y.grad.tolist()) == ([20, 20], [3, 3])
    grad_in, _ = log.gradients()
    assert grad_in[0].tolist() == [20, 20]


def test_new_gradients_of_one_tensor_have_to_agree(manager: bt.HookManager) -> None:
    module = Function(lambda self, x, y: x * y)
    x = leaf(2)
    hook = manager.register_backward_hook(lambda m, i, o: (i[0] * 2, i[1] * 2), module=module)
    module(x, x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 4 * x)
    hook.deactivate()
    manager.register_backward_hook(lambda m, i, o: (i[0] * 2, i[1]), module=module)
    with pytest.raises(
        bt.errors.InputError, match=r"inputs \[0, 1\] of module 'module' are the same"
    ):
        module(x, x).sum().backward()


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "a tensor": (lambda i: i[0], "None, or the gradients of the inputs as a tuple of 2 tensors"),
    "too few": (lambda i: (i[0],), "it returned a tuple of 1 (Tensor)"),
    "another shape": (lambda i: (i[0][None], None), "of shape (1, 2) for input 0, which has"),
    "where none is": (
        lambda i: (i[0], i[0]),
        "another gradient for input 1, but that input passes no",
    ),
    "in place": (lambda i: i[0].mul_(2), "changed a gradient in place"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_backward_hook_must_not_do_is_named(name: str, manager: bt.HookManager) -> None:
    wrong, told = WRONG[name]

    module = Function(lambda self, x, y: x * y)
    manager.register_backward_hook(
        lambda m, grad_in, grad_out: wrong(grad_in), hook_fn_name="h", module=module
    )
    with pytest.raises(InputError) as error:
        module(leaf(2), torch.ones(2)).sum().backward()
    assert str(error.value).startswith("backward hook 'h' on module 'module' ")
    assert told in str(error.value)


def test_a_gradient_cannot_be_given_to_inputs_that_have_none(manager: bt.HookManager) -> None:
    linear = nn.Linear(2, 2)
    manager.register_backward_hook(lambda m, i, o: (torch.ones(2),), linear=linear)
    with pytest.raises(InputError, match="another gradient for input 0, but that input passes no"):
        linear(torch.ones(2)).sum().backward()


class Tagged(torch.Tensor):
    pass


def test_tensors_of_other_kinds(manager: bt.HookManager, log: Log) -> None:
    seen: list[Any] = []

    def forward(self: Any, x: Any) -> Any:
        seen.append((type(x), x.tag))
        return x * 2

    tagged = torch.randn(3).as_subclass(Tagged).requires_grad_()
    tagged.tag = "kept"  # type: ignore[attr-defined]
    module = Function(forward)
    manager.register_backward_hook(log.backward, module=module)
    module(tagged).sum().backward()
    assert seen == [(Tagged, "kept")]
    assert log.gradients()[0][0].tolist() == [2, 2, 2]

    module = Function(lambda self, x: torch.sparse.mm(x, torch.eye(2)).to_sparse())
    manager.register_backward_hook(log.backward, sparse=module)
    out = module(torch.eye(2).to_sparse().requires_grad_())
    torch.sparse.sum(out * 3).backward()
    grad_in, grad_out = log.gradients()
    assert grad_out[0].to_dense().tolist() == [[3, 0], [0, 3]]
    assert grad_in[0].to_dense().tolist() == [[3, 0], [0, 3]]

    nested = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged, requires_grad=True
    )
    linear = nn.Linear(3, 3)
    manager.register_backward_hook(log.backward, nested=linear)
    linear(nested).values().sum().backward()
    grad_in, grad_out = log.gradients()
    assert grad_out[0].values().shape == grad_in[0].values().shape == (6, 3)


def test_gradients_kept_inside_and_outside(manager: bt.HookManager, log: Log) -> None:
    kept: list[Tensor] = []

    def forward(self: Any, x: Tensor) -> Tensor:
        h = x * 2
        h.retain_grad()
        kept.append(h)
        return h

    module = Function(forward)
    manager.register_backward_hook(log.backward, module=module)
    out = module(leaf(2))
    assert out is kept[0]
    (out * 3).sum().backward()
    assert out.grad is not None
    assert out.grad.tolist() == [3, 3]


def test_packed_sequences_and_views_made_together(manager: bt.HookManager, log: Log) -> None:
    lstm = nn.LSTM(3, 4, batch_first=True)
    halves = Function(lambda self, x: (x * 1).chunk(2))
    manager.register_backward_hook(log.backward, lstm=lstm, halves=halves)
    packed = nn.utils.rnn.pack_padded_sequence(leaf(2, 5, 3), torch.tensor([5, 3]), True)
    out, (hidden, _) = lstm(packed)
    assert type(out) is type(packed)
    (out.data.sum() + hidden.sum()).backward()
    grad_in, grad_out = log.gradients()
    assert [None if g is None else tuple(g.shape) for g in grad_in] == [(8, 3), None]
    shapes = [None if g is None else tuple(g.shape) for g in grad_out]
    assert shapes == [(8, 4), None, (1, 2, 4), None]
    left, right = halves(leaf(4))
    (left * 2 + right * 3).sum().backward()
    grad_in, grad_out = log.gradients()
    assert grad_in[0].tolist() == [2, 2, 3, 3]
    assert [g.tolist() for g in grad_out] == [[2, 2], [3, 3]]


def test_an_output_that_was_there_before_the_call(manager: bt.HookManager, log: Log) -> None:
    module = Function(lambda self, x: self.kept)
    module.kept = leaf(2) * 2
    manager.register_backward_hook(log.backward, module=module)
    one, two = module(leaf(2)), module(leaf(2))
    (one * 3 + two * 5 + module.kept).sum().backward()
    assert sorted(event[3][0].tolist() for event in log.take()) == [[3, 3], [5, 5]]
    with pytest.raises(RuntimeError, match="being modified inplace"):
        one.mul_(2)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_activation_checkpoints(
    use_reentrant: bool, manager: bt.HookManager, log: Log
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    x = leaf(2)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    log.register(manager, linear=model[0])
    out = checkpoint(model, x, use_reentrant=use_reentrant)
    out.sum().backward()
    assert bits(x.grad) == bits(wanted)
    kinds = [kind for kind, _ in log.kinds]
    assert kinds == ["before", "after", "before", "after", "backward"]


@pytest.mark.more
@pytest.mark.parametrize(
    "model", [pytest.param(model, id=model.name) for model in HF_MODELS if model.name != "bert"]
)
def test_models_of_hugging_face_give_what_they_give(
    model: TinyModel, manager: bt.HookManager
) -> None:
    eager = model.make()

    def run() -> tuple[Any, Any]:
        eager.zero_grad()
        out = eager(**model.inputs())
        sum(t.pow(2).sum() for t in all_tensors_in(out) if t.requires_grad).backward()
        return out, {name: p.grad for name, p in eager.named_parameters()}

    torch.manual_seed(0)
    wanted, gradients = run()
    seen: list[Any] = []
    manager.register_backward_hook(
        lambda m, i, o: seen.append(manager.name_of(m)), **dict(eager.named_modules())
    )
    torch.manual_seed(0)
    given, gradients_with_hooks = run()
    assert [bits(t) for t in all_tensors_in(given)] == [bits(t) for t in all_tensors_in(wanted)]
    assert type(given) is type(wanted)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_with_hooks[name], gradient, rtol=1e-3, atol=1e-3)
    assert "" in seen
    assert len(set(seen)) > 10
    manager.remove_all_hooks()
    assert traces_of_hooks(eager) == []
