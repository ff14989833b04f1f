"""Whole training tasks on real data, one function a file, written as a textbook would write them."""
