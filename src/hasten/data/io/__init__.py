"""Local and remote files: path resolution, byte ranges, change detection, and caches of file lists and indexes."""
