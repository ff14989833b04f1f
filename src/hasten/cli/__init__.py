"""The command line: ``main.py`` parses it and runs one command. See README.md for the list of modules."""
