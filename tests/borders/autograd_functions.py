"""Custom `autograd.Function`s: one op each, with their own backward."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.borders.border import Border, Stateful, given

border = Border()


class Doubled(Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, names: Any = None) -> Tensor:
        ctx.factor = factor
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None, None


class Saves(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return first * y * 3 + second, first * x * 5 + second


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.add_(1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 7


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * 11


class SetUp(Function):
    @staticmethod
    def forward(x: Tensor, power: int) -> tuple[Tensor, Tensor]:
        return x**power, x.argmax()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.power = inputs
        ctx.save_for_backward(x, output[0])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, _: Any) -> Any:
        x, out = ctx.saved_tensors
        return None if gradient is None else gradient * out * x, None


class Flagged(Function):
    """Its backward reads a flag when it is carried out."""

    scale = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Flagged.scale = 1.0
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Flagged.scale += 1
        return gradient * Flagged.scale


class ReturnsInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x, x.view(-1), 3, "text"

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, flat: Tensor, *_: Any) -> Tensor:
        return gradient * 2 + flat.view_as(gradient)


class Straight(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Inner(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Straight.apply(x) + Doubled.apply(x, 3.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Straight.apply(gradient) * 13


class Shifted(Function):
    """Has an `apply` of its own, which calls torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 17

    @classmethod
    def apply(cls, x: Tensor) -> Any:
        return super().apply(x + 1) / 4


# Since torch 2.14, `apply` is written in C, and one that was taken before a run goes past it.
exchanged = isinstance(vars(Function)["apply"], classmethod)
takes = border.replays if exchanged else border.live(r"\w+\.apply, taken before the run,")

doubled, saves, in_place, once = Doubled.apply, Saves.apply, InPlace.apply, Once.apply


@border.replays
def with_numbers(x: Tensor) -> Tensor:
    return Doubled.apply(x, 100.0)


@border.replays
def with_its_own_apply(x: Tensor) -> Tensor:
    return Shifted.apply(x).cos()


@border.replays
def with_a_size(x: Tensor) -> Tensor:
    return Doubled.apply(x, x.shape[0] / 2)


@border.replays
def with_containers(x: Tensor) -> Tensor:
    return Doubled.apply(x, 2.5, {"names": ["a", "b"]}) + 1


@border.replays
def with_two_outputs(x: Tensor) -> Any:
    product, total = Saves.apply(x, x.flip(0))
    return product * 2, total


@border.replays
def with_an_unused_output(x: Tensor) -> Tensor:
    return Saves.apply(x, x + 1)[1]


@border.replays
def in_place_on_a_result(x: Tensor) -> Tensor:
    y = x * 2
    z = InPlace.apply(y)
    return z + y


@border.replays
def in_place_on_an_argument(x: Tensor) -> Tensor:
    InPlace.apply(x)
    return x * 2


@border.replays
def once_differentiable_ones(x: Tensor) -> Tensor:
    return Once.apply(x * 2)


@border.replays
def with_a_context_set_up_apart(x: Tensor) -> Any:
    return SetUp.apply(x, 3)


@border.replays
def with_a_backward_that_reads_a_flag(x: Tensor) -> Tensor:
    return Flagged.apply(x)


@border.replays
def that_returns_its_input(x: Tensor) -> Any:
    same, flat, number, text = ReturnsInput.apply(x)
    return same * 2, flat + number, text


@border.replays
def inside_another(x: Tensor) -> Tensor:
    return Inner.apply(x)


@takes
def whose_apply_was_taken_before(x: Tensor) -> Tensor:
    return doubled(x, 100.0) + once(x)


@takes
def in_place_whose_apply_was_taken_before(x: Tensor) -> Tensor:
    y = x.exp()
    return in_place(y) * y


# What `apply` comes down to, with any torch.
past_apply = super(torch.autograd.function._SingleLevelFunction, InPlace).apply


@border.live(r"InPlace\.apply, taken before the run,")
def in_place_past_apply(x: Tensor) -> Tensor:
    y = x.exp()
    return past_apply(y) * y


@takes
def with_two_outputs_and_an_apply_taken_before(x: Tensor) -> Tensor:
    a, b = saves(x, x * 2)
    return a - b


@border.replays
def of_a_view(x: Tensor) -> Tensor:
    y = x * 1
    InPlace.apply(y.t().contiguous())
    return y + Straight.apply(y[0])


@border.replays
def before_a_branch(x: Tensor) -> Tensor:
    y = Straight.apply(x)
    return y * 2 if y.sum() > 0 else Doubled.apply(y, 3.0)


