"""Scripts for onnxruntime-training run unchanged, with and without an installed onnxruntime."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import RECORDS

import ortrain.compat

SCRIPT = """
import sys

import numpy as np
import onnx
import onnxruntime
import onnxruntime.training.onnxblock as onnxblock
from onnxruntime import OrtValue
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, LinearLRScheduler, Module, Optimizer
from onnxruntime.training.api.checkpoint_state import Parameter, Parameters, Properties


class Twice(onnxblock.Block):
    def __init__(self):
        super().__init__()
        self.loss = onnxblock.loss.CrossEntropyLoss()
        self.add = onnxblock.blocks.Add()

    def build(self, scores):
        loss = self.loss(scores)
        return self.add(loss, loss)


model = onnx.load(sys.argv[1])
trained = [tensor.name for tensor in model.graph.initializer]
artifacts.generate_artifacts(
    model, requires_grad=trained, loss=Twice(), optimizer=artifacts.OptimType.AdamW, artifact_directory="."
)
state = CheckpointState.load_checkpoint("checkpoint")
module = Module("training_model.onnx", state, "eval_model.onnx", device="cpu")
optimizer = Optimizer("optimizer_model.onnx", module)
scheduler = LinearLRScheduler(optimizer, 2, 20, 0.05)
rng = np.random.default_rng(0)
shape = [size.dim_value or 8 for size in model.graph.input[0].type.tensor_type.shape.dim]
x = rng.standard_normal(shape).astype(np.float32)
labels = rng.integers(0, 2, shape[0])
for step in range(20):
    loss = module(OrtValue.ortvalue_from_numpy(x), OrtValue.ortvalue_from_numpy(labels)).numpy()
    optimizer.step()
    scheduler.step()
    module.lazy_reset_grad()
    print(float(loss))
assert isinstance(state.parameters[trained[0]], Parameter)
module.export_model_for_inferencing("trained.onnx", [model.graph.output[0].name])
session = onnxruntime.InferenceSession("trained.onnx", providers=["CPUExecutionProvider"])
print(len(session.run(None, {session.get_inputs()[0].name: x})[0]))
"""

HIDE = """
import importlib.abc, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "onnxruntime":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Hide())
"""


@pytest.mark.parametrize("before", ["", HIDE, "import onnxruntime\n"], ids=["installed", "hidden", "imported"])
def test_a_script(before: str, tmp_path: Path) -> None:
    script = f"{before}\nimport ortrain.compat\nortrain.compat.install()\n{SCRIPT}"
    arguments = [sys.executable, "-c", script, str(RECORDS / "mlp_adamw_ce" / "forward.onnx")]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *losses, rows = map(float, done.stdout.splitlines())
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert rows == 8


@pytest.fixture
def installed() -> Iterator[None]:
    ortrain.compat.install()
    yield
    ortrain.compat.uninstall()


PROVIDERS = """
import numpy as np
import onnxruntime
from onnxruntime.capi import _pybind_state as C

options = onnxruntime.RunOptions()
options.log_severity_level = 3
assert isinstance(options, C.RunOptions)
print(C.get_available_providers(), onnxruntime.get_available_providers())
for module in (C, onnxruntime):
    module.set_default_logger_severity(4)
    module.set_default_logger_verbosity(0)

# A session of the extension module: made first, opened then.
path = ortrain.examples.perceptron()
for made in (str(path), True), (path.read_bytes(), False):
    session = C.InferenceSession(onnxruntime.SessionOptions(), *made, False)
    try:
        session.run(None, {})
    except C.Fail as error:
        assert "initialize_session" in str(error)
    session.initialize_session(["CPUExecutionProvider"], [{}], set())
    (value,) = session.inputs_meta
    x = np.ones((2, 64), np.float32)
    (expected,) = onnxruntime.InferenceSession(str(path)).run(None, {value.name: x})
    assert (session.run(["logits"], {value.name: x}, None)[0] == expected).all()
    binding = session.io_binding()
    binding.bind_input(value.name, x)
    binding.bind_output("logits", C.OrtDevice(C.OrtDevice.cpu(), C.OrtDevice.default_memory(), 0))
    session.run_with_iobinding(binding, None)
    assert (binding.get_outputs()[0].numpy() == expected).all()
    try:
        session.initialize_session()
    except C.ModelLoaded:
        print("once")
