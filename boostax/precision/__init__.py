"""Lower precision without lost gradients: policies, loss scaling, finiteness."""
