"""A thread that loads experts one after another, in the order they were asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

Key = tuple[int, int]
"""(layer, expert)."""


class ExpertLoader:
    """Runs `load` for each submitted key. If the thread dies, `revive` tells at what and starts another.

    Attributes:
        changed: notified whenever a load has ended; its lock guards what `load` and its owner share.
        current: the key being loaded now.
    """

    def __init__(self, load: Callable[[Key], None]) -> None:
        self.changed = threading.Condition()
        self.current: Key | None = None
        self._load = load
        self._queue: OrderedDict[Key, None] = OrderedDict()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is loaded or waits for it."""
        return self.current is None and not self._queue

    def submit(self, key: Key) -> None:
        """Load `key` after what was submitted before; starts the thread the first time."""
        with self.changed:
            self._queue[key] = None
            self.changed.notify_all()
        if self._thread is None:
            self._start()

    def cancel(self, key: Key) -> None:
        """Forget `key` if its load has not begun."""
        with self.changed:
            self._queue.pop(key, None)

    def revive(self) -> tuple[bool, Key | None]:
        """Whether the thread had died, and the key it was at; there is a new one then."""
        if self._thread is None or self._thread.is_alive() or self._closing:
            return False, None
        with self.changed:
            died_at, self.current = self.current, None
        self._start()
        return True, died_at

    def close(self) -> None:
        """Stop after the load that is under way; safe to call twice."""
        with self.changed:
            self._closing = True
            self._queue.clear()
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=60)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="expert-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self.changed:
                while not self._closing and not self._queue:
                    self.changed.wait()
                if self._closing:
                    return
                self.current, _ = self._queue.popitem(last=False)
                key = self.current
            self._load(key)
            with self.changed:
                self.current = None
                self.changed.notify_all()
