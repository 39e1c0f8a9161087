"""Models on several processes: DDP, FSDP2, DTensors, the model's own collectives.

They are traced, replayed and accept insertions like other models; ranks agree before they
communicate.

>>> import torch, bendtrace as bt
>>> bt.distributed.whole({"loss": torch.ones(2)})
{'loss': tensor([1., 1.])}
"""

from bendtrace.distributed.agreeing import Agreement, Traffic, agree, agreement, traffic
from bendtrace.distributed.tensors import whole

__all__ = [
    "Agreement",
    "Traffic",
    "agree",
    "agreement",
    "traffic",
    "whole",
]
__dir__ = __all__.copy
