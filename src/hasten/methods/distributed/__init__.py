"""Methods for several processes: strategies, and what they build on."""
