"""The loader autotuner: its result, what it never tries, and that it changes only the timing of batches."""

import math
import pickle
from itertools import cycle

import pytest

from hasten.core.data import WorkerConfig
from hasten.loading import autotuner as autotuner_module
from hasten.loading import loader_stats
from hasten.loading.autotuner import WAIT_TOLERANCE, LoaderAutotuner, SearchSpace, default_memory_budget
from hasten.loading.loader_stats import LoaderStats

BOTH = ("threads", "processes")


def make_autotuner(**changes) -> LoaderAutotuner:
    return LoaderAutotuner(**({"cores": 4, "memory_budget": lambda: math.inf} | changes))


def run_search(autotuner: LoaderAutotuner, model, kinds=BOTH, memory_budget=lambda: math.inf) -> list[WorkerConfig]:
    """Runs a search in which ``model(workers)`` is measured; returns all measured configurations, in order."""
    search, measured = autotuner.search(SearchSpace(kinds, autotuner.cores, memory_budget)), []
    try:
        workers = next(search)
        while True:
            measured.append(workers)
            workers = search.send(model(workers))
    except StopIteration as end:
        assert end.value == model(autotuner.workers)
        return measured


def machine(work: float, step: float, size: int = 0, kinds=BOTH):
    """Returns stats for batches that take one worker ``work`` seconds; workers of the given kinds run in parallel."""

    def seen(workers: WorkerConfig) -> LoaderStats:
        if not workers.num_workers:
            return LoaderStats(work, step, size)
        helping = workers.num_workers if ("processes" if workers.processes else "threads") in kinds else 1
        return LoaderStats(max(0.0, work / helping - step), step, size)

    return seen


def test_search_without_waiting_steps_keeps_the_loader():
    autotuner = make_autotuner()
    assert run_search(autotuner, machine(work=0.0001, step=0.05)) == [WorkerConfig()]
    started = make_autotuner(workers=WorkerConfig(processes=3, prefetch=2))
    assert run_search(started, machine(work=0.1, step=0.05)) == [WorkerConfig(processes=3, prefetch=2)]


@pytest.mark.parametrize(("work", "least"), [(0.04, 1), (0.09, 2), (0.14, 3), (0.19, 4)])
def test_search_uses_no_more_workers_than_the_step_needs(work, least):
    autotuner = make_autotuner(cores=16)
    measured = run_search(autotuner, machine(work, step=0.05))
    assert (
        autotuner.workers.num_workers == least
        and machine(work, 0.05)(autotuner.workers).wait_fraction <= WAIT_TOLERANCE
    )
    assert max(workers.num_workers for workers in measured) == least, "more workers than needed were tried"


def test_search_uses_at_most_as_many_workers_as_cores():
    autotuner = make_autotuner(cores=4)
    measured = run_search(autotuner, machine(work=1.0, step=0.01))
    assert autotuner.workers.num_workers == 4 == max(workers.num_workers for workers in measured)


def test_search_on_one_core_uses_one_worker():
    autotuner = make_autotuner(cores=1)
    measured = run_search(autotuner, machine(work=0.1, step=0.1))
    assert autotuner.workers.num_workers == 1 == max(workers.num_workers for workers in measured)


def test_search_uses_processes_if_threads_are_serialized():
    autotuner = make_autotuner()
    run_search(autotuner, machine(work=0.1, step=0.03, kinds=("processes",)))
    assert autotuner.workers.processes == 4
    only = make_autotuner()
    assert (
        not any(workers.threads for workers in run_search(only, machine(work=0.1, step=0.03), kinds=("processes",)))
        and only.workers.processes
    )


def test_search_uses_fewer_workers_if_they_slow_each_other_down():
    autotuner, waits = (
        make_autotuner(workers=WorkerConfig(processes=4, prefetch=2)),
        {4: 0.2, 3: 0.15, 2: 0.08, 1: 0.1, 0: 0.3},
    )
    run_search(autotuner, lambda workers: LoaderStats(waits[workers.num_workers], 0.05))
    assert autotuner.workers.num_workers == 2


