"""Commands that train, evaluate, predict, export and compare: a face of ``Model`` and ``fit``."""
