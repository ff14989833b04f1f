"""``hasten serve``: an exported model behind a REST address, with batching, limits, metrics and reload."""
