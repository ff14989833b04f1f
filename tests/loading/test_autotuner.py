"""The climber: what it settles at, what it never asks for, and that nothing but the time changes."""

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


def made(**changes) -> LoaderAutotuner:
    return LoaderAutotuner(**({"cores": 4, "room": lambda: math.inf} | changes))


def climb(autotuner: LoaderAutotuner, model, kinds=BOTH, memory_budget=lambda: math.inf) -> list[WorkerConfig]:
    """Lets it search where ``model(crew)`` is what is seen; every crew that was looked at."""
    search, asked = autotuner.search(SearchSpace(kinds, autotuner.cores, memory_budget)), []
    try:
        workers = next(search)
        while True:
            asked.append(workers)
            workers = search.send(model(workers))
    except StopIteration as end:
        assert end.value == model(autotuner.workers)
        return asked


def machine(work: float, step: float, size: int = 0, kinds=BOTH):
    """What is seen where a batch takes ``work`` seconds of one worker, and several of these kinds share the work."""

    def seen(workers: WorkerConfig) -> LoaderStats:
        if not workers.num_workers:
            return LoaderStats(work, step, size)
        helping = workers.num_workers if ("processes" if workers.processes else "threads") in kinds else 1
        return LoaderStats(max(0.0, work / helping - step), step, size)

    return seen


def test_who_does_not_wait_is_left_alone():
    autotuner = made()
    assert climb(autotuner, machine(work=0.0001, step=0.05)) == [WorkerConfig()]
    started = made(workers=WorkerConfig(processes=3, prefetch=2))
    assert climb(started, machine(work=0.1, step=0.05)) == [WorkerConfig(processes=3, prefetch=2)]


@pytest.mark.parametrize(("work", "least"), [(0.04, 1), (0.09, 2), (0.14, 3), (0.19, 4)])
def test_no_more_workers_than_the_step_can_eat(work, least):
    autotuner = made(cores=16)
    asked = climb(autotuner, machine(work, step=0.05))
    assert (
        autotuner.workers.num_workers == least
        and machine(work, 0.05)(autotuner.workers).wait_fraction <= WAIT_TOLERANCE
    )
    assert max(workers.num_workers for workers in asked) == least, "it did not try more than it needed"


def test_as_many_as_there_are_cores_where_that_is_not_enough():
    autotuner = made(cores=4)
    asked = climb(autotuner, machine(work=1.0, step=0.01))
    assert autotuner.workers.num_workers == 4 == max(workers.num_workers for workers in asked)


def test_one_worker_may_help_on_one_core():
    autotuner = made(cores=1)
    asked = climb(autotuner, machine(work=0.1, step=0.1))
    assert autotuner.workers.num_workers == 1 == max(workers.num_workers for workers in asked)


def test_processes_where_threads_hold_each_other_up():
    autotuner = made()
    climb(autotuner, machine(work=0.1, step=0.03, kinds=("processes",)))
    assert autotuner.workers.processes == 4
    only = made()
    assert (
        not any(workers.threads for workers in climb(only, machine(work=0.1, step=0.03), kinds=("processes",)))
        and only.workers.processes
    )


def test_fewer_where_they_are_in_each_others_way():
    autotuner, waits = made(workers=WorkerConfig(processes=4, prefetch=2)), {4: 0.2, 3: 0.15, 2: 0.08, 1: 0.1, 0: 0.3}
    climb(autotuner, lambda workers: LoaderStats(waits[workers.workers], 0.05))
    assert autotuner.workers.num_workers == 2


def test_nothing_that_does_not_help_is_kept():
    autotuner = made(cores=8)
    asked = climb(autotuner, lambda workers: LoaderStats(0.01, 0.01))
    assert autotuner.workers == WorkerConfig() and len(asked) > 1
    assert len({workers for workers in asked if workers != WorkerConfig()}) == len(
        [workers for workers in asked if workers != WorkerConfig()]
    ), "each was tried once"


def test_the_memory_that_may_be_taken_is_not_exceeded():
    autotuner = made(cores=8)
    memory_budget, size = 40e6, 4_000_000

    def taken(workers):
        return (workers.workers + workers.prefetch + 1) * size * (2 if workers.processes else 1)

    asked = climb(autotuner, machine(work=0.5, step=0.01, size=size), memory_budget=lambda: memory_budget)
    assert 0 < max(taken(workers) for workers in asked if workers.num_workers) <= memory_budget
    tight = made(cores=8)
    assert climb(tight, machine(work=0.5, step=0.01, size=size), memory_budget=lambda: size) == [WorkerConfig()]
    assert default_memory_budget(2.5, lambda: 0)() == 2.5e9 and default_memory_budget(None, lambda: 1000)() == 250


