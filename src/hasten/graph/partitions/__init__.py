"""Graphs whose features are divided over ranks: partitions, exchange, sampling and batches."""
