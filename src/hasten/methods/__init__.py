"""One acceleration method a file. The file name is the method's name. See README.md for how to add one."""
