"""The DataLoaders of a script under methods: the batches that it would read without, whatever it does with them."""

import copy
import gc
import pickle
import warnings
from functools import partial
from itertools import islice
from weakref import ref

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hasten.core.errors import HastenWarning
from hasten.core.recipe import Recipe
from hasten.engine.registry import make_methods
from hasten.hosts.inside.composition import Composition
from hasten.hosts.inside.loaders import LoaderSeam
from hasten.hosts.inside.replace import replaces
from hasten.hosts.inside.sites import Sites
from hasten.utils.batch import map_tensors
from hasten.utils.phase_timer import PhaseTimer
from hasten.utils.tree import bitwise_equal

CACHES = ["in_memory_batches", "cache_dataset"]
WORKERS = [
    pytest.param(
        recipe, marks=[pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore:autotune_loader converged")]
    )
    for recipe in ("loader_workers:num_workers=1", "autotune_loader:processes=1")
]


class Shifted(Dataset):
    """Samples that the script may change between two epochs."""

    def __init__(self, samples=40):
        self.samples, self.shift, self.noise = samples, 0.0, False

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        noise = torch.rand(3) if self.noise else torch.zeros(3)
        return noise + index + self.shift, index % 4


def sampled_anew(dataset):
    dataset.shift += 1.0


def made_random(dataset):
    dataset.noise = True


def made_longer(dataset):
    dataset.samples += 10


@pytest.fixture
def under(monkeypatch, tmp_path):
    """Function ``(recipe) -> seam`` that puts the DataLoaders of this process under methods, as those of a script.

    The loaders are for training, as if the script had named them; with ``roles``, as these and backward passes tell.
    """
    for owner, name in ((DataLoader, "__init__"), (DataLoader, "_get_iterator"), (_BaseDataLoaderIter, "__next__")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # the seam replaces them; the test puts them back

    def make(recipe: str, steps: int | None = None, roles: dict[str, str] | None = None) -> LoaderSeam:
        composition = Composition(make_methods(Recipe.coerce(recipe)), "cpu", 0, True, "train.py", steps)
        seam = LoaderSeam(Sites(str(tmp_path)), PhaseTimer(torch.device("cpu")), composition.source_of, roles)
        if roles is None:
            replaces(DataLoader, "__init__")(partial(named, seam))
        return seam

    def named(seam, original, loader, *args, **kwargs):
        original(loader, *args, **kwargs)
        if seam.sites.of(loader):
            seam.attach(loader)

    return make


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.multiprocess)])
def test_loader_that_no_run_has_seen_is_one_for_training_after_a_backward_pass(under, persistent):
    """Before, its batches might be kept by an evaluation: those of training are overwritten by later ones."""
    seam = under("in_memory_batches", roles={})
    options = {"num_workers": 1, "persistent_workers": True} if persistent else {}
    loader = DataLoader(Shifted(), batch_size=4, **options)
    kept = list(loader)
    assert bitwise_equal([batch[1] for batch in kept], [torch.arange(4)] * 10)
    next(iter(loader))
    assert not vars(loader)["_hasten_source"].training
    seam.on_backward()
    before = vars(loader)["_hasten_source"]
    next(iter(loader))
    assert vars(loader)["_hasten_source"] is before and before.training


def test_loader_at_a_new_site_has_the_role_of_its_line(under):
    def made(count):
        return [DataLoader(Shifted(), batch_size=4) for _ in range(count)]  # the line of all

    line = f"{__file__}:{made.__code__.co_firstlineno + 1}"
    both = {"#1": "training", "#2": "evaluation"}
    for known, training in ({"#1": "training"}, True), (both, False), ({"#2": "evaluation"}, False):
        under("in_memory_batches", roles={line + number: role for number, role in known.items()})
        last = made(3)[-1]
        next(iter(last))
        assert vars(last)["_hasten_source"].training is training


def made_with_shuffling() -> DataLoader:
    return DataLoader(Shifted(), batch_size=4, shuffle=True)


LINE_OF_MADE = made_with_shuffling.__code__.co_firstlineno + 1


