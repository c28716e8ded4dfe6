"""Simulator of a serving cluster. It computes how long requests would take, without running a model.

The scheduler's policies run unchanged. A cost model gives the time of each step. The simulated time (virtual time)
passes without waiting. This package imports no JAX. The Python API is `serving.simulator.simulate`, and the command is
`amoeba simulate`. See docs/simulation.md.
"""
