"""Weights on devices: loading them, releasing their memory to the KV cache, and restoring them."""
