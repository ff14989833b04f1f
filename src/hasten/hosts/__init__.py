"""Runs hasten around training loops that others wrote: an untouched script; Lightning, Transformers, Keras."""
