"""Random programs that were once wrong, made small."""

from __future__ import annotations

from .program import Call, Program

__all__ = ["FOUND"]


def _model(attributes: str, forward: str, *calls: str | Call) -> Program:
    """A program of one class, from the lines of its `__init__` and its `forward`."""
    lines = [
        "import torch",
        "from torch import nn",
        "from torch.nn import functional as F",
        "",
        "",
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in attributes.splitlines()),
        "",
        *(f"    {line}" for line in forward.splitlines()),
    ]
    made = (call if isinstance(call, Call) else Call(call) for call in calls)
    return Program("\n".join(lines) + "\n", tuple(made))


_BUFFER = 'self.register_buffer("buf", torch.zeros(4))'
_VECTOR = "self.h = torch.zeros(4)"

FOUND: dict[str, Program] = {
    "two attributes become one tensor": _model(
        f"{_BUFFER}\n{_VECTOR}",
        """\
def forward(self, x):
    self.buf.add_(1)
    if x.sum() > 0:
        x = x * 2
    self.h = self.buf
    return x
""",
        "normal(0, 3, plus=9)",
        "normal(0, 3, plus=-9)",
        "normal(0, 3, plus=9)",
    ),
    "an attribute that changed once, before calls that raise": _model(
        "self.last = None",
        """\
def forward(self, x):
    x = x[1:] + x[1]
    if self.last is not None and self.last.shape[0] > 0:
        x = x + 1
    self.last = x.detach()
    return x
""",
        "normal(0, 3)",
        *["normal(0, 1)"] * 3,
        *["normal(0, 3)"] * 3,
    ),
    "a number that is asked for what it does not have": _model(
        "",
        """\
def forward(self, x):
    n = x.shape[0]
    return n.item() if x.sum() > 0 else len(n)
""",
        "normal(0, 3, plus=9)",
        "normal(0, 3, plus=-9)",
    ),
    "a list of the caller's that forward makes longer": _model(
        "",
        """\
def forward(self, x, xs):
    xs.insert(0, x * len(x))
    return xs[-1]
""",
        *[f"normal(2, 3), [{', '.join(['normal(3)'] * n)}]" for n in (1, 3, 2, 1, 3, 4, 5)],
    ),
    "a list that keeps a buffer at each call": _model(
        f"{_BUFFER}\nself.log = []",
        """\
def forward(self, x):
    self.log.append(self.buf)
    return x + len(x)
""",
        *["normal(2, 3)"] * 8,
    ),
}
