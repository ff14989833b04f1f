"""Numba kernels: choose the k largest values of rows; products of a graph with dense rows and with CBSR; gradients.

Every kernel works on a range of rows and releases the GIL; ``threads.py`` calls it for all ranges in threads. A
range writes to its own rows only, and adds in the order of the edges, so the bits are the same for any number of
threads. Formulas: MaxK-GNN, arXiv 2312.08656.

Column indices may be uint8, int16 or int32. They become unsigned before use, because Numba tests signed indices for
values below zero.
"""

import numba
import numpy

from hasten.graph.prefetch import prefetch

AHEAD = 12  # edges between a prefetch and its use: the source rows are at random places in memory
LINE_BYTES = 64  # bytes of a cache line
SHORT_ROW = 32  # edges, up to which a row is sorted by insertion

jit = numba.njit(nogil=True, cache=True)
index = numpy.uint64


@jit
def choose_columns(x, bits, columns, begin, end):
    """Writes to ``columns[i]`` the columns of the k largest values of row i, ascending; of equal values, the first.

    NaN counts as larger than all numbers, as in ``torch.topk``.

    Args:
        x: Rows, float, shape (n, d).
        bits: ``x`` viewed as int32 (of float32) or int64 (of float64).
        columns: Result, shape (n, k).
        begin: First row of the range.
        end: Row after the last of the range.
    """
    width, k = x.shape[1], columns.shape[1]
    keys = numpy.empty(width, bits.dtype)
    found = numpy.empty(width + 1, columns.dtype)
    for row in range(begin, end):
        _order_keys(x[row], bits[row], keys)
        threshold = _kth_largest(keys, k)
        ties = k
        for key in keys:
            ties -= key > threshold
        place = 0
        for column in range(width):
            equal = (keys[column] == threshold) & (ties > 0)
            found[place] = column
            place += (keys[column] > threshold) | equal
            ties -= equal
        columns[row] = found[:k]


@jit
def _order_keys(x, bits, keys):
    """Writes to ``keys`` integers in the order of the floats ``x``, from their ``bits``: NaN is largest, -0 is 0."""
    integer = keys.dtype.type  # without it, Numba computes in 64 bits, and a vector holds half as many
    largest, sign = integer(numpy.iinfo(keys.dtype).max), integer(8 * keys.itemsize - 1)
    for column in range(len(keys)):
        value, pattern = x[column], bits[column]
        key = integer(pattern ^ integer(integer(pattern >> sign) & largest))
        keys[column] = largest if value != value else (integer(0) if value == 0 else key)


@jit
def _kth_largest(keys, k):
    """A number that at least k keys reach and less than k exceed; bisection counts them by vector instructions."""
    integer = keys.dtype.type
    low, high = keys.min(), keys.max()
    while low < high:
        middle = integer((low | high) - ((low ^ high) >> 1))  # the mean, rounded up, without overflow
        count = integer(0)
        for key in keys:
            count = integer(count + integer(key >= middle))
        if count >= k:
            low = middle
        else:
            high = integer(middle - 1)
        if count == k:
            break
    return low


@jit
def spmm(indptr, indices, weights, mean, x, out, begin, end):
    """Rows [begin, end) of ``out = A @ X``: product of a CSR matrix and a dense matrix.

    Args:
        indptr: Row pointers of A, int64, shape (rows + 1,).
        indices: Columns of A: sources of the edges, int32, shape (edges,).
        weights: Values of A, shape (edges,), or empty for ones.
        mean: Whether each row is divided by its number of edges.
        x: The dense matrix, flat, shape (sources * width,).
        out: Result, float, shape (rows, width).
        begin: First row of the range.
        end: Row after the last of the range.
    """
    width = out.shape[1]
    per_line = LINE_BYTES // x.itemsize
    for row in range(begin, end):
        total = out[row]
        total[:] = 0
        first, last = indptr[row], indptr[row + 1]
        for edge in range(first, last):
            ahead = numba.int64(indices[min(edge + AHEAD, len(indices) - 1)]) * width
            for offset in range(0, width, per_line):
                prefetch(x, ahead + offset)  # pyright: ignore[reportCallIssue]
            place = numba.int64(indices[edge]) * width
            source = x[place : place + width]
            if len(weights):
                weight = weights[edge]
                for column in range(width):
                    total[column] += weight * source[column]
            else:
                for column in range(width):
                    total[column] += source[column]
        if mean and last > first:
            count = x.dtype.type(last - first)
            for column in range(width):
                total[column] /= count


@jit
def spgemm(indptr, indices, weights, mean, values, columns, k, out, begin, end):
    """Rows [begin, end) of ``out = A @ Xs``: row-wise product of a CSR matrix and a CBSR matrix; the result is dense.

    Args:
        indptr: Row pointers of A, int64, shape (rows + 1,).
        indices: Columns of A: sources of the edges, int32, shape (edges,).
        weights: Values of A, shape (edges,), or empty for ones.
        mean: Whether each row is divided by its number of edges.
        values: Values of the CBSR matrix, flat, shape (sources * k,).
        columns: Their columns, flat.
        k: Values per row.
        out: Result, float, shape (rows, width).
        begin: First row of the range.
        end: Row after the last of the range.
    """
    k = index(k)
    for row in range(begin, end):
        total = out[row]
        total[:] = 0
        first, last = indptr[row], indptr[row + 1]
        scale = values.dtype.type(1 / (last - first)) if mean and last > first else values.dtype.type(1)
        for edge in range(first, last):
            _prefetch_row(values, columns, indices[min(edge + AHEAD, len(indices) - 1)], k)
            place = index(indices[edge]) * k
            weight = weights[edge] * scale if len(weights) else scale
            for t in range(k):
                total[index(columns[place + t])] += weight * values[place + t]