def test_search_rejects_useless_workers_after_one_trial():
    autotuner = make_autotuner(cores=8)
    measured = run_search(autotuner, lambda workers: LoaderStats(0.01, 0.01))
    assert autotuner.workers == WorkerConfig() and len(measured) > 1
    assert len({workers for workers in measured if workers != WorkerConfig()}) == len(
        [workers for workers in measured if workers != WorkerConfig()]
    ), "each was tried once"


def test_search_stays_within_the_memory_budget():
    autotuner = make_autotuner(cores=8)
    memory_budget, size = 40e6, 4_000_000

    def taken(workers):
        return (workers.num_workers + workers.prefetch + 1) * size * (2 if workers.processes else 1)

    measured = run_search(autotuner, machine(work=0.5, step=0.01, size=size), memory_budget=lambda: memory_budget)
    assert 0 < max(taken(workers) for workers in measured if workers.num_workers) <= memory_budget
    tight = make_autotuner(cores=8)
    assert run_search(tight, machine(work=0.5, step=0.01, size=size), memory_budget=lambda: size) == [WorkerConfig()]
    assert default_memory_budget(2.5, lambda: 0)() == 2.5e9 and default_memory_budget(None, lambda: 1000)() == 250


def test_search_rejects_failing_workers():
    autotuner = make_autotuner()
    measured = run_search(
        autotuner, lambda workers: None if workers.processes else machine(work=0.1, step=0.06, kinds=())(workers)
    )
    assert any(workers.processes for workers in measured) and not autotuner.workers.processes


# ---- epochs


