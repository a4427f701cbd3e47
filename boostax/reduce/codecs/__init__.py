"""What compressed reductions send, a codec each."""
