"""Weights on devices: loading, releasing and restoring."""