for wrong in ((3, True), (path.read_bytes(), True), (str(path), False)):
    try:
        C.InferenceSession(None, *wrong)
    except TypeError as error:
        print(error)
training = C.TrainingSession()
assert isinstance(training, C.InferenceSession)
try:
    training.initialize_session()
except RuntimeError as error:
    assert "load_model or read_bytes" in str(error)
ortrain.compat.uninstall()
try:
    import onnxruntime.capi
except ModuleNotFoundError:
    print("gone")
"""


def test_native_module_without_onnxruntime() -> None:
    script = f"{HIDE}\nimport ortrain.compat\nortrain.compat.install()\n{PROVIDERS}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['CPUExecutionProvider'] ['CPUExecutionProvider']",
        *["once"] * 2,
        "the path of a model must be a str, got int",
        "the path of a model must be a str, got bytes",
        "a model must be bytes, got str",
        "gone",
    ]


@pytest.mark.usefixtures("installed")
def test_modules_are_the_same() -> None:
    import onnxruntime.training.api.checkpoint_state as theirs
    from onnxruntime.training import onnxblock
    from onnxruntime.training.onnxblock import blocks

    import ortrain.onnxblock

    assert theirs is ortrain.api.checkpoint_state
    assert onnxblock is ortrain.onnxblock
    assert blocks is ortrain.onnxblock.blocks
    assert onnxblock.__spec__.name == "ortrain.onnxblock"
    ortrain.compat.install()
    assert sys.modules["onnxruntime.training.api"] is ortrain.api


def test_uninstall() -> None:
    def found() -> dict[str, object]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "onnxruntime"}

    import onnxruntime

    before, attributes, finders = found(), set(vars(onnxruntime)), list(sys.meta_path)
    ortrain.compat.install()
    import onnxruntime.training.onnxblock

    ortrain.compat.uninstall()
    assert found() == before
    assert set(vars(onnxruntime)) == attributes
    assert sys.meta_path == finders
    ortrain.compat.uninstall()


def test_values_of_onnxruntime() -> None:
    """OrtValues of onnxruntime are accepted as inputs and buffers, as Python objects and as native ones."""
    import onnxruntime

    case = RECORDS / "mlp_adamw_ce"
    state = ortrain.api.CheckpointState.load_checkpoint(case / "checkpoint")
    module = ortrain.api.Module(case / "training_model.onnx", state)
    with np.load(case / "inputs.npz") as stored:
        arrays = [stored[f"batch0/{name}"] for name in module.input_names()]
    theirs = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in arrays]
    want = module(*arrays)
    ours = [ortrain.OrtValue.ortvalue_from_numpy(array) for array in arrays]
    native = [value._ortvalue for value in theirs]
    for given, kind in [
        (theirs, onnxruntime.OrtValue),
        (ours, ortrain.OrtValue),
        (native, ortrain.OrtValue),
        ([theirs[0], ours[1]], ortrain.OrtValue),
        ([theirs[0], arrays[1]], np.ndarray),
    ]:
        result = module(*given)
        assert isinstance(result, kind)
        assert (result if kind is np.ndarray else result.numpy()) == want
    # Returned values own their memory, and arrays of them keep it alive.
    kept = [module(*theirs).numpy() for _ in range(20)]
    junk = [np.full_like(value, 7) for value in kept]
    assert kept == [want] * len(junk)
    packed = module.get_contiguous_parameters(True)
    module.copy_buffer_to_parameters(onnxruntime.OrtValue.ortvalue_from_numpy(packed.numpy() * 2), True)
    np.testing.assert_array_equal(module.get_contiguous_parameters(True).numpy(), packed.numpy() * 2)


SEEDED = """
import sys

import numpy as np
import onnxruntime
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, Module

def kept(seed, again=None):
    onnxruntime.set_seed(seed)
    state = CheckpointState.load_checkpoint("checkpoint")
    if again is not None:
        onnxruntime.set_seed(again)
    module = Module("training_model.onnx", state)
    ones = np.ones((8, 10), np.float32)
    return [int.from_bytes((module(ones, np.zeros(8, np.int64))[1] != 0).tobytes(), "big") for _ in range(3)]

