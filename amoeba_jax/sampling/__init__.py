"""Sampling: settings of each sequence on the host, and the sampler that chooses tokens on the devices."""
