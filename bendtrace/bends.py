"""Bends: callbacks that change activations and weights, and the numbers that control them.

The names and their meanings are those of torchbend.

>>> import torch, bendtrace as bt
>>> bended = bt.BendedModule(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Identity()))
>>> _ = bended.bend(bt.bends.Scale(2.0), "0")
>>> bended(torch.tensor([-1.0, 3.0]))
tensor([0., 6.])
"""

from bendtrace.interject.bends.affine import Affine, Bias, Scale
from bendtrace.interject.bends.bend import Bend, CallbackChain
from bendtrace.interject.bends.bending import Bending
from bendtrace.interject.bends.capture import Capture, InterpolationFromCapture
from bendtrace.interject.bends.config import BendingConfig
from bendtrace.interject.bends.functional import Lambda
from bendtrace.interject.bends.interpolation import InterpolateActivation
from bendtrace.interject.bends.mask import Mask, OrderedMask, ThresholdActivation
from bendtrace.interject.bends.noise import Normal
from bendtrace.interject.bends.parameter import BendingParameter
from bendtrace.interject.bends.permute import Permute, ThresholdPermute

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
