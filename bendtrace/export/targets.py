"""Has torch trace an exported program, and writes it to a file for torch, AOTInductor or ONNX."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import logging
import operator
import os
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from bendtrace.engine.compile_attempts import QuietCompilation
from bendtrace.errors import ExportError, InputError
from bendtrace.export.conditions import arguments_of
from bendtrace.python.checks import required_path
from bendtrace.python.internals import internal, pytree
from bendtrace.python.lazy import required
from bendtrace.watch.functions import OpOverload

# Tracing by torch: quietly, each side of a question once, leaving nothing behind.

_LOGGERS = ("torch.onnx", "torch._export", "onnxscript", "onnx_ir")
_TRACES = "do_not_emit_stack_traces"
_KeepsKeys: Any = internal("torch._C._PreserveDispatchKeyGuard", contextlib.nullcontext)
_FakeTensorMode: Any = internal("torch._subclasses.fake_tensor.FakeTensorMode", None)
_LOCK = threading.RLock()  # around what is exchanged in torch


def open_sizes(is_open: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context in which torch does not take all open sizes for larger than 1.

    By default it does, and does not check it (torch 2.13).
    """
    config: Any = internal("torch.fx.experimental._config")
    context: contextlib.AbstractContextManager[None] = config.patch(backed_size_oblivious=is_open)
    return context


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Return a context in which torch and onnx log nothing: errors say what they refuse.

    Nodes of graphs get no stack traces, which only name generated code and take a tenth of the time
    (torch 2.13). After an error, the keys that torch dispatches by are as they were.
    """
    loggers = [*map(logging.getLogger, _LOGGERS)]
    levels = [logger.level for logger in loggers]
    settings: Any = internal("torch.fx.config", None)
    traces = getattr(settings, _TRACES, None)
    with warnings.catch_warnings(), QuietCompilation(), torch.no_grad(), _KeepsKeys():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        if traces is not None:
            setattr(settings, _TRACES, True)
        try:
            yield
        except BaseException as error:
            _clear_frames(error)
            raise
        finally:
            if traces is not None:
                setattr(settings, _TRACES, traces)
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames that an error has come through.

    Some of them hold guards of torch's: freed with the error, these would set the keys that torch
    dispatches by to those of the code that has failed, and the next export could end the process
    (torch 2.13; the test of operators that no fake tensor goes through notices a change).
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def each_side_once() -> Iterator[None]:
    """Return a context in which torch traces each side of a question once.

    By itself it runs the graph of a side again to learn what it returns, and after each of its
    passes writes the code of all graphs in a graph: the time grows with the third power of how many
    questions are in each other (torch 2.13). Who leaves this context calls `recompile`.
    """
    table = getattr(torch.ops.higher_order.cond, "python_key_table", {})
    run, write = table.get(_FakeTensorMode), getattr(fx.GraphModule, _WRITE, None)
    if run is None or write is None:
        yield
        return
    thread = threading.get_ident()

    def run_cond(mode: Any, asked: Any, yes: Any, no: Any, operands: Any) -> Any:
        made = [_outputs_of(side, operands, mode) for side in (yes, no)]
        if any(one is None for one in made):
            return run(mode, asked, yes, no, operands)
        return run(mode, asked, lambda *_: made[0], lambda *_: made[1], operands)

    def write_inner(module: fx.GraphModule) -> Any:
        return [] if threading.get_ident() == thread else write(module)

    with _LOCK:
        table[_FakeTensorMode] = run_cond
        setattr(fx.GraphModule, _WRITE, write_inner)
        try:
            yield
        finally:
            table[_FakeTensorMode] = run
            setattr(fx.GraphModule, _WRITE, write)


_WRITE = "_recompile_submodules"


def _outputs_of(side: Any, operands: Sequence[Any], mode: Any) -> Any:
    """Return what a graph has returned when it was traced with some operands; None if unknown."""
    if not isinstance(side, fx.GraphModule):
        return None
    given = [node.meta.get("val") for node in side.graph.find_nodes(op="placeholder")]
    nodes, structure = pytree.tree_flatten(side.graph.output_node().args[0])
    made = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in nodes]
    if not all(isinstance(one, Tensor) and _mode_of(one) is mode for one in made):
        return None
    same = len(given) == len(operands) and all(map(_are_alike, given, operands))
    return pytree.tree_unflatten(made, structure) if same else None


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two values are tensors of the same sizes, or the same size."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and str(one) == str(other)
    kinds = [(each.dtype, each.device, _mode_of(each)) for each in (one, other)]
    sizes = [[*map(str, (*each.shape, *each.stride()))] for each in (one, other)]
    return kinds[0] == kinds[1] and sizes[0] == sizes[1]


def _mode_of(value: Tensor) -> Any:
    return getattr(value, "fake_mode", None)


_SUBGRAPHS = "pkg.torch.__subgraph__"
_UNSEEN = "bendtrace_unseen"  # the key of the messages for the last output of an ONNX model
_ARGUMENTS = "bendtrace_arguments"  # the key of what `arguments_of` returns


def target_of(path: str | os.PathLike[str]) -> str:
    """Return the kind of file to write, by its ending."""
    file = Path(required_path("to=", path))
    if not file.parent.is_dir():
        raise InputError(f"there is no folder {str(file.parent)!r} to write {file.name} to")
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise InputError(f"{str(file)!r} cannot be written")
    for ending, target in ((".aoti.pt2", "aoti"), (".pt2", "pt2"), (".onnx", "onnx")):
        if file.name.endswith(ending):
            if target == "onnx":
                _onnx()
            return target
    raise InputError(
        f"{file.name!r} has to end with .pt2 (torch.export), .aoti.pt2 (a compiled package) or "
        ".onnx"
    )


@contextlib.contextmanager
def _whole_file(path: str | os.PathLike[str], ending: str) -> Iterator[str]:
    """Yield a temporary file, which is moved to its place only after success."""
    file = Path(path)
    handle, temporary = tempfile.mkstemp(ending, f".{file.stem}-", file.parent)
    os.close(handle)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, file)
    except OSError as error:  # a full disk, for example
        raise ExportError(f"{str(file)!r} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


@contextlib.contextmanager
def _in_memory(temporary: str) -> Iterator[io.BytesIO]:
    """Yield what torch writes to: its own writer ends the process on a full disk (2.13)."""
    file = io.BytesIO()
    yield file
    Path(temporary).write_bytes(file.getbuffer())


Check = Callable[[Callable[..., Any]], None]


def save_program(
    program: torch.export.ExportedProgram, path: str | os.PathLike[str], check: Check
) -> None:
    """Write a program for `torch.export.load`, and have `check` compare what is loaded."""
    with _whole_file(path, ".pt2") as temporary, quiet():
        try:
            with _in_memory(temporary) as file:
                torch.export.save(program, file)
            loaded = torch.export.load(temporary).module()
        except OSError:
            raise
        except Exception as error:
            raise ExportError(
                f"torch.export cannot save and load it: {_first_line(error)}"
            ) from error
        check(loaded)


def save_package(
    program: torch.export.ExportedProgram,
    path: str | os.PathLike[str],
    calls: Sequence[Any],
    groups: Sequence[int],
    check: Check,
) -> None:
    """Compile a program into a package that runs without Python, and have `check` compare it.

    Arguments with equal numbers in `groups` are one object; without numbers that does not matter.
    """
    for leaf in pytree.tree_leaves(program.example_inputs):
        if type(leaf) in (bool, int, float, str):
            raise ExportError(
                f"an AOTInductor package takes tensors only, and would ignore another value than "
                f"{leaf!r}: export a function that passes it to the model, and does not take it"
            )
    with _whole_file(path, ".pt2") as temporary, quiet(), _checking_inputs(groups), open_sizes():
        try:
            made = with_distinct_outputs(program)
            with _in_memory(temporary) as file, each_side_once():
                torch._inductor.aoti_compile_and_package(made, package_path=file)
        except OSError:
            raise
        except Exception as error:
            raise ExportError(f"AOTInductor cannot compile it: {_first_line(error)}") from error
        _require_alive(temporary, calls)
        check(torch._inductor.aoti_load_package(temporary))


@contextlib.contextmanager
def _checking_inputs(groups: Sequence[int]) -> Iterator[None]:
    """Return a context in which AOTInductor writes packages that check their inputs.

    By itself it has checks that run only if an environment variable is set, and that know nothing
    of sizes and strides which are not fixed (torch 2.13; the tests of conditions notice a change).
    """
    name = "generate_input_output_runtime_checks"
    writer = internal("torch._inductor.codegen.cpp_wrapper_cpu.CppWrapperCpu")
    before = getattr(writer, name)
    setattr(writer, name, lambda wrapper: wrapper.prefix.splice_aot(_checks(wrapper, groups)))
    try:
        yield
    finally:
        setattr(writer, name, before)


def _checks(wrapper: Any, groups: Sequence[int]) -> str:
    """Return the C++ function that checks the inputs of a package."""
    inputs = list(internal("torch._inductor.virtualized.V").graph.graph_inputs.values())
    symbols: dict[str, str] = {}
    lines: list[str] = []

    def require(holds: str, text: str) -> None:
        lines.append(f'AOTI_RUNTIME_CHECK({holds}, "the package requires {text}");')

    for number, tensor in enumerate(inputs):
        handle, name = f"input_handles[{number}]", f"input {number}"
        dtype, device = str(tensor.get_dtype()).split(".")[-1], tensor.get_device().type
        for what in ("int64_t dim", "int32_t dtype", "int32_t device_type", "int64_t* sizes",
                     "int64_t* strides"):  # fmt: skip
            kind, asked = what.split()
            lines.append(f"{kind} {asked}{number};")
            got = f"aoti_torch_get_{asked}({handle}, &{asked}{number})"
            lines.append(f"AOTI_TORCH_ERROR_CODE_CHECK({got});")
        lines.append(f"void* data{number};")
        lines.append(
            f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr({handle}, &data{number}));"
        )
        require(f"dtype{number} == aoti_torch_dtype_{dtype}()", f"{dtype} as {name}")
        require(f"device_type{number} == aoti_torch_device_type_{device}()", f"{name} on {device}")
        rank = len(tensor.get_size())
        require(f"dim{number} == {rank}", f"{rank} dimensions of {name}")
        for dim, size in enumerate(tensor.get_size()):
            if size.is_symbol and str(size) not in symbols:
                symbols[str(size)] = f"int64_t {size} = sizes{number}[{dim}];"
                lines.append(symbols[str(size)])
    for number, tensor in enumerate(inputs):
        for dim, (size, stride) in enumerate(
            zip(tensor.get_size(), tensor.get_stride(), strict=True)
        ):
            text = wrapper.codegen_sizevar(size)
            place = f"at {dim} of input {number}"
            require(f"sizes{number}[{dim}] == {text}", f"a size of {text} {place}")
            step = wrapper.codegen_sizevar(stride)
            alike = f"sizes{number}[{dim}] < 2 || strides{number}[{dim}] == {step}"
            require(alike, f"the memory layout of the export: a stride of {step} {place}")
        for other, one in enumerate(inputs[:number] if groups else ()):  # by their addresses
            kinds = [(each.get_dtype(), len(each.get_size())) for each in (one, tensor)]
            if groups[other] == groups[number]:
                require(f"data{number} == data{other}", f"inputs {other} and {number} to be one")
            elif kinds[0] == kinds[1]:
                require(f"data{number} != data{other}", f"inputs {other} and {number} to be two")
    body = "\n".join(lines)
    handles = "AtenTensorHandle* input_handles, AtenTensorHandle* output_handles"
    return (
        "static bool _check_aoti_runtime_check_inputs_env() { return false; }\n"
        f"AOTI_NOINLINE static void __check_inputs_outputs({handles}) {{\n{body}\n}}\n"
    )


# Compiled code that reads a wrong address ends its process, so another process tries it first.
_IN_ANOTHER_PROCESS = """
import sys, torch
program = torch._inductor.aoti_load_package(sys.argv[1])
with torch.no_grad():
    for args, kwargs in torch.load(sys.argv[2], weights_only=False):
        program(*args, **kwargs)
