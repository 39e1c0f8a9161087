"""Prints what becomes of each type of model: `python -m tools.hub [types]`."""

import sys
import warnings

import torch

from tools.hub.building import types
from tools.hub.sweeping import counted, sweep

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for row in sweep(sys.argv[1:] or types()):
        rows.append(row)
        print(row, flush=True)
    print(counted(rows))
