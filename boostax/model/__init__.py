"""What depends on the layout of a model: its kernels, their inputs and outputs."""
