"""Policies for comparison: the baselines of the papers, and the paper's own rules."""
