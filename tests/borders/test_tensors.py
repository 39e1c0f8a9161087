"""Tensors that are more than their values: other layouts, subclasses, storages, attributes."""

from __future__ import annotations

import copy
import functools
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import bendtrace as bt
from tests.borders.border import DEFAULT, Border, Case, Maker, Stateful, given
from tests.promise import bits, footprint

border = Border("The .grad attribute of a Tensor that is not a leaf")


@border.replays
def data_read(x: Tensor) -> Any:
    y = x * 2
    y.data.add_(1)
    return y + x.data * 3, x.data.requires_grad


@border.replays
def data_assigned(x: Tensor) -> Any:
    y = x.detach() * 2
    y.data = torch.ones(2, 2) * x.detach().sum()
    return y, y.shape[0]


@border.replays
def data_assigned_with_another_dtype(x: Tensor) -> Any:
    y = x.detach() * 2
    y.data = x.detach().double()
    return y * 2, y.dtype


@border.replays
class DataOfAParameter(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.fc.weight.data.clamp_(-0.1, 0.1)
        self.fc.bias.data = self.fc.bias.data * 0.5
        return self.fc(x)


@border.replays
def set_to_another_shape(x: Tensor) -> Any:
    y = torch.zeros(2)
    y.set_(x.detach() + 1)
    y.mul_(2)
    return y, y.shape


@border.replays
def set_to_one_of_the_same_shape(x: Tensor) -> Tensor:
    y = torch.zeros_like(x.detach())
    y.set_(x.detach() + 1)
    return y * 2


@border.live("swap_tensors", at="swap_tensors")
def swapped(x: Tensor) -> Tensor:
    first, second = x.detach() + 1, x.detach() * 2
    torch.utils.swap_tensors(first, second)
    return first - second * 3


@border.live("real", at="y.real")
def parts_of_complex_numbers_written(x: Tensor) -> Tensor:
    y = torch.complex(x.detach(), x.detach())
    y.real = x.detach() * 5
    y.imag.mul_(3)
    return y


@border.live("storage", at="untyped_storage")
def set_to_a_storage(x: Tensor) -> Tensor:
    y = torch.zeros(0).set_(x.detach().untyped_storage(), 0, (2, 2))
    return y * 2


@border.replays
def resized(x: Tensor) -> Any:
    y = x.detach().clone()
    y.resize_(2, 2)
    y.t_().unsqueeze_(0)
    return y, y.shape[1] * x


@border.replays
def strided(x: Tensor) -> Any:
    y = torch.as_strided(x.detach().clone(), (2, 2), (1, 2))
    return y * 2, y.stride(), y.is_contiguous(), x.t().contiguous().stride(0)


@border.replays
def detached_in_place(x: Tensor) -> Tensor:
    y = x * 2
    z = y.exp()
    z.detach_()
    return y * z


@border.replays
def requires_grad_switched(x: Tensor) -> Any:
    y = x.detach().clone().requires_grad_()
    z = x.detach().clone()
    z.requires_grad = True
    with torch.enable_grad():
        out = (y * z).sum()
    return out, y.requires_grad


@border.replays
def gradient_inside(x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad((y**3).sum(), y)
    return found + x


@border.replays
def gradient_kept_differentiable(x: Tensor) -> Any:
    with torch.enable_grad():
        y = x.clone() if x.requires_grad else x.clone().requires_grad_()
        (found,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        return found * 2


@border.replays
def backward_inside(x: Tensor) -> Any:
    y = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        (y.sin() * y).sum().backward()
    return y.grad * x, y.grad is None


@border.replays
class BackwardOfParametersInside(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.fc(x.detach()).pow(2).sum().backward()
        with torch.no_grad():
            self.fc.weight.sub_(self.fc.weight.grad, alpha=0.01)
        self.fc.zero_grad()
        return self.fc(x)


@border.replays
class GradientsAccumulatedInside(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            torch.autograd.backward(self.fc(x.detach()).sum())
        return self.fc(x) + self.fc.bias.grad


class OptimizerInside(Stateful):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.optimizer = kind(self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with torch.enable_grad():
            self.fc(x.detach()).pow(2).sum().backward()
        self.optimizer.step()
        return self.fc(x)


@border.either("", at="optimizer.", gradients=False)  # the first step makes its state
def an_optimizer_inside() -> nn.Module:
    return OptimizerInside(lambda p: torch.optim.SGD(p, 0.1, momentum=0.5))


@border.replays(graph=True)
def a_tensor_hook(x: Tensor) -> Tensor:
    y = x * 2
    if y.requires_grad:
        y.register_hook(lambda g: g * 3)
    return y.exp()


@border.replays
def a_tensor_hook_that_is_never_put(x: Tensor) -> Tensor:
    y = x.detach() * 2
    if y.requires_grad:
        y.register_hook(lambda g: g * 3)
    return y


@border.replays
def retained_gradients(x: Tensor) -> Tensor:
    y = x * 2
    if y.requires_grad:
        y.retain_grad()
    return y.exp()


@border.live("storage", at="copy.copy")
def a_clone_by_copy(x: Tensor) -> Any:
    y = copy.copy(x.detach())
    return x + y, y is x


@border.replays
def whether_there_is_a_gradient_function(x: Tensor) -> Any:
    y = x * 2 if x.sum() > 0 else x.detach()
    has = y.grad_fn is not None
    if y.grad_fn:
        y = y * 3
    return y if y.grad_fn is None or has else y - 1


@border.replays
def a_deep_copy(x: Tensor) -> Tensor:
    return x + copy.deepcopy(x.detach()) * 2


@border.replays
class ADeepCopyOfAModule(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        return copy.deepcopy(self.fc)(x)


@border.replays
def an_attribute_on_a_temporary(x: Tensor) -> Tensor:
    y = x * 2
    y.tag = 3
    return y * y.tag


@border.live("calls", at="calls", inputs=DEFAULT * 2)
class AnAttributeOnAParameter(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.fc.weight
        weight.calls = getattr(weight, "calls", 0) + 1
        return self.fc(x) * weight.calls


class AnAttributeReadFromAParameter(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.fc.weight.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.fc.weight.scale


border.replays(AnAttributeReadFromAParameter)


@border.replays
def weak_references(x: Tensor) -> Any:
    y = x * 2
    reference = weakref.ref(y)
    assert reference() is y
    z = reference() + 1
    return z


@border.replays
def out_arguments(x: Tensor) -> Any:
    y = torch.empty(0)
    with warnings.catch_warnings(), torch.no_grad():
        torch.add(x.detach(), 1, out=y)
        values, indices = torch.empty(0), torch.empty(0, dtype=torch.long)
        torch.max(x.detach(), 1, out=(values, indices))
        torch.stack([y, y], out=torch.empty(0))
    return x + y, values, indices


@border.replays
def views_written(x: Tensor) -> Any:
    y = x.clone()
    y[0] = 1
    y[:, 1:3] *= 2
    y[y > 1] = 0.5
    first, *_ = y.unbind(1)
    first = first.clone()
    first.zero_()
    y.t()[0].add_(3) if not y.requires_grad else None
    y.diagonal().fill_(9) if not y.requires_grad else None
    return y, first


@border.replays
def complex_numbers(x: Tensor) -> Any:
    z = torch.complex(x, x * 2)
    spectrum = torch.fft.rfft(x)
    return z.conj() * z, z.conj().is_conj(), z.imag.is_neg(), spectrum.angle(), z.conj().imag


@border.replays
def conjugate_views(x: Tensor) -> Any:
    z = torch.complex(x, x * 2).conj()
    negative = z.imag
    return (
        z.resolve_conj(),
        negative.resolve_neg() * 2,
        negative,
        torch.view_as_real(z.resolve_conj()),
    )


COMPLEX: list[Maker] = [
    given(torch.complex(torch.arange(3.0), torch.ones(3))),
    given(torch.complex(torch.arange(3.0), torch.ones(3)).conj()),
    given(torch.complex(torch.arange(4.0), -torch.ones(4))),
    given(torch.complex(torch.arange(3.0), torch.ones(3))),
]


@border.replays(inputs=COMPLEX * 2)
def given_conjugates(x: Tensor) -> Any:
    return x * 2, x.is_conj(), x.real + 1 if x.is_conj() else x.imag


SPARSE: list[Maker] = [
    lambda: ((torch.eye(3).to_sparse(),), {}),
    lambda: ((torch.ones(3, 3).triu().to_sparse() * 2,), {}),
    lambda: ((torch.eye(4).to_sparse(),), {}),
    lambda: ((torch.eye(3).to_sparse(),), {}),
]


def given_sparse(x: Tensor) -> Any:
    y = x.coalesce()
    return (x @ torch.ones(x.shape[1], 2), y.values() * 2, y.indices(), y._nnz(), x.is_sparse)


@border.replays
def sparse_inside(x: Tensor) -> Any:
    y = x.detach().relu().to_sparse()
    return y.to_dense() * 2, torch.sparse.mm(y, x.t()), torch.sparse.sum(y)


@border.replays
def sparse_from_parts(x: Tensor) -> Any:
    indices = torch.tensor([[0, 1], [1, 0]])
    y = torch.sparse_coo_tensor(indices, x[0, :2], (2, 2), check_invariants=False)
    return y.to_dense(), (y @ x[:2]) * 2


@border.replays
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def compressed_rows(x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = x.detach().relu().to_sparse_csr()
    return y @ x.t(), y.values() * 2, y.layout == torch.sparse_csr


@border.live("unknown origin")
def nested(x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = torch.nested.nested_tensor([x.detach()[0], x.detach()[1, :2]])
    return y.to_padded_tensor(0.0), (y * 2).unbind()[0]


@border.live("unknown origin")
def nested_and_jagged(x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = torch.nested.nested_tensor([x.detach()[:1], x.detach()[1:]], layout=torch.jagged)
    return (y * 2).values(), y.offsets()


@border.replays
def quantised(x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = torch.quantize_per_tensor(x.detach(), 0.1, 10, torch.quint8)
    return y.dequantize(), y.int_repr(), y.q_scale(), y.is_quantized


@border.replays
def meta(x: Tensor) -> Any:
    y = torch.empty(x.shape, device="meta")
    return (y @ y.t()).shape, x * y.shape[0], y.is_meta


META: list[Maker] = [lambda n=n: ((torch.empty(n, 4, device="meta"),), {}) for n in (3, 5, 3, 5)]


@border.replays
def small_dtypes(x: Tensor) -> Any:
    y = x.detach()
    return (
        y.half() * 2,
        y.bfloat16() + 1,
        y.to(torch.float8_e4m3fn).float(),
        y.to(torch.int8),
        y > 0,
    )


@border.replays
def named_tuples(x: Tensor) -> Any:
    y = x.detach()
    found = y.max(0)
    decomposed = torch.linalg.svd(y)
    q = torch.linalg.qr(y)
    return (
        found.values * 2,
        found,
        decomposed.S,
        q.R,
        torch.linalg.slogdet(y.t() @ y).logabsdet,
        found[0],
    )


@border.replays
def zero_dimensional(x: Tensor) -> Any:
    y = x.detach().sum()
    return y * torch.tensor(2), y.expand(3), x[torch.tensor(1)], x[y > 0]


class Logged(Tensor):
    """A subclass that changes what some functions do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if getattr(func, "__name__", "") == "mul":
            return out + 1000
        return out


class Wrapped(Tensor):
    """A wrapper subclass: its content is in another tensor."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"Wrapped({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain, named = tree_map(
            lambda v: v.inner if isinstance(v, Wrapped) else v, (args, kwargs or {})
        )
        out = func(*plain, **named)
        return tree_map(lambda v: Wrapped(v * 2) if isinstance(v, Tensor) else v, out)


class Marked(nn.Parameter):
    """A kind of parameter."""


class Duck:
    """No tensor, but torch functions take it."""

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.inner if isinstance(a, Duck) else a for a in args), **(kwargs or {})) * 5


@border.live("unknown origin")
def a_subclass_made_inside(x: Tensor) -> Any:
    y = x.detach().as_subclass(Logged)
    return (y * 2).as_subclass(Tensor), type(y * 2) is Logged


@border.live("unknown origin", gradients=False)
def a_wrapper_made_inside(x: Tensor) -> Tensor:
    y = Wrapped(x.detach()) + 1
    return y.inner * 2


@border.replays
def a_duck(x: Tensor) -> Tensor:
    return torch.add(Duck(x), 1) * 2


@border.replays
class AMarkedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = Marked(torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return x * self.w * (2 if isinstance(self.w, Marked) else 3), type(self.w).__name__


@border.live("unknown origin")
class ASubclassAsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4).as_subclass(Logged))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w).as_subclass(Tensor)


@border.replays
class ABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen += x.detach().sum()
        return x * self.seen, isinstance(self.seen, nn.Buffer)


@border.live("unknown origin")
def masked(x: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = torch.masked.masked_tensor(x.detach(), x.detach() > 0)
        return (y * 2).get_data() + 0, torch.masked.sum(x.detach(), mask=x.detach() > 0)


@border.live("dispatch mode", at="FakeTensorMode()")
def fake(x: Tensor) -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        y = torch.empty(4, 4) @ torch.empty(4, 2)
    return x * y.shape[1]


@border.replays
def packed_sequences(x: Tensor) -> Any:
    lengths = torch.tensor([4, 2, 1])
    packed = nn.utils.rnn.pack_padded_sequence(x[:3].t(), lengths)
    padded, back = nn.utils.rnn.pad_packed_sequence(packed)
    return padded * 2, back, packed.data, nn.utils.rnn.pad_sequence([x[0], x[1, :2]])


@border.replays
class PackedRecurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Any:
        y = x.view(len(x), 1, 4).expand(-1, 2, -1)
        packed = nn.utils.rnn.pack_padded_sequence(y, torch.tensor([len(x), 2]))
        out, (h, _) = self.rnn(packed)
        return nn.utils.rnn.pad_packed_sequence(out)[0], h


@border.replays
def lists_of_tensors_at_once(x: Tensor) -> Any:
    parts = [x.detach() * 2, x.detach() + 1]
    torch._foreach_add_(parts, 1)
    torch._foreach_mul_(parts, [2.0, 3.0])
    return parts, torch._foreach_norm(parts)


@border.replays
class VectorsOfParameters(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        vector = nn.utils.parameters_to_vector(self.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.5, self.parameters())
        return self.fc(x)


@border.replays
class InitialisedAnew(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        nn.init.normal_(self.fc.weight)
        nn.init.zeros_(self.fc.bias)
        return self.fc(x)


@border.replays
class GradientsClipped(Stateful):
    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            self.fc(x.detach()).sum().backward()
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        return self.fc.weight.grad * 2, norm


@border.live("grad_fn", at="grad_fn", graph=True)
def a_graph_that_is_looked_at(x: Tensor) -> Tensor:
    y = x * 2
    return y if y.grad_fn is None else y * len(y.grad_fn.next_functions)


@border.live("grad_fn|hook", at="register_multi_grad_hook", graph=True)
def a_hook_on_several(x: Tensor) -> Tensor:
    y, z = x * 2, x * 3
    if x.requires_grad:
        torch.autograd.graph.register_multi_grad_hook([y, z], lambda grads: None)
    return y + z


@border.replays
def versions(x: Tensor) -> Any:
    y = x.detach() * 1
    before = y._version
    y.add_(1)
    return y * (y._version - before), y._base is None, y[0]._base is y


def _subclassed(kind: str) -> list[Maker]:
    def one(seed: int, rows: int) -> Maker:
        def inputs() -> Any:
            x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed))
            return ((x.as_subclass(Logged) if kind == "logged" else Wrapped(x)),), {}

        return inputs

    return [one(*pair) for pair in [(0, 3), (1, 3), (2, 5), (0, 3), (2, 5)]]


def doubles_a_logged_one(x: Any) -> Any:
    y = x * 2
    return y.as_subclass(Tensor), type(y).__name__


def doubles_a_wrapped_one(x: Any) -> Any:
    y = x * 2
    return y.inner, type(y).__name__, y.shape[0]


def shapes(x: Tensor) -> Any:
    y = x @ torch.ones(4, 2, device="meta")
    return y.shape, y.device.type


def of_quantised(x: Tensor) -> Any:
    return x.dequantize() * 2, x.q_scale(), x.int_repr()


def of_nested(x: Tensor) -> Any:
    return (x * 2).to_padded_tensor(0.0), x.size(0)


def quantised_inputs() -> list[Maker]:
    def one(scale: float) -> Maker:
        def make() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return (torch.quantize_per_tensor(torch.ones(3), scale, 1, torch.quint8),), {}

        return make

    return [one(0.1), one(0.2), one(0.1)]


def nested_inputs() -> list[Maker]:
    def one(*lengths: int) -> Maker:
        def make() -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return (torch.nested.nested_tensor([torch.ones(n, 2) for n in lengths]),), {}

        return make

    return [one(1, 2), one(2, 3), one(1, 2, 3)]


OTHERS: dict[str, tuple[Any, list[Maker]]] = {
    "logged": (doubles_a_logged_one, _subclassed("logged")),
    "wrapped": (doubles_a_wrapped_one, _subclassed("wrapped")),
    "sparse": (given_sparse, SPARSE),
    "meta": (shapes, META),
    "quantised": (of_quantised, quantised_inputs()),
    "nested": (of_nested, nested_inputs()),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tensors_as_arguments(kind: str) -> None:
    model, inputs = OTHERS[kind]
    bended = bt.BendedModule(model)
    for number, make in enumerate(inputs * 3):
        args, _ = make()
        wanted = bits(model(*args))
        before = footprint()
        assert bits(bended(*make()[0])) == wanted, number
        assert footprint() == before
    assert bended.stats.replays >= 3 or bended.why_live


def tags_its_result(x: Tensor) -> Tensor:
    y = x * 2
    y.tag = x.shape[0]
    return y


def tags_its_argument(x: Tensor) -> Tensor:
    x.tag = x.shape[0]
    return x


class TagsItsParameter(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        self.fc.bias.tag = x.shape[0]
        return self.fc.bias


def removes_a_tag(x: Tensor) -> Tensor:
    y = x * 2
    y.tag = 1
    del y.tag
    y.other = [x]
    return y


@pytest.mark.parametrize(
    "make",
    [lambda: tags_its_result, lambda: tags_its_argument, TagsItsParameter, lambda: removes_a_tag],
)
def test_attributes_that_python_sets_on_tensors(make: Any) -> None:
    eager = make()
    model = copy.deepcopy(eager)
    bended = bt.BendedModule(model)
    for rows in (3, 3, 5, 3, 5):
        wanted, given = vars(eager(torch.ones(rows))), vars(bended(torch.ones(rows)))
        assert bits(given) == bits(wanted)
    if bended.why_live:
        Case(make, make(), live="tag|attribute").check_served(bended)


class Aliases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        y = x * 2
        return [x, x.view(-1), x.detach(), x[0], self.kept, self.kept[:2], y, y.t(), x.contiguous()]


def test_what_is_returned_shares_memory_as_in_eager() -> None:
    eager, model = Aliases(), Aliases()
    bended = bt.BendedModule(model)
    for step in range(4):
        seen = []
        for one, call in ((eager, eager), (model, bended)):
            x = torch.ones(3, 4)
            outputs = call(x)
            for number, out in enumerate(outputs):
                out.add_(number + step)
            views = [(out._is_view(), out is x, out is one.kept) for out in outputs]
            seen.append((bits([x, outputs, one.kept]), views))
        assert seen[0] == seen[1]
    assert bended.stats.replays == 3


def test_inputs_made_under_inference_mode() -> None:
    def model(x: Tensor) -> Any:
        try:
            y = x.add_(1) * 2
        except RuntimeError:
            y = x * 3
        return y.clone(), x.is_inference()

    def inputs(inference: bool, rows: int) -> Maker:
        def make() -> Any:
            with torch.inference_mode(inference):
                return (torch.ones(rows, 4),), {}

        return make

    order = [inputs(bool(k & 1), 3 + k // 4) for k in (0, 1, 1, 0, 5, 1, 0, 5)]
    Case(lambda: model, model, inputs=order, gradients=False).check()


def _tensors_of_many_kinds() -> list[Tensor]:
    """Tensors of one shape whose attributes differ: leaves, views, with hooks, with gradients."""
    ones = functools.partial(torch.ones, 3, 4)
    kept, hooked, after, with_gradient, written = (ones(requires_grad=True) for _ in range(5))
    kept = kept * 1
    kept.retain_grad()
    hooked.register_hook(lambda gradient: gradient)
    after.register_post_accumulate_grad_hook(lambda leaf: None)
    with_gradient.grad = ones()
    written = written.detach().add_(0)
    return [
        ones(), ones(requires_grad=True), ones(requires_grad=True) * 1, kept, hooked, after,
        with_gradient, written, torch.ones(2, 3, 4).unbind(0)[1], nn.Parameter(ones()),
        torch.ones(2, 3, 4, requires_grad=True).unbind(0)[1],
    ]  # fmt: skip


_ATTRIBUTES = [
    name
    for name, attribute in vars(torch._C.TensorBase).items()
    if isinstance(attribute, types.GetSetDescriptorType) and name != "_cdata"  # an address
]


@pytest.mark.filterwarnings("ignore:The .grad attribute|volatile was removed")
@pytest.mark.parametrize("name", _ATTRIBUTES)
@pytest.mark.parametrize("backwards", [False, True])
def test_an_attribute_that_tells_tensors_of_one_shape_apart(name: str, backwards: bool) -> None:
    def model(x: Tensor) -> Tensor:
        value = getattr(x, name)
        if isinstance(value, bool | int):
            return x.detach() + value
        return x.detach() if value is None else x.detach() * 3

    def outcome(call: Any, x: Tensor) -> Any:
        try:
            return bits(call(x))
        except Exception as error:
            return type(error)

    bended, tensors = bt.BendedModule(model), _tensors_of_many_kinds()
    for x in [*reversed(tensors), *tensors] if backwards else tensors * 2:
        assert outcome(bended, x) == outcome(model, x)
