"""Local and remote files: path resolution, byte ranges, change detection, and caches of what was found in files."""
