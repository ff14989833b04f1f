"""Where a training loop runs that is not hasten's own: an untouched script, and later the frameworks."""
