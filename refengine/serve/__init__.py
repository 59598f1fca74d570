"""Running requests through a model and a backend."""
