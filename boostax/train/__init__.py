"""From a loss function to a compiled train step, and the loop around it."""
