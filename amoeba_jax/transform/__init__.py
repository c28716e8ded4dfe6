"""Changes of layout while requests run."""
