"""Run under torchrun: carries out the checks of one module, and writes down how they ended."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def main(name: str, folder: str) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(float(os.environ.get("HANGS_AFTER", "90")))
    dist.init_process_group("gloo")
    module = importlib.import_module(f"tests.distributed.{name}")
    for check in [key for key in vars(module) if key.startswith("check_")]:
        file = Path(folder) / f"{check}.{dist.get_rank()}"
        dist.barrier()
        try:
            vars(module)[check]()
        except BaseException:
            file.write_text(traceback.format_exc())
            # The other rank may wait for this one: torchrun ends it.
            os._exit(1)
        file.write_text("passed")
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
