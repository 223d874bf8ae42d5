"""`gradwire demo`: train a network spread over four workers, and the same in one process."""
