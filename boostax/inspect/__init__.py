"""What a transformation or a train step consists of, what it costs, and what is in wrong order."""
