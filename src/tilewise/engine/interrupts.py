"""Ctrl-C, and other signals whose handlers may raise, come when an engine's bookkeeping is whole: while the model
computes, or after.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class Interrupts:
    """Keeps handlers of signals waiting until the block ends, where those are called whose signal came.

    These are handlers in Python of Ctrl-C (SIGINT), SIGTERM, SIGHUP, SIGQUIT, SIGALRM, SIGUSR1, SIGUSR2 and SIGBREAK.
    Where Python does not handle a signal, it has its usual effect at once, such as the end of the process; so have all
    other signals. An exception that a handler of another signal raises may leave an engine's bookkeeping in pieces. In
    threads that get no signals it does nothing. Blocks may be nested: the outermost one decides.

    Example:
        >>> with Interrupts() as interrupts:  # here all or nothing happens
        ...     with interrupts.let_through():  # here Ctrl-C raises KeyboardInterrupt
        ...         pass
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._came: dict[int, FrameType | None] = {}
        self._wait = True
        self._once = False  # where they do not wait: until one raises

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():  # which alone runs handlers
            return self
        try:
            for number in SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    signal.signal(number, self._handle)
        except BaseException:  # of a handler that was still there
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        except BaseException:  # of a handler that was back
            self._restore()
            raise
        finally:
            self._wait = False
            with contextlib.ExitStack() as all_of_them:  # also where one raises
                for number, frame in reversed(self._came.items()):
                    all_of_them.callback(self._handlers[number], number, frame)

    @contextlib.contextmanager
    def let_through(self) -> Iterator[None]:
        """In this block handlers are called at once, until one raises: what follows an exception is whole again."""
        self._wait, self._once = False, True
        try:
            for number in [*self._came]:
                self._handle(number, self._came.pop(number))
            yield
        finally:
            self._wait, self._once = True, False

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._wait:
            self._came[number] = frame
            return
        self._wait = self._once
        self._handlers[number](number, frame)
        self._wait = False
