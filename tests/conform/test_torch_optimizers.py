"""Optimizers compared with the classes of torch.optim, which run in float64 on the same gradients."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import environments
import numpy as np
import pytest
from optimizer_formulas import UNUSUAL, Group

from ortrain.schedules import Cosine, Warmup

TESTS = Path(__file__).parent.parent
# Runs need tests/conftest.py, which the conftest.py of this folder shadows.
sys.modules.pop("conftest", None)
sys.path.insert(0, str(TESTS))
from test_optimizers import ROWS, STEPS, Both, Part, Plan, assert_close, pool_of, started  # noqa: E402

SCRIPT = TESTS / "in_torch" / "optimizers.py"
# Tolerance relative to the largest weight: ours are float32, and each of 50 steps rounds a weight by up to 6e-8 of it.
CLOSE = 1e-6
# Some gradients exceed this norm, and some do not.
MAX_NORM = 250.0
SCHEDULE = Warmup(5, Cosine(total=60), start=0.1)
# Settings and flags without an equivalent in torch.
OURS = {"adamw", "bias_correction", "onnxruntime"}
# Optimizers without an equivalent in torch.optim; tests/test_optimizers.py has the formulas of their papers.
ELSEWHERE = {
    "LAMB": "reference implementation in TensorFlow",
    "LARS": "reference implementation in Caffe",
    "Lion": "reference implementation in the paper",
    "ScheduleFreeAdamW": "reference implementation in a separate package",
}


def plan_of(name: str, flipped: str) -> Plan:
    """Return a plan with three groups, settings that differ from the defaults, and one inverted flag."""
    row = ROWS[name]
    settings = {setting: UNUSUAL[setting] for setting in row.settings}
    if flipped == "nesterov" and "dampening" in settings:
        settings["dampening"] = 0.0  # torch rejects both together
    if name == "Adafactor":
        settings["d"] = 1.5  # torch rejects values less than 1
    rate = row.learning_rate
    parts = [
        Part(["one", "row"], ["one", "row"], Group({"weight_decay": 0.0}, lr_factor=0.5)),
        Part("long", ["long"], Group({"weight_decay": 0.2, "eps": 0.01} if "eps" in settings else {}, lr=2 * rate)),
    ]
    flags = {flipped: not row.flags[flipped]} if flipped else {}
    return Plan(row, settings, flags, parts=parts, max_norm=MAX_NORM)


PLANS = {
    f"{name}-{flipped}".rstrip("-"): plan_of(name, flipped)
    for name, row in ROWS.items()
    for flipped in ["", *(flag for flag in row.flags if flag not in OURS)]
}


def case_of(plan: Plan) -> dict[str, Any]:
    """Return a plan in the format of the script in torch."""
    assert plan.lr is not None
    own = set().union(*(part.names for part in plan.parts))
    rest = Part(None, [name for name in started() if name not in own], Group({}))
    parts = [*plan.parts, rest]
    rates = []
    for t in range(STEPS):
        factor = SCHEDULE(t)
        # The rate of an optimizer is an input of its model, in float32.
        shared = float(np.float32(plan.lr * factor))
        groups = [part.group for part in parts]
        rates.append([shared * group.lr_factor if group.lr is None else group.lr * factor for group in groups])
    return {
        "optimizer": plan.row.name,
        "settings": plan.settings,
        "flags": plan.flags,
        "groups": [{"parameters": part.names, "settings": part.group.settings} for part in parts],
        "max_norm": plan.max_norm,
        "rates": rates,
    }


@pytest.fixture(scope="session")
def in_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights after the steps, by case and parameter, and the defaults of torch's optimizers."""
    folder = tmp_path_factory.mktemp("torch")
    record: dict[str, Any] = {f"weights/{name}": values for name, values in started().items()}
    for k, gradients in enumerate(pool_of()):
        record |= {f"gradients/{k}/{name}": values for name, values in gradients.items()}
    np.savez(folder / "record.npz", **record)
    (folder / "cases.json").write_text(json.dumps({label: case_of(plan) for label, plan in PLANS.items()}))
    files = [str(folder / name) for name in ("record.npz", "cases.json", "results.npz")]
    defaults = json.loads(environments.in_environment(environments.torch(), SCRIPT, *files))
    return dict(np.load(folder / "results.npz")), defaults


def test_torch_has_the_others_with_the_same_defaults(in_torch: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, found = in_torch
    assert set(ROWS) - set(found) == set(ELSEWHERE)
    for name, defaults in found.items():
        row = ROWS[name]
        wanted = {"lr": row.learning_rate, **row.settings, **row.flags}
        assert {key: defaults[key] for key in wanted if key not in OURS} == {
            key: value for key, value in wanted.items() if key not in OURS
        }, name


@pytest.mark.parametrize("label", [label for label, plan in PLANS.items() if plan.row.name not in ELSEWHERE])
def test_fifty_steps(label: str, in_torch: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    both = Both(tmp_path, PLANS[label], None, SCHEDULE)
    both.steps(STEPS, pool_of())
    assert min(both.norms) < MAX_NORM < max(both.norms)
    wanted = {name: in_torch[0][f"{label}/{name}"] for name in started()}
    found = {name: both.state(name)["weights"] for name in started()}
    for name, start in started().items():
        moved, apart = np.abs(wanted[name] - start).max(), np.abs(wanted[name] - found[name]).max()
        print(f"{name}: largest change {moved:.1e}, largest difference {apart:.1e}")
    assert_close(found, wanted, CLOSE)
