"""A chain read as parts: what each does, in which order they must stand, what a step lacks."""
