"""Measurements: interleaved comparisons in worker processes, ratios with intervals, exactness checks."""
