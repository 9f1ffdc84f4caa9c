"""Longer comparisons, which `make conform` runs and CI does not run."""
