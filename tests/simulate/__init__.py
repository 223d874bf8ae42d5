"""Deterministic simulations of the pure parts: one thread, and one seed for all chance."""
