"""Ctrl-C that ends a training after a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupt"]


class Interrupt:
    """Handler of Ctrl-C during a training: the first one sets :attr:`requested`, a second one interrupts at once.

    Other threads than the main one, and programs with a handler of their own, are not changed.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        self._is_installed = False

    def __enter__(self) -> Interrupt:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, self._previous)
