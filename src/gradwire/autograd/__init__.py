"""Contexts, the nodes where tensors leave and arrive, and the backward engine."""
