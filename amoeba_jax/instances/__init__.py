"""Sequences, the instances that compute them, and the cluster of instances."""
