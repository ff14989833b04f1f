"""The command line: ``main.py`` reads it, one file a command does it. See README.md for the way through."""
