"""Several processes: process groups, collectives, mesh, sharded state; batches and models divided among ranks."""
