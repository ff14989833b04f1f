"""What runs inside the user's script: one file for each seam, and the session that joins them and answers.

A seam is a place where the script calls torch, a framework or a tracker, and hasten can watch or change what happens
without changing the script (Feathers 2004): steps, loaders, models, seeds, imports. ``session.py`` is read first.
"""