@jit
def sspmm(indptr, indices, weights, mean, gradient, columns, k, out, begin, end):
    """The gradient of ``spgemm`` to the values of sources [begin, end): ``A.T @ gradient`` at the CBSR's columns.

    Outer-product form: it reads each dense row of the gradient once, in order, and adds to the sources of its edges.
    Each row of A is sorted, so the edges of the range are neighbors in memory.

    Args:
        indptr: Row pointers of A, as the next three in ``spgemm``.
        indices: Columns of A, ascending in every row.
        weights: Values of A, or empty.
        mean: Whether each row was divided by its number of edges.
        gradient: Gradient to the result, shape (rows, width).
        columns: Columns of the CBSR matrix, flat.
        k: Values per row.
        out: Result, float, flat, shape (sources * k,).
        begin: First source of the range.
        end: Source after the last of the range.
    """
    k = index(k)
    out[begin * k : end * k] = 0
    for row in range(len(indptr) - 1):
        first, last = indptr[row], indptr[row + 1]
        scale = out.dtype.type(1 / (last - first)) if mean and last > first else out.dtype.type(1)
        start = first + numpy.searchsorted(indices[first:last], begin)
        stop = first + numpy.searchsorted(indices[first:last], end)
        of_row = gradient[row]
        for edge in range(start, stop):
            _prefetch_row(out, columns, indices[min(edge + AHEAD, stop - 1)], k)
            place = index(indices[edge]) * k
            weight = weights[edge] * scale if len(weights) else scale
            for t in range(k):
                out[place + t] += weight * of_row[index(columns[place + t])]


@jit
def _prefetch_row(values, columns, row, k):
    """Starts to load row ``row`` of a CBSR matrix."""
    place, per_line = numba.int64(row) * numba.int64(k), LINE_BYTES // values.itemsize
    for offset in range(0, numba.int64(k), per_line):
        prefetch(values, place + offset)  # pyright: ignore[reportCallIssue]
    prefetch(columns, place)  # pyright: ignore[reportCallIssue]


@jit
def checksum(values):
    """64 bits that change, but for rare coincidences, when an integer or its place changes."""
    total, spread = index(0), index(0x9E3779B97F4A7C15)
    for place in range(len(values)):
        weight = index(place) * spread
        total += index(values[place]) * ((weight ^ (weight >> index(29))) | index(1))
    return total


@jit
def sort_edges(sources, targets, num_sources, num_targets):
    """The CSR form of edges, sorted by (target, source), stable: two counting sorts.

    Where the edges are sorted by target, as those of a sampled batch are, each short row is sorted by itself.

    Returns:
        Row pointers, int64, shape (num_targets + 1,); sources in their new order, int32; positions that the edges had
        before, int64.
    """
    order = numpy.arange(len(sources))
    longest = _longest_run(targets)
    if 0 < longest <= SHORT_ROW:
        indptr = _row_pointers(targets, num_targets)
        for row in range(num_targets):
            _insertion_sort(sources, order, indptr[row], indptr[row + 1])
    else:
        by_source = _counting_sort(sources, order, num_sources)[1]
        indptr, order = _counting_sort(targets, by_source, num_targets)
    indices = numpy.empty(len(order), numpy.int32)
    for edge in range(len(order)):
        indices[edge] = sources[order[edge]]
    return indptr, indices, order


@jit
def _longest_run(keys):
    """The length of the longest run of equal keys; 0 if they do not ascend."""
    longest = run = 0
    for place in range(len(keys)):
        if place and keys[place] < keys[place - 1]:
            return 0
        run = run + 1 if place and keys[place] == keys[place - 1] else 1
        longest = max(longest, run)
    return longest


@jit
def _insertion_sort(keys, order, begin, end):
    """Sorts ``order[begin:end]`` by the keys at these positions; stable."""
    for place in range(begin + 1, end):
        moved = order[place]
        before = place - 1
        while before >= begin and keys[order[before]] > keys[moved]:
            order[before + 1] = order[before]
            before -= 1
        order[before + 1] = moved


@jit
def _row_pointers(keys, bound):
    """How many keys are below each number from 0 to ``bound``, shape (bound + 1,)."""
    pointers = numpy.zeros(bound + 1, numpy.int64)
    for key in keys:
        pointers[key + 1] += 1
    for key in range(bound):
        pointers[key + 1] += pointers[key]
    return pointers


@jit
def _counting_sort(keys, order, bound):
    """(pointers to the first position of each key, ``order`` sorted by the keys); stable."""
    pointers = _row_pointers(keys, bound)
    places, after = pointers.copy(), numpy.empty_like(order)
    for edge in order:
        after[places[keys[edge]]] = edge
        places[keys[edge]] += 1
    return pointers, after
