"""Random chains of transformations against a float64 reference that shares no code with them."""
