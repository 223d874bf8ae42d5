"""Distributed autograd: contexts, send and recv nodes, backward passes."""
