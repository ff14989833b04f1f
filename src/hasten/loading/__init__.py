"""Loading of batches: how many workers a training needs, probes of samples, and copies to a GPU ahead of the step."""
