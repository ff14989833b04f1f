"""The contract between methods and the packages that run them. Read by method authors; holds no machinery."""
