"""Writes a run as one PyTorch script that does not need hasten."""
