"""The parts of a model in float64, each a chain of the stages that layer_bounds.py moves. Spec numerics §4, flash-next."""
