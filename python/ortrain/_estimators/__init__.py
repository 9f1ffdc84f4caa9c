"""Estimators of onnxcustom. Their public names are in :mod:`ortrain.gradient`."""
