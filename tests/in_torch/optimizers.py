"""Weights after steps of the optimizers of torch.optim, in float64, on prescribed gradients.

``optimizers.py RECORD.npz CASES.json RESULTS.npz``: the record has ``weights/NAME`` and ``gradients/K/NAME``, and the
cases are those of tests/conform/test_torch_optimizers.py. The results are ``CASE/NAME``; the last line printed is the
defaults of the optimizers that torch.optim has, as JSON.
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


def arguments(kind: type[torch.optim.Optimizer], settings: dict[str, float], flags: dict[str, bool]) -> dict[str, Any]:
    """Settings by the names of torch; flags that it does not have."""
    names = inspect.signature(kind).parameters
    given: dict[str, Any] = dict(settings)
    if "beta1" in given:
        given["betas"] = (given.pop("beta1"), given.pop("beta2"))
    unknown = set(given) - set(names)
    if unknown:
        raise TypeError(f"{kind.__name__} has no settings {sorted(unknown)}")
    return given | {name: value for name, value in flags.items() if name in names}


def trained(kind: type[torch.optim.Optimizer], case: dict[str, Any], weights: Tensors, pool: list[Tensors]) -> Tensors:
    """The weights after the steps of a case, which names a rate for each group at each step."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    groups = [
        {"params": [parameters[name] for name in group["parameters"]]} | arguments(kind, group["settings"], {})
        for group in case["groups"]
    ]
    optimizer = kind(groups, lr=1.0, **arguments(kind, case["settings"], case["flags"]))
    for t, rates in enumerate(case["rates"]):
        for name, parameter in parameters.items():
            parameter.grad = pool[t % len(pool)][name].clone()
        torch.nn.utils.clip_grad_norm_(parameters.values(), case["max_norm"])
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def main(record: Path, cases: Path, results: Path) -> None:
    """Train each case that torch has a class for."""
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
        defaults[optimizer.__name__] = optimizer([torch.nn.Parameter(torch.zeros(1))]).defaults
        for name, tensor in trained(optimizer, case, weights, pool).items():
            found[f"{label}/{name}"] = tensor.numpy()
    np.savez(results, **found)
    print(json.dumps(defaults))


main(*map(Path, sys.argv[1:]))
