"""The command line: ``main.py`` parses it and runs one command; every other command module holds one command. See README.md."""
