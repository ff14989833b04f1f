"""What is behind ``hasten data inspect``, ``convert`` and ``bench``: measuring stored data, and storing them otherwise."""
