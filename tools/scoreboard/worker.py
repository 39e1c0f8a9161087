"""A process that runs cases for somebody who watches it: it may crash, and it may hang.

Requests come as JSON, a line each, on standard input; answers go out likewise on the descriptor
that was standard output. What the cases print goes nowhere.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import sys
from typing import Any

__all__ = ["main"]

_MEMORY = 10 << 30  # bytes that the cases may have at once


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    # A program that wants more gets an error, before the machine ends what it pleases.
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    import torch

    torch.set_num_threads(1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from tools.scoreboard.judging import Result, is_repeatable, judge, truth
    from tools.scoreboard.suites import suite_of
    from tools.scoreboard.ways import quietly, ways

    way = next(way for way in ways(request["backend"]) if way.name == request["way"])
    suite, option = suite_of(request["suite"]), request["option"]
    try:
        with quietly():
            case = suite.case(request["case"], option)
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
            random.seed(0)
            wanted = truth(case)
            random.seed(0)
            result = judge(case, way, wanted)
            if result.outcome == "wrong" and not is_repeatable(case, wanted):
                result.outcome, result.why = "invalid", "eager gives another result each time"
    except Exception as error:  # the program cannot even be made
        text = f"{type(error).__name__}: {error}"[:300]
        result = Result(suite.name, request["case"], way.name, "invalid", why=text)
    return dataclasses.asdict(result)


if __name__ == "__main__":
    main()
