"""Sums over neighbors by one kernel, of all values of each node or of the k largest (MaxK)."""
