"""The words that every other room shares. Imports torch and the standard library, and nothing of ours."""
