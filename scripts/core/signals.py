"""A run that is asked to stop finishes its step and saves first.

This module only notes Ctrl-C and SIGTERM; the run looks at the note after each step.
"""

import signal
import threading
from typing import Any


class Stopped(Exception):
    """The run was asked to stop, and it has saved its state."""

    def __init__(self, number: int, steps: int):
        self.number = number
        super().__init__(
            f"stopped by {signal.Signals(number).name} after step {steps}, and saved: "
            "the same command with --resume goes on"
        )


class StopSignal:
    """Remembers Ctrl-C and SIGTERM until the step is over; a second one acts at once."""

    def __init__(self):
        self.number = 0
        self.before: dict[int, Any] = {}

    def note(self, number: int, frame: Any) -> None:
        """The handler. A second signal finds the one before: a validation may take minutes."""
        self.number = number
        signal.signal(number, self.before[number])

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():  # other threads get no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
