"""Training of a model in two lines: the parts behind ``ortrain.Model``."""
