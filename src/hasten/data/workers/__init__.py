"""Where batches are computed (the caller, threads, worker processes), their transport, and the copy to a device."""
