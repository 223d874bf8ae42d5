"""References to values on other workers, and when such a value may be freed."""
