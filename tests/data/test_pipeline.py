"""The pipeline: the same batches from every runner, any position resumable, compatible with trainers."""

import itertools
import random
import threading

import numpy
import pytest
import torch

from hasten import ConfigurationError, RunError
from hasten.data import Pipeline, arrays
from helpers.pipelines import BATCH, ROWS, Bad, equal, random_pipeline

WAYS = [{"batches": 0}, {"batches": 3}]
WAYS += [{way: count} for way in ("threads", "processes") for count in (1, 2, 8)]


@pytest.fixture(scope="module")
def epoch_batches():
    return list(random_pipeline())


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_runner_gives_the_same_bits(epoch_batches, way):
    assert equal(list(random_pipeline().prefetch(**way)), epoch_batches)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_runners_keep_the_random_state_of_the_run(way):
    pipeline = random_pipeline().prefetch(**way)
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    before = torch.rand(3), random.random(), numpy.random.rand()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    list(pipeline)
    after = torch.rand(3), random.random(), numpy.random.rand()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def noise(batch):
    """Draws from generators that belong to the process."""
    return torch.cat(
        [torch.rand(2, dtype=torch.float64), torch.tensor([random.random(), numpy.random.rand()], dtype=torch.float64)]
    )


def test_draws_from_process_generators_are_the_same_in_every_runner():
    pipeline = arrays(torch.arange(ROWS)).batch(BATCH).map(noise)
    passes = [list(pipeline), list(pipeline)]
    for way in ({"processes": 1}, {"processes": 2}, {"batches": 0}):
        again = arrays(torch.arange(ROWS)).batch(BATCH).map(noise).prefetch(**way)
        assert equal(list(again), passes[0]) and equal(list(again), passes[1])
    ranks = [list(pipeline.shard(2, rank).epoch(0)) for rank in (0, 1)]
    drawn = torch.cat([*passes[0], *passes[1], *ranks[1]])
    assert equal(ranks[0], passes[0]) and len(drawn.unique()) == len(drawn), (
        "no two batches, passes, ranks or generators are alike"
    )


@pytest.mark.parametrize("way", [{"batches": 0}, {"processes": 2}], ids=str)
def test_draws_of_maps_keep_the_random_state_of_the_run(way):
    def drawn():
        return torch.rand(3).tolist(), random.random(), numpy.random.rand()

    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    before = drawn()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    list(arrays(torch.arange(ROWS)).map(noise).batch(BATCH).map(noise).prefetch(**way))
    assert drawn() == before


class Noisy(Bad):
    """A source that draws random numbers."""

    def read(self, rows):
        return super().read(rows) + torch.rand(len(rows))


def torch_numbers(batch):
    return torch.rand(2)


def numpy_numbers(batch):
    return torch.tensor(numpy.random.rand())


def python_numbers(batch):
    return torch.tensor(random.random())


@pytest.mark.parametrize("way", [{}, {"threads": 2}, {"batches": "auto", "threads": 1}], ids=str)
@pytest.mark.parametrize("draws", [torch_numbers, numpy_numbers, python_numbers, Noisy], ids=lambda each: each.__name__)
def test_draws_from_process_generators_are_refused_in_threads(draws, way):
    pipeline = (
        Pipeline(Noisy([])).batch(BATCH) if draws is Noisy else arrays(torch.arange(ROWS)).batch(BATCH).map(draws)
    )
    state = torch.get_rng_state(), random.getstate(), str(numpy.random.get_state())
    message = (
        rf"{draws.__name__} draws from the global generators .* a parameter named rng, or use \.prefetch\(processes=1\)"
    )
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=message):
            next(iter(pipeline.prefetch(**way)))
    assert (
        torch.equal(torch.get_rng_state(), state[0]) and (random.getstate(), str(numpy.random.get_state())) == state[1:]
    )


