"""Reductions of local gradients over the replicas."""
