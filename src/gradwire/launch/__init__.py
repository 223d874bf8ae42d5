"""`gradwire launch`: start the workers of a world, show what they say, end them together."""
