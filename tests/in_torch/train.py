"""Train small networks in torch and export them: train.py FOLDER [CASE...], the cases being those of cases.py.

Writes FOLDER/NET.npz for each network, what torch says of it (training.py). torch trains in float64, so that only the
other side's rounding is seen. Writes FOLDER/CASE/model.onnx (perhaps with a side file) for each model, or
FOLDER/CASE/error.txt; and FOLDER/CASE/record.npz, of the weights in the model, where they are others.
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
    """A network and its batch, the same at every call. No two elements of parameters are equal."""
    torch.manual_seed(zlib.crc32(name.encode()))
    make, batch = nets.NETS[name]
    net = make()
    training.disturb(net, 0.1)
    return net, batch()


def train(net: nn.Module, x: Tensor, optimizer: str, path: Path, weights: Weights | None = None) -> None:
    """Write the record of a network; that of weights which an exporter computed is of one that is not in training."""
    net = copy.deepcopy(net).train(weights is None)
    target = training.drawn_target(*training.doubled(net, x))
    record = training.record(net, x, target, STEPPERS[optimizer], STEPS, weights)
    for key, _ in net.named_parameters():
        assert weights is not None or f"gradient/{key}" in record, f"{key} does not reach the loss"
    np.savez(path, **record)  # type: ignore[arg-type]


def export(net: nn.Module, x: Tensor, case: cases.Case, folder: Path) -> None:
    """The model file. What is exported in training mode is as it was written; in eval mode it is optimized."""
    path = folder / "model.onnx"
    net = copy.deepcopy(net).train(case.training)
    if case.dynamo:
        # Sizes of a batch are found where they are not fixed by the network.
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
    """All cases, or those that are named."""
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
