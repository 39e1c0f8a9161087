"""TackleBox's README runs as it stands there, but for the import; then its examples one by one.

`activate_all_hook` is written so there once; it is the same as `activate_all_hooks`. A module's
`name` exists only while a hook runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bendtrace.compat.tacklebox import (
    HookFunction,
    HookHandle,
    HookManager,
    ModuleTracker,
    TrackingProtocol,
)
from bendtrace.errors import InputError
from tests import seeds


def my_forward_hook(module: Any, inputs: Any, outputs: Any) -> Any:
    print("Finished forward pass for module %s" % module.name)  # noqa: UP031
    return outputs


def my_forward_pre_hook(module: Any, inputs: Any) -> Any:
    print("Beginning forward pass for module %s" % module.name)  # noqa: UP031
    return inputs


def my_backward_hook(module: Any, grad_in: Any, grad_out: Any) -> Any:
    print("Finished backward pass for module %s" % module.name)  # noqa: UP031


class Pair(nn.Module):
    """Two modules of equal `repr`, and a third."""

    def __init__(self) -> None:
        super().__init__()
        self.my_module = nn.Linear(3, 3)
        self.other_module = nn.Linear(3, 3)
        self.third = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.other_module(self.my_module(x)))


@pytest.fixture
def model() -> Pair:
    torch.manual_seed(0)
    return Pair()


@pytest.fixture
def hookmngr() -> HookManager:
    return HookManager()


def said(model: nn.Module, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run forward and backward and return what was printed."""
    capsys.readouterr()
    model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    return capsys.readouterr().out.splitlines()


BEFORE, AFTER, BACK = (
    f"{start} pass for module "
    for start in ("Beginning forward", "Finished forward", "Finished backward")
)


