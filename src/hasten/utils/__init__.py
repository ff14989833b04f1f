"""Stateless helpers that every package above core may use."""
