"""Exchanges between all ranks in rounds: a request (ids, sorted by the rank that owns them) and a response to it.

A round is one message from every rank to every other. A request takes two collective calls, since the ranks do not know
how much they will receive: the sizes, then the ids. A response of known size takes one call.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hasten._torch_compat import peer_failure
from hasten.core.errors import CollectiveTimeout, ConfigurationError, PeerFailure
from hasten.core.process_group_info import DEFAULT_TIMEOUT_S

LOST = "another rank ended during an exchange of graph data; its own output has the cause"


@dataclass(frozen=True)
class Request:
    """What this rank asked of the others, and they of it, in one round.

    Attributes:
        order: int64: positions of this rank's ids, sorted by owner; those that this rank owns are not among them.
        own: int64: positions of the ids that this rank owns itself.
        sent: number of ids sent to each rank.
        ids: int64: the ids that the other ranks ask of this one, by rank.
        received: number of ids received from each rank.
        keys: int64, of shape (ranks,): the number that each rank sent along.
    """

    order: Tensor
    own: Tensor
    sent: list[int]
    ids: Tensor
    received: list[int]
    keys: Tensor


class RankExchange:
    """Exchanges over a gloo process group of its own, so that its messages never mix with those of the training.

    All ranks must create it at the same point of the program, and call its methods in the same order. Only one thread
    may use it at a time.

    Args:
        offsets: int64, of shape (ranks + 1,): rank r owns the ids ``offsets[r]`` to ``offsets[r + 1]`` (exclusive).
        timeout: seconds to wait for a rank that does not answer. One that has ended is noticed at once.

    Attributes:
        rounds: number of rounds so far.
        calls: number of collective calls so far.
        sent_bytes: bytes that this rank sent to others so far.
        holder: identifier of the only thread that may use it, where a loader fetches batches in the background: with
            two threads, the ranks would exchange in different orders.

    Raises:
        ConfigurationError: there is no default process group, or the partition is for another number of ranks.
    """

    def __init__(self, offsets: Tensor, timeout: float = DEFAULT_TIMEOUT_S):
        if not dist.is_available() or not dist.is_initialized():
            advice = "call torch.distributed.init_process_group first, in processes started by torchrun"
            raise ConfigurationError(f"features in other ranks require a process group; {advice}")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if len(offsets) - 1 != self.world_size:
            parts = len(offsets) - 1
            raise ConfigurationError(f"the partition has {parts} parts, but there are {self.world_size} ranks")
        self.offsets, self.timeout = offsets, timeout
        self.rounds = self.calls = self.sent_bytes = 0
        self.holder: int | None = None
        with self._peer_errors():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    @property
    def bounds(self) -> tuple[int, int]:
        """The first id that this rank owns, and the id after its last."""
        return int(self.offsets[self.rank]), int(self.offsets[self.rank + 1])

    def request(self, ids: Tensor, key: int = 0) -> Request:
        """Sends each id to the rank that owns it. One round: two collective calls.

        Args:
            ids: int64, of shape (N,), in the range of the offsets.
            key: an int64 that every other rank receives along.
        """
        owners = torch.bucketize(ids, self.offsets[1:], right=True)
        is_own = owners == self.rank
        others = (~is_own).nonzero().flatten()
        order = others[torch.argsort(owners[others], stable=True)]
        sent = torch.bincount(owners[others], minlength=self.world_size)
        header = torch.stack([sent, torch.full_like(sent, key)], 1)
        headers = self._all_to_all(header, [1] * self.world_size, [1] * self.world_size)
        received = headers[:, 0].tolist()
        asked = self._all_to_all(ids[order], sent.tolist(), received)
        self.rounds += 1
        return Request(order, is_own.nonzero().flatten(), sent.tolist(), asked, received, headers[:, 1])

    def respond(self, request: Request, rows: Tensor) -> Tensor:
        """Sends one row for each id that was received. One round: one collective call.

        Args:
            request: of the round before.
            rows: of shape (len(request.ids), ...), in the order of ``request.ids``.

        Returns:
            The rows of the ids that this rank sent, in the order of ``request.order``.
        """
        self.rounds += 1
        return self._all_to_all(rows, request.received, request.sent)

    def respond_varying(self, request: Request, counts: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """As ``respond``, ``counts[i]`` rows for id number i. One round: two collective calls.

        Returns:
            The counts, and the rows of all ids one after the other, both in the order of ``request.order``.
        """
        found = self._all_to_all(counts, request.received, request.sent)
        sent = [int(part.sum()) for part in counts.split(request.received)]
        expected = [int(part.sum()) for part in found.split(request.sent)]
        self.rounds += 1
        return found, self._all_to_all(rows, sent, expected)

    def max_and_min(self, number: int) -> tuple[int, int]:
        """The largest and the smallest number that a rank passes. One collective call, which counts as no round."""
        values = torch.tensor([number, -number])
        self._check_holder()
        with self._peer_errors():
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return int(values[0]), -int(values[1])

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Sends ``sent[r]`` rows to rank r, and returns the ``received[r]`` rows that each rank sent to this one."""
        self._check_holder()
        result = rows.new_empty([sum(received), *rows.shape[1:]])
        row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else 0
        self.sent_bytes += row_bytes * (len(rows) - sent[self.rank])
        self.calls += 1
        with self._peer_errors():
            dist.all_to_all_single(_as_bytes(result), _as_bytes(rows), received, sent, group=self._group)
        return result

    def _check_holder(self) -> None:
        if self.holder not in (None, threading.get_ident()):
            advice = "end its loop, call its close(), or take another RankExchange"
            raise ConfigurationError(f"a loader still exchanges data over this RankExchange; {advice}")

    @contextmanager
    def _peer_errors(self) -> Iterator[None]:
        """Replaces errors of gloo about another rank by one line."""
        try:
            yield
        except RuntimeError as error:
            kind = peer_failure(error)
            if kind == "timeout":
                raise CollectiveTimeout(self.timeout) from error
            if kind == "gone":
                raise PeerFailure(LOST) from error
            raise


def _as_bytes(rows: Tensor) -> Tensor:
    """The same memory as uint8, of shape (rows, bytes per row): gloo does not support all dtypes."""
    if not rows.numel():
        return torch.empty([len(rows), 1], dtype=torch.uint8)
    return rows.contiguous().view(torch.uint8).reshape(len(rows), -1)
