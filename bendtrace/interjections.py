"""Interjections: user code at nodes, and functions that insert it into a model.

The functions and the interjections that are modules have the names of TorchWatcher.

>>> import torch, bendtrace as bt
>>> class Tell(bt.interjections.ForwardInterjection):
...     def process(self, name, module, output):
...         print(name, tuple(output.shape))
>>> bended = bt.interjections.interject_by_match(torch.nn.ReLU(), "relu", Tell())
>>> _ = bended(torch.ones(2, 3))
relu (2, 3)
"""

from bendtrace._interject import (
    interject_by_match,
    interject_by_module,
    interject_by_module_class,
    interject_by_module_class_native,
    interject_by_name,
)
from bendtrace.interject.insertion import Insertion
from bendtrace.interject.interjection import Inputs, Interjection, NodePass
from bendtrace.interject.interjections import (
    ForwardInterjection,
    WrappedForwardBackwardInterjection,
    WrappedForwardInterjection,
)
from bendtrace.interject.report import Report

__all__ = [
    "ForwardInterjection",
    "Inputs",
    "Insertion",
    "Interjection",
    "NodePass",
    "Report",
    "WrappedForwardBackwardInterjection",
    "WrappedForwardInterjection",
    "interject_by_match",
    "interject_by_module",
    "interject_by_module_class",
    "interject_by_module_class_native",
    "interject_by_name",
]