def test_a_crew_that_fails_is_given_up():
    autotuner = made()
    asked = climb(
        autotuner, lambda workers: None if workers.processes else machine(work=0.1, step=0.06, kinds=())(workers)
    )
    assert any(workers.processes for workers in asked) and not autotuner.workers.processes


# ---- passes


@pytest.fixture
def at_once(monkeypatch):
    """Two batches make a look, however short."""
    for name, value in {"LEAST_BATCHES": 2, "LEAST_SECONDS": 0.0, "ROUNDS": 0, "UNSETTLED": 0}.items():
        monkeypatch.setattr(loader_stats, name, value)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves on: a list of the one number that it shows."""
    shown = [0.0]
    monkeypatch.setattr(autotuner_module, "perf_counter", lambda: shown[0])
    return shown


class Restless(LoaderAutotuner):
    """Never settles: looks at one crew after the other."""

    def search(self, choices, seen=None):
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


def test_every_batch_once_and_in_order_whoever_computes_it(at_once):
    autotuner, crews = Restless(cores=4, memory_budget=lambda: math.inf), []
    choices = SearchSpace(BOTH, 4, autotuner.memory_budget)
    for _ in range(3):
        assert list(autotuner.iterate(lambda workers, done: numbers(workers, done, seen=crews), choices)) == list(
            range(40)
        )
    assert len(set(crews)) == 5


def test_it_goes_on_after_a_crew_that_raises_and_tells_what_the_first_one_raises(at_once, clock):
    def enter(workers, done):
        if workers.workers:
            raise OSError("no more processes")
        for number in numbers(workers, done, to=200):
            clock[0] += 0.001
            yield number

    autotuner = made()
    assert list(autotuner.iterate(enter, SearchSpace(BOTH, 4, autotuner.memory_budget))) == list(range(200))
    assert autotuner.converged and autotuner.workers == WorkerConfig()

    def broken(workers, done):
        for number in numbers(workers, done, to=7):
            clock[0] += 0.001
            yield number
        raise KeyError("row 7")

    seen = []
    with pytest.raises(KeyError, match="row 7"):
        for number in made().iterate(broken, SearchSpace(BOTH, 4, lambda: math.inf)):
            seen.append(number)
    assert seen == list(range(7))


def test_a_pass_that_is_left_closes_what_it_read_from():
    closed = []

    def enter(workers, done):
        try:
            yield from numbers(workers, done)
        finally:
            closed.append(workers)

    autotuner = made()
    for _ in autotuner.iterate(enter, SearchSpace(BOTH, 4, autotuner.memory_budget)):
        break
    assert closed == [WorkerConfig()]
    assert list(autotuner.iterate(enter, SearchSpace(BOTH, 4, autotuner.memory_budget))) == list(range(40)), (
        "and the next pass can be watched"
    )


def test_two_passes_at_a_time_do_not_disturb_each_other(at_once):
    autotuner = Restless(cores=4, memory_budget=lambda: math.inf)
    choices = SearchSpace(BOTH, 4, autotuner.memory_budget)
    both = zip(autotuner.iterate(numbers, choices), autotuner.iterate(numbers, choices), strict=True)
    assert list(both) == [(number, number) for number in range(40)]


def slow(clock, seconds: float, to: int = 30):
    """Batches that take their time, unless somebody computes them ahead."""

    def enter(workers, done):
        for number in numbers(workers, done, to):
            clock[0] += 0.0 if workers.workers else seconds
            yield number

    return enter


def one_pass(autotuner, enter, clock, step=0.002):
    for _ in autotuner.iterate(enter, SearchSpace(("processes",), autotuner.cores, autotuner.memory_budget)):
        clock[0] += step


def test_it_tells_when_it_has_settled_and_looks_again_when_the_waiting_is_back(at_once, clock):
    told = []
    autotuner = made(on_converged=lambda autotuner: told.append(dict(autotuner.tuned_settings)))
    one_pass(autotuner, slow(clock, 0.00004), clock, step=0.005)
    assert autotuner.converged and told == [{"processes": 0}] and autotuner.initial_wait_fraction < 0.5
    one_pass(autotuner, slow(clock, 0.00004), clock, step=0.005)
    for _ in range(5):
        one_pass(autotuner, slow(clock, 0.02, to=60), clock)
        if autotuner.workers.processes:
            break
    assert autotuner.workers.processes and told[-1]["processes"], "the source has become slow"


def test_once_it_has_settled_the_bare_iterator_is_handed_over(at_once, clock):
    autotuner = made()
    autotuner.wait_fraction = 0.05
    passing = autotuner.iterate(numbers, SearchSpace(BOTH, 4, autotuner.memory_budget))
    for number in range(4):
        assert next(passing) == number
        clock[0] += 0.005
    assert passing.gi_yieldfrom.gi_code is numbers.__code__, (
        "nothing of the climber is left between the loop and its batches"
    )
    assert list(passing) == list(range(4, 40))


def test_who_climbed_in_vain_climbs_once_more(clock):
    autotuner, crews = made(cores=2), []

    def enter(workers, done):
        crews.append(workers)
        for number in numbers(workers, done):
            clock[0] += 0.1
            yield number

    for climbs in (True, True, False):
        crews.clear()
        for _ in autotuner.iterate(enter, SearchSpace(("processes",), autotuner.cores, autotuner.memory_budget)):
            clock[0] += 0.1
        assert autotuner.converged and autotuner.wait_fraction == pytest.approx(0.5)
        assert (len(set(crews)) > 1) is climbs, "others were tried"


def photos(clock, batches: int):
    """Passes over so many batches, each of which takes a worker 0.13 s; a worker starts within 0.05 s."""

    def enter(workers, done):
        clock[0] += 0.05 * workers.workers
        free = [clock[0]] * workers.workers
        for number in range(done, batches):
            if workers.workers:
                free[number % workers.workers] += 0.13
            clock[0] = max(clock[0], free[number % workers.workers]) if workers.workers else clock[0] + 0.13
            yield number

    return enter


@pytest.mark.parametrize(("batches", "most"), [(13, 6.0), (3, 15.0), (1, 30.0)])
def test_it_settles_within_a_few_seconds_however_short_the_passes_are(clock, batches, most):
    autotuner, enter = made(cores=2), photos(clock, batches)
    while not autotuner.converged and clock[0] < 60:
        for _ in autotuner.iterate(enter, SearchSpace(("processes",), 2, autotuner.memory_budget)):
            clock[0] += 0.02
    assert autotuner.converged and clock[0] < most
    assert batches < 13 or autotuner.workers == WorkerConfig(processes=2, prefetch=2)


def test_what_was_chosen_survives_as_plain_data():
    autotuner = made(workers=WorkerConfig(processes=2, prefetch=4), cache="memory")
    autotuner.wait_fraction, autotuner.seconds_per_batch = 0.25, 0.01
    again = made()
    again.load_state_dict(autotuner.state_dict())
    assert (again.workers, again.wait_fraction, again.seconds_per_batch, again.cache, again.converged) == (
        autotuner.workers,
        0.25,
        0.01,
        "memory",
        True,
    )
    assert again.tuned_settings == {"processes": 2, "prefetch": 4, "cache": "memory"} and made().tuned_settings == {
        "processes": 0
    }
    assert made(workers=WorkerConfig(threads=1, prefetch=2)).tuned_settings == {"threads": 1, "prefetch": 2}
    smaller = made(cores=1)
    smaller.load_state_dict(autotuner.state_dict())
    assert smaller.workers == WorkerConfig(processes=1, prefetch=4), "the run goes on on a machine with fewer cores"


def test_it_can_be_sent_to_another_process_in_the_middle_of_a_search():
    autotuner = LoaderAutotuner(cores=2, memory_budget=default_memory_budget(1.0, int))
    passing = autotuner.iterate(numbers, SearchSpace(BOTH, 2, autotuner.memory_budget))
    next(passing)
    again = pickle.loads(pickle.dumps(autotuner))
    assert list(again.iterate(numbers, SearchSpace(BOTH, 2, again.memory_budget))) == list(range(40))
    passing.close()


def test_a_cache_that_is_no_faster_is_given_up(at_once, clock):
    autotuner = made(workers=WorkerConfig(processes=2, prefetch=2))
    autotuner.wait_fraction, autotuner.seconds_per_batch = 0.5, 0.0001
    autotuner.try_cache("memory")
    assert (autotuner.workers, autotuner.cache, autotuner.converged) == (WorkerConfig(), "memory", False)
    one_pass(autotuner, slow(clock, 0.0), clock)
    assert (autotuner.workers, autotuner.cache, autotuner.wait_fraction) == (
        WorkerConfig(processes=2, prefetch=2),
        "no",
        0.5,
    )
    autotuner.wait_fraction, autotuner.seconds_per_batch, autotuner.cache = 0.5, 10.0, None
    autotuner.try_cache("memory")
    one_pass(autotuner, slow(clock, 0.0), clock)
    assert autotuner.cache == "memory" and autotuner.converged
