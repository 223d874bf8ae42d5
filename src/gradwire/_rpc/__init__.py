"""Calls: sending, running, responding, and their futures."""
