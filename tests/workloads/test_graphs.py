"""The graph workloads on their real data: documented sizes, a training that learns; what a pickle may name."""

import dataclasses
import functools
import pickle

import numpy
import pytest

pytest.importorskip("torch_geometric")
pytest.importorskip("numba")

from hasten import ConfigurationError
from hasten.engine.evaluation import evaluate
from hasten.engine.loop import train_steps
from hasten.engine.plan import build
from hasten.engine.tasks import load_task
from hasten.workloads import _planetoid
from hasten.workloads._data import find_file

FILES = {
    "cora": "planetoid/ind.cora.allx",
    "citeseer": "planetoid/ind.citeseer.allx",
    "facebook_large": "graph-facebook-large/facebook_features.json",
}
EXPECTED = {  # nodes, undirected edges without self loops, width, nodes of a class, training nodes, validation nodes
    "cora": (2708, 5278, 1433, [351, 217, 418, 818, 426, 298, 180], 140, 1000),
    "citeseer": (3327, 4552, 3703, [249 + 15, 590, 668, 701, 596, 508], 120, 1000),  # 15 papers have no row
    "facebook_large": (22470, 171002 - 179, 128, [6880, 6495, 5768, 3327], 18000, 4470),
}
loaded = functools.cache(load_task)


@pytest.fixture(params=FILES)
def name(request):
    if find_file(FILES[request.param]) is None:
        pytest.skip(f"the data of {request.param} are not here ({FILES[request.param]}); set HASTEN_DATA")
    return request.param


def test_graph_workload_has_the_documented_sizes(name):
    nodes, edges, width, classes, training, validation = EXPECTED[name]
    task = loaded(name)
    graph = task.validation_data.graph
    assert tuple(graph.x.shape) == (nodes, width) and graph.y.bincount().tolist() == classes
    assert tuple(graph.edge_index.shape) == (2, 2 * edges) and graph.is_undirected() and not graph.has_self_loops()
    assert (len(task.train_data.dataset), len(task.validation_data.dataset)) == (training, validation)
    assert task.name == name and task.target is not None and task.epochs > 1


def test_citation_split_is_the_public_one(name):
    if name == "facebook_large":
        pytest.skip("it has no public split")
    task = loaded(name)
    graph, train, test = task.train_data.graph, task.train_data.dataset, task.validation_data.dataset
    assert graph.y[train].bincount().tolist() == [20] * (len(train) // 20)
    assert not {*train.tolist()} & {*test.tolist()}
    assert graph.x[train].sum(1).numpy() == pytest.approx(1)


@pytest.mark.slow  # a training, with a graph of thousands of nodes in each step
def test_graph_workload_rises_above_chance(name):
    task = dataclasses.replace(loaded(name), epochs=1 if name == "facebook_large" else 20)
    program = build(task, seed=0)
    before = evaluate(program).metric
    for _ in train_steps(program):
        pass
    largest = max(EXPECTED[name][3]) / EXPECTED[name][0]
    assert before < 0.45 and evaluate(program).metric > 1.2 * largest + 0.05


class Malicious:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickle_that_names_anything_else_is_refused(tmp_path, protocol):
    executed = tmp_path / "executed"
    path = tmp_path / "ind.cora.x"
    for function, arguments in ((open, (str(executed), "w")), (eval, ("1",)), (getattr, (numpy, "load"))):
        try:
            path.write_bytes(pickle.dumps([numpy.zeros(2).tolist(), Malicious(function, *arguments)], protocol))
        except (pickle.PicklingError, TypeError):  # a module is no argument of a pickle
            continue
        with pytest.raises(ConfigurationError, match=r"ind\.cora\.x cannot be read: it names \S+, which these"):
            _planetoid.load_restricted(path)
    assert not executed.exists()


@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x02]q\x00(K\x01"])
def test_damaged_pickle_is_refused(tmp_path, content):
    path = tmp_path / "ind.cora.x"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"ind\.cora\.x cannot be read: .*; replace it with https"):
        _planetoid.load_restricted(path)


def test_links_are_listed_in_both_directions_once_and_without_self_loops():
    edges = _planetoid._edges({0: [1, 1, 0], 1: [0], 2: [1]}, papers=4)
    assert edges.T.tolist() == [[1, 0], [0, 1], [2, 1], [1, 2]]
