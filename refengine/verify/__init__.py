"""What is right, and how far a kernel may be from it: float64 oracles and derived bounds."""
