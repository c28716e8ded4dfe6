"""Policies to compare with: the baselines that the AMOEBA and Gyges papers use, and AMOEBA's policy as published."""
