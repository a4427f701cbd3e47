"""Gradient accumulation: over calls, and inside one step."""
