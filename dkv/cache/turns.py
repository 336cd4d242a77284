"""One thread at a time uses a cache; another that tries is refused before it changes anything."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

_guard = threading.Lock()  # of every turn: it is held for a few lines


class Turn:
    """Whose turn it is with one cache. A step of a model holds it from its first layer to its last.

    It also knows which length each thread was told for the step that it prepares: its positions follow from that.
    """

    def __init__(self) -> None:
        self._holder: threading.Thread | None = None
        self._depth = 0  # of operations that make use of others
        self._told: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> Turn:
        return Turn()  # a copy of a cache is nobody's

    @property
    def mine(self) -> bool:
        return self._holder is threading.current_thread()

    def take(self) -> None:
        """Hold the turn, which this thread may hold already.

        Raises
        ------
        RuntimeError
            When it is another thread's. That of a thread which has ended lapses.
        """
        with _guard:
            if self._holder is not None and not self.mine and self._holder.is_alive():
                raise RuntimeError(
                    "this DKVCache is in use by another thread: give each thread a cache of its own, or take turns; "
                    "if a step was interrupted in that thread, reset() the cache there"
                )
            self._holder = threading.current_thread()

    def give_back(self) -> None:
        with _guard:
            self._told.pop(threading.current_thread(), None)
            self._holder = None

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """The turn is held inside the block alone, which may hold others; a step that was interrupted ends with it."""
        self.take()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.give_back()

    @contextlib.contextmanager
    def goes_on(self, last: bool) -> Iterator[None]:
        """A part of a step: the turn stays with this thread unless the part is the last or fails."""
        try:
            yield
        except BaseException:
            self.give_back()
            raise
        if last:
            self.give_back()

    def tell(self, length: int) -> int:
        """This thread asks how many positions the cache has seen."""
        if not self.mine:
            with _guard:
                self._told[threading.current_thread()] = length
        return length

    def check_told(self, length: int) -> None:
        """Refuse a step whose positions were made for another length than the cache has now."""
        with _guard:
            told = self._told.setdefault(threading.current_thread(), length)
            if told != length:
                del self._told[threading.current_thread()]
                raise RuntimeError(
                    f"this DKVCache had seen {told} positions when this thread asked and has seen {length} now: "
                    "another thread used it in between; give each thread a cache of its own, or take turns"
                )
