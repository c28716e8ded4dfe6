"""Policies for comparison: the baselines in the papers of AMOEBA and Gyges, and AMOEBA's own rules as its paper
describes them."""
