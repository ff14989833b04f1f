"""The private steps of torchrun's elastic agent, as methods that a subclass may extend. See ``_torch_compat.py``."""

import signal
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


class ExtensibleElasticAgent(LocalElasticAgent):
    """torchrun's agent, with the steps that a subclass may extend as methods without an underscore. torch documents the
    steps (start, monitor and stop workers) in ``SimpleElasticAgent`` but names them as private.
    """

    start_workers: Any = LocalElasticAgent._start_workers  # of this node; returns {local rank: process ID}
    monitor_workers: Any = LocalElasticAgent._monitor_workers  # returns their state: healthy, succeeded, failed, ...
    stop_workers: Any = LocalElasticAgent._stop_workers  # before all nodes meet again or the job ends
    exit_barrier: Any = LocalElasticAgent._exit_barrier  # waits for the other nodes, once this one has succeeded

    def close_workers(self, close: Callable[[signal.Signals, int], None], signal_number: signal.Signals) -> None:
        """Called when a rank has failed or the agent ends: ends the ranks that still run.

        ``close(signal, timeout)`` signals them, and kills those that still run after ``timeout`` seconds.
        """
        close(signal_number, self._shutdown_timeout)

    @property
    def remaining_restarts(self) -> int:
        """Number of restarts left after failures; torch subtracts one for each restart."""
        return self._remaining_restarts

    @remaining_restarts.setter
    def remaining_restarts(self, count: int) -> None:
        self._remaining_restarts = count

    def exit_codes(self) -> list[int | None]:
        """Exit codes of the ranks of this node, by local rank; None for a rank that still runs, -N after signal N."""
        context: Any = self._pcontext
        return [handler.proc.poll() for handler in context.subprocess_handlers.values()]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started = self.start_workers(worker_group)
        context: Any = self._pcontext
        close = context.close

        def close_all(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            self.close_workers(close, death_sig or signal.SIGTERM)

        context.close = close_all  # torch calls it with a timeout of its own in three places
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop_workers(worker_group)

    def _exit_barrier(self) -> None:
        self.exit_barrier()
