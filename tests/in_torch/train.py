"""Train small networks in torch and export them: train.py FOLDER [CASE...], with the cases of cases.py.

Writes FOLDER/NET.npz for each network, with torch's results (training.py). torch trains in float64, so that only the
rounding of the other library is visible. Writes FOLDER/CASE/model.onnx (perhaps with external data) for each model, or
FOLDER/CASE/error.txt. If the model has other weights, FOLDER/CASE/record.npz has torch's results for these weights.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
import zlib
from pathlib import Path

import cases
import nets
import numpy as np
import torch
import training
from folded import Weights, tied
from torch import Tensor, nn

STEPS, RATES = 8, {"SGD": 0.02, "AdamW": 2e-3}
STEPPERS: dict[str, training.Stepper] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=RATES["SGD"]),
    "AdamW": training.adamw(RATES["AdamW"]),
}


def prepared(name: str) -> tuple[nn.Module, Tensor]:
    """Return a network and its batch, equal at every call. All elements of parameters are distinct."""
    torch.manual_seed(zlib.crc32(name.encode()))
    make, batch = nets.NETS[name]
    net = make()
    training.disturb(net, 0.1)
    return net, batch()


def train(net: nn.Module, x: Tensor, optimizer: str, path: Path, weights: Weights | None = None) -> None:
    """Write the record of a network, in training mode, or in eval mode for weights that an exporter computed."""
    net = copy.deepcopy(net).train(weights is None)
    target = training.drawn_target(*training.doubled(net, x))
    record = training.record(net, x, target, STEPPERS[optimizer], STEPS, weights)
    for key, _ in net.named_parameters():
        assert weights is not None or f"gradient/{key}" in record, f"{key} does not reach the loss"
    np.savez(path, **record)  # type: ignore[arg-type]


def export(net: nn.Module, x: Tensor, case: cases.Case, folder: Path) -> None:
    """Write the model file: unchanged in training mode, optimized in eval mode."""
    path = folder / "model.onnx"
    net = copy.deepcopy(net).train(case.training)
    if case.dynamo:
        # Dynamic sizes are inferred, unless the network fixes them.
        program = training.export(net, x, path, dynamo=True, opset_version=case.opset, optimize=not case.training)
        program.save(path, external_data=case.opset == cases.EXPORT_OPSETS[0])
        return
    mode = torch.onnx.TrainingMode.TRAINING if case.training else torch.onnx.TrainingMode.EVAL
    module = torch.jit.script(net) if case.net in cases.SCRIPTED else net
    training.export(
        module,
        x,
        path,
        dynamo=False,
        opset_version=case.opset,
        training=mode,
        do_constant_folding=not case.training,
    )


def main() -> None:
    """Run all cases, or the named ones."""
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for case in cases.cases():
        if wanted and not any(word in str(case) for word in wanted):
            continue
        here = folder / str(case)
        here.mkdir()
        net, x = prepared(case.net)
        record = folder / f"{case.net}.npz"
        try:
            if not record.exists():
                train(net, x, case.optimizer, record)
            export(net, x, case, here)
            if case.changed:
                train(net, x, case.optimizer, here / "record.npz", tied(here / "model.onnx"))
        except Exception as error:
            (here / "error.txt").write_text(f"{type(error).__name__}: {error}")
    print("done")


if __name__ == "__main__":
    main()
