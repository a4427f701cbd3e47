"""The cells of the reliability scorecard: what is tried on every transformation."""