assert kept(7) == kept(7) != kept(8)
# A seed that is set once the state is there is taken when a module is made of it.
assert kept(8, 7) == kept(7)
print(kept(7))
"""


@pytest.fixture(scope="module")
def dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of a classifier with a Dropout, and with the result of the Dropout as an output."""
    folder = tmp_path_factory.mktemp("dropout")
    model = onnx.load(RECORDS / "mlp_adamw_ce" / "forward.onnx")
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if name == "x":
                node.input[at] = "dropped"
    model.graph.node.insert(0, onnx.helper.make_node("Dropout", ["x"], ["dropped"]))
    ortrain.artifacts.generate_artifacts(
        model,
        loss=ortrain.artifacts.LossType.CrossEntropyLoss,
        additional_output_names=["dropped"],
        artifact_directory=folder,
    )
    return folder


@pytest.mark.parametrize("before", ["", HIDE], ids=["installed", "hidden"])
def test_set_seed(before: str, dropout: Path) -> None:
    """Dropout masks repeat with the seed, with and without onnxruntime, and equal the masks of the state's seed."""
    script = f"{before}\nimport ortrain.compat\nortrain.compat.install()\n{SEEDED}"
    done = subprocess.run([sys.executable, "-c", script], cwd=dropout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    state = ortrain.api.CheckpointState.load_checkpoint(dropout / "checkpoint")
    state.seed = 7
    module = ortrain.api.Module(dropout / "training_model.onnx", state)
    ones, labels = np.ones((8, 10), np.float32), np.zeros(8, np.int64)
    found = [int.from_bytes((module(ones, labels)["dropped"] != 0).tobytes(), "big") for _ in range(3)]
    assert done.stdout == f"{found}\n"


NATIVE_SEED_SCRIPT = """
import onnxruntime
from onnxruntime.capi._pybind_state import set_seed

assert set_seed is onnxruntime.set_seed
ortrain.compat.uninstall()
"""


def test_native_module_has_set_seed() -> None:
    script = f"{HIDE}\nimport ortrain.compat\nortrain.compat.install()\n{NATIVE_SEED_SCRIPT}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_set_seed_does_not_overwrite_the_seed_of_a_state(installed: None) -> None:
    import onnxruntime

    checkpoint = RECORDS / "mlp_adamw_ce" / "checkpoint"
    model = RECORDS / "mlp_adamw_ce" / "training_model.onnx"
    before = ortrain.api.CheckpointState.load_checkpoint(checkpoint)
    onnxruntime.set_seed(5)
    # The seed is set on the state afterwards, directly or by a session.
    state = ortrain.api.CheckpointState.load_checkpoint(checkpoint)
    assert (before.seed, state.seed) == (0, 5)
    state.seed = 6
    ortrain.api.Module(model, state)
    assert state.seed == 6
    assert copy.deepcopy(state).seed == 6
    assert pickle.loads(pickle.dumps(before)).seed == 0
    ortrain.session.TrainingSession(before, model)
    assert before.seed == 5
    for wrong, kind in [("5", TypeError), (2**63, OverflowError), (True, TypeError)]:
        with pytest.raises(kind, match=r"a seed must be an? (64-bit )?integer"):
            onnxruntime.set_seed(wrong)
    ortrain.compat.uninstall()
    assert ortrain.api.CheckpointState.load_checkpoint(checkpoint).seed == 0
    assert onnxruntime.set_seed.__module__ != "ortrain.compat"
    ortrain.compat.install()


EXPORT = (
    "export the model to an .onnx file (torch.onnx.export) and train the file: artifacts.generate_artifacts, then "
    "CheckpointState, Module and Optimizer of onnxruntime.training.api"
)
OPTIMIZERS = (
    "write artifacts with optimizer=OptimType.AdamW or OptimType.SGD (for settings and gradient clipping: "
    "onnxruntime.training.onnxblock.optim), then use Optimizer of onnxruntime.training.api"
)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("statement", "sentence"),
    [
        (
            "from onnxruntime.training import ORTModule",
            "onnxruntime.training.ORTModule is not in ortrain: it wraps modules of PyTorch, and ortrain trains ONNX "
            f"models: {EXPORT}",
        ),
        (
            "from onnxruntime.training.ortmodule import ORTModule, DebugOptions",
            "onnxruntime.training.ortmodule (with ORTModule) is not in ortrain: it wraps modules of PyTorch, and "
            f"ortrain trains ONNX models: {EXPORT}",
        ),
        (
            "import onnxruntime.training.ortmodule",
            "onnxruntime.training.ortmodule (with ORTModule) is not in ortrain: it wraps modules of PyTorch, and "
            f"ortrain trains ONNX models: {EXPORT}",
        ),
        (
            "from onnxruntime.training.optim import FusedAdam",
            f"onnxruntime.training.optim.FusedAdam is not in ortrain: it updates parameters of PyTorch: {OPTIMIZERS}",
        ),
        (
            "from onnxruntime.training.optim.fused_adam import FusedAdam",
            "onnxruntime.training.optim.fused_adam (with FusedAdam) is not in ortrain: it updates parameters of "
            f"PyTorch: {OPTIMIZERS}",
        ),
        (
            "from onnxruntime.training.optim.fp16_optimizer import FP16_Optimizer",
            "onnxruntime.training.optim.fp16_optimizer (with FP16_Optimizer) is not in ortrain: it wraps optimizers "
            f"of PyTorch: {OPTIMIZERS}; set precision='bf16' of a Module, which needs no "
            "loss scale because sums stay float32",
        ),
        (
            "from onnxruntime.training import FusedAdam",
            f"onnxruntime.training.FusedAdam is not in ortrain: it updates parameters of PyTorch: {OPTIMIZERS}",
        ),
    ],
)
def test_names_that_are_not_there(statement: str, sentence: str) -> None:
    with pytest.raises(ImportError) as error:
        exec(statement, {})
    assert type(error.value) is ImportError
    assert str(error.value) == sentence


