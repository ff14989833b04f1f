"""Computes batches in the caller, in threads or in worker processes, and copies them to a device."""
