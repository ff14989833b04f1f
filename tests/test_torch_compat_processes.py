"""Private names of torch that concern threads, worker processes and ranks."""

import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, Dataset

from hasten import _torch_compat as compat


def threads_of_this_process() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def test_end_intra_op_threads_leaves_only_this_thread_to_compute():
    values = torch.ones(1 << 18)
    torch.set_num_threads(2)
    try:
        compat.end_intra_op_threads()
        others = threads_of_this_process()  # of earlier tests: one of them may end at any time
        values.mul(2)
        second = threads_of_this_process() - others
        assert second and compat.end_intra_op_threads()
        assert not second & threads_of_this_process()
        assert values.mul(2).sum() == 2 * len(values)  # starts it again
        assert threads_of_this_process() - others and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# ── DataLoader ───────────────────────────────────────────────────────────────────────────────────


class Faulty(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            raise KeyError("no such\nlabel")
        return index


def error_of(loader: DataLoader) -> Exception:
    with pytest.raises(KeyError) as caught:
        list(loader)
    return caught.value


def test_workers_started():
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    assert not compat.workers_started(loader)
    list(loader)
    assert compat.workers_started(loader)


def test_iterator_that_a_loader_keeps_is_swapped():
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    first = iter(loader)
    assert compat.swap_persistent_iterator(loader, None) is first
    second = iter(loader)
    assert second is not first and compat.swap_persistent_iterator(loader, first) is second
    assert iter(loader) is first and len(list(first)) == 2


def test_error_of_a_worker_is_recognized_and_quoted():
    error = error_of(DataLoader(Faulty(), batch_size=2, num_workers=1))
    assert compat.contains_worker_traceback(error)
    assert compat.worker_error_text(error) == repr(KeyError("no such\nlabel")).replace("KeyError(", "KeyError: ")[:-1]


def run_ranks(function, *args) -> list:
    """Returns what ``function(rank, *args)`` returns in each of two gloo ranks; None for a rank that dies."""
    system = multiprocessing.get_context("fork")
    queue = system.SimpleQueue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def run(rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        dist.init_process_group("gloo", store=client, rank=rank, world_size=2, timeout=timedelta(seconds=3))
        queue.put((rank, function(rank, *args)))
        os._exit(0)

    processes = [system.Process(target=run, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    answers = {}
    while not queue.empty():
        rank, answer = queue.get()
        answers[rank] = answer
    return [answers.get(rank) for rank in range(2)]


def failing_peer(rank: int, is_killed: bool):
    dist.barrier()
    if rank == 1:
        if is_killed:
            os._exit(1)
        time.sleep(6)
        return None
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        wrapped = ValueError("the step failed")
        wrapped.__cause__ = error
        return compat.peer_failure(error), compat.peer_failure(wrapped)
    return "no error"


@pytest.mark.parametrize(("is_killed", "kind"), [(True, "gone"), (False, "timeout")])
def test_peer_failure_of_gloo(is_killed, kind):
    assert run_ranks(failing_peer, is_killed)[0] == (kind, kind)


def test_peer_failure_of_other_errors():
    assert compat.peer_failure(dist.DistBackendError("NCCL: remote process exited")) == "gone"
    assert compat.peer_failure(RuntimeError("gloo, connection closed by peer in DataLoader worker 1")) is None
    closed = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?"
    assert compat.peer_failure(dist.DistNetworkError(closed)) == "gone"
    assert compat.peer_failure(RuntimeError("closed by peer")) is compat.peer_failure(None) is None


def timeouts_of_new_groups(rank: int) -> list[float]:
    """Returns the timeout of a barrier in a group created inside the context and in one created outside."""
    with compat.default_process_group_timeout(1.0):
        inside = dist.new_group([0, 1])
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(Exception) as caught:
            dist.all_reduce(torch.ones(1), group=inside)
        error = caught.value
        assert compat.peer_failure(error) == "timeout"
    waited = time.monotonic() - began
    time.sleep(2.0)
    return waited


def test_default_process_group_timeout():
    waited = run_ranks(timeouts_of_new_groups)[0]
    assert waited is not None and 0.5 < waited < 2.5


def ddp_buckets(rank: int) -> list:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    first = compat.ddp_bucket_sizes(model)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    sizes = compat.ddp_bucket_sizes(model)
    hooked = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    hooked.register_comm_hook(None, allreduce_hook)
    hooked(torch.ones(1, 4)).sum().backward()
    return [first, sizes, compat.ddp_bucket_sizes(hooked)]


def test_ddp_bucket_sizes():
    for answer in run_ranks(ddp_buckets):
        assert answer is not None
        assert sum(answer[1]) == 4 * (16 + 4) and answer[2] is None
