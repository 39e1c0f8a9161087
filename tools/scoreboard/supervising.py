"""Running cases in a process that may crash or hang, and going on with the next."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["Supervisor"]

_STARTING = 60.0  # seconds more for the first case of a process, which imports all it needs


class Supervisor:
    """Asks a worker, and starts another one where that is gone.

    Also a context manager, which ends the worker.

    Args:
        command: what starts a worker.
        most: after how many cases a worker is replaced by another one.
    """

    def __init__(
        self,
        command: Sequence[str] = (sys.executable, "-W", "ignore", "-m", "tools.scoreboard.worker"),
        most: int = 250,
    ) -> None:
        self._command = list(command)
        self._most = most
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0
        self._pending = b""

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer, or what became of the process.

        Args:
            request: what to run; `suite`, `case` and `way` name it.
            seconds: how long it may take.
        """
        if self._process is None or self._asked >= self._most:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        first = self._asked == 0
        self._asked += 1
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = self._line(time.monotonic() + seconds + _STARTING * first)
        except BrokenPipeError:
            line = b""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if line is None:
            outcome, why = "hung", f"no answer in {seconds:.0f} s"
        else:
            code = process.wait()
            name = signal.Signals(-code).name if code < 0 else f"status {code}"
            outcome, why = "crashed", f"the process ended with {name}"
        self.stop()
        named = {key: request[key] for key in ("suite", "case", "way")}
        return {**named, "outcome": outcome, "right": {}, "calls": {}, "why": why}

    def _line(self, until: float) -> bytes | None:
        """Return a line of the worker's; b"" at its end, None if it takes too long."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        while b"\n" not in self._pending:
            left = until - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                return None
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                return b""
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _start(self) -> None:
        self.stop()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._asked, self._pending = 0, b""

    def stop(self) -> None:
        """End the worker, and what it may have started."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