def test_loader_that_shuffles_is_one_for_training_unless_a_run_has_seen_it_evaluate(under):
    for roles, training in ({}, True), ({f"{__file__}:{LINE_OF_MADE}#1": "evaluation"}, False):
        under("in_memory_batches", roles=roles)
        loader = made_with_shuffling()
        next(iter(loader))
        assert vars(loader)["_hasten_source"].training is training


def test_backward_pass_after_an_evaluation_is_not_that_of_its_loader(under):
    seam = under("in_memory_batches", roles={})
    seam.is_evaluating = lambda: True
    list(DataLoader(Shifted(), batch_size=4))
    assert seam.on_backward() is None


@pytest.mark.parametrize("is_marked", [True, False], ids=["eval", "no_grad"])
def test_validation_after_every_step_is_no_training(under, is_marked):
    """Where one batch holds all samples, or a step of LBFGS reads them all."""
    seam, evaluating = under("in_memory_batches", roles={}), [False]
    seam.is_evaluating = lambda: evaluating[0]
    training, validation = (DataLoader(Shifted(), batch_size=40) for _ in range(2))
    for _ in range(3):
        next(iter(training))
        evaluating[0] = False
        seam.on_backward()
        with torch.set_grad_enabled(is_marked):
            for _ in validation:
                evaluating[0] = is_marked  # once the model is called
    assert seam.sites.of(validation)["role"] == "evaluation"


def test_epoch_that_is_never_read_draws_as_in_torch(under):
    """Keras makes one iterator too many at each end of an epoch."""

    def labels_and_state():
        torch.manual_seed(0)
        loader = DataLoader(Shifted(), batch_size=4, shuffle=True)
        iter(loader)
        return torch.cat([batch[1] for batch in loader]), torch.get_rng_state()

    plain = labels_and_state()
    under("in_memory_batches")
    assert bitwise_equal(plain, labels_and_state())


def test_loaders_that_each_step_reads_are_all_for_training(under):
    seam = under("in_memory_batches", roles={})
    labeled, unlabeled, looked_at = (DataLoader(Shifted(), batch_size=4) for _ in range(3))
    next(iter(looked_at))
    for _ in zip(islice(labeled, 2), unlabeled, strict=False):
        seam.on_backward()
    roles = {id(loader): seam.sites.of(loader)["role"] for loader in (labeled, unlabeled, looked_at)}
    assert list(roles.values()) == ["training", "training", "evaluation"]


def test_batches_that_are_read_ahead_are_trained_on_by_as_many_backward_passes(under):
    """As accelerate and the Trainer of Transformers read them; a second pass over a batch is none of another one."""
    seam = under("in_memory_batches", roles={})
    read = len(list(DataLoader(Shifted(), batch_size=4, shuffle=True)))
    lines = [seam.on_backward() for _ in range(read + 1)]
    assert None not in lines[:-1] and lines[-1] is None


def copied(batch):
    return map_tensors(torch.clone, batch)


def epochs(dataset, change=lambda dataset: None, number=4, batch_size=8, **options) -> list[list]:
    """The batches of several epochs; ``change`` is called after each."""
    torch.manual_seed(0)
    loader, read = DataLoader(dataset, batch_size=batch_size, shuffle=True, **options), []
    for _ in range(number):
        read.append([copied(batch) for batch in loader])
        change(dataset)
    return read


@pytest.mark.parametrize("change", [sampled_anew, made_random, made_longer])
@pytest.mark.parametrize("recipe", CACHES)
def test_dataset_that_the_script_changes_is_stored_anew(under, recipe, change):
    plain = epochs(Shifted(), change)
    under(recipe)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default", HastenWarning)
        assert bitwise_equal(plain, epochs(Shifted(), change))
    messages = [str(one.message) for one in warned if "the script has changed its dataset" in str(one.message)]
    assert len(messages) == (recipe != "cache_dataset" or change is not made_longer)  # a longer one keeps its samples


