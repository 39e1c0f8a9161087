"""Content that leaves torch for other code, or comes from there."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Variable

from bendtrace.python.results import can_exchange_operands
from tests.borders.border import Border, given

border = Border()


# Where operands can be exchanged, what numpy does is followed.
followed = border.replays if can_exchange_operands() else border.live("numpy", at="numpy")


@followed
def numpy_and_back(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.detach().numpy() * 2)


@followed
def numpy_by_force(x: Tensor) -> Tensor:
    return x * float(x.numpy(force=True).sum())


@border.live("numpy|array", at="asarray")
def asarray(x: Tensor) -> Tensor:
    return x + torch.tensor(np.asarray(x.detach()) * 2)


@border.live("array", at="np.asarray")
def a_function_of_numpy(x: Tensor) -> Tensor:
    y = x.detach() + 1
    return x * float(np.exp(np.asarray(y, dtype=np.float64)).max())


@border.live("numpy", at=".numpy()")
def written_through_numpy(x: Tensor) -> Tensor:
    y = x.detach().clone()
    y.numpy()[0] = 7
    return x * y


@border.live("numpy", at=".numpy()")
def returned_as_an_array(x: Tensor) -> Any:
    return x.detach().numpy().copy()


@border.replays
def from_a_constant_array(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.ones(4))


@border.live("unknown origin", at="frombuffer")
def from_a_buffer(x: Tensor) -> Tensor:
    return x + torch.frombuffer(array.array("f", [1, 2, 3, 4]), dtype=torch.float32)


@border.live("data_ptr", at="data_ptr")
def through_a_pointer(x: Tensor) -> Tensor:
    y = x.detach().clone()
    (ctypes.c_float * 1).from_address(y.data_ptr())[0] = 5.0
    return x * y


@border.replays
def pointers_compared(x: Tensor) -> Tensor:
    y = x.view(-1)
    return x * 2 if y.data_ptr() == x.data_ptr() else x


@border.live("storage", at="untyped_storage")
def storages(x: Tensor) -> Any:
    return x * x.untyped_storage().nbytes()


@border.live("storage", at="untyped_storage")
def written_through_a_storage(x: Tensor) -> Tensor:
    y = x.detach().clone()
    y.untyped_storage().fill_(0)
    return x + y


@border.live("dlpack", at="dlpack")
def dlpack(x: Tensor) -> Tensor:
    return x + torch.from_dlpack(x.detach())


@border.live("dlpack|unknown origin", at="dlpack")
def dlpack_by_its_capsule(x: Tensor) -> Tensor:
    y = x.detach() + 1
    return x + torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y))


@border.live("dlpack|array", at="from_dlpack")
def dlpack_to_numpy(x: Tensor) -> Tensor:
    return x * float(np.from_dlpack(x.detach()).sum())


@border.replays(
    inputs=[given(torch.tensor(values)) for values in ([1.0, 2.0], [3.0, -1.0], [0.5] * 3)] * 3
)
def lists_and_back(x: Tensor) -> Any:
    values = x.tolist()
    return x + torch.tensor(values) * 2, torch.as_tensor([v + 1 for v in values]), values


@border.replays(inputs=[given(torch.tensor(value)) for value in (2.5, -1.0, 3.0)] * 2)
def numbers_and_back(x: Tensor) -> Any:
    value = x.item()
    return torch.tensor(value) + x, torch.tensor([value, 1.0]), torch.full((2,), value), value * 2


@border.replays(inputs=[given(torch.ones(n, 4)) for n in (3, 5, 3, 5, 2, 2)])
def sizes_as_tensors(x: Tensor) -> Any:
    return x * torch.tensor(x.shape[0]), torch.as_tensor(x.shape), torch.tensor([x.size(0), 2])


@border.replays
def made_from_python(x: Tensor) -> Any:
    return (
        x + torch.tensor([1.0, 2, 3, 4]),
        torch.as_tensor([[1]]),
        torch.asarray([1.5]),
        x.new_tensor([2]),
    )


@border.replays
def tensors_from_tensors(x: Tensor) -> Any:
    return (
        torch.as_tensor(x) * 2,
        torch.asarray(x.detach()) + 1,
        torch.tensor([x.sum().item(), 1.0]),
    )


@border.replays
def torchs_functions_of_symbolic_numbers(x: Tensor) -> Any:
    rows, columns = x.shape
    numbers = (
        torch.sym_float(rows), torch.sym_int(x.sum().item()), torch.sym_max(rows, 3),
        torch.sym_min(rows, 2.5), torch.sym_not(rows > 3), torch.sym_sum([rows, columns, 2]),
        torch.sym_ite(rows > 3, 1.0, 2.0), torch.sym_float(x.mean().item()),
    )  # fmt: skip
    return x * sum(numbers), numbers


@border.replays
def a_list_of_tensors_as_tensor(x: Tensor) -> Tensor:
    return x * torch.tensor([x.detach().sum(), x.detach().max()]).sum()


@border.replays(
    inputs=[given(torch.ones(3), np.arange(3.0)), given(torch.ones(3), np.ones(3))] * 3,
)
def an_array_as_an_argument(x: Tensor, values: Any) -> Tensor:
    return x + torch.from_numpy(values)


class HoldsAnArray(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = np.arange(4, dtype=np.float32)


@border.replays
class HoldsAnArrayOfNumbers(HoldsAnArray):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(self.values.sum()) + self.values[1].item()


@border.replays
class HoldsAnArrayMadeATensor(HoldsAnArray):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor(self.values)


@border.live("through the tensor", at="from_numpy")
class HoldsAnArrayThatBecomesATensor(HoldsAnArray):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.from_numpy(self.values)
        y.add_(1)
        return x + y


@border.live("written to afterwards", at="as_tensor")
def an_array_written_to_after_it_is_a_tensor(x: Tensor) -> Tensor:
    values = np.zeros(4, dtype=np.float32)
    y = torch.as_tensor(values)
    values[0] = 1
    return x + y


@border.live("written to afterwards", at="from_numpy")
def an_array_written_to_and_back(x: Tensor) -> Tensor:
    values = np.arange(8, dtype=np.float32)
    y = torch.from_numpy(values[2:6])
    values[3] = 10
    y = x + y
    values[3] = 3
    return y


@border.live("through the tensor", at="from_numpy")
def an_array_read_after_its_tensor_is_written_to(x: Tensor) -> Tensor:
    values = np.zeros(4, dtype=np.float32)
    torch.from_numpy(values).add_(x.detach()[0])
    total = float(values.sum())
    del values
    return x * total


@border.live("still exists", at="from_numpy")
def an_array_given_out_with_its_tensor(x: Tensor) -> Any:
    values = np.arange(4, dtype=np.float32)
    return x * 2, torch.from_numpy(values), values


@border.replays
def a_mask_made_in_numpy(x: Tensor) -> Tensor:
    mask = np.triu(np.ones((4, 4)), k=1).astype("uint8")
    unmasked = torch.from_numpy(mask) == 0
    return (x @ unmasked.to(x.dtype)) * torch.from_numpy(np.arange(4.0)[::2].copy()).sum()


@border.replays
def an_array_that_branches_come_after(x: Tensor) -> Tensor:
    values = np.arange(4, dtype=np.float32)
    y = x * torch.from_numpy(values)
    return y if y.sum() > 0 else y - 1


@border.replays
class HoldsAnArrayThatIsATensor(HoldsAnArray):
    def forward(self, x: Tensor) -> Any:
        return x + torch.from_numpy(self.values), torch.FloatTensor(self.values)


@border.replays
def multiplied_by_numpy_numbers(x: Tensor) -> Tensor:
    return x * np.float32(2.5) + np.int64(3)


@border.replays
def a_legacy_constructor(x: Tensor) -> Tensor:
    return x + torch.Tensor([1, 2, 3, 4])


@border.replays
def a_legacy_constructor_by_type(x: Tensor) -> Tensor:
    return x + torch.FloatTensor(4).fill_(2)


@border.replays
def a_legacy_constructor_that_is_only_returned(x: Tensor) -> Any:
    return x * 2, torch.Tensor([4, 5])


@border.replays
def a_legacy_constructor_as_an_index(x: Tensor) -> Tensor:
    return x[torch.LongTensor([0, 2])]


@border.replays
def a_legacy_constructor_written_at(x: Tensor) -> Tensor:
    index = torch.LongTensor([0, 2])
    y = x.clone()
    y[index] = 0
    return y


@border.replays
def a_legacy_constructor_of_content(x: Tensor) -> Tensor:
    return torch.Tensor(x.tolist()) + x


@border.replays
def a_legacy_constructor_of_a_tensor(x: Tensor) -> Tensor:
    return torch.Tensor(x.detach()) + x


@border.replays(inputs=[given(torch.ones(n, 4)) for n in (3, 5, 3, 5, 2, 2)])
def a_legacy_constructor_of_sizes(x: Tensor) -> Tensor:
    return (
        x.sum() + torch.zeros_like(torch.FloatTensor(x.shape[0], x.size(1))) + len(torch.Tensor())
    )


@border.replays
def a_legacy_constructor_by_another_name(x: Tensor) -> Tensor:
    kind = FLOATS if x.dtype is torch.float32 else torch.DoubleTensor
    return x + FLOATS([1, 2, 3, 4]) + kind(*x.shape).fill_(2) + kind(*[4]).zero_()


@border.live("unknown origin", at="map(FLOATS")
def a_legacy_constructor_that_c_code_calls(x: Tensor) -> Tensor:
    return x + next(map(FLOATS, [[1, 2, 3, 4]]))


FLOATS = torch.FloatTensor


@border.replays
def legacy_constructors_as_types(x: Tensor) -> Any:
    kinds = {torch.FloatTensor: 2.0, torch.DoubleTensor: 3.0}
    same = torch.FloatTensor is FLOATS and isinstance(x.detach(), torch.FloatTensor)
    return x.type(torch.DoubleTensor) * kinds[torch.FloatTensor] if same else x


@border.replays
def variables(x: Tensor) -> Any:
    y = Variable(x.data, requires_grad=True)
    return x * y, Variable(torch.zeros(4)) + x, Variable(x) * 2, isinstance(y, Variable)


@border.replays
def new(x: Tensor) -> Any:
    return x.new([1, 2, 3, 4]) + x, x.new(2, 3).shape, x.new_zeros(4) + x, x.new_full((2,), 3.0)


@border.replays
def type_conversions(x: Tensor) -> Any:
    return x.type(torch.DoubleTensor) * 2, x.type_as(torch.ones(1).double()), x.detach().type()


@border.replays
def a_parameter_made_inside(x: Tensor) -> Tensor:
    return x * nn.Parameter(torch.ones(4))


@border.replays
def a_parameter_of_the_input(x: Tensor) -> Tensor:
    return nn.Parameter(x.detach()) * 2


@border.replays
def a_module_made_inside(x: Tensor) -> Tensor:
    return nn.Linear(4, 4)(x)


@border.replays
def a_buffer_made_inside(x: Tensor) -> Tensor:
    return x * nn.Buffer(torch.ones(4))


@border.live("", at="pickle")
def pickled(x: Tensor) -> Tensor:
    import pickle

    return x + pickle.loads(pickle.dumps(x.detach()))


@border.live("", at="torch.save")
def saved_and_loaded(x: Tensor) -> Tensor:
    import io

    buffer = io.BytesIO()
    torch.save(x.detach(), buffer)
    buffer.seek(0)
    return x + torch.load(buffer)


@border.replays
def bytes_of(x: Tensor) -> Tensor:
    return x * len(bytes(x.detach().to(torch.uint8).flatten().tolist()))


@border.replays
def printed(x: Tensor) -> Any:
    return x * len(str(x.detach()[0, 0].round().int())), f"{x.detach()[0, 0]:.1f}"
