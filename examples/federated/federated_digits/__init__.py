"""Handwritten digits of scikit-learn on ten clients."""