def test_maps_without_draws_are_probed_once_in_threads():
    seen = []

    def noted(batch):
        seen.append(batch[0].item())
        return batch

    pipeline = Pipeline(Bad([3])).skip_bad_rows(1).batch(BATCH).map(noted).prefetch()
    for _ in range(2):
        assert torch.cat(list(pipeline)).tolist() == [row for row in range(ROWS) if row != 3]
    firsts = [0, *range(BATCH, ROWS, BATCH)]
    assert sorted(seen) == sorted([0, *firsts, *firsts]) and len(pipeline.faults.found) == 1


def test_hang_in_the_probe_is_reported():
    end = threading.Event()
    pipeline = arrays(torch.arange(ROWS)).batch(BATCH).map(lambda batch: end.wait(60) and batch).prefetch(timeout=0.5)
    with pytest.raises(RunError, match=r"batch 3 of the epoch was not ready within 0.5 s: a thread hangs"):
        next(pipeline.epoch(0, 3))
    end.set()
    for thread in threading.enumerate():
        if thread.name.startswith("hasten-data"):
            thread.join()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shards_of_all_ranks_are_the_global_batch(epoch_batches, ranks):
    shares = [list(random_pipeline().shard(ranks, rank)) for rank in range(ranks)]
    joined = [
        tuple(torch.cat(parts) for parts in zip(*of_ranks, strict=True)) for of_ranks in zip(*shares, strict=True)
    ]
    assert equal(joined, epoch_batches)


def drawn(rows, size, shard=(1, 0), start=0, bad=(), **way):
    """Returns {row: what it drew} of an epoch."""
    pipeline = (
        Pipeline(Bad(bad, rows)).shuffle(seed=3).skip_bad_rows(len(bad)).batch(size).shard(*shard).prefetch(**way)
    )
    batches = pipeline.map(lambda batch, rng: (batch, rng.integers(0, 1 << 32), rng.uniform(3))).epoch(1, start)
    rows, *numbers = (torch.cat(column) for column in zip(*batches, strict=True))
    return {row: each for row, *each in zip(rows.tolist(), *(column.tolist() for column in numbers), strict=True)}


def test_row_draws_the_same_for_any_batch_size_rank_and_start():
    rows = 20_000  # more than are computed at a time
    expected = drawn(rows, 512)
    assert len({first for first, _ in expected.values()}) > rows - 5
    assert drawn(rows, 300, threads=2) == expected == drawn(rows, 7777, processes=2)
    assert drawn(rows, 512, (3, 0)) | drawn(rows, 512, (3, 1)) | drawn(rows, 512, (3, 2)) == expected
    late = drawn(rows, 512, start=17)
    assert len(late) == rows - 17 * 512 and late == {row: each for row, each in expected.items() if row in late}


def test_row_draws_the_same_if_others_are_bad():
    expected, bad = drawn(ROWS, BATCH), (3, 50, 51)
    assert drawn(ROWS, BATCH, bad=bad) == {row: each for row, each in expected.items() if row not in bad}


def test_last_batch_without_a_row_for_some_rank_is_refused():
    pipeline = arrays(torch.arange(17)).batch(8).shard(2, 0)
    with pytest.raises(ConfigurationError, match="a batch of 1 rows cannot be divided into 2 shards"):
        list(pipeline)
    assert len(list(arrays(torch.arange(17)).batch(8, drop_last=True).shard(2, 0))) == 2


@pytest.mark.parametrize("way", [{"batches": 0}, {"threads": 2}, {"processes": 2}], ids=str)
def test_resume_at_any_batch_gives_the_rest(way):
    pipeline = random_pipeline().prefetch(**way)
    first, second = list(pipeline), list(pipeline)
    for seen in range(1, len(first) + 1) if way == WAYS[0] else (3, len(first)):
        interrupted = random_pipeline()
        list(itertools.islice(interrupted, seen))
        resumed = random_pipeline().prefetch(**way)
        resumed.load_state_dict(interrupted.state_dict())
        assert equal(list(resumed), first[seen:])
        assert equal(list(resumed), second), "the pass after the resumed one"


