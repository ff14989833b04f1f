"""The engine: turns a task and a recipe into plain functions, and runs them. See README.md for the way through."""
