"""Starts the ranks of a job on one node or several, and restarts lost ones."""
