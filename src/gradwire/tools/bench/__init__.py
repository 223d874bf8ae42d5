"""Gradwire beside torch RPC, in one run: `python -m gradwire.tools.bench`."""
