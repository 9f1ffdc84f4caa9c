"""Uses changed files as a user would: work.py CORPUS FOLDER KIND SEED FIRST END.

File number N of a kind is a function of only the seed and N. Before each call, FOLDER/progress gets the number of the
file, the processor time, and the name of the call; the file itself is in FOLDER/now. FOLDER/failures gets a line of
JSON for every exception that is not an ortrain error. The process may use 4 GB in addition to its memory at the start.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import onnx

import ortrain
from ortrain import artifacts, optim
from ortrain.api import CheckpointState, Module, Optimizer

MEMORY, RUN_LIMIT, ITERATIONS = 4 << 30, 256 << 20, 10_000
# Maximum number of elements of generated inputs.
LARGEST_INPUT = 1 << 20
LOSSES = (artifacts.LossType.MSELoss, artifacts.LossType.L1Loss, artifacts.LossType.CrossEntropyLoss, None)
DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": bool,
}
DTYPES |= {f"tensor({kind}{bits})": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)}


class Work:
    """Calls on the files of a folder."""

    def __init__(self, corpus: Path, folder: Path, kind: str, seed: int) -> None:
        self.corpus, self.folder, self.kind, self.seed = corpus, folder, kind, seed
        self.now = folder / "now"
        self.index, self.stage = 0, ""
        self.progress = (folder / "progress").open("w")
        self.outcomes: dict[str, int] = {}
        if kind in ("models", "external"):
            names = sorted((corpus / "models").iterdir())
            self.models = [onnx.load(path) for path in names]
        elif kind == "artifacts":
            self.models = [onnx.load(path) for path in sorted((corpus / "artifacts").glob("*/*.onnx"))]
        if kind in ("models", "external", "artifacts"):
            self.of_models = mutations.OfModels(self.models)

    def at(self, stage: str) -> None:
        """Record the name of the next call."""
        self.stage = stage
        self.progress.seek(0)
        self.progress.write(f"{self.index} {time.process_time():.3f} {stage}\n".ljust(200))
        self.progress.flush()

    def attempt(self, stage: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call; `None` after a proper error."""
        self.at(stage)
        try:
            value = call()
        except ortrain.OrtrainError as error:
            self.count(f"{stage}: {type(error).__name__}")
            if not str(error).strip():
                self.failed(error)
            return None
        except BaseException as error:
            self.failed(error)
            return None
        self.count(f"{stage}: done")
        return value

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def failed(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))[-3000:]
        line = {"kind": self.kind, "seed": self.seed, "index": self.index, "stage": self.stage, "error": text}
        with (self.folder / "failures").open("a") as file:
            file.write(json.dumps(line) + "\n")
        shutil.copytree(self.now, self.folder / "kept" / f"{self.kind}-{self.seed}-{self.index}", dirs_exist_ok=True)

    def file(self, index: int) -> None:
        """Make and use one changed file."""
        self.index = index
        shutil.rmtree(self.now, ignore_errors=True)
        self.now.mkdir(parents=True)
        self.at("the change")
        rng = random.Random(f"{self.kind} {self.seed} {index}")
        {
            "models": self.model,
            "artifacts": self.artifact,
            "checkpoints": self.checkpoint,
            "safetensors": self.safetensors,
            "external": self.external,
        }[self.kind](rng)

    def changed(self, model: onnx.ModelProto, rng: random.Random) -> bytes:
        if rng.random() < 0.25:
            return mutations.of_bytes(model.SerializeToString(), rng)
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        self.of_models.change(copy, rng)
        data = mutations.serialized(copy)
        return data if data is not None else mutations.of_bytes(model.SerializeToString(), rng)

    def options(self, rng: random.Random) -> ortrain.SessionOptions:
        options = ortrain.SessionOptions()
        options.intra_op_num_threads = 1
        options.iteration_limit = ITERATIONS
        if rng.random() < 0.5:
            options.memory_limit = RUN_LIMIT
        return options

    def model(self, rng: random.Random) -> None:
        path = self.now / "model.onnx"
        path.write_bytes(self.changed(rng.choice(self.models), rng))
        self.use(path, rng)

    def external(self, rng: random.Random) -> None:
        model = onnx.ModelProto()
        # Many models have no initializer, so draw until one has.
        while not model.graph.initializer:
            model.CopyFrom(rng.choice(self.models))
        path, side = self.now / "model.onnx", self.now / "model.onnx.data"
        onnx.save(model, path, save_as_external_data=True, location=side.name, size_threshold=0)
        data = side.read_bytes() if side.exists() else b""
        model = onnx.load(path, load_external_data=False)
        if any(tensor.external_data for tensor in model.graph.initializer):
            model, data = mutations.of_external(model, data, rng)
        if rng.random() < 0.1:
            side.unlink(missing_ok=True)
        else:
            side.write_bytes(data)
        path.write_bytes(model.SerializeToString())
        self.use(path, rng)

    def use(self, path: Path, rng: random.Random) -> None:
        """Make all calls on a model."""
        options = self.options(rng)
        session = self.attempt("InferenceSession", lambda: ortrain.InferenceSession(path, options))
        if session is not None:
            feeds = self.feeds(session, rng)
            if feeds is not None:
                self.attempt("run", lambda: session.run(None, feeds))
        size = rng.choice((None, 1, 3))
        self.attempt("inspect", lambda: str(ortrain.inspect(path, batch_size=size)))
        stage: Any = rng.choice(("graph", "gradient", "program"))
        self.attempt(f"dump {stage}", lambda: ortrain.dump(path, stage))
        folder = self.now / "made"
        folder.mkdir()
        loss = rng.choice(LOSSES)
        kinds = (
            artifacts.OptimType.AdamW,
            artifacts.OptimType.SGD,
            optim.Lion(max_norm=1.0),
            optim.Muon(),
            optim.LAMB(),
        )
        optimizer = rng.choice(kinds)
        self.attempt(
            "generate_artifacts",
            lambda: artifacts.generate_artifacts(path, loss=loss, optimizer=optimizer, artifact_directory=folder),
        )
        if (folder / "checkpoint").exists():
            self.train(folder, {}, rng)

    def feeds(self, session: ortrain.InferenceSession, rng: random.Random) -> dict[str, np.ndarray] | None:
        feeds = {}
        for info in session.get_inputs():
            dtype = DTYPES.get(info.type)
            if dtype is None:
                return None
            made = self.array(info.shape, dtype, rng)
            if made is None:
                return None
            feeds[info.name] = made
        return feeds

    def array(self, shape: Any, dtype: Any, rng: random.Random) -> np.ndarray | None:
        sizes = [size if isinstance(size, int) and size >= 0 else 2 for size in shape or ()]
        # NumPy rejects large sizes even in combination with a zero.
        if len(sizes) > 32 or np.prod([float(max(size, 1)) for size in sizes]) > LARGEST_INPUT:
            return None
        draws = np.random.default_rng(rng.randrange(2**32))
        if np.dtype(dtype).kind == "f":
            return np.asarray(draws.standard_normal(sizes), dtype)
        return np.asarray(draws.integers(0, 3, sizes), dtype)

    def train(self, folder: Path, own: dict[str, Path], rng: random.Random) -> None:
        """Take a step with the artifacts of a folder; `own` replaces some of them."""
        place = {name: own.get(name, folder / name) for name in ("training_model.onnx", "eval_model.onnx")}
        optimizer_model = own.get("optimizer_model.onnx", folder / "optimizer_model.onnx")
        checkpoint = own.get("checkpoint", folder / "checkpoint")
        state = self.attempt("load_checkpoint", lambda: CheckpointState.load_checkpoint(checkpoint))
        if state is None:
            return
        options = self.options(rng)
        training, evaluation = place.values()
        module = self.attempt("Module", lambda: Module(training, state, evaluation, session_options=options))
        if module is None:
            return
        optimizer = self.attempt("Optimizer", lambda: Optimizer(optimizer_model, module))
        for mode in (True, False):
            module.train(mode)
            declared = self.declared(training if mode else evaluation)
            inputs = [declared.get(name) and self.array(*declared[name], rng) for name in module.input_names()]
            if any(array is None for array in inputs):
                continue
            done = self.attempt(f"step {mode}", lambda inputs=inputs: module(*inputs))
            if mode and done is not None and optimizer is not None:
                self.attempt("optimizer step", optimizer.step)
        if optimizer is not None:
            self.attempt("save", lambda: CheckpointState.save_checkpoint(state, self.now / "saved", True))
            self.attempt("load saved", lambda: CheckpointState.load_checkpoint(self.now / "saved"))
        self.at("export")
        outputs = module.output_names()
        self.attempt("export", lambda: module.export_model_for_inferencing(self.now / "exported.onnx", outputs))

    def declared(self, path: Path) -> dict[str, tuple[list[int], Any]]:
        """Return shapes and types of inputs, as far as this Python can read them."""
        try:
            model = onnx.load(path, load_external_data=False)
            return {
                value.name: (
                    [dim.dim_value if dim.HasField("dim_value") else 2 for dim in value.type.tensor_type.shape.dim],
                    onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type),
                )
                for value in model.graph.input
            }
        except Exception:
            return {}

    def artifact(self, rng: random.Random) -> None:
        folder = rng.choice(sorted((self.corpus / "artifacts").iterdir()))
        name = rng.choice(("training_model.onnx", "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"))
        path = self.now / name
        path.write_bytes(self.changed(onnx.load(folder / name), rng))
        self.train(folder, {name: path}, rng)
        self.attempt("inspect", lambda: str(ortrain.inspect(path)))
        self.attempt("dump graph", lambda: ortrain.dump(path))

    def checkpoint(self, rng: random.Random) -> None:
        source = rng.choice(sorted((self.corpus / "checkpoints").iterdir()))
        path = self.now / "checkpoint"
        path.write_bytes(mutations.of_buffer(source.read_bytes(), rng))
        state = self.attempt("load_checkpoint", lambda: CheckpointState.load_checkpoint(path))
        if state is not None:
            for _, parameter in self.attempt("parameters", lambda: list(state.parameters)) or ():
                self.attempt("data", lambda parameter=parameter: parameter.data.sum())
            self.attempt("properties", lambda: list(state.properties))
            self.attempt("save", lambda: CheckpointState.save_checkpoint(state, self.now / "saved", True))
            if (self.now / "saved").exists():
                self.attempt("load saved", lambda: CheckpointState.load_checkpoint(self.now / "saved"))
        folder = self.corpus / "artifacts" / source.name.split(".")[0]
        if folder.exists():
            self.train(folder, {"checkpoint": path}, rng)
            good = CheckpointState.load_checkpoint(folder / "checkpoint")
            self.attempt("load_parameters", lambda: good.load_parameters(path, strict=rng.random() < 0.5))

    def safetensors(self, rng: random.Random) -> None:
        source = rng.choice(sorted((self.corpus / "safetensors").iterdir()))
        path = self.now / "model.safetensors"
        path.write_bytes(mutations.of_safetensors(source.read_bytes(), rng))
        state = CheckpointState.load_checkpoint(self.corpus / "artifacts" / source.stem / "checkpoint")
        self.attempt("load_safetensors", lambda: state.load_safetensors(path))
        self.attempt("load_safetensors", lambda: state.load_safetensors(path, strict=False))
        self.attempt("save_safetensors", lambda: state.save_safetensors(self.now / "saved.safetensors"))


def main() -> None:
    corpus, folder, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    seed, first, end = map(int, sys.argv[4:])
    work = Work(corpus, folder, kind, seed)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for index in range(first, end):
        work.file(index)
    work.index = end
    work.at("the end")
    print(json.dumps(work.outcomes))


if __name__ == "__main__":
    main()
