"""What things cost, and how sure one may be of it."""