@pytest.mark.parametrize("before", ["", HIDE], ids=["installed", "hidden"])
def test_every_name_that_is_not_there(before: str) -> None:
    """An import raises ImportError, attribute access AttributeError, and ``hasattr`` returns False."""
    script = f"""{before}
import ortrain.compat
ortrain.compat.install()
import onnxruntime.training
for name, reason in ortrain.compat._ABSENT.items():
    assert not hasattr(onnxruntime.training, name)
    for statement in (f"from onnxruntime.training import {{name}}", f"import onnxruntime.training.{{name}}"):
        try:
            exec(statement)
        except ImportError as error:
            assert str(error).endswith(f"is not in ortrain: {{reason}}"), error
        else:
            raise AssertionError(statement)
try:
    from onnxruntime.training import nothing_at_all
except ImportError as error:
    print(error)
try:
    onnxruntime.training.artefacts
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("cannot import name 'nothing_at_all' from 'onnxruntime.training'")
    assert second == "module 'onnxruntime.training' has no attribute 'artefacts'; did you mean 'artifacts'?"


TRAINER = """
import sys
{imported}

import ortrain.classic
import ortrain.trainer as trainer

t = sys.modules["onnxruntime.training"]
assert t.orttrainer.ORTTrainer is t.ORTTrainer and t.orttrainer_options.ORTTrainerOptions is t.ORTTrainerOptions
assert t._checkpoint_storage is trainer._checkpoint_storage
names = ("ORTTrainer", "ORTTrainerOptions", "PropagateCastOpsStrategy", "TrainStepInfo")
assert [getattr(t, name) for name in names] == [getattr(trainer, name) for name in names]
from onnxruntime.training.amp.loss_scaler import DynamicLossScaler
from onnxruntime.training.optim.config import AdamConfig
from onnxruntime.training.optim.lr_scheduler import _LRScheduler
from onnxruntime.training.orttrainer import ORTTrainer, TrainStepInfo
from onnxruntime.training.orttrainer_options import ORTTrainerOptions
from onnxruntime.training._checkpoint_storage import load
from onnxruntime.training import TrainingParameters, TrainingSession

assert DynamicLossScaler is trainer.amp.DynamicLossScaler and _LRScheduler is trainer.optim._LRScheduler
assert (ORTTrainer, TrainStepInfo) == (trainer.ORTTrainer, trainer.TrainStepInfo)
assert AdamConfig is trainer.optim.AdamConfig and ORTTrainerOptions is trainer.ORTTrainerOptions
assert load is trainer._checkpoint_storage.load
assert TrainingParameters is ortrain.classic.TrainingParameters and TrainingSession is ortrain.classic.TrainingSession
for name in ("amp", "checkpoint", "model_desc_validation", "optim", "postprocess"):
    assert getattr(t, name) is getattr(trainer, name)
    assert getattr(trainer, name).__spec__.name == f"ortrain.trainer.{{name}}"
