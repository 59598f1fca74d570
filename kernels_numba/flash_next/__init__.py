"""Kernels of Flash Next. Spec flash-next."""
