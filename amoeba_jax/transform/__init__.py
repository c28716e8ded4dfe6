"""Changes of degrees and of placements while requests run."""