@pytest.mark.parametrize(
    "way",
    [lambda p: p.to("cpu"), lambda p: p.prefetch(1), lambda p: p.shard(1, 0), lambda p: p.skip_bad_rows(1)],
    ids=["to", "prefetch", "shard", "skip_bad_rows"],
)
def test_every_way_of_iterating_advances_and_resumes_epochs(epoch_batches, way):
    train, plain = random_pipeline(), random_pipeline()
    for _ in range(2):
        seen = []
        for batch in way(train):
            seen.append(batch)
        assert equal(seen, list(plain))
    assert train.state_dict() == plain.state_dict() == {"seed": 5, "epoch": 2, "position": 0}
    resumed = random_pipeline()
    resumed.load_state_dict({"seed": 5, "epoch": 0, "position": 4 * BATCH})
    assert equal(list(way(resumed)), epoch_batches[4:])


def test_position_holds_for_batch_sizes_that_divide_it():
    def rows(size, state=None):
        pipeline = arrays(torch.arange(ROWS)).shuffle(seed=5).batch(size)
        pipeline.load_state_dict(state or pipeline.state_dict())
        return pipeline, torch.cat([*pipeline, torch.empty(0, dtype=torch.int64)]).tolist()

    pipeline, order = rows(16)
    pipeline.set_epoch(0)
    list(itertools.islice(pipeline, 2))
    assert pipeline.state_dict() == {"seed": 5, "epoch": 0, "position": 32}
    for size in (1, 8, 32):
        assert rows(size, pipeline.state_dict())[1] == order[32:]
    with pytest.raises(ConfigurationError, match="no batch of 10 rows begins at row 32 of an epoch"):
        rows(10, pipeline.state_dict())
    pipeline.set_epoch(0)
    list(itertools.islice(pipeline, len(pipeline)))
    assert pipeline.state_dict()["position"] == ROWS and rows(10, pipeline.state_dict())[1] == []


def test_position_after_the_last_batch_is_the_next_start():
    pipeline, resumed = random_pipeline(), random_pipeline()
    list(pipeline)
    resumed.load_state_dict(pipeline.state_dict())
    assert equal(list(resumed), list(pipeline))


def test_epochs_differ_and_a_seed_repeats_them(epoch_batches):
    pipeline = random_pipeline()
    first, second = list(pipeline), list(pipeline)
    assert equal(first, epoch_batches) and not equal(first, second)
    assert sorted(torch.cat([labels for _, labels in second]).tolist()) == list(range(ROWS))
    assert not equal(list(pipeline.shuffle(seed=6)), first)


def test_abandoned_epoch_is_followed_by_the_next():
    pipeline, complete = random_pipeline(), random_pipeline()
    for _ in pipeline:
        break
    list(complete)
    assert equal(list(pipeline), list(complete))


def test_maps_draw_independent_numbers():
    def drawn(batch, rng):
        return (*batch, rng.uniform()) if isinstance(batch, tuple) else (batch, rng.uniform())

    for _, a, b in arrays(torch.arange(64)).batch(64).map(drawn).map(drawn):
        assert not torch.equal(a, b)


def test_batches_have_the_nesting_of_the_samples():
    x, y = torch.arange(12.0).view(6, 2), torch.arange(6)
    nested = {"a": (x, y), "b": y}
    for data in ((x, y), nested):
        plain = arrays(*data) if isinstance(data, tuple) else arrays(data)
        mapped = plain.map(lambda sample: sample)
        for pipeline in (plain, mapped, plain.cache(), mapped.cache()):
            (batch,) = pipeline.batch(6)
            assert str(batch) == str(data), "tuples stay tuples"
    (batch,) = arrays(x, y).map(lambda sample: (str(int(sample[1])), [sample[0], 2])).batch(6)
    assert batch[0] == list("012345") and torch.equal(batch[1][0], x) and batch[1][1].tolist() == [2] * 6


