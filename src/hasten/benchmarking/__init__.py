"""Timing that can be believed: processes that take turns, ratios with intervals, proofs by running."""
