"""Who computes the batches, and how they travel: the caller, threads, processes; the copy to a device."""
