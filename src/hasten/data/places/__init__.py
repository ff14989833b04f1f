"""Where files are: globs, folders, remote addresses; what is read of them, whether they changed, and what was found out in them."""
