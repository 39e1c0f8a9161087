"""The names of five other libraries: a script for one of them only changes its import.

| was | is |
|---|---|
| `import torchbend as tb` | `from bendtrace.compat import torchbend as tb` |
| `import torchlens as tl` | `from bendtrace.compat import torchlens as tl` |
| `from graphpatch import ...` | `from bendtrace.compat.graphpatch import ...` |
| `from torchwatcher.interjection import ...` | `from bendtrace.compat.torchwatcher import ...` |
| `from tacklebox.hook_management import ...` | `from bendtrace.compat.tacklebox import ...` |

Each module contains what only that library has: its names and its conventions, based on the same
insertions, traces and replays as everything else.

>>> import torch, bendtrace as bt
>>> bended = bt.compat.torchbend.BendedModule(torch.nn.ReLU())
>>> graph, out = bended.trace(torch.tensor([-1.0, 2.0]), _return_out=True)
>>> out
(tensor([0., 2.]),)
"""

from bendtrace import _public

__all__: list[str] = []  # its modules are `_public.COMPAT`
__dir__ = [*_public.COMPAT].copy

__getattr__ = _public.importer(globals(), {})
