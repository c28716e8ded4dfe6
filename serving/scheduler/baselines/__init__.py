"""Policies for comparison: the baselines in the AMOEBA and Gyges papers, and AMOEBA's policy as published."""