def test_the_readme_runs_with_one_line_changed(
    model: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    was = "from tacklebox.hook_management import HookManager"
    blocks = [
        code.replace(was, "from bendtrace.compat.tacklebox import HookManager")
        for code in seeds.fenced("tacklebox")
    ]
    assert sum(was in code for code in seeds.fenced("tacklebox")) == 1
    define, natively, register, inactive, activate, context, handle, *tables, remove, off = blocks
    names: dict[str, Any] = {
        "my_module": model.my_module, "other_module": model.other_module,
        "more_named_modules": {"third": model.third}, "more_modules": [model.third],
    }  # fmt: skip

    def run(*codes: str) -> None:
        for number, code in enumerate(codes):
            seeds.run(code, names, tmp_path / f"block{number}.py")

    run(define, natively, off, register, inactive)
    assert len(said(model, capsys)) == 9
    run(activate)
    assert said(model, capsys) == []
    run(context)
    assert said(model, capsys) == []
    manager = names["hookmngr"]
    names["hook_function"] = manager.name_to_hookfn[repr(names["my_forward_hook"])]
    run(handle)
    assert names["hook_handle"].module is model.my_module
    assert names["hook_handle"].hook_fn is names["hook_function"]
    # From here on the README calls the modules by other names.
    manager.remove_all_hooks()
    manager.register_forward_hook(
        names["my_forward_hook"], my_module_name=model.other_module, my_module=model.my_module
    )
    run(*tables)
    assert list(manager.name_to_hookhandle)[1] == "my_forward_hook[my_module]"
    lines = remove.splitlines()
    for line in filter(None, reversed(lines)):  # each of them removes what the one before has not
        run(line)
    assert not manager.name_to_hookhandle


def test_a_second_name_is_ignored_and_one_that_is_taken_gets_a_number(
    model: Pair, hookmngr: HookManager, capsys: pytest.CaptureFixture[str]
) -> None:
    hookmngr.register_forward_hook(my_forward_hook, hook_fn_name="f", one=model.my_module)
    hookmngr.register_forward_hook(my_forward_hook, hook_fn_name="g", two=model.my_module)
    hookmngr.register_forward_pre_hook(my_forward_pre_hook, hook_fn_name="f", one=model.third)
    assert list(hookmngr.name_to_module) == ["one", "one_1"]
    assert list(hookmngr.name_to_hookfn) == ["f", "f_1"]
    assert list(hookmngr.name_to_hookhandle) == ["f[one]", "f_1[one_1]"]
    assert said(model, capsys) == [AFTER + "one", BEFORE + "one_1"]


def test_registering_hooks(
    model: Pair, hookmngr: HookManager, capsys: pytest.CaptureFixture[str]
) -> None:
    my_module, other_module = model.my_module, model.other_module
    more_named_modules = {"third": model.third}

    # register a forward hook on my_module, other_module, etc.
    hookmngr.register_forward_hook(my_forward_hook,
                                   my_module_name=my_module,
                                   other_module_name=other_module,
                                   **more_named_modules)  # fmt: skip

    # register a forward pre-hook on my_module, other_module, etc.
    hookmngr.register_forward_pre_hook(my_forward_pre_hook,
                                       my_module_name=my_module,
                                       other_module_name=other_module,
                                       **more_named_modules)  # fmt: skip

    # register a backward hook on my_module, other_module, etc.
    hookmngr.register_backward_hook(my_backward_hook,
                                    my_module_name=my_module,
                                    other_module_name=other_module,
                                    **more_named_modules)  # fmt: skip

    names = ["my_module_name", "other_module_name", "third"]
    forward = [line for name in names for line in (BEFORE + name, AFTER + name)]
    assert said(model, capsys) == forward + [BACK + name for name in reversed(names)]
    assert not hasattr(my_module, "name")


def test_what_hooks_are_given(model: Pair, hookmngr: HookManager) -> None:
    seen: dict[str, Any] = {}

    def forward(module: Any, inputs: Any, outputs: Any) -> None:
        seen.update(inputs=inputs, outputs=outputs)

    def backward(module: Any, grad_in: Any, grad_out: Any) -> None:
        seen.update(grad_in=grad_in, grad_out=grad_out)

    hookmngr.register_forward_hook(forward, my_module=model.my_module)
    hookmngr.register_backward_hook(backward, my_module=model.my_module)
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert [type(value) for value in seen.values()] == [tuple] * 4
    assert len(seen["grad_in"]) == len(seen["inputs"]) == 1
    assert len(seen["grad_out"]) == len(seen["outputs"]) == 1
    assert torch.equal(seen["inputs"][0], x)
    assert x.grad is not None
    assert torch.equal(seen["grad_in"][0], x.grad)


def test_new_inputs_and_outputs_are_used(model: Pair, hookmngr: HookManager) -> None:
    def zero(module: Any, inputs: Any) -> Any:
        return tuple(value * 0 for value in inputs)

    def seven(module: Any, inputs: Any, outputs: Any) -> Any:
        assert not inputs[0].any()
        return tuple(value * 0 + 7 for value in outputs)

    hookmngr.register_forward_pre_hook(zero, my_module=model.my_module)
    hookmngr.register_forward_hook(seven, my_module=model.my_module)
    out = model(torch.ones(2, 3))
    assert torch.equal(out, model.third(model.other_module(torch.full((2, 3), 7.0))))


def test_activating_hooks(
    model: Pair, hookmngr: HookManager, capsys: pytest.CaptureFixture[str]
) -> None:
    my_module, other_module = model.my_module, model.other_module
    more_modules = [model.third]
    hookmngr.register_forward_hook(my_forward_hook, my_module_name=my_module,
                                   activate=False)  # fmt: skip
    assert said(model, capsys) == []
    modules = dict(my_module_name=my_module, other=other_module, third=model.third)
    hookmngr.register_forward_hook(my_forward_hook, **modules, activate=False)
    hookmngr.register_backward_hook(my_backward_hook, **modules, activate=False)
    forward = [AFTER + name for name in modules]
    backward = [BACK + name for name in reversed(modules)]
    assert said(model, capsys) == []

    # activate/deactivate all hooks
    hookmngr.activate_all_hooks()
    assert said(model, capsys) == forward + backward
    hookmngr.deactivate_all_hooks()
    assert said(model, capsys) == []

    # filter by module:
    # activate/deactivate all hooks registered to my_module, other_module, etc.
    hookmngr.activate_module_hooks(my_module, other_module, *more_modules)
    assert said(model, capsys) == forward + backward
    hookmngr.deactivate_module_hooks(my_module, other_module, *more_modules)
    assert said(model, capsys) == []

    # filter by function:
    # activate/deactivate my_forward_hook on all modules it's been registered with
    hookmngr.activate_all_hook(hook_types=[my_forward_hook])
    assert said(model, capsys) == forward
    hookmngr.deactivate_all_hooks(hook_types=[my_forward_hook])
    assert said(model, capsys) == []

    # filter by hook category
    # activate/deactivate all forward hooks that have been registered
    hookmngr.activate_all_hooks(category="forward_hook")
    assert said(model, capsys) == forward
    hookmngr.deactivate_all_hooks(category="forward_hook")
    assert said(model, capsys) == []

    # module, hook function and category in the same call
    hookmngr.activate_module_hooks(
        my_module, hook_types=[my_backward_hook], category="backward_hook"
    )
    assert said(model, capsys) == [BACK + "my_module_name"]
    hookmngr.deactivate_module_hooks(other_module, category="all")
    assert said(model, capsys) == [BACK + "my_module_name"]


def test_hook_activation_with_python_contexts(
    model: Pair, hookmngr: HookManager, capsys: pytest.CaptureFixture[str]
) -> None:
    my_module, other_module = model.my_module, model.other_module
    more_modules: list[nn.Module] = []
    modules = dict(my_module=my_module, other=other_module, third=model.third)
    hookmngr.register_forward_hook(my_forward_hook, **modules, activate=False)
    hookmngr.register_backward_hook(my_backward_hook, **modules, activate=False)

    with hookmngr.hook_all_context():
        # all hooks active
        assert len(said(model, capsys)) == 6
    # all hooks inactive
    assert said(model, capsys) == []

    with hookmngr.hook_module_context(my_module, other_module, *more_modules):
        # hooks on my_module, other_module, etc. are active
        assert [AFTER + "third" in said(model, capsys), len(said(model, capsys))] == [False, 4]
    # hooks on my_module, other_module, etc. are inactive
    assert said(model, capsys) == []

    with hookmngr.hook_all_context(hook_types=[my_backward_hook], category="backward_hook"):
        assert said(model, capsys) == [BACK + name for name in reversed(modules)]

    hookmngr.activate_all_hooks()
    with hookmngr.hook_module_context(my_module, hook_types=[my_forward_hook]):
        assert len(said(model, capsys)) == 6
    assert len(said(model, capsys)) == 5
    with hookmngr.hook_all_context():
        assert len(said(model, capsys)) == 6
    # all hooks inactive, as the README says
    assert said(model, capsys) == []


def test_hook_function_and_hook_handle_objects(
    model: Pair, hookmngr: HookManager, capsys: pytest.CaptureFixture[str]
) -> None:
    my_module = model.my_module
    hook_function = hookmngr.register_forward_hook(my_forward_hook, my_module=my_module)
    assert isinstance(hook_function, HookFunction)
    assert hook_function.function is my_forward_hook

    # access the HookHandle obtained from registering hook_function on my_module
    hook_handle = hook_function.module_to_handle[my_module]
    assert isinstance(hook_handle, HookHandle)

    assert hook_handle.module is my_module
    assert hook_handle.hook_fn is hook_function

    # activate/deactivate hook_function for my_module
    hook_handle.activate()
    assert said(model, capsys) == [AFTER + "my_module"]
    hook_handle.deactivate()
    assert said(model, capsys) == []


def test_looking_up_registered_hooks(model: Pair, hookmngr: HookManager) -> None:
    my_module = model.my_module
    hookmngr.register_forward_hook(my_forward_hook, my_module_name=my_module)
    assert hookmngr.name_to_module["my_module_name"] is my_module
    automatic = hookmngr.name_to_hookfn[repr(my_forward_hook)]
    assert automatic.function is my_forward_hook

    hookmngr.register_forward_hook(my_forward_hook, hook_fn_name="my_forward_hook")
    assert hookmngr.name_to_hookfn["my_forward_hook"] is automatic
    assert list(hookmngr.name_to_hookhandle) == ["my_forward_hook[my_module_name]"]

    hookmngr.remove_module(my_module)
    hookmngr.register_forward_hook(my_forward_hook, my_module=my_module)

    # access the HookHandle obtained from registering my_forward_hook on my_module
    handle = hookmngr.name_to_hookhandle["my_forward_hook[my_module]"]
    assert (handle.module, handle.hook_fn.function) == (my_module, my_forward_hook)


def test_removing_hooks(
    model: Pair, hookmngr: HookManager, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = dict(my_module=model.my_module, other=model.other_module)

    def register() -> None:
        name = "my_forward_hook"
        hookmngr.register_forward_hook(my_forward_hook, hook_fn_name=name, **modules)
        hookmngr.register_forward_pre_hook(my_forward_pre_hook, **modules)

    def left() -> list[str]:
        hookmngr.activate_all_hooks()
        return said(model, capsys)

    register()
    hookmngr.remove_hook_function(my_forward_hook)
    assert left() == [BEFORE + "my_module", BEFORE + "other"]
    assert my_forward_hook.__name__ not in hookmngr.name_to_hookfn

    register()
    hookmngr.remove_module_by_name("my_module")
    assert left() == [BEFORE + "other", AFTER + "other"]
    assert list(hookmngr.name_to_module) == ["other"]

    register()
    hookmngr.remove_hook_by_name("my_forward_hook[my_module]")
    assert left() == [BEFORE + "my_module", BEFORE + "other", AFTER + "other"]
    assert "my_forward_hook[my_module]" not in hookmngr.name_to_hookhandle


def test_a_backward_hook_is_handed_the_values_of_the_forward_pass(
    model: Pair, hookmngr: HookManager
) -> None:
    seen: list[Any] = []

    def keep(module: Any, grad_in: Any, grad_out: Any, inputs: Any, outputs: Any) -> None:
        seen.append((module.name, inputs[0], outputs[0], grad_in[0]))

    hookmngr.register_backward_hook(
        keep, retain_forward_cache=True, activate=False, first=model.my_module
    )
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert not seen
    with hookmngr.hook_all_context(hook_types=[keep]):
        model(x).sum().backward()
    ((name, given, returned, gradient),) = seen
    assert name == "first"
    assert torch.equal(given, x)
    assert torch.equal(returned, model.my_module(x))
    assert gradient.shape == given.shape
    with hookmngr.hook_all_context(), pytest.raises(InputError, match="there were 2"):
        (model(x) + model(x)).sum().backward()


def test_a_tracker_gathers_values_and_gradients(model: Pair) -> None:
    tracker = ModuleTracker(first=model.my_module, protocol=TrackingProtocol(buffer_len=2))
    x = torch.ones(2, 3, requires_grad=True)
    with tracker.track(clear_on_exit=False):
        for scale in (1, 2):
            model(x * scale).sum().backward()
    model(x).sum().backward()  # not tracked
    found = tracker.gather()["first"]
    assert torch.equal(found["inp"], torch.cat([x, x * 2]).detach())
    assert torch.equal(found["out"], model.my_module(found["inp"]).detach())
    assert found["out_grad"].shape == found["inp_grad"].shape == (4, 3)
    with pytest.warns(UserWarning, match="more than 2 passes"), tracker.track():
        model(x)
    assert tracker.gather_var("out")["first"].numel() == 0
    with pytest.raises(InputError, match="no 'outs'"):
        TrackingProtocol("outs")


def test_hooks_and_modules_are_found_by_name(model: Pair, hookmngr: HookManager) -> None:
    hookmngr.register_forward_hook(
        my_forward_hook, hook_fn_name="tell", a=model.my_module, b=model.third, activate=False
    )
    hookmngr.activate_hook_by_name("tell[a]")
    hookmngr.activate_module_hooks_by_name("b")
    assert [one.active for one in hookmngr.get_module_hooks_by_name("b")] == [True]
    hookmngr.deactivate_hook_by_name("tell[a]")
    hookmngr.deactivate_module_hooks_by_name("b")
    assert list(hookmngr.get_module_hooks(model.third, include_inactive=False)) == []
    with hookmngr.hook_module_context_by_name("b") + torch.no_grad():
        assert hookmngr.name_to_hookhandle["tell[b]"].active
        assert not torch.is_grad_enabled()
