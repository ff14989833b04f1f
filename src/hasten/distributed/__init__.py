"""Several processes: process groups, collectives, sharded state, batches and models divided among ranks."""
