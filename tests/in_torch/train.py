"""Train small networks in torch and export them: train.py FOLDER [CASE...], the cases being those of cases.py.

Writes FOLDER/NET.npz for each network: the batch `x` and `target`, the `losses` of each step, and `value/NAME` and
`gradient/NAME` of the parameters at the first one. torch trains in float64, so that only the other side's rounding is
seen. Writes FOLDER/CASE/model.onnx (perhaps with a side file) for each model, or FOLDER/CASE/error.txt.
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


def train(net: nn.Module, x: Tensor, optimizer: str) -> dict[str, np.ndarray]:
    """The record of a network; it is not changed."""
    record = {"x": x.numpy()}
    record |= {f"value/{key}": value.detach().numpy().copy() for key, value in net.named_parameters()}
    net, x = training.doubled(net, x)
    target = training.drawn_target(net.train(), x)
    losses, gradients = training.steps(net, x, target, STEPPERS[optimizer], STEPS)
    for key, _ in net.named_parameters():
        assert key in gradients, f"{key} does not reach the loss"
    record |= {f"gradient/{key}": value for key, value in gradients.items()}
    return record | {"target": target.numpy(), "losses": losses}


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
                np.savez(record, **train(net, x, case.optimizer))  # type: ignore[arg-type]
            export(net, x, case, here)
        except Exception as error:
            (here / "error.txt").write_text(f"{type(error).__name__}: {error}")
    print("done")


if __name__ == "__main__":
    main()
