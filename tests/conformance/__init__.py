"""Programs drawn at random, trained by MindSpore 2.10 and by boostax."""
