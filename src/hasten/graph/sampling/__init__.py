"""Neighbor sampling: ``NeighborSampler``, the draws of a hop, and the kernels behind them."""
