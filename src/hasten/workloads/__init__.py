"""Complete training tasks on real data, one per file, written as in a textbook."""
