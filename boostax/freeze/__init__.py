"""Freezing: a prefix of the layers stands still on some steps, and its backward pass is saved."""
