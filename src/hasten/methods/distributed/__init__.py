"""Methods for several processes: parallelization strategies, and methods that build on one."""
