"""Replay the recorded case checkpoint_resume: three steps, a checkpoint, and every continuation from there.

Needs NumPy alone, so that it runs in ortrain's environment and in onnxruntime-training's:

    python resuming.py API CASE ARTIFACTS FOLDER [CHECKPOINTS]      prints a line of JSON: Outcome
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from replaying import Record, as_tuple, batches_of, load_api

RATE = 0.005
STEPS = 3


@dataclass
class Outcome:
    """The results of a run: distances from the record, and properties and learning rates after loading."""

    distances: dict[str, float]
    properties: dict[str, dict[str, object]]
    rates: dict[str, float]


class Run:
    """A module and an optimizer on a checkpoint."""

    def __init__(self, api: Any, artifacts: Path, checkpoint: Path, **module_arguments: Any) -> None:
        self.state = api.CheckpointState.load_checkpoint(str(checkpoint))
        self.module = api.Module(
            str(artifacts / "training_model.onnx"), self.state, str(artifacts / "eval_model.onnx"), **module_arguments
        )
        self.optimizer = api.Optimizer(str(artifacts / "optimizer_model.onnx"), self.module)

    def steps(self, batches: list[dict[str, np.ndarray]], rate: float | None) -> list[Any]:
        """Take a step on each batch and return the losses. The gradients of the last step are not reset.

        Without a `rate`, the learning rate does not change.
        """
        losses = []
        for batch in batches:
            self.module.lazy_reset_grad()
            losses.append(self.module(*[batch[name] for name in self.module.input_names()]))
            if rate is not None:
                self.optimizer.set_learning_rate(rate)
            self.optimizer.step()
        return losses


def resume(
    api_name: str, case: Path, artifacts: Path, checkpoints: Path | None, folder: Path, **module_arguments: Any
) -> Outcome:
    """Replay the record with artifacts, from its first step.

    Continues from the checkpoints in ``checkpoints`` (checkpoint_step3_optim, checkpoint_step3_plain), or, if it is
    None, from the checkpoints that the run itself saves into ``folder``. The run saves its own in both cases.
    """
    api = load_api(api_name)
    record, batches = Record(case), batches_of(case)
    meta = json.loads((case / "meta.json").read_text())
    outcome = Outcome(record.distances, {}, {})

    def run_on(checkpoint: Path) -> Run:
        return Run(api, artifacts, checkpoint, **module_arguments)

    def compare(run: Run, moment: str, *, gradients: bool = True) -> None:
        for name, parameter in run.state.parameters:
            record.compare("parameter", parameter.data, f"param/{moment}/{name}")
            if gradients and parameter.requires_grad:
                record.compare("gradient", parameter.grad, f"grad/{moment}/{name}")

    run = run_on(artifacts / "checkpoint")
    compare(run, "init", gradients=False)
    losses = run.steps(batches[:STEPS], RATE)
    compare(run, "step3")
    for name, value in meta["properties_set"].items():
        run.state.properties[name] = value
    for kind in ("optim", "plain"):
        path = folder / f"checkpoint_step3_{kind}"
        api.CheckpointState.save_checkpoint(run.state, str(path), include_optimizer_state=kind == "optim")
    losses += run.steps(batches[STEPS:], RATE)
    record.compare("loss", losses, "loss_continued")
    compare(run, "continued_step6")

    run.module.eval()
    results = as_tuple(run.module(*[batches[0][name] for name in run.module.input_names()]))
    for name, value in zip(run.module.output_names(), results, strict=True):
        record.compare("eval", value, f"eval/final/{name}")
    exported = folder / "inference_model.onnx"
    run.module.export_model_for_inferencing(str(exported), meta["inference_outputs"])
    runtime = importlib.import_module(api_name.split(".")[0])
    session = runtime.InferenceSession(str(exported), providers=["CPUExecutionProvider"])
    feeds = {name: batches[0][name] for name in meta["inference_inputs"]}
    for name, value in zip(meta["inference_outputs"], session.run(None, feeds), strict=True):
        record.compare("infer", value, f"infer/{name}")

    for kind in ("optim", "plain"):
        again = run_on((checkpoints or folder) / f"checkpoint_step3_{kind}")
        compare(again, f"loaded_{kind}", gradients=False)
        outcome.properties[kind] = dict(again.state.properties)
        outcome.rates[kind] = again.optimizer.get_learning_rate()
        record.compare("loss", again.steps(batches[STEPS:], RATE), f"loss_resumed_{kind}")
        compare(again, f"resumed_{kind}_step6")

    # A nominal checkpoint has no values, so a buffer supplies them. The steps set no learning rate: setting one here
    # terminates onnxruntime-training.
    nominal = run_on(artifacts / "nominal_checkpoint")
    sizes = {which: nominal.module.get_parameters_size(which == "trainable") for which in ("all", "trainable")}
    assert sizes == meta["nominal_parameters_size"], sizes
    buffer: Any = runtime.OrtValue.ortvalue_from_numpy(record.values["nominal_buffer_all"])
    nominal.module.copy_buffer_to_parameters(getattr(buffer, "_ortvalue", buffer), False)
    record.compare("parameter", nominal.module.get_contiguous_parameters(False).numpy(), "nominal_buffer_all")
    record.compare("loss", nominal.steps(batches[:1], None), "loss_from_nominal")
    compare(nominal, "nominal_step1")

    assert not record.forgotten(), record.forgotten()
    return outcome


def main() -> None:
    """Replay the case with the artifacts of the command line."""
    api_name, case, artifacts, folder, *checkpoints = sys.argv[1:]
    given = Path(checkpoints[0]) if checkpoints else None
    print(json.dumps(asdict(resume(api_name, Path(case), Path(artifacts), given, Path(folder)))))


if __name__ == "__main__":
    main()
