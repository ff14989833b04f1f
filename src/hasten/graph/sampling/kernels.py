"""Numba kernels for the sampling of neighbors: draw edges for each node of a hop, then number the nodes found.

The first two steps of FastSample's fused kernel (arXiv 2311.17847), without its races: what is drawn for a node is a
function of (key, node) alone, and nodes are numbered in the order in which they are found first. So the bits are the
same for any number of threads. All functions release the GIL; ``threads.py`` calls them for ranges of nodes.
"""

import numba
import numpy

from hasten.graph.prefetch import prefetch

jit = numba.njit(nogil=True, cache=True)

WEYL = numpy.uint64(0x9E3779B97F4A7C15)  # the increment of SplitMix64 (Steele, Lea and Flood 2014)
EMPTY = -1
NODE_PREFETCH_DISTANCE = 4  # nodes between the prefetch of the sources of their edges and its use
PREFETCH_DISTANCE = 16  # reads between a prefetch and its use


@jit
def mix(value):
    """The finalizer of SplitMix64: uint64 -> uint64, a bijection that changes half of the bits for any change."""
    value = (value ^ (value >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return value ^ (value >> numpy.uint64(31))


@jit
def key_of(seed, nodes):
    """A uint64 hash of ``seed`` (uint64) and the node ids (int64 array), in their order."""
    key = mix(seed + WEYL)
    for node in nodes:
        key = mix((key ^ numpy.uint64(node)) + WEYL)
    return key


@jit
def uniform(state, counter):
    """Draw number ``counter`` of the stream ``state`` (uint64): a float64 in [0, 1)."""
    bits = mix(state + numpy.uint64(counter) * WEYL) >> numpy.uint64(11)
    return numpy.float64(numpy.int64(bits)) * 2.0**-53


@jit
def below(state, counter, limit):
    """Draw number ``counter`` of the stream: an int64 in [0, limit)."""
    return numpy.int64(uniform(state, counter) * limit)


@jit
def edges_to_draw(available, fanout, replace):
    """How many edges are drawn from those available; a fanout of -1 draws all."""
    if available <= 0:
        return 0
    if fanout < 0 or (available <= fanout and not replace):
        return available
    return fanout


@jit
def count(first, last, fanout, replace, begin, end, counts):
    """Writes ``counts[i]``: edges to draw for node i of [begin, end), whose edges are [first[i], last[i])."""
    for i in range(begin, end):
        counts[i] = edges_to_draw(last[i] - first[i], fanout, replace)


@jit
def count_weighted(first, last, weights, fanout, replace, begin, end, counts):
    """As ``count``, for a fanout from 0 up; edges of weight 0 are never drawn."""
    for i in range(begin, end):
        positive = 0
        for edge in range(first[i], last[i]):
            positive += weights[edge] > 0
        counts[i] = edges_to_draw(positive, fanout, replace)


@jit
def edges_of(indptr, nodes, begin, end, first, last):
    """Writes the range of the edges of node ``nodes[i]`` in the CSC matrix, ``first[i]`` to ``last[i]`` (exclusive)."""
    for i in range(begin, end):
        prefetch(indptr, nodes[min(i + PREFETCH_DISTANCE, end - 1)])
        node = nodes[i]
        first[i] = indptr[node]
        last[i] = indptr[node + 1]


@jit
def repeat_positions(offsets, base, begin, end, positions):
    """Writes ``base + i`` for each edge drawn into node i of [begin, end)."""
    for i in range(begin, end):
        for t in range(offsets[i], offsets[i + 1]):
            positions[t] = base + i


@jit
def end_at_times(times, sources, limits, first, begin, end, last):
    """Lowers ``last[i]`` to the edges whose time is at most ``limits[i]``; the edges of a node are sorted by time.

    Args:
        times: of edges; with ``sources``, of nodes.
        sources: None, or the source of each edge: its time is that of the edge.
        limits: the latest time for each node of [begin, end).
        first: the first edge of each node.
        begin: first node of the range.
        end: node after the last of the range.
        last: the edge after the last of each node, which is lowered.
    """
    for i in range(begin, end):
        low, high = first[i], last[i]
        while low < high:
            middle = (low + high) // 2
            if times[middle if sources is None else sources[middle]] <= limits[i]:
                low = middle + 1
            else:
                high = middle
        last[i] = low


@jit
def pick(indices, streams, first, last, replace, key, begin, end, offsets, edges, neighbors):
    """Draws ``offsets[i + 1] - offsets[i]`` edges for each node i of [begin, end), uniformly.

    Writes their positions to ``edges`` and their sources to ``neighbors``. ``streams[i]`` (int64) selects the random
    stream. Without replacement by Floyd's method (Bentley and Floyd 1987): as many draws as edges, none of which is
    rejected.
    """
    done = offsets[begin]  # the sources of the edges before are written
    for i in range(begin, end):
        start, at = first[i], offsets[i]
        degree, number = last[i] - start, offsets[i + 1] - at
        if number == degree and not replace:
            for t in range(number):
                edges[at + t] = start + t
        else:
            state = mix(key ^ mix(numpy.uint64(streams[i])))
            if replace:
                for t in range(number):
                    edges[at + t] = start + below(state, t, degree)
            else:
                seen = numpy.uint64(0)  # bit e % 64 of each edge e drawn: most edges are new by this test alone
                for t in range(number):
                    top = degree - number + t
                    edge = below(state, t, top + 1)
                    bit = numpy.uint64(1) << numpy.uint64(edge & 63)
                    if seen & bit:
                        for earlier in range(at, at + t):
                            if edges[earlier] == start + edge:
                                edge = top
                                bit = numpy.uint64(1) << numpy.uint64(edge & 63)
                                break
                    seen |= bit
                    edges[at + t] = start + edge
        for t in range(at, at + number):
            prefetch(indices, edges[t])
        ready = offsets[max(begin, i - NODE_PREFETCH_DISTANCE)]
        for t in range(done, ready):
            neighbors[t] = indices[edges[t]]
        done = max(done, ready)
    for t in range(done, offsets[end]):
        neighbors[t] = indices[edges[t]]


@jit
def pick_weighted(indices, weights, streams, first, last, replace, key, begin, end, offsets, edges, neighbors):
    """As ``pick``, an edge with a probability proportional to its weight.

    Without replacement by exponential keys (Efraimidis and Spirakis 2006): those with the smallest -log(u) / weight.
    """
    for i in range(begin, end):
        start, stop, at = first[i], last[i], offsets[i]
        number = offsets[i + 1] - at
        if number == 0:
            continue
        state = mix(key ^ mix(numpy.uint64(streams[i])))
        if replace:
            cumulative = numpy.cumsum(weights[start:stop].astype(numpy.float64))
            last_positive = numpy.searchsorted(cumulative, cumulative[-1])  # a product of denormals is rounded up
            for t in range(number):
                drawn = numpy.searchsorted(cumulative, uniform(state, t) * cumulative[-1], side="right")
                edges[at + t] = start + min(drawn, last_positive)
        else:
            keys = numpy.empty(number, numpy.float64)
            filled = 0
            for edge in range(start, stop):
                if weights[edge] <= 0:
                    continue
                value = -numpy.log(1.0 - uniform(state, edge - start)) / weights[edge]
                if filled == number and value >= keys[number - 1]:
                    continue
                place = min(filled, number - 1)
                while place > 0 and keys[place - 1] > value:
                    keys[place] = keys[place - 1]
                    edges[at + place] = edges[at + place - 1]
                    place -= 1
                keys[place] = value
                edges[at + place] = edge
                filled = min(filled + 1, number)
        for t in range(at, at + number):
            neighbors[t] = indices[edges[t]]


@jit
def number_nodes(table, start, nodes, base, found):
    """Numbers nodes in the order in which they are found first, from ``base`` on; returns how many are new.

    Args:
        table: an entry ``start + number`` for each node of the graph. Entries below ``start`` are those of earlier
            samples and count as empty, so that the table is never cleared.
        start: of this sample, above 0.
        nodes: int64 ids of the nodes found, duplicates included; gets the number of each in its place.
        base: how many nodes have a number already.
        found: int64, long enough for the ids of the new nodes, which it gets.
    """
    new, last = 0, len(nodes) - 1
    for position in range(len(nodes)):
        prefetch(table, nodes[min(position + PREFETCH_DISTANCE, last)])
        node = nodes[position]
        number = table[node] - start
        if number < 0:
            number = base + new
            table[node] = start + number
            found[new] = node
            new += 1
        nodes[position] = number
    return new


@jit
def number_pairs(keys, numbers, pairs, base, found):
    """As ``number_nodes``, by a hash table, for pairs (seed, node) as one int64 each.

    ``keys`` (EMPTY at first) and ``numbers`` are the table: int64, as long as a power of two, longer than all pairs.
    """
    mask = numpy.uint64(len(keys) - 1)
    new = 0
    for position in range(len(pairs)):
        pair = pairs[position]
        slot = mix(numpy.uint64(pair)) & mask
        while keys[slot] != EMPTY and keys[slot] != pair:
            slot = (slot + numpy.uint64(1)) & mask
        if keys[slot] == EMPTY:
            keys[slot] = pair
            numbers[slot] = base + new
            found[new] = pair
            new += 1
        pairs[position] = numbers[slot]
    return new