from onnxruntime.capi.ort_trainer import ORTTrainer, generate_sample, load_checkpoint
import onnxruntime.capi.ort_trainer as older

assert ORTTrainer.__module__ == older.__name__ == "ortrain.trainer.legacy"
assert not {{"cerberus", "h5py", "torch"}} & set(sys.modules)
ortrain.compat.uninstall()
assert not [name for name in sys.modules if name.startswith("onnxruntime.training") or name.endswith("ort_trainer")]
assert not hasattr(sys.modules.get("onnxruntime.capi"), "ort_trainer")
from ortrain.trainer.optim import AdamConfig as same

assert same is AdamConfig
"""
EACH_WAY = [
    "from onnxruntime.training import ORTTrainer, ORTTrainerOptions, PropagateCastOpsStrategy, TrainStepInfo",
    "from onnxruntime.training import amp, checkpoint, model_desc_validation, optim, postprocess",
    "import onnxruntime.training; onnxruntime.training.optim.lr_scheduler",
    "import onnxruntime.training.optim.lr_scheduler",
    "from onnxruntime.capi import ort_trainer",
]


@pytest.mark.parametrize("before", ["", HIDE], ids=["installed", "hidden"])
@pytest.mark.parametrize("imported", EACH_WAY)
def test_the_trainer(imported: str, before: str) -> None:
    """Names and modules are the same in every import order; required packages are imported on first use only."""
    script = f"{before}\nimport ortrain.compat\nortrain.compat.install()\n{TRAINER.format(imported=imported)}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_older_trainer_that_is_installed_comes_back() -> None:
    script = """
import sys, types
import onnxruntime.capi
import ortrain.compat

theirs = types.ModuleType("onnxruntime.capi.ort_trainer")
sys.modules[theirs.__name__] = onnxruntime.capi.ort_trainer = theirs
ortrain.compat.install()
from onnxruntime.capi import ort_trainer
import ortrain.trainer.legacy

assert ort_trainer is ortrain.trainer.legacy
ortrain.compat.uninstall()
assert sys.modules[theirs.__name__] is onnxruntime.capi.ort_trainer is theirs
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


VALUES = """
import numpy as np
from onnxruntime.capi import _pybind_state as C
from onnxruntime.capi._pybind_state import (
    EPFail, EngineError, Fail, InvalidArgument, InvalidGraph, InvalidProtobuf, ModelLoaded, NoModel, NoSuchFile,
    NotImplemented, OrtDevice, OrtMemType, OrtValue, OrtValueCache, OrtValueVector, RuntimeException,
)
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument as same
import onnxruntime
import ortrain

assert same is InvalidArgument and C.OrtValue is OrtValue is ortrain.capi.OrtValue
device = OrtDevice(OrtDevice.cpu(), OrtMemType.DEFAULT, 0)
array = np.ones(3, np.float32)
vector = OrtValueVector()
vector.push_back(OrtValue.ortvalue_from_numpy(array, device))
array[0] = 5
print(vector[0].numpy().tolist(), vector[0].device_name())
for wrong, kind in (
    (lambda: ortrain.InferenceSession(b"x"), InvalidProtobuf),
    (lambda: ortrain.InferenceSession("nowhere.onnx"), NoSuchFile),
    (lambda: ortrain.OrtValue.ortvalue_from_numpy(np.array(["a"])), NotImplemented),
    (lambda: vector[0].update_inplace(np.zeros(4, np.float32)), InvalidArgument),
    (lambda: OrtValueCache().remove("x"), Fail),
):
    try:
        wrong()
    except kind as error:
        print(isinstance(error, ortrain.OrtrainError), isinstance(error, Fail))
bases = [kind.__bases__ for kind in vars(ortrain.errors).values() if isinstance(kind, type)]
ortrain.compat.uninstall()
assert ortrain.InvalidArgumentError.__bases__ == (ortrain.OrtrainError, ValueError), bases
assert ortrain.OrtrainError.__bases__ == (RuntimeError,)
"""


