"""`gradwire doctor`: what this machine offers, what is used of it, and a self test."""