"""


def _require_alive(package: str, calls: Sequence[Any]) -> None:
    """Raise if a package ends the process that runs it."""
    with tempfile.TemporaryDirectory() as folder:
        inputs = os.path.join(folder, "inputs.pt")
        try:
            torch.save(list(calls), inputs)
        except Exception:  # not all inputs can be pickled; `check` runs it anyway
            return
        command = [sys.executable, "-c", _IN_ANOTHER_PROCESS, package, inputs]
        done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode < 0:
        raise ExportError(
            f"the package that AOTInductor has compiled ends its process by signal "
            f"{-done.returncode}: no file is written"
        )


def save_onnx(
    program: torch.export.ExportedProgram,
    path: str | os.PathLike[str],
    messages: dict[int, str],
    arguments: tuple[list[list[Any]], bool],
    check: Check,
) -> None:
    """Write a program for ONNX, and have `check` compare it in onnxruntime.

    Its last output is the number of the unseen side it came to, and each has a message. With the
    arguments (see `arguments_of`) stands whether it matters which of them are one object.
    """
    onnx = _onnx()
    with _whole_file(path, ".onnx") as temporary, quiet():
        try:
            with each_side_once():
                made = _translate(program)
            made.save(temporary, external_data=False)
        except OSError:
            raise
        except Exception as error:
            raise ExportError(f"ONNX cannot express it: {_first_line(error)}") from error
        model = onnx.load(temporary)
        messages = {**messages, **_compare_sizes(model.graph, max(messages, default=0))}
        for key, value in ((_UNSEEN, messages), (_ARGUMENTS, arguments)):
            entry = model.metadata_props.add()
            entry.key, entry.value = key, json.dumps(value)
        sizes = (dim for one in model.graph.input for dim in one.type.tensor_type.shape.dim)
        for size in sizes:  # the translation takes fixed sizes for names (torch 2.13)
            if size.dim_param.isdigit():
                size.dim_value = int(size.dim_param)
        onnx.save(model, temporary)
        try:
            loaded = OnnxProgram(temporary)
        except Exception as error:
            hint = ": convert the model with to(torch.float32)" if _has_bfloat16(program) else ""
            raise ExportError(f"onnxruntime cannot run it{hint} ({_first_line(error)})") from error
        check(loaded)


def _compare_sizes(graph: Any, largest: int) -> dict[int, str]:
    """Have the last output tell of sizes that differ although the program has one name for them.

    onnxruntime does not compare them. The new numbers begin above the largest that the output has
    had; their messages are returned.
    """
    make, kinds = _onnx().helper, _onnx().TensorProto
    places: dict[str, list[tuple[str, int]]] = {}
    for one in graph.input:
        for axis, size in enumerate(one.type.tensor_type.shape.dim):
            if size.dim_param and not size.dim_param.isdigit():
                places.setdefault(size.dim_param, []).append((one.name, axis))
    pairs = [(first, place) for first, *others in places.values() for place in others]
    messages = {
        largest + number: f"the program requires {place[0]}.size({place[1]}) to be equal to "
        f"{first[0]}.size({first[1]})"
        for number, (first, place) in enumerate(pairs, 1)
    }
    if not pairs:
        return messages
    latest, unseen = f"{_UNSEEN}_0", graph.output[-1].name
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [latest if name == unseen else name for name in names]
    for constant in graph.initializer:
        constant.name = latest if constant.name == unseen else constant.name
    for number, (first, place) in zip(messages, pairs, strict=True):
        base = f"{_UNSEEN}_{number}"
        constant = make.make_tensor(f"{base}_number", kinds.INT64, [], [number])
        graph.initializer.append(constant)
        for name, axis, end in ((*first, "one"), (*place, "other")):
            graph.node.append(
                make.make_node("Shape", [name], [f"{base}_{end}"], start=axis, end=axis + 1)
            )
        rows = (
            ("Sub", (f"{base}_one", f"{base}_other"), f"{base}_apart"),
            ("Abs", (f"{base}_apart",), f"{base}_distance"),
            ("Sign", (f"{base}_distance",), f"{base}_sign"),
            ("Squeeze", (f"{base}_sign",), f"{base}_differs"),
            ("Mul", (f"{base}_differs", f"{base}_number"), f"{base}_told"),
            ("Max", (latest, f"{base}_told"), base),
        )
        for operator_name, inputs, output in rows:
            graph.node.append(make.make_node(operator_name, inputs, [output]))
        latest = base
    graph.node.append(make.make_node("Identity", [latest], [unseen]))
    return messages


def _has_bfloat16(program: torch.export.ExportedProgram) -> bool:
    values = (node.meta.get("val") for node in program.graph.nodes)
    return any(isinstance(one, Tensor) and one.dtype is torch.bfloat16 for one in values)


def _translate(program: torch.export.ExportedProgram) -> torch.onnx.ONNXProgram:
    """Translate a program to ONNX.

    It does what `torch.onnx.export` does, but for two things: in loops with branches there are
    functions in functions, which it notes different versions of (torch 2.13; the test of greedy
    decoding notices); and it rounds `//` of sizes to 0 (the test of rounded sizes notices).
    """
    exporter = importlib.import_module("torch.onnx._internal.exporter._core")
    functions = importlib.import_module("torch.onnx._internal.exporter._registration")
    registry = functions.ONNXRegistry.from_torchlib()
    registry.register_op(operator.floordiv, _floor_division)
    for target in (_ATEN.matmul.default, _ATEN.mv.default):
        registry.register_op(target, _product)
    model = exporter.exported_program_to_ir(program, registry=registry)
    for holder in (model, *model.functions.values()):
        if _SUBGRAPHS in holder.opset_imports:
            holder.opset_imports[_SUBGRAPHS] = 1
    made = torch.onnx.ONNXProgram(model, program)
    made.optimize()
    return made


def _floor_division(one: Any, other: Any) -> Any:
    op: Any = importlib.import_module("onnxscript").opset18
    return op.Div(op.Sub(one, op.Mod(one, other)), other)


def _product(one: Any, other: Any) -> Any:
    """Multiply as `matmul` does: onnxruntime 1.32 computes `x.T @ v` for a vector v wrongly."""
    op: Any = importlib.import_module("onnxscript").opset18
    if one.shape and other.shape and len(one.shape) > 1 == len(other.shape):
        return op.Squeeze(op.MatMul(one, op.Unsqueeze(other, [1])), [-1])
    return op.MatMul(one, other)


class OnnxProgram:
    """An exported model that onnxruntime runs.

    The last output of the file says which unseen side a call came to, or which condition on its
    inputs does not hold, or 0: this raises then, as the other targets do by themselves. It is
    called as the model was, and returns a flat list of tensors.

    Args:
        path: the file that `BendedModule.export` has written.

    Attributes:
        session: the `onnxruntime.InferenceSession`.
        messages: the unseen sides by their numbers.

    Example:
        >>> import torch, bendtrace as bt
        >>> bended = bt.BendedModule(lambda x: x + 1 if x.sum() > 0 else x - 1)
        >>> _ = bended.export(torch.ones(2), -torch.ones(2), to="m.onnx")  # doctest: +SKIP
        >>> bt.export.OnnxProgram("m.onnx")(torch.ones(2))  # doctest: +SKIP
        [tensor([2., 2.])]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        onnxruntime = _required("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        self.session: Any = onnxruntime.InferenceSession(os.fspath(path), options)
        found = self.session.get_modelmeta().custom_metadata_map
        self.messages: dict[int, Any] = {
            int(k): v for k, v in json.loads(found.get(_UNSEEN, "{}")).items()
        }
        self._arguments: Any = json.loads(found.get(_ARGUMENTS, "null"))

    def __call__(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """Run it.

        Raises:
            RuntimeError: the inputs lead to a side that was never seen, or have sizes that it was
                not exported for.
            InputError: there are others than those that it was exported from, or other numbers
                among them.
        """
        if self._arguments is not None:
            required, compares = self._arguments
            _require_same(arguments_of(args, kwargs, compares), required)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        names = [one.name for one in self.session.get_inputs()]
        feed = {n: t.detach().cpu().numpy() for n, t in zip(names, leaves, strict=True)}
        *outputs, flag = self.session.run(None, feed)
        if int(flag):
            raise RuntimeError(self.messages[int(flag)])
        return [torch.from_numpy(out) for out in outputs]


def _require_same(rows: list[list[Any]], required: list[list[Any]]) -> None:
    """Require that a call has the arguments that a file was exported from (see `arguments_of`)."""
    places, wanted = ([row[0] for row in each] for each in (rows, required))
    if places != wanted:
        raise InputError(f"the model takes arguments at {wanted}, not at {places}")
    for (place, text, first), (_, other, same) in zip(rows, required, strict=True):
        if text != other:
            one, instead = (each or "a tensor" for each in (text, other))
            raise InputError(f"argument {place} is {one}; the file was exported for {instead}")
        if first != same:
            is_same = places[first] != place
            how, alike = ("is", first) if is_same else ("is not", same)
            raise InputError(
                f"argument {place} {how} the same tensor as {places[alike]}, unlike in the inputs "
                "that the file was exported from"
            )


def _onnx() -> Any:
    for name in ("onnxscript", "onnxruntime"):
        _required(name)
    return _required("onnx")


def _required(name: str) -> Any:
    return required(name, "an ONNX file", "onnx onnxruntime onnxscript", InputError)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


# Outputs of the sides of questions, and of rounds of loops, that AOTInductor would take for one.
#
# Inductor computes equal values once. Where a subgraph returns such a value twice, the C++ that
# it writes moves one and the same buffer into two outputs, and reads a null pointer afterwards
# (torch 2.13: the process crashes; the test of greedy decoding would notice a change).

_ATEN = torch.ops.aten
_SAME = frozenset({_ATEN.clone.default, _ATEN.alias.default, _ATEN.detach.default})
_RESHAPED = frozenset({_ATEN.reshape.default, _ATEN.view.default, _ATEN._to_copy.default})


def with_distinct_outputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program that does the same, whose subgraphs return no value twice."""
    made = copy.copy(program)
    made._graph_module = copy.deepcopy(program.graph_module)
    for name, module in made.graph_module.named_modules():
        if name and isinstance(module, fx.GraphModule):
            _separate(module)
    return made


def _separate(module: fx.GraphModule) -> None:
    numbers: dict[fx.Node, int] = {}
    number_of: dict[Any, int] = {}
    for node in module.graph.nodes:
        key: Any = node
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            if node.target in _SAME or (node.target in _RESHAPED and _is_as_before(node)):
                numbers[node] = numbers[node.args[0]]
                continue
            given = fx.map_arg((node.args, node.kwargs), lambda one: _NodeNumber(numbers[one]))
            key = node.target, repr(given)
        numbers[node] = number_of.setdefault(key, len(number_of))
    output = module.graph.output_node()
    results = output.args[0]
    if not isinstance(results, (tuple, list)):
        return
    seen: dict[int, fx.Node] = {}
    separate: list[Any] = []
    for result in results:
        if isinstance(result, fx.Node) and isinstance(result.meta.get("val"), torch.Tensor):
            number = numbers[result]
            if number in seen:
                with module.graph.inserting_before(output):
                    result = _again(module.graph, seen[number])
            seen[number] = result
        separate.append(result)
    output.args = (tuple(separate),)
    module.recompile()


class _NodeNumber(int):
    """A number that takes the place of a node."""

    def __repr__(self) -> str:
        return f"value {int(self)}"


def _is_as_before(node: fx.Node) -> bool:
    before, after = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    return (
        isinstance(before, torch.Tensor)
        and isinstance(after, torch.Tensor)
        and before.dtype is after.dtype
        and tuple(before.shape) == tuple(after.shape)
    )


def _again(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """Return a value once more, in a way that inductor does not see through."""
    same = graph.call_function(_ATEN.eq.Tensor, (value, value))
    made = graph.call_function(_ATEN.where.self, (same, value, value))
    same.meta["val"] = torch.eq(value.meta["val"], value.meta["val"])
    made.meta["val"] = value.meta["val"].clone()
    return made
