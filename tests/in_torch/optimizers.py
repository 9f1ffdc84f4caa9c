"""Weights after steps of torch.optim's optimizers, in float64, on prescribed gradients.

``optimizers.py RECORD.npz CASES.json RESULTS.npz``: the record has ``weights/NAME`` and ``gradients/K/NAME``. The cases
come from tests/conform/test_torch_optimizers.py. The results are ``CASE/NAME``; the last output line has the defaults
of torch.optim's optimizers as JSON.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]


# Muon's settings for parameters that torch.optim.Muon rejects, by their names in torch.optim.AdamW.
OF_ADAMW = {"beta1": "beta1", "beta2": "beta2", "adamw_eps": "eps", "weight_decay": "weight_decay"}


class InDouble:
    """Module torch with float64 as bfloat16, so that torch.optim.Muon iterates without rounding."""

    bfloat16 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


vars(sys.modules["torch.optim._muon"])["torch"] = InDouble()


def arguments(kind: type[torch.optim.Optimizer], settings: dict[str, float], flags: dict[str, bool]) -> dict[str, Any]:
    """Return the settings with torch's names, and only flags that torch has."""
    names = inspect.signature(kind).parameters
    given: dict[str, Any] = dict(settings)
    if kind is torch.optim.Muon:
        given = {name: value for name, value in given.items() if name in names}
    for name, pair in {"betas": ("beta1", "beta2"), "eps": ("eps1", "eps2")}.items():
        if pair[0] in given:
            given[name] = tuple(given.pop(part) for part in pair)
    unknown = set(given) - set(names)
    if unknown:
        raise TypeError(f"{kind.__name__} has no settings {sorted(unknown)}")
    if flags.get("match_rms_adamw"):
        given["adjust_lr_fn"] = "match_rms_adamw"
    return given | {name: value for name, value in flags.items() if name in names}


def optimizer_of(
    kind: type[torch.optim.Optimizer], case: dict[str, Any], parameters: Tensors, names: dict[str, str] | None = None
) -> torch.optim.Optimizer:
    """Return an optimizer of these parameters; `names` renames its settings."""

    def renamed(settings: dict[str, float]) -> dict[str, float]:
        return settings if names is None else {names[key]: v for key, v in settings.items() if key in names}

    groups = [
        {"params": [parameters[name] for name in group["parameters"] if name in parameters]}
        | arguments(kind, renamed(group["settings"]), {})
        for group in case["groups"]
    ]
    return kind(groups, lr=1.0, **arguments(kind, renamed(case["settings"]), {} if names else case["flags"]))


def trained(kind: type[torch.optim.Optimizer], case: dict[str, Any], weights: Tensors, pool: list[Tensors]) -> Tensors:
    """Return the weights after the steps of a case, which has a rate for each group and step."""
    parameters: Tensors = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    if kind is torch.optim.Muon:
        matrices = {name: value for name, value in parameters.items() if value.ndim == 2}
        others = {name: value for name, value in parameters.items() if value.ndim != 2}
        optimizers = [optimizer_of(kind, case, matrices), optimizer_of(torch.optim.AdamW, case, others, OF_ADAMW)]
    else:
        optimizers = [optimizer_of(kind, case, parameters)]
    for t, rates in enumerate(case["rates"]):
        for name, parameter in parameters.items():
            parameter.grad = pool[t % len(pool)][name].clone()
        torch.nn.utils.clip_grad_norm_(parameters.values(), case["max_norm"])
        for optimizer in optimizers:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def defaults_of(kind: type[torch.optim.Optimizer], parameter: torch.nn.Parameter) -> dict[str, Any]:
    """Return the defaults of an optimizer, with separate betas."""
    found = dict(kind([parameter]).defaults)
    if "betas" in found:
        found["beta1"], found["beta2"] = found["betas"]
    if kind is torch.optim.Muon:
        adamw = defaults_of(torch.optim.AdamW, parameter)
        found |= {name: adamw[other] for name, other in OF_ADAMW.items() if name not in found}
        found["match_rms_adamw"] = found["adjust_lr_fn"] == "match_rms_adamw"
    if kind is torch.optim.Adafactor:
        # None is the epsilon of the weights' type.
        assert found["eps"][0] is None
        found["eps1"], found["eps2"] = torch.finfo(torch.float32).eps, found["eps"][1]
    return found


def main(record: Path, cases: Path, results: Path) -> None:
    """Train each case that has a class in torch."""
    weights: Tensors = {}
    pool: list[Tensors] = []
    for key, value in np.load(record).items():
        kind, *place, name = key.split("/")
        if kind == "weights":
            weights[name] = torch.from_numpy(value).double()
            continue
        while len(pool) <= int(place[0]):
            pool.append({})
        pool[int(place[0])][name] = torch.from_numpy(value).double()
    found: dict[str, Any] = {}
    defaults: dict[str, dict[str, Any]] = {}
    for label, case in json.loads(cases.read_text()).items():
        optimizer = getattr(torch.optim, case["optimizer"], None)
        if optimizer is None:
            continue
        defaults[optimizer.__name__] = defaults_of(optimizer, torch.nn.Parameter(torch.zeros(1, 1)))
        for name, tensor in trained(optimizer, case, weights, pool).items():
            found[f"{label}/{name}"] = tensor.numpy()
    np.savez(results, **found)
    print(json.dumps(defaults))


main(*map(Path, sys.argv[1:]))
