"""The cache of sorted graphs: one for the tensors of a graph while they live and stay as they are."""

import weakref

import torch

from hasten.graph.aggregation.adjacency import CACHE_ENTRIES, Adjacency, AdjacencyCache


def built(edge_index: torch.Tensor) -> Adjacency:
    return Adjacency.from_edge_index(edge_index, 3, 3)


def test_graph_is_sorted_once_until_it_changes():
    cache, edges = AdjacencyCache(), torch.tensor([[0, 1, 2], [1, 2, 0]])
    first = cache.get((edges, None), "settings", lambda: built(edges))
    assert cache.get((edges, None), "settings", lambda: built(edges)) is first
    assert cache.get((edges, None), "others", lambda: built(edges)) is not first
    edges[0, 0] = 2
    changed = cache.get((edges, None), "settings", lambda: built(edges))
    assert changed.indices.tolist() == [2, 2, 1], "row by row: the sources of the edges into nodes 0, 1 and 2"


def test_sorted_graph_does_not_outlive_the_batch_that_it_was_sampled_for():
    cache = AdjacencyCache()
    for _ in range(5):
        edges = torch.randint(3, (2, 10))
        cache.get((edges,), "settings", lambda edges=edges: built(edges))
    assert len(cache._entries) == 1
    del edges
    assert not cache._entries


def test_graph_that_changes_is_kept_once():
    cache, edges = AdjacencyCache(), torch.tensor([[0, 1, 2], [1, 2, 0]])
    for source in range(3):
        edges[0, 0] = source
        cache.get((edges, None), "settings", lambda: built(edges))
    assert len(cache._entries) == 1
    assert weakref.getweakrefcount(edges) == 1


def test_graph_that_is_needed_no_more_is_not_watched():
    cache, edges = AdjacencyCache(), torch.tensor([[0, 1, 2], [1, 2, 0]])
    for settings in range(2 * CACHE_ENTRIES):
        cache.get((edges,), settings, lambda: built(edges))
    assert len(cache._entries) == weakref.getweakrefcount(edges) == CACHE_ENTRIES