def test_rng_is_passed_by_parameter_name():
    def named(sample, scale=2, *, rng):
        return sample * scale + rng.uniform()

    def other(sample, power=1):
        return sample**power

    numbers = torch.arange(64.0)
    (drawn,) = arrays(numbers).map(named).batch(64).map(other)
    assert ((drawn - 2 * numbers >= 0) & (drawn - 2 * numbers < 1)).all() and len((drawn - 2 * numbers).unique()) > 32


def test_pipeline_steps_do_not_modify_the_former_pipeline():
    plain = arrays(torch.arange(8)).batch(4)
    list(plain.shuffle(seed=1))
    assert plain.state_dict() == {"seed": 0, "epoch": 0, "position": 0}
    assert [batch.tolist() for batch in plain] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_all_batches_of_an_epoch_may_be_kept():
    batches = list(arrays(torch.arange(40_000).view(20, 2000)).batch(2))
    assert [batch[0, 0].item() for batch in batches] == list(range(0, 40_000, 4000))


@pytest.mark.parametrize("way", [{"batches": 0}, {"threads": 3}, {"processes": 2}], ids=str)
def test_bad_rows_are_skipped_equally_in_every_runner(way):
    pipeline = Pipeline(Bad([3, 50, 51])).shuffle(seed=2).skip_bad_rows(3).batch(BATCH).prefetch(**way)
    rows = torch.cat(list(pipeline)).tolist()
    assert sorted(rows) == sorted(set(range(ROWS)) - {3, 50, 51})
    assert rows == [
        row
        for row in torch.cat(list(Pipeline(Bad([])).shuffle(seed=2).batch(BATCH))).tolist()
        if row not in (3, 50, 51)
    ]
    assert sorted(pipeline.faults.found) == [3, 50, 51]
    list(pipeline)
    assert len(pipeline.faults.found) == 3, "a row is counted once, however often it is met"


def test_position_has_constant_cost():
    state = random_pipeline().state_dict()
    assert set(state) == {"seed", "epoch", "position"} and all(isinstance(value, int) for value in state.values())


