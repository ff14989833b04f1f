"""The climber: what it settles at, what it never asks for, and that nothing but the time changes."""

import math
import pickle
from itertools import cycle

import pytest

from hasten.loading import autotuner
from hasten.loading import loader_stats
from hasten.loading.autotuner import WAIT_TOLERANCE, SearchSpace, LoaderAutotuner, default_memory_budget
from hasten.core.data import WorkerConfig
from hasten.loading.loader_stats import LoaderStats

BOTH = ("threads", "processes")


def made(**changes) -> LoaderAutotuner:
    return LoaderAutotuner(**({"cores": 4, "room": lambda: math.inf} | changes))


def climb(climber: LoaderAutotuner, model, kinds=BOTH, room=lambda: math.inf) -> list[WorkerConfig]:
    """Lets it search where ``model(crew)`` is what is seen; every crew that was looked at."""
    search, asked = climber.search(SearchSpace(kinds, climber.cores, room)), []
    try:
        crew = next(search)
        while True:
            asked.append(crew)
            crew = search.send(model(crew))
    except StopIteration as end:
        assert end.value == model(climber.workers)
        return asked


def machine(work: float, step: float, size: int = 0, kinds=BOTH):
    """What is seen where a batch takes ``work`` seconds of one worker, and several of these kinds share the work."""

    def seen(crew: WorkerConfig) -> LoaderStats:
        if not crew.num_workers:
            return LoaderStats(work, step, size)
        helping = crew.num_workers if ("processes" if crew.processes else "threads") in kinds else 1
        return LoaderStats(max(0.0, work / helping - step), step, size)

    return seen


def test_who_does_not_wait_is_left_alone():
    climber = made()
    assert climb(climber, machine(work=0.0001, step=0.05)) == [WorkerConfig()]
    started = made(crew=WorkerConfig(processes=3, prefetch=2))
    assert climb(started, machine(work=0.1, step=0.05)) == [WorkerConfig(processes=3, prefetch=2)]


@pytest.mark.parametrize(("work", "least"), [(0.04, 1), (0.09, 2), (0.14, 3), (0.19, 4)])
def test_no_more_workers_than_the_step_can_eat(work, least):
    climber = made(cores=16)
    asked = climb(climber, machine(work, step=0.05))
    assert climber.workers.num_workers == least and machine(work, 0.05)(climber.workers).wait_fraction <= WAIT_TOLERANCE
    assert max(crew.num_workers for crew in asked) == least, "it did not try more than it needed"


def test_as_many_as_there_are_cores_where_that_is_not_enough():
    climber = made(cores=4)
    asked = climb(climber, machine(work=1.0, step=0.01))
    assert climber.workers.num_workers == 4 == max(crew.num_workers for crew in asked)


def test_one_worker_may_help_on_one_core():
    climber = made(cores=1)
    asked = climb(climber, machine(work=0.1, step=0.1))
    assert climber.workers.num_workers == 1 == max(crew.num_workers for crew in asked)


def test_processes_where_threads_hold_each_other_up():
    climber = made()
    climb(climber, machine(work=0.1, step=0.03, kinds=("processes",)))
    assert climber.workers.processes == 4
    only = made()
    assert not any(crew.threads for crew in climb(only, machine(work=0.1, step=0.03), kinds=("processes",))) and only.workers.processes


def test_fewer_where_they_are_in_each_others_way():
    climber, waits = made(crew=WorkerConfig(processes=4, prefetch=2)), {4: 0.2, 3: 0.15, 2: 0.08, 1: 0.1, 0: 0.3}
    climb(climber, lambda crew: LoaderStats(waits[crew.workers], 0.05))
    assert climber.workers.num_workers == 2


def test_nothing_that_does_not_help_is_kept():
    climber = made(cores=8)
    asked = climb(climber, lambda crew: LoaderStats(0.01, 0.01))
    assert climber.workers == WorkerConfig() and len(asked) > 1
    assert len({crew for crew in asked if crew != WorkerConfig()}) == len([crew for crew in asked if crew != WorkerConfig()]), "each was tried once"


def test_the_memory_that_may_be_taken_is_not_exceeded():
    climber = made(cores=8)
    room, size = 40e6, 4_000_000

    def taken(crew):
        return (crew.workers + crew.ahead + 1) * size * (2 if crew.processes else 1)

    asked = climb(climber, machine(work=0.5, step=0.01, size=size), room=lambda: room)
    assert 0 < max(taken(crew) for crew in asked if crew.num_workers) <= room
    tight = made(cores=8)
    assert climb(tight, machine(work=0.5, step=0.01, size=size), room=lambda: size) == [WorkerConfig()]
    assert default_memory_budget(2.5, lambda: 0)() == 2.5e9 and default_memory_budget(None, lambda: 1000)() == 250


