"""What every technique stands on: the gate, named axes, per-replica state, trees and checks."""
