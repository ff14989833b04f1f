"""Samples that are read and decoded once, in memory or on disk, and how one knows that they are still the same."""
