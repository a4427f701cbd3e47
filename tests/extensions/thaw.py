"""A freeze schedule: a function from the step to the number of frozen groups."""


def thaw(step: int) -> int:
    """Thaw the second group at step 4, the first at step 8."""
    return 2 if step < 4 else 1 if step < 8 else 0
