"""Buffers of weights: loading, releasing and restoring them."""
