"""Policies for comparison: the baselines in the papers of AMOEBA and Gyges, and the policy of AMOEBA's paper."""
