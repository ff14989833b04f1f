"""Where files are: globs, folders, remote addresses, manifests; what is read of them, and whether they changed."""
