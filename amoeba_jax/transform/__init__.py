"""Change tensor-parallel degrees and placements of instances while requests run."""
