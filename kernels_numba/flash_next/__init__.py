"""Kernels that Qwen3.8 Flash Next (qwen4_exp) alone needs. Spec flash-next."""
