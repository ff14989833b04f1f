"""Produces items in a thread, a fixed number before they are read: on every rank the same number at the same point."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from hasten.core.errors import ConfigurationError

T = TypeVar("T")
STOP, PRODUCE = False, True
END: Any = object()  # the last item


class BackgroundProducer(Generic[T]):
    """Calls ``produce(index)`` in ``thread``, which the owner starts, for index 0, 1, ... as far as permitted.

    ``produce`` contains collectives. So whether it runs must not depend on the speed of a thread: an item that was
    permitted is always produced, and one that was not, never. An error of ``produce`` ends the thread, and is raised
    once, by the next call that waits for the thread.

    Args:
        produce: the function.
        total: number of items.
        prefetch: items produced before they are read.
    """

    def __init__(self, produce: Callable[[int], T], total: int, prefetch: int):
        self._produce, self._total = produce, total
        self._permits: SimpleQueue[bool] = SimpleQueue()
        self._items: SimpleQueue[T] = SimpleQueue()
        self._permitted = 0
        self._is_stopped = False
        self._error: BaseException | None = None
        self._permit(prefetch)
        # a daemon: where the training fails, the process must end although this thread waits for another rank
        self.thread = threading.Thread(target=self._run, name="hasten-graph-exchange", daemon=True)

    @property
    def is_current_thread(self) -> bool:
        return threading.current_thread() is self.thread

    @property
    def is_fully_permitted(self) -> bool:
        """Whether all items are permitted."""
        return self._permitted == self._total

    @property
    def will_end(self) -> bool:
        """Whether the thread ends without a further call."""
        return self._is_stopped or self.is_fully_permitted

    def get(self) -> T:
        """The next item; permits one more.

        Raises:
            ConfigurationError: the producer was stopped, or all items have been read. An error of ``produce`` is raised
                in its place, once.
        """
        self._permit(1)
        item = self._items.get()
        if item is END:
            self._items.put(END)
            self._raise_error()
            raise ConfigurationError("this iterator has ended: its loader was closed, or iterated again")
        return item

    def permit_all(self) -> None:
        """Permits all items that are left, without waiting for them."""
        self._permit(self._total)

    def stop(self) -> None:
        """Ends the thread after the items that are permitted, without waiting for it."""
        self._is_stopped = True
        self._permits.put(STOP)

    def join(self, timeout: float | None = None) -> None:
        """Waits until the thread has ended, at most ``timeout`` seconds; raises the error of ``produce``, if any."""
        self.thread.join(timeout)
        self._raise_error()

    def _permit(self, number: int) -> None:
        for _ in range(0 if self._is_stopped else min(number, self._total - self._permitted)):
            self._permits.put(PRODUCE)
            self._permitted += 1

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            for index in range(self._total):
                if self._permits.get() is STOP:
                    break
                self._items.put(self._produce(index))
        except BaseException as error:
            self._error = error
        finally:
            self._items.put(END)
