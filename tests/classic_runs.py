"""Recorded runs of the classic TrainingSession: ten steps of SGD and Adam on graphs of tests/data/gradient-graph.

Needs onnx and NumPy alone, so that it runs in the environment of onnxruntime-training 1.15.0 and in ortrain's. The
argument ``framework`` has the classes of a session: the module ``onnxruntime``, or ``ortrain.classic``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

GRAPHS = Path(__file__).parent / "data" / "gradient-graph"
STEPS = 10
# The rate of step k is RATE / (1 + k). The float inputs of every second step are multiplied by OTHER, which is exact.
RATE, OTHER = 0.01, -0.5
# Weights of each graph with more than eight elements: onnxruntime-training 1.15.0 trains no smaller ones.
WEIGHTS = {
    "conv": ("K", "W"),
    "gather": ("E", "W"),
    "gemm_mlp": ("W1", "W2"),
    "matmul_broadcast": ("V", "W", "c"),
    "reduce": ("S",),
    "slice_concat_split": ("A",),
    "softmax_ce": ("W",),
}
NORM = "global_gradient_norm"
# Largest difference from the record: of a loss relative to the loss, of a state relative to its largest element. Both
# are computed in float32, and the order of summation differs.
LOSS_TOLERANCE = 1e-5
STATE_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Run:
    """An optimizer with its settings. The weights take the settings in turn, and start again after the last one."""

    optimizer: str
    settings: tuple[dict[str, float], ...] = ({},)
    switches: tuple[dict[str, int], ...] = ({},)
    norm: bool = False
    parts: tuple[str, ...] = field(default=())


MOMENTS = ("Moment_1", "Moment_2", "Update_Count")
RUNS = {
    "sgd": Run("SGDOptimizer"),
    "sgd_with_norm": Run("SGDOptimizer", norm=True),
    "adam": Run("AdamOptimizer", parts=MOMENTS),
    "adam_with_settings": Run(
        "AdamOptimizer",
        ({"alpha": 0.8, "beta": 0.98, "lambda": 0.01, "epsilon": 1e-3}, {"lambda": 0.1, "epsilon": 1e-4}),
        ({"weight_decay_mode": 1}, {"do_bias_correction": 0}, {"weight_decay_mode": 1, "do_bias_correction": 0}),
        parts=MOMENTS,
    ),
}


def feeds_of(case: str, step: int) -> dict[str, np.ndarray]:
    """Return the inputs of a step, with its learning rate."""
    with np.load(GRAPHS / case / "io.npz") as stored:
        feeds = {key[3:]: stored[key] for key in stored.files if key.startswith("in/")}
    if step % 2:
        feeds = {name: OTHER * value if value.dtype == np.float32 else value for name, value in feeds.items()}
    return feeds | {"Learning_Rate": np.asarray([RATE / (1 + step)], np.float32)}


def session_of(framework: Any, case: str, run: Run, options: Any = None) -> Any:
    """Return a session that trains a graph."""
    weights = WEIGHTS[case]
    parameters = framework.TrainingParameters()
    parameters.loss_output_name = "loss"
    parameters.weights_to_train = set(weights)
    parameters.training_optimizer_name = run.optimizer
    parameters.enable_grad_norm_clip = run.norm
    parameters.optimizer_attributes_map = {w: run.settings[i % len(run.settings)] for i, w in enumerate(weights)}
    parameters.optimizer_int_attributes_map = {w: run.switches[i % len(run.switches)] for i, w in enumerate(weights)}
    model = onnx.load(GRAPHS / case / "forward.onnx").SerializeToString()
    return framework.TrainingSession(model, parameters, options, ["CPUExecutionProvider"])


def train(framework: Any, case: str, name: str, options: Any = None) -> dict[str, np.ndarray]:
    """Train and return the losses, norms and states of every step, under ``loss``, ``norm`` and ``state/NAME``.

    ``optimizer/WEIGHT/PART`` is the state of the optimizer at the end.
    """
    run = RUNS[name]
    session = session_of(framework, case, run, options)
    outputs = ["loss", NORM] if run.norm else ["loss"]
    losses, states = [], []
    for step in range(STEPS):
        losses.append(session.run(outputs, feeds_of(case, step)))
        states.append(session.get_state())
    found = {"loss": np.asarray([values[0] for values in losses], np.float32)}
    if run.norm:
        found["norm"] = np.asarray([values[1] for values in losses], np.float32)
    found |= {f"state/{key}": np.stack([state[key] for state in states]) for key in states[0]}
    for weight, parts in session.get_optimizer_state().items():
        found |= {f"optimizer/{weight}/{part}": value for part, value in parts.items()}
    return found


def train_all(framework: Any, options: Any = None) -> dict[str, np.ndarray]:
    """Train all graphs with all runs; the keys are ``CASE/RUN/KIND``."""
    return {
        f"{case}/{name}/{key}": value
        for case in WEIGHTS
        for name in RUNS
        for key, value in train(framework, case, name, options).items()
    }


def keys_of(case: str, name: str) -> set[str]:
    """Return the keys that :func:`train` returns, from the settings alone."""
    run, weights = RUNS[name], WEIGHTS[case]
    found = {"loss", *(["norm"] if run.norm else []), *(f"state/{weight}" for weight in weights)}
    found |= {f"state/{part}_{weight}" for weight in weights for part in run.parts}
    return found | {f"optimizer/{weight}/{part}" for weight in weights for part in run.parts}


def distance(key: str, got: np.ndarray, want: np.ndarray) -> float:
    """Return the distance from the recorded value: relative for losses and norms, else to the largest element."""
    if got.shape != want.shape or got.dtype != want.dtype or not np.isfinite(got).all():
        return float("inf")
    gap = np.abs(got.astype(np.float64) - want.astype(np.float64))
    if key in ("loss", "norm"):
        return float((gap / np.abs(want)).max())
    # Each step of a state is compared with its own largest element.
    steps = gap.reshape(len(gap), -1) if key.startswith("state/") else gap.reshape(1, -1)
    sizes = np.abs(want).reshape(steps.shape).max(axis=1)
    return float((steps.max(axis=1) / np.maximum(sizes, np.finfo(np.float32).tiny)).max())


def above_tolerance(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the values that differ by more than their tolerance, and the values that one side lacks."""
    found = {key: float("inf") for key in got.keys() ^ want.keys()}
    for key in got.keys() & want.keys():
        tolerance = LOSS_TOLERANCE if key in ("loss", "norm") else STATE_TOLERANCE
        far = distance(key, got[key], want[key])
        if not far <= tolerance:
            found[key] = far
    return found