def test_position_of_another_order_is_refused():
    with pytest.raises(ConfigurationError, match="belongs to seed 9"):
        random_pipeline().load_state_dict({"seed": 9, "epoch": 0, "position": 0})
    with pytest.raises(ConfigurationError, match="seed, epoch and position"):
        random_pipeline().load_state_dict({"step": 4})
    for position in (-BATCH, BATCH + 1):
        with pytest.raises(ConfigurationError, match=f"begins at row {position}"):
            random_pipeline().load_state_dict({"seed": 5, "epoch": 0, "position": position})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p: p.batch(0), "batch.size. must be an integer of at least 1"),
        (lambda p: p.batch(2.5), "not 2.5"),
        (lambda p: p.map(3), "expects a function, not a int"),
        (lambda p: p.map(lambda image, label: image), "this one requires image, label; unpack a tuple"),
        (lambda p: p.load_state_dict(p.state_dict()), "has no batch size"),
        (lambda p: p.shuffle(window=0), "window"),
        (lambda p: p.prefetch(threads=1, processes=1), "not both"),
        (lambda p: p.prefetch(timeout=0), "seconds"),
        (lambda p: p.prefetch(timeout="x"), "timeout"),
        (lambda p: p.prefetch(threads=10**6), "at most 256"),
        (lambda p: p.prefetch(processes=10**6), "at most 256"),
        (lambda p: p.prefetch(10**6), "at most 1024"),
        (lambda p: p.shard(2, 2), "index must be below num_shards"),
        (lambda p: p.shard(2, "a"), "shard.index. must be an integer"),
        (lambda p: p.shard(1.5, 0), "shard.num_shards. must be an integer"),
        (lambda p: p.shard(2, -1), "at least 0"),
        (lambda p: p.to("gpu"), "unknown device 'gpu'; use cpu"),
        (lambda p: p.to(3), "expects a device"),
        (lambda p: p.to(None), "expects a device"),
        (lambda p: p.batch(4, collate=3), "collate"),
        (lambda p: p.batch(10**30), "at most"),
        (lambda p: p.cache(gigabytes="a"), "gigabytes"),
        (lambda p: p.batch(4).set_epoch(-1), "set_epoch.*at least 0"),
        (lambda p: p.batch(4).set_epoch(1.5), "set_epoch.*integer"),
        (lambda p: p.batch(4).set_epoch(True), "set_epoch.*integer"),
        (lambda p: p.batch(4).set_epoch(None), "set_epoch.*integer"),
        (lambda p: p.batch(4).set_epoch(10**30), "set_epoch.*integer"),
        (lambda p: p.batch(4).load_state_dict(None), "a state is a dict"),
        (
            lambda p: p.batch(4).load_state_dict({"seed": 0, "epoch": "1", "position": 0}),
            "epoch of the state must be an integer",
        ),
        (
            lambda p: p.batch(4).load_state_dict({"seed": 0, "epoch": True, "position": 0}),
            "epoch of the state must be an integer",
        ),
        (
            lambda p: p.batch(4).load_state_dict({"seed": 0, "epoch": -1, "position": 0}),
            "epoch of the state must be an integer of at least 0",
        ),
        (
            lambda p: p.batch(4).load_state_dict({"seed": 0, "epoch": 0, "position": 1.0}),
            "position of the state must be an integer",
        ),
        (lambda p: p.batch(4).load_state_dict({"seed": 0, "epoch": 0, "position": 400}), "have only 8 rows"),
        (
            lambda p: p.batch(4).load_state_dict({"seed": None, "epoch": 0, "position": 0}),
            "seed of the state must be an integer",
        ),
        (lambda p: p.skip_bad_rows(-1), "max_rows"),
        (lambda p: list(p), "has no batch size"),
        (lambda p: p.batch(4).cache(), "before .batch"),
    ],
)
def test_invalid_requests_are_refused(wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        wrong(arrays(torch.arange(8)))


def test_position_accepts_any_integer_type():
    pipeline, rest = random_pipeline(), list(random_pipeline())[2:]
    pipeline.load_state_dict({"seed": numpy.int64(5), "epoch": torch.tensor(0), "position": numpy.int32(2 * BATCH)})
    assert equal(list(pipeline), rest)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing to refuse")
def test_missing_gpu_is_one_line():
    with pytest.raises(ConfigurationError, match="no device cuda on this machine"):
        list(random_pipeline().to("cuda"))


def test_pipeline_has_the_dataloader_interface():
    pipeline = random_pipeline().prefetch(processes=2)
    assert len(pipeline) == len(list(pipeline)) == -(-ROWS // BATCH)
    assert len(pipeline.dataset) == ROWS and pipeline.batch_size == BATCH and pipeline.drop_last is False
    assert pipeline.num_workers == 2 and pipeline.pin_memory is False and pipeline.batch_sampler is None
    with pytest.raises(TypeError):
        len(arrays(torch.arange(8)))


def test_set_epoch_keeps_a_loaded_position(epoch_batches):
    pipeline = random_pipeline()
    list(pipeline)
    pipeline.set_epoch(0)
    assert equal(list(pipeline), epoch_batches)
    pipeline.load_state_dict({"seed": 5, "epoch": 0, "position": 4 * BATCH})
    pipeline.sampler.set_epoch(0)  # as trainers do at the start of an epoch that they resume
    assert equal(list(pipeline), epoch_batches[4:])


def test_engine_batches_depend_on_the_run_and_validation_is_unshuffled():
    pipeline = random_pipeline()
    runs = [list(pipeline.batches(8, seed, training=True).epoch(0, 0)) for seed in (0, 0, 1)]
    assert equal(runs[0], runs[1]) and not equal(runs[0], runs[2])
    judged = [list(pipeline.batches(8, seed, training=False).epoch(0, 0)) for seed in (0, 1)]
    assert equal(*judged)
    assert torch.cat([labels for _, labels in judged[0]]).tolist() == list(range(ROWS))
