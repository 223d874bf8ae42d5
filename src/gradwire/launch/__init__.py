"""`gradwire launch`: start the workers of a world, show their output, stop them together."""
