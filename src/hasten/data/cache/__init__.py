"""Caches of decoded samples in memory or on disk, and the fingerprints that decide whether they are still valid."""
