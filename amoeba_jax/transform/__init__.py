"""Change the tensor-parallel degree or the placement of instances while their requests run."""
