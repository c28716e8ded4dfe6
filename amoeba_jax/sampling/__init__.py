"""Sampling: settings of sequences on the host, and the sampler on the devices."""
