"""Policy of CoCoServe (arXiv 2507.18006): layers replicate and migrate while requests run."""