@pytest.mark.parametrize("before", ["", HIDE, "import onnxruntime\n"], ids=["installed", "hidden", "imported"])
def test_values_vectors_and_exceptions_of_the_native_module(before: str, tmp_path: Path) -> None:
    script = f"{before}\nimport ortrain.compat\nortrain.compat.install()\n{VALUES}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[5.0, 1.0, 1.0] Cpu", *["True True"] * 5]


def test_installed_onnxruntime_keeps_its_own_classes(installed: None) -> None:
    import onnxruntime
    from onnxruntime.capi import _pybind_state as behind

    theirs = sys.modules["onnxruntime.capi.onnxruntime_pybind11_state"]
    assert behind.InferenceSession is theirs.InferenceSession
    assert behind.InvalidArgument is theirs.InvalidArgument
    assert behind.OrtValue is ortrain.capi.OrtValue
    # The installed sessions raise the installed exceptions, and return the installed values.
    with pytest.raises(behind.InvalidProtobuf):
        onnxruntime.InferenceSession(b"x", providers=["CPUExecutionProvider"])
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(3, np.float32))
    vector = behind.OrtValueVector()
    vector.push_back(value)
    vector.push_back(onnxruntime.OrtValue.ortvalue_from_numpy(np.array([True])))
    assert [kept.data_type() for kept in vector] == ["tensor(float)", "tensor(bool)"]
    assert vector[0].data_ptr() == value.data_ptr()
    ortrain.compat.uninstall()
    from onnxruntime.capi import _pybind_state as again

    assert again.OrtValue is theirs.OrtValue
    ortrain.compat.install()


CUSTOM = """
import sys

from onnxcustom import __max_supported_opset__, __version__
from onnxcustom.training import ConvergenceError, ConvergenceWarning, EvaluationError, ProviderError
from onnxcustom.training.excs import ConvergenceError as same
import onnxcustom.utils.onnx_helper

assert (__max_supported_opset__, __version__, same) == (15, "0.4.344", ConvergenceError)
for training in ("data_loader", "grad_helper", "optimizers", "optimizers_partial", "ortgradient", "sgd_learning_loss",
                 "sgd_learning_penalty", "sgd_learning_rate"):
    __import__(f"onnxcustom.training.{training}")
    assert sys.modules[f"onnxcustom.training.{training}"] is sys.modules[f"ortrain.gradient.{training}"]
for utils in ("onnx_function", "onnx_helper", "onnx_rewriter", "onnxruntime_helper", "orttraining_helper"):
    __import__(f"onnxcustom.utils.{utils}")
    assert sys.modules[f"onnxcustom.utils.{utils}"] is sys.modules[f"ortrain.gradient.utils.{utils}"]
try:
    import onnxcustom.plotting
except ImportError as error:
    print(error)
try:
    from onnxcustom.utils import benchmark
except ImportError as error:
    print(error)
ortrain.compat.uninstall()
assert not any(name.partition(".")[0] == "onnxcustom" for name in sys.modules)
"""


@pytest.mark.parametrize("before", ["", HIDE], ids=["installed", "hidden"])
def test_onnxcustom(before: str) -> None:
    script = f"{before}\nimport ortrain.compat\nortrain.compat.install()\n{CUSTOM}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "onnxcustom.plotting is not in ortrain, which has onnxcustom.training, onnxcustom.utils",
        "onnxcustom.utils.benchmark is not in ortrain, which has onnxcustom.utils.onnx_function, "
        "onnxcustom.utils.onnx_helper, onnxcustom.utils.onnx_rewriter, onnxcustom.utils.onnxruntime_helper, "
        "onnxcustom.utils.orttraining_helper",
    ]


def test_an_onnxcustom_that_is_installed_comes_back(tmp_path: Path) -> None:
    (tmp_path / "onnxcustom").mkdir()
    (tmp_path / "onnxcustom" / "__init__.py").write_text("theirs = 1\n")
    (tmp_path / "onnxcustom" / "plotting.py").write_text("theirs = 2\n")
    script = """
import onnxcustom.plotting
import ortrain.compat

ortrain.compat.install()
from onnxcustom.training.excs import ConvergenceError

assert ConvergenceError.__module__ == "ortrain.gradient.excs"
ortrain.compat.uninstall()
import onnxcustom.plotting

print(onnxcustom.theirs, onnxcustom.plotting.theirs)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 2\n"
