"""Produces items in a thread, a fixed number ahead of the consumer: on every rank the same number at the same point."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
STOP, PRODUCE = False, True


class BackgroundProducer(Generic[T]):
    """Calls ``produce(index)`` in a thread, for index 0, 1, ... as far as permitted.

    ``produce`` contains collectives. So whether it runs must not depend on the speed of a thread: an item that was
    permitted is always produced, and one that was not, never. An error of ``produce`` ends the thread, and is raised by
    ``get`` and ``finish``.

    Args:
        produce: the function.
        total: number of items.
        ahead: items produced before they are asked for.
    """

    def __init__(self, produce: Callable[[int], T], total: int, ahead: int):
        self._produce, self._total = produce, total
        self._permits: SimpleQueue[bool] = SimpleQueue()
        self._items: SimpleQueue[T | BaseException] = SimpleQueue()
        self._permitted = 0
        self._error: BaseException | None = None
        self._permit(ahead)
        # a daemon: where the training fails, the process must end although this thread waits for another rank
        self._thread = threading.Thread(target=self._run, name="hasten-graph-exchange", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int | None:
        return self._thread.ident

    @property
    def is_fully_permitted(self) -> bool:
        """Whether the thread ends by itself."""
        return self._permitted == self._total

    def get(self) -> T:
        """The next item; permits one more."""
        self._permit(1)
        item = self._items.get()
        if isinstance(item, BaseException):
            self._error = item
            raise item
        return item

    def permit_all(self) -> None:
        """Permits all items that are left, without waiting for them."""
        self._permit(self._total)

    def finish(self, timeout: float | None = None) -> None:
        """Waits until all permitted items are produced, at most ``timeout`` seconds, and ends the thread."""
        self._permits.put(STOP)
        self._thread.join(timeout)
        reported, self._error = self._error, None
        while not self._items.empty() and reported is None:
            item = self._items.get()
            if isinstance(item, BaseException):
                raise item

    def _permit(self, number: int) -> None:
        for _ in range(min(number, self._total - self._permitted)):
            self._permits.put(PRODUCE)
            self._permitted += 1

    def _run(self) -> None:
        for index in range(self._total):
            if self._permits.get() is STOP:
                return
            try:
                self._items.put(self._produce(index))
            except BaseException as error:
                self._items.put(error)
                return