class CountedReads(Shifted):
    """4,000 samples that count how often one is read."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("epochs", "most"), [(1, 400), (2, 5000)])
def test_process_that_checks_a_few_steps_reads_the_samples_of_these_in_its_first_epoch(under, epochs, most):
    def first_batches(dataset):
        torch.manual_seed(0)
        loader, read = DataLoader(dataset, batch_size=8, shuffle=True), []
        for _ in range(epochs):  # a script may leave an epoch early
            read += [copied(batch) for batch in islice(loader, 5)]
            dataset.shift += 1.0
        return read, torch.rand(3)

    plain, dataset = first_batches(CountedReads(4000)), CountedReads(4000)
    under("in_memory_batches", steps=30)
    assert bitwise_equal(plain, first_batches(dataset))
    assert dataset.reads < most


@pytest.mark.parametrize(("batch_size", "looks"), [(8, 20), (512, 0)])
def test_script_that_looks_at_a_batch_gets_the_same_batches(under, batch_size, looks):
    def batches_and_looks(dataset):
        torch.manual_seed(0)
        loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
        read = [copied(next(iter(loader)))]
        for number, batch in enumerate(islice(loader, 20)):
            read += [copied(batch)] + ([copied(next(iter(loader)))] if number < looks else [])
        return read

    plain, dataset = batches_and_looks(CountedReads(40 * batch_size)), CountedReads(40 * batch_size)
    under("in_memory_batches", steps=30)
    assert bitwise_equal(plain, batches_and_looks(dataset))
    assert looks or dataset.reads < 25 * batch_size, "a look before the loop costs no reading of all samples"


class DrawsInVain(Shifted):
    """Samples that are the same in every epoch, although reading one draws a random number, as a flip of p=0 does."""

    def __getitem__(self, index):
        torch.rand(1)
        return super().__getitem__(index)


@pytest.mark.parametrize("recipe", CACHES)
def test_samples_that_draw_random_numbers_are_not_stored(under, recipe):
    plain = epochs(DrawsInVain())
    under(recipe)
    assert bitwise_equal(plain, epochs(DrawsInVain()))


def test_process_that_trains_beyond_its_few_steps_reads_the_rest(under):
    plain = epochs(Shifted(), sampled_anew)
    under("in_memory_batches", steps=3)
    assert bitwise_equal(plain, epochs(Shifted(), sampled_anew))


@pytest.mark.parametrize("recipe", WORKERS)
def test_workers_see_what_the_script_changes_in_its_dataset(under, recipe):
    plain = epochs(Shifted(), sampled_anew)
    under(recipe)
    assert bitwise_equal(plain, epochs(Shifted(), sampled_anew))


def test_other_tensors_of_a_tensor_dataset_are_read_from_the_next_epoch_on(under):
    def replaced(dataset):
        dataset.tensors = (dataset.tensors[0].clone(), dataset.tensors[1])
        dataset.tensors[0][7] += 1  # which no probe reads

    data = torch.arange(400.0).view(200, 2)
    plain = epochs(TensorDataset(data, torch.arange(200)), replaced)
    under("in_memory_batches")
    assert bitwise_equal(plain, epochs(TensorDataset(data, torch.arange(200)), replaced))


@pytest.mark.multiprocess
@pytest.mark.parametrize("recipe", CACHES)
def test_persistent_workers_of_the_script_keep_the_dataset_of_the_first_epoch(under, recipe):
    options = {"num_workers": 1, "persistent_workers": True}
    plain = epochs(Shifted(), sampled_anew, **options)
    under(recipe)
    assert bitwise_equal(plain, epochs(Shifted(), sampled_anew, **options))


@pytest.mark.parametrize("recipe", CACHES)
def test_unchanged_dataset_is_compared_once_an_epoch(under, recipe, monkeypatch):
    read, original = [], Shifted.__getitem__
    monkeypatch.setattr(Shifted, "__getitem__", lambda self, index: read.append(index) or original(self, index))
    under(recipe)
    epochs(Shifted(100))
    probe = 25  # every fourth
    assert len(read) - 100 - 4 * probe in range(3 * probe, 4 * probe + 1)


def two_at_a_time() -> list:
    """What a script reads that looks at a batch within an epoch, and then reads a loader beside itself."""
    torch.manual_seed(0)
    loader, read = DataLoader(Shifted(96), batch_size=8, shuffle=True), []
    for index, batch in enumerate(loader):
        read.append(copied(batch))
        if index % 2:
            read.append(copied(next(iter(loader))))
        assert len(read) < 20, "the epoch does not end"
    in_order = DataLoader(Shifted(), batch_size=8)
    return read + [copied(pair) for pair in zip(in_order, in_order, strict=True)]


@pytest.mark.parametrize("recipe", [*CACHES, *WORKERS])
def test_two_epochs_of_a_loader_at_a_time_are_independent(under, recipe):
    plain = two_at_a_time()
    under(recipe)
    assert bitwise_equal(plain, two_at_a_time())


class Ragged(Shifted):
    """One sample, which no probe reads, has another shape."""

    def __getitem__(self, index):
        return torch.full((2 if index == 7 else 3,), index), index


@pytest.mark.multiprocess
def test_persistent_workers_of_the_script_are_read_through(under):
    options = {"num_workers": 1, "persistent_workers": True, "batch_size": 1}
    plain = epochs(Ragged(), **options)
    under("in_memory_batches")
    assert bitwise_equal(plain, epochs(Ragged(), **options))


@pytest.mark.multiprocess
def test_epoch_of_persistent_workers_that_is_left_in_the_middle_is_begun_anew(under):
    def left() -> list:
        loader, read = DataLoader(Shifted(), batch_size=8, num_workers=1, persistent_workers=True), []
        for number in (2, 3, 5):
            read.append([copied(batch) for batch, _ in zip(loader, range(number), strict=False)])
        return read

    plain = left()
    under("loader_workers:num_workers=2")
    assert bitwise_equal(plain, left())


@pytest.mark.parametrize("recipe", ["prefetch_to_device", "in_memory_batches:place=device"])
def test_evaluation_gets_its_batches_on_the_host(recipe):
    composition = Composition(make_methods(Recipe.coerce(recipe)), "cuda", 0, True, "train.py")
    data = TensorDataset(torch.zeros(8, 2), torch.arange(8))
    assert composition.source_of(DataLoader(data, batch_size=4), False) is None
    assert composition.run.no_effect == []


class Collating(DataLoader):
    """A loader whose collate function is a method of its own, so that only the garbage collector frees it."""

    def __init__(self, dataset, batch_size):
        super().__init__(dataset, batch_size=batch_size, collate_fn=self.collated)

    def collated(self, samples):
        return torch.stack([x for x, _ in samples])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DataLoader, Collating])
@pytest.mark.parametrize("recipe", [*CACHES, WORKERS[0]])
def test_loaders_of_earlier_epochs_are_freed(under, recipe, kind):
    seam, loaders = under(recipe), []
    for _ in range(20):
        loader = kind(Shifted(), batch_size=8)
        assert len(list(loader)) == 5
        loaders.append(ref(loader))
    if kind is Collating:
        gc.collect()
    assert [one() for one in loaders if one() is not None] == [loader] and seam.has_loader


def test_copied_and_pickled_loader_is_read_as_without_methods(under):
    under("in_memory_batches")
    loader = DataLoader(Shifted(), batch_size=8)
    read = [copied(batch) for batch in loader]
    for other in (copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert bitwise_equal(read, list(other))


@pytest.mark.parametrize("most", [2, 11])
def test_validation_while_a_batch_waits_to_be_trained_on_is_no_training(under, most):
    seam, evaluating, lines = under("in_memory_batches", roles={}), [False], []
    seam.is_evaluating = lambda: evaluating[0]
    training, validation = (DataLoader(Shifted(), batch_size=4) for _ in range(2))
    for _ in training:
        with torch.no_grad():
            for _ in islice(validation, most):
                evaluating[0] = True
        evaluating[0] = False
        lines.append(seam.on_backward())
    roles = [seam.sites.of(one)["role"] for one in (training, validation)]
    assert None not in lines and roles == ["training", "evaluation"]
