"""Models on several processes: DDP, FSDP2, DTensors, collectives of the model's own.

They are traced, replayed and cut into like others; ranks agree before they act together.

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
