"""Runs a file that a model was exported to, in a process that has nothing but torch or onnxruntime.

Called with the target, the file, the inputs, and where the outputs go: a list of flat outputs, or
of the message of the error that a call raised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def flat(value: Any) -> list[Tensor]:
    """Return the tensors in outputs."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value
    return [leaf for item in items for leaf in flat(item)]


def onnx_program(path: str) -> Callable[..., Any]:
    """Return what runs an ONNX file, whose last output is the number of an unseen side."""
    import json

    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    found = session.get_modelmeta().custom_metadata_map["bendtrace_unseen"]
    names = [one.name for one in session.get_inputs()]

    def run(*args: Tensor) -> list[Tensor]:
        feed = {name: arg.numpy() for name, arg in zip(names, args, strict=True)}
        *outputs, flag = session.run(None, feed)
        if int(flag):
            raise RuntimeError(json.loads(found)[str(int(flag))])
        return [torch.from_numpy(output) for output in outputs]

    return run


def loaded(target: str, path: str) -> Callable[..., Any]:
    """Load a file for a target."""
    if target == "onnx":
        return onnx_program(path)
    if target == "aoti":
        package: Callable[..., Any] = torch._inductor.aoti_load_package(path)
        return package
    return torch.export.load(path).module()


def main(target: str, path: str, inputs: str, outputs: str) -> None:
    """Run the file with all inputs."""
    torch.set_num_threads(1)
    program = loaded(target, path)
    found: list[Any] = []
    with torch.no_grad():
        for args in torch.load(inputs):
            try:
                found.append([leaf.clone() for leaf in flat(program(*args))])
            except RuntimeError as error:
                found.append(str(error))
    strangers = [name for name in sys.modules if name.split(".")[0] in ("bendtrace", "tests")]
    assert not strangers, strangers
    torch.save(found, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
