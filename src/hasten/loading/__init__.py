"""Loading: finds out how many workers a training needs, and copies batches to a GPU ahead of the step."""
