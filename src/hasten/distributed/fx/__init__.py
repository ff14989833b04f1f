"""Models as torch.fx graphs: pipeline stages, branches, and checks that a partition computes the same."""
