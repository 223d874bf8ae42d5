"""Calls: sent, run, answered, and their futures."""
