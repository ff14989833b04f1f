"""Models as graphs: where they can be divided into stages and branches, and whether the parts compute the same."""
