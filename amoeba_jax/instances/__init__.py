"""What runs: sequences, the instances that compute them, and the cluster of instances."""
