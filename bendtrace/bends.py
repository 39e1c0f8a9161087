"""Bends: callbacks that change activations and weights, and the numbers that control them.

The names and their meanings are those of torchbend.

>>> import torch, bendtrace as bt
>>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Identity()))
>>> _ = bended.bend(bt.bends.Scale(2.0), "0")
>>> bended(torch.tensor([-1.0, 3.0]))
tensor([0., 6.])
"""

from bendtrace.insert.bend import Bend, BendingParameter, CallbackChain
from bendtrace.insert.bend_callbacks import (
    Affine,
    Bias,
    Capture,
    InterpolateActivation,
    InterpolationFromCapture,
    Lambda,
    Mask,
    Normal,
    OrderedMask,
    Permute,
    Scale,
    ThresholdActivation,
    ThresholdPermute,
)
from bendtrace.insert.bending import Bending, BendingConfig

__all__ = [
    "Affine",
    "Bend",
    "Bending",
    "BendingConfig",
    "BendingParameter",
    "Bias",
    "CallbackChain",
    "Capture",
    "InterpolateActivation",
    "InterpolationFromCapture",
    "Lambda",
    "Mask",
    "Normal",
    "OrderedMask",
    "Permute",
    "Scale",
    "ThresholdActivation",
    "ThresholdPermute",
]
__dir__ = __all__.copy