@border.replays
class InAModule(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(self.fc(x)) + Saves.apply(self.fc.weight, self.fc.weight)[0].sum()


@takes
class WithASubmodulesParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = doubled(x, 2.0)
        with torch.enable_grad():
            return once(self.w) * y


@border.live("last|Remembers")
def that_leaves_a_number_in_its_class() -> Any:
    class Remembers(Function):
        last = 0.0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            Remembers.last = float(x.sum())
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def model(x: Tensor) -> Tensor:
        return Remembers.apply(x) * Remembers.last

    return model


@border.replays(
    inputs=[given(torch.ones(3), torch.ones(3)), given(torch.ones(3), -torch.ones(3))] * 2
)
def that_raises(x: Tensor, y: Tensor) -> Tensor:
    try:
        return Raises.apply(x, y)
    except ValueError:
        return x * 2


class Raises(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        if y.sum() < 0:
            raise ValueError("negative")
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient * 2


class Draws(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        mask = torch.rand_like(x) > p
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


class Needs(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, optional: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, y, optional)
        return x * y if optional is None else x * y + optional

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y, _ = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return y * gradient if wanted[0] else None, x * 2 if wanted[1] else None, None


class Quiet(Function):
    """Writes into an argument without saying so, and returns nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> None:
        x.add_(1)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        return None


class Transposable(Function):
    """Works under functorch's transforms too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * 2

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent * ctx.saved_tensors[0]


@border.replays
def that_draws_random_numbers(x: Tensor) -> Tensor:
    return Draws.apply(x, 0.5) + torch.rand(4)


draws = Draws.apply


@takes
def that_draws_with_an_apply_taken_before(x: Tensor) -> Tensor:
    return draws(x, 0.5) + torch.rand(4)


@border.replays
def that_asks_which_gradients_are_needed(x: Tensor) -> Tensor:
    return Needs.apply(x, x.detach(), None) + Needs.apply(x.detach() + 1, x, x * 2)


@border.replays
def that_writes_without_saying(x: Tensor) -> Tensor:
    y = x.detach() * 2
    Quiet.apply(y)
    return x * y


@border.replays
def under_no_grad_and_inference(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = Saves.apply(x, x)[0]
    with torch.inference_mode():
        z = Doubled.apply(x, 2.0)
    return x * y + z.clone()


@border.either("transform|origin")
def under_a_transform(x: Tensor) -> Tensor:
    return torch.func.vmap(Transposable.apply)(x) + torch.func.grad(_exponential)(x)


def _exponential(x: Tensor) -> Tensor:
    return Transposable.apply(x).sum()


@border.replays
class WithModulesInside(Stateful):
    """Its forward and its backward call a module."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return CallsModules.apply(x, self) + self.drop(x)


class CallsModules(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: WithModulesInside) -> Tensor:
        ctx.owner = owner
        return owner.drop(owner.fc(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.owner.fc(gradient), None


@border.live("", at="")
def made_inside(x: Tensor) -> Tensor:
    total = x.detach().sum()

    class Local(Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y * total

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * total * 2

    return Local.apply(x)


@border.live("factor|Reads")
def that_reads_what_forward_left_in_its_class() -> nn.Module:
    class Reads(Function):
        factor = 1.0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * Reads.factor

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * Reads.factor

    class Configured(Stateful):
        def forward(self, x: Tensor) -> Tensor:
            Reads.factor = float(x.shape[0])
            return Reads.apply(self.fc(x))

    return Configured()


# Without gradients, those that are given objects are code of the model like any other.


class Fills(Function):
    """Fills a list, branches on values, and calls a module that counts its calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Any, parts: list[Tensor], gives: str) -> Any:
        ctx.save_for_backward(x)
        ctx.owner = owner
        y = owner.fc(x) if x.sum() > 0 else x - 1
        parts.append(y * 2)
        owner.calls = owner.calls + 1
        if any(ctx.needs_input_grad):
            y = y * 3
        if gives == "argument":
            return x, y
        return y.view(-1) if gives == "view" else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (*gradients[:1], None, None, None)


class GivenObjects(Stateful):
    def __init__(self, gives: str, from_weight: bool) -> None:
        super().__init__()
        self.calls = 0
        self.gives, self.from_weight = gives, from_weight

    def forward(self, x: Tensor) -> Any:
        parts: list[Tensor] = []
        given = self.fc.weight if self.from_weight else x * 1
        out = Fills.apply(given, self, parts, self.gives)
        same = [one is given for one in out] if isinstance(out, tuple) else out is given
        return out, parts, self.calls, same, [t._is_view() for t in parts]


SIDES = [given(torch.full((4, 4), side)) for side in (1.0, -1.0) * 5]
for _gives in ("result", "argument", "view"):
    for _from_weight in (False, True):

        def given_objects(gives: str = _gives, from_weight: bool = _from_weight) -> nn.Module:
            return GivenObjects(gives, from_weight)

        given_objects.__name__ = f"given_objects_{_gives}_{_from_weight}"
        given_objects.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
        border.replays(modes=[torch.no_grad], gradients=False, inputs=SIDES)(given_objects)


class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[int]) -> Tensor:
        log.append(1)
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


@border.live(r"ctx\.mark_dirty", at="Dirty.apply", modes=[torch.no_grad], gradients=False)
def given_a_list_and_dirty(x: Tensor) -> Tensor:
    log: list[int] = []
    return Dirty.apply(x * 2, log) * len(log)
