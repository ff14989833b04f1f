"""MaxK: sums over neighbors that read the k largest values of each node only."""