@pytest.fixture
def at_once(monkeypatch):
    """Two batches make a measurement, however short."""
    for name, value in {"MIN_BATCHES": 2, "MIN_SECONDS": 0.0, "BATCHES_PER_WORKER": 0, "WARMUP_BATCHES": 0}.items():
        monkeypatch.setattr(loader_stats, name, value)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances: a list with its time in seconds."""
    shown = [0.0]
    monkeypatch.setattr(autotuner_module, "perf_counter", lambda: shown[0])
    return shown


class NeverConverges(LoaderAutotuner):
    """Never converges: measures one configuration after the other."""

    def search(self, space, seen=None):
        for workers in cycle(
            [
                WorkerConfig(),
                WorkerConfig(threads=1),
                WorkerConfig(processes=2, prefetch=3),
                WorkerConfig(threads=2, prefetch=1),
                WorkerConfig(processes=1),
            ]
        ):
            self.last = yield workers


def numbers(workers, done, to=40, seen=None):
    for number in range(done, to):
        if seen is not None:
            seen.append(workers)
        yield number


def test_iterate_yields_every_batch_once_in_order(at_once):
    autotuner, configurations = NeverConverges(cores=4, memory_budget=lambda: math.inf), []
    space = SearchSpace(BOTH, 4, autotuner.memory_budget)
    for _ in range(3):
        assert list(
            autotuner.iterate(lambda workers, done: numbers(workers, done, seen=configurations), space)
        ) == list(range(40))
    assert len(set(configurations)) == 5


def test_iterate_survives_errors_of_tried_workers_and_raises_those_of_current_ones(at_once, clock):
    def enter(workers, done):
        if workers.num_workers:
            raise OSError("no more processes")
        for number in numbers(workers, done, to=200):
            clock[0] += 0.001
            yield number

    autotuner = make_autotuner()
    assert list(autotuner.iterate(enter, SearchSpace(BOTH, 4, autotuner.memory_budget))) == list(range(200))
    assert autotuner.converged and autotuner.workers == WorkerConfig()

    def broken(workers, done):
        for number in numbers(workers, done, to=7):
            clock[0] += 0.001
            yield number
        raise KeyError("row 7")

    seen = []
    with pytest.raises(KeyError, match="row 7"):
        for number in make_autotuner().iterate(broken, SearchSpace(BOTH, 4, lambda: math.inf)):
            seen.append(number)
    assert seen == list(range(7))


def test_iterate_left_early_closes_its_iterator():
    closed = []

    def enter(workers, done):
        try:
            yield from numbers(workers, done)
        finally:
            closed.append(workers)

    autotuner = make_autotuner()
    for _ in autotuner.iterate(enter, SearchSpace(BOTH, 4, autotuner.memory_budget)):
        break
    assert closed == [WorkerConfig()]
    assert list(autotuner.iterate(enter, SearchSpace(BOTH, 4, autotuner.memory_budget))) == list(range(40)), (
        "the next epoch can be measured"
    )


def test_iterate_two_epochs_at_a_time_are_independent(at_once):
    autotuner = NeverConverges(cores=4, memory_budget=lambda: math.inf)
    space = SearchSpace(BOTH, 4, autotuner.memory_budget)
    both = zip(autotuner.iterate(numbers, space), autotuner.iterate(numbers, space), strict=True)
    assert list(both) == [(number, number) for number in range(40)]


def slow(clock, seconds: float, to: int = 30):
    """Batches that take ``seconds`` each, unless workers compute them."""

    def enter(workers, done):
        for number in numbers(workers, done, to):
            clock[0] += 0.0 if workers.num_workers else seconds
            yield number

    return enter


def one_epoch(autotuner, enter, clock, step=0.002):
    for _ in autotuner.iterate(enter, SearchSpace(("processes",), autotuner.cores, autotuner.memory_budget)):
        clock[0] += step


def test_search_reports_convergence_and_restarts_if_steps_wait_again(at_once, clock):
    reported = []
    autotuner = make_autotuner(on_converged=lambda autotuner: reported.append(dict(autotuner.tuned_settings)))
    one_epoch(autotuner, slow(clock, 0.00004), clock, step=0.005)
    assert autotuner.converged and reported == [{"processes": 0}] and autotuner.initial_wait_fraction < 0.5
    one_epoch(autotuner, slow(clock, 0.00004), clock, step=0.005)
    for _ in range(5):
        one_epoch(autotuner, slow(clock, 0.02, to=60), clock)
        if autotuner.workers.processes:
            break
    assert autotuner.workers.processes and reported[-1]["processes"], "the source has become slow"


def test_iterate_after_convergence_yields_from_the_bare_iterator(at_once, clock):
    autotuner = make_autotuner()
    autotuner.wait_fraction = 0.05
    batches = autotuner.iterate(numbers, SearchSpace(BOTH, 4, autotuner.memory_budget))
    for number in range(4):
        assert next(batches) == number
        clock[0] += 0.005
    assert batches.gi_yieldfrom.gi_code is numbers.__code__, (
        "no frame of the autotuner is between the loop and its batches"
    )
    assert list(batches) == list(range(4, 40))


def test_search_without_success_is_repeated_once(clock):
    autotuner, configurations = make_autotuner(cores=2), []

    def enter(workers, done):
        configurations.append(workers)
        for number in numbers(workers, done):
            clock[0] += 0.1
            yield number

    for searches in (True, True, False):
        configurations.clear()
        for _ in autotuner.iterate(enter, SearchSpace(("processes",), autotuner.cores, autotuner.memory_budget)):
            clock[0] += 0.1
        assert autotuner.converged and autotuner.wait_fraction == pytest.approx(0.5)
        assert (len(set(configurations)) > 1) is searches, "other workers were tried"


def photos(clock, batches: int):
    """Epochs of ``batches`` batches that take a worker 0.13 s each; a worker starts within 0.05 s."""

    def enter(workers, done):
        clock[0] += 0.05 * workers.num_workers
        free = [clock[0]] * workers.num_workers
        for number in range(done, batches):
            if workers.num_workers:
                free[number % workers.num_workers] += 0.13
            clock[0] = max(clock[0], free[number % workers.num_workers]) if workers.num_workers else clock[0] + 0.13
            yield number

    return enter


@pytest.mark.parametrize(("batches", "most"), [(13, 6.0), (3, 15.0), (1, 30.0)])
def test_search_converges_within_seconds_for_short_epochs(clock, batches, most):
    autotuner, enter = make_autotuner(cores=2), photos(clock, batches)
    while not autotuner.converged and clock[0] < 60:
        for _ in autotuner.iterate(enter, SearchSpace(("processes",), 2, autotuner.memory_budget)):
            clock[0] += 0.02
    assert autotuner.converged and clock[0] < most
    assert batches < 13 or autotuner.workers == WorkerConfig(processes=2, prefetch=2)


def test_state_dict_restores_the_result():
    autotuner = make_autotuner(workers=WorkerConfig(processes=2, prefetch=4), cache="memory")
    autotuner.wait_fraction, autotuner.seconds_per_batch = 0.25, 0.01
    again = make_autotuner()
    again.load_state_dict(autotuner.state_dict())
    assert (again.workers, again.wait_fraction, again.seconds_per_batch, again.cache, again.converged) == (
        autotuner.workers,
        0.25,
        0.01,
        "memory",
        True,
    )
    assert again.tuned_settings == {
        "processes": 2,
        "prefetch": 4,
        "cache": "memory",
    } and make_autotuner().tuned_settings == {"processes": 0}
    assert make_autotuner(workers=WorkerConfig(threads=1, prefetch=2)).tuned_settings == {"threads": 1, "prefetch": 2}
    smaller = make_autotuner(cores=1)
    smaller.load_state_dict(autotuner.state_dict())
    assert smaller.workers == WorkerConfig(processes=1, prefetch=4), "resumed on a machine with fewer cores"


def test_autotuner_can_be_pickled_during_a_search():
    autotuner = LoaderAutotuner(cores=2, memory_budget=default_memory_budget(1.0, int))
    batches = autotuner.iterate(numbers, SearchSpace(BOTH, 2, autotuner.memory_budget))
    next(batches)
    again = pickle.loads(pickle.dumps(autotuner))
    assert list(again.iterate(numbers, SearchSpace(BOTH, 2, again.memory_budget))) == list(range(40))
    batches.close()


def test_cache_that_is_not_faster_is_removed(at_once, clock):
    autotuner = make_autotuner(workers=WorkerConfig(processes=2, prefetch=2))
    autotuner.wait_fraction, autotuner.seconds_per_batch = 0.5, 0.0001
    autotuner.try_cache("memory")
    assert (autotuner.workers, autotuner.cache, autotuner.converged) == (WorkerConfig(), "memory", False)
    one_epoch(autotuner, slow(clock, 0.0), clock)
    assert (autotuner.workers, autotuner.cache, autotuner.wait_fraction) == (
        WorkerConfig(processes=2, prefetch=2),
        "no",
        0.5,
    )
    autotuner.wait_fraction, autotuner.seconds_per_batch, autotuner.cache = 0.5, 10.0, None
    autotuner.try_cache("memory")
    one_epoch(autotuner, slow(clock, 0.0), clock)
    assert autotuner.cache == "memory" and autotuner.converged


def test_device_times_of_a_gpu_that_works_while_the_host_waits_are_those_of_the_gpu():
    """Batches come every 100 ms and the GPU needs 90: the host waits 98 ms, having launched the step in 2."""
    marks = [(0.1 * index, 0.1 * index + 0.09) for index in range(1, 6)]
    waits, steps = loader_stats.device_times(marks)
    assert waits == pytest.approx([0.01] * 4) and steps == pytest.approx([0.09] * 5)
    workers = SearchSpace(BOTH, 16, lambda: math.inf).neighbors(WorkerConfig(), LoaderStats(waits[0], steps[0]))
    assert max(config.num_workers for config in workers) == 1
    as_the_host_sees_it = SearchSpace(BOTH, 16, lambda: math.inf).neighbors(WorkerConfig(), LoaderStats(0.098, 0.002))
    assert max(config.num_workers for config in as_the_host_sees_it) == 16


def test_device_times_of_a_gpu_that_is_behind_the_host_have_no_waits():
    waits, _ = loader_stats.device_times([(0.0, 0.3), (0.3, 0.6), (0.6, 0.9)])
    assert waits == [0.0, 0.0]