def test_a_crew_that_fails_is_given_up():
    climber = made()
    asked = climb(climber, lambda crew: None if crew.processes else machine(work=0.1, step=0.06, kinds=())(crew))
    assert any(crew.processes for crew in asked) and not climber.workers.processes


# ---- passes


@pytest.fixture
def at_once(monkeypatch):
    """Two batches make a look, however short."""
    for name, value in {"LEAST_BATCHES": 2, "LEAST_SECONDS": 0.0, "ROUNDS": 0, "UNSETTLED": 0}.items():
        monkeypatch.setattr(looking, name, value)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves on: a list of the one number that it shows."""
    shown = [0.0]
    monkeypatch.setattr(climbing, "perf_counter", lambda: shown[0])
    return shown


class Restless(LoaderAutotuner):
    """Never settles: looks at one crew after the other."""

    def search(self, choices, seen=None):
        for crew in cycle([WorkerConfig(), WorkerConfig(threads=1), WorkerConfig(processes=2, prefetch=3), WorkerConfig(threads=2, prefetch=1), WorkerConfig(processes=1)]):
            self.last = yield crew


def numbers(crew, done, to=40, seen=None):
    for number in range(done, to):
        if seen is not None:
            seen.append(crew)
        yield number


def test_every_batch_once_and_in_order_whoever_computes_it(at_once):
    climber, crews = Restless(cores=4, room=lambda: math.inf), []
    choices = SearchSpace(BOTH, 4, climber.memory_budget)
    for _ in range(3):
        assert list(climber.iterate(lambda crew, done: numbers(crew, done, seen=crews), choices)) == list(range(40))
    assert len(set(crews)) == 5


def test_it_goes_on_after_a_crew_that_raises_and_tells_what_the_first_one_raises(at_once, clock):
    def enter(crew, done):
        if crew.workers:
            raise OSError("no more processes")
        for number in numbers(crew, done, to=200):
            clock[0] += 0.001
            yield number

    climber = made()
    assert list(climber.iterate(enter, SearchSpace(BOTH, 4, climber.memory_budget))) == list(range(200))
    assert climber.converged and climber.workers == WorkerConfig()

    def broken(crew, done):
        for number in numbers(crew, done, to=7):
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

    def enter(crew, done):
        try:
            yield from numbers(crew, done)
        finally:
            closed.append(crew)

    climber = made()
    for _ in climber.iterate(enter, SearchSpace(BOTH, 4, climber.memory_budget)):
        break
    assert closed == [WorkerConfig()]
    assert list(climber.iterate(enter, SearchSpace(BOTH, 4, climber.memory_budget))) == list(range(40)), "and the next pass can be watched"


def test_two_passes_at_a_time_do_not_disturb_each_other(at_once):
    climber = Restless(cores=4, room=lambda: math.inf)
    choices = SearchSpace(BOTH, 4, climber.memory_budget)
    both = zip(climber.iterate(numbers, choices), climber.iterate(numbers, choices), strict=True)
    assert list(both) == [(number, number) for number in range(40)]


def slow(clock, seconds: float, to: int = 30):
    """Batches that take their time, unless somebody computes them ahead."""

    def enter(crew, done):
        for number in numbers(crew, done, to):
            clock[0] += 0.0 if crew.workers else seconds
            yield number

    return enter


def one_pass(climber, enter, clock, step=0.002):
    for _ in climber.over(enter, SearchSpace(("processes",), climber.cores, climber.room)):
        clock[0] += step


def test_it_tells_when_it_has_settled_and_looks_again_when_the_waiting_is_back(at_once, clock):
    told = []
    climber = made(told=lambda climber: told.append(dict(climber.chosen)))
    one_pass(climber, slow(clock, 0.00004), clock, step=0.005)
    assert climber.converged and told == [{"processes": 0}] and climber.initial_wait_fraction < 0.5
    one_pass(climber, slow(clock, 0.00004), clock, step=0.005)
    for _ in range(5):
        one_pass(climber, slow(clock, 0.02, to=60), clock)
        if climber.workers.processes:
            break
    assert climber.workers.processes and told[-1]["processes"], "the source has become slow"


def test_once_it_has_settled_the_bare_iterator_is_handed_over(at_once, clock):
    climber = made()
    climber.wait_fraction = 0.05
    passing = climber.iterate(numbers, SearchSpace(BOTH, 4, climber.memory_budget))
    for number in range(4):
        assert next(passing) == number
        clock[0] += 0.005
    assert passing.gi_yieldfrom.gi_code is numbers.__code__, "nothing of the climber is left between the loop and its batches"
    assert list(passing) == list(range(4, 40))


def test_who_climbed_in_vain_climbs_once_more(clock):
    climber, crews = made(cores=2), []

    def enter(crew, done):
        crews.append(crew)
        for number in numbers(crew, done):
            clock[0] += 0.1
            yield number

    for climbs in (True, True, False):
        crews.clear()
        for _ in climber.iterate(enter, SearchSpace(("processes",), climber.cores, climber.memory_budget)):
            clock[0] += 0.1
        assert climber.converged and climber.wait_fraction == pytest.approx(0.5)
        assert (len(set(crews)) > 1) is climbs, "others were tried"


def photos(clock, batches: int):
    """Passes over so many batches, each of which takes a worker 0.13 s; a worker starts within 0.05 s."""

    def enter(crew, done):
        clock[0] += 0.05 * crew.workers
        free = [clock[0]] * crew.workers
        for number in range(done, batches):
            if crew.workers:
                free[number % crew.workers] += 0.13
            clock[0] = max(clock[0], free[number % crew.workers]) if crew.workers else clock[0] + 0.13
            yield number

    return enter


@pytest.mark.parametrize(("batches", "most"), [(13, 6.0), (3, 15.0), (1, 30.0)])
def test_it_settles_within_a_few_seconds_however_short_the_passes_are(clock, batches, most):
    climber, enter = made(cores=2), photos(clock, batches)
    while not climber.converged and clock[0] < 60:
        for _ in climber.iterate(enter, SearchSpace(("processes",), 2, climber.memory_budget)):
            clock[0] += 0.02
    assert climber.converged and clock[0] < most
    assert batches < 13 or climber.workers == WorkerConfig(processes=2, prefetch=2)


def test_what_was_chosen_survives_as_plain_data():
    climber = made(crew=WorkerConfig(processes=2, prefetch=4), cache="memory")
    climber.wait_fraction, climber.seconds_per_batch = 0.25, 0.01
    again = made()
    again.load_state_dict(climber.state_dict())
    assert (again.workers, again.wait_fraction, again.seconds_per_batch, again.cache, again.converged) == (climber.workers, 0.25, 0.01, "memory", True)
    assert again.tuned_settings == {"processes": 2, "ahead": 4, "cache": "memory"} and made().tuned_settings == {"processes": 0}
    assert made(crew=WorkerConfig(threads=1, prefetch=2)).tuned_settings == {"threads": 1, "ahead": 2}
    smaller = made(cores=1)
    smaller.load_state_dict(climber.state_dict())
    assert smaller.workers == WorkerConfig(processes=1, prefetch=4), "the run goes on on a machine with fewer cores"


def test_it_can_be_sent_to_another_process_in_the_middle_of_a_search():
    climber = LoaderAutotuner(cores=2, room=default_memory_budget(1.0, int))
    passing = climber.iterate(numbers, SearchSpace(BOTH, 2, climber.memory_budget))
    next(passing)
    again = pickle.loads(pickle.dumps(climber))
    assert list(again.over(numbers, SearchSpace(BOTH, 2, again.room))) == list(range(40))
    passing.close()


def test_a_cache_that_is_no_faster_is_given_up(at_once, clock):
    climber = made(crew=WorkerConfig(processes=2, prefetch=2))
    climber.wait_fraction, climber.seconds_per_batch = 0.5, 0.0001
    climber.try_cache("memory")
    assert (climber.workers, climber.cache, climber.converged) == (WorkerConfig(), "memory", False)
    one_pass(climber, slow(clock, 0.0), clock)
    assert (climber.workers, climber.cache, climber.wait_fraction) == (WorkerConfig(processes=2, prefetch=2), "no", 0.5)
    climber.wait_fraction, climber.seconds_per_batch, climber.cache = 0.5, 10.0, None
    climber.try_cache("memory")
    one_pass(climber, slow(clock, 0.0), clock)
    assert climber.cache == "memory" and climber.converged
