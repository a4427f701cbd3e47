"""Training in few dimensions: what a run has travelled through, and a basis of it."""
