"""The commands ``ortrain train``, ``evaluate``, ``predict``, ``export`` and ``compare``."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import commands_page
import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image

import ortrain
from ortrain.__main__ import main

NAMES = ["compare", "evaluate", "export", "predict", "train"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model and 120 rows of three classes."""
    monkeypatch.chdir(tmp_path)
    Path("model.onnx").write_bytes(Path(ortrain.examples.perceptron()).read_bytes())
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 3
    x = (rng.normal(size=(120, 64)) + 3 * np.eye(64)[labels * 7]).astype(np.float32)
    np.savez("data.npz", x=x, y=labels)
    with Path("data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*(f"p{column}" for column in range(64)), "kind"])
        writer.writerows([*row, ["ant", "bee", "cat"][label]] for row, label in zip(x.tolist(), labels, strict=True))
    return tmp_path


def run(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run a command; return the exit status, the output, and the messages."""
    try:
        status = main(list(map(str, arguments)))
    except SystemExit as end:
        status = int(end.code or 0)
    found = capsys.readouterr()
    out, err = (text.replace("python -m ortrain", "ortrain") for text in (found.out, found.err))
    return status, out, err


def trained(*arguments: object, capsys: pytest.CaptureFixture[str]) -> str:
    status, out, err = run("train", "model.onnx", *arguments, capsys=capsys)
    assert status == 0, err
    return out


def test_train_evaluate_predict_export(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = trained(
        "--data", "data.csv", "--target", "kind", "--classes", "auto", "--val", "0.25", "--epochs", 8, "--lr", 0.01,
        capsys=capsys,
    )  # fmt: skip
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["data"] == "90 rows; 3 classes: ant 30, bee 30, cat 30"
    assert lines["validation"] == "30 rows; 3 classes: ant 10, bee 10, cat 10"
    assert lines["run"] == "run"
    assert lines["model"] == str(Path("run", "trained.onnx"))
    assert lines["result"].startswith("loss 0.")
    assert {"config.json", "history.csv", "last", "trained.onnx"} <= {path.name for path in Path("run").iterdir()}

    status, out, _ = run("evaluate", "run", "--data", "data.csv", "--json", capsys=capsys)
    values = json.loads(out)
    assert status == 0
    assert list(values) == ["loss", "accuracy"]
    assert values["accuracy"] > 0.9
    status, out, _ = run("evaluate", "run", "--data", "data.csv", capsys=capsys)
    assert out.splitlines()[1:] == [f"loss        {values['loss']:.6g}", f"accuracy    {values['accuracy']:.6g}"]

    status, out, _ = run("predict", "run", "--data", "data.csv", capsys=capsys)
    rows = list(csv.DictReader(out.splitlines()))
    assert list(rows[0]) == ["row", "prediction", "logits.ant", "logits.bee", "logits.cat"]
    correct = np.mean([row["prediction"] == ["ant", "bee", "cat"][number % 3] for number, row in enumerate(rows)])
    assert correct == pytest.approx(values["accuracy"])
    assert run("predict", "run", "--data", "data.csv", "--out", "p.jsonl", capsys=capsys)[0] == 0
    first = json.loads(Path("p.jsonl").read_text().splitlines()[0])
    assert first["prediction"] == rows[0]["prediction"]
    assert first["logits"] == [float(rows[0][f"logits.{name}"]) for name in ("ant", "bee", "cat")]
    assert run("predict", "run", "--data", "data.csv", "--out", "p.npz", capsys=capsys)[0] == 0
    with np.load("p.npz") as found:
        assert found["logits"].shape == (120, 3)
        assert found["prediction"].tolist() == [row["prediction"] for row in rows]

    status, out, _ = run("export", "run", "small.onnx", "--opset", 13, "--float16", "--external-data", capsys=capsys)
    assert status == 0
    assert "weights     small.onnx.data" in out
    model = onnx.load("small.onnx")
    onnx.checker.check_model(model)
    assert (model.opset_import[0].version, model.ir_version) == (13, 7)
    assert {tensor.data_type for tensor in model.graph.initializer} == {onnx.TensorProto.FLOAT16}
    with np.load("data.npz") as content:
        feeds = {"x": content["x"]}
    theirs = onnxruntime.InferenceSession("small.onnx", providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    assert theirs.dtype == np.float32
    np.testing.assert_allclose(theirs, ortrain.InferenceSession("run/trained.onnx").run(None, feeds)[0], atol=0.02)


def test_evaluate_remembers_loss_and_metrics(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with np.load("data.npz") as content:
        hot = np.eye(10, dtype=np.float32)[content["y"]]
        np.savez("hot.npz", x=content["x"], y=hot, w=np.linspace(0, 1, 120, dtype=np.float32))
    chosen = ["--loss", "binary_crossentropy", "--metrics", "f1_micro", "--weighted-metrics", "accuracy"]
    trained("--data", "hot.npz", "--sample-weight", "w", *chosen, capsys=capsys)
    status, out, err = run("evaluate", "run", "--data", "hot.npz", "--json", capsys=capsys)
    assert status == 0, err
    model = ortrain.Model(
        "run/trained.onnx", loss="binary_crossentropy", metrics="f1_micro", weighted_metrics="accuracy"
    )
    assert json.loads(out) == model.evaluate(ortrain.data.open("hot.npz", sample_weight="w"), return_dict=True)


def test_the_command_gives_the_history_of_python(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained("--data", "data.npz", "--epochs", 2, "--batch-size", 16, "--val", 0.25, "--out", "a", capsys=capsys)
    from ortrain._fit.model import Model

    train, validation = ortrain.data.split(ortrain.data.open("data.npz"), 0.25, seed=0)
    model = Model("model.onnx", metrics=["accuracy"])
    history = model.fit(train, epochs=2, batch_size=16, validation_data=validation, verbose=0)
    again = Model("model.onnx", metrics=["accuracy"])
    source = ortrain.data.open("data.npz")
    assert again.fit(source, epochs=2, batch_size=16, validation_split=0.25, verbose=0).history == history.history
    rows = list(csv.DictReader(Path("a", "history.csv").read_text().splitlines()))
    assert [float(row["val_loss"]) for row in rows] == history["val_loss"]
    assert [float(row["loss"]) for row in rows] == history["loss"]


def test_a_run_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", "data.npz", "--out", "a"]
    trained(*arguments, "--epochs", 1, capsys=capsys)
    status, _, err = run("train", "model.onnx", *arguments, "--epochs", 2, capsys=capsys)
    assert (status, err) == (1, "ortrain: a holds a run; pass --resume to go on with it, or another --out\n")
    trained(*arguments, "--epochs", 3, "--resume", capsys=capsys)
    trained("--data", "data.npz", "--out", "b", "--epochs", 3, capsys=capsys)
    assert Path("a", "history.csv").read_text() == Path("b", "history.csv").read_text()
    # Without --out, a new run gets a new folder.
    for number in ("run", "run-2"):
        assert f"run         {number}\n" in trained("--data", "data.npz", capsys=capsys)


def test_settings_in_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--data",
        "data.csv",
        "--target",
        "kind",
        "--classes",
        "auto",
        "--epochs",
        1,
        "--class-weight",
        "ant=2,bee=1,cat=0.5",
    ]
    trained(*arguments, "--save-config", "a.toml", "--out", "a", capsys=capsys)
    text = Path("a.toml").read_text()
    assert 'class_weight = { "ant" = 2.0, "bee" = 1.0, "cat" = 0.5 }\n' in text
    assert "# rows of a step; auto: as many as fit into the memory (default: 32)\n# batch_size =\n" in text
    status, _, err = run("train", "--config", "a.toml", "--out", "b", capsys=capsys)
    assert status == 0, err
    assert Path("a", "history.csv").read_text() == Path("b", "history.csv").read_text()
    # Flags override the file, and a file alone is written without a training.
    assert (
        run("train", "--config", "a.toml", "--epochs", 4, "--save-config", "c.toml", "--out", "c", capsys=capsys)[0]
        == 0
    )
    assert "epochs = 4\n" in Path("c.toml").read_text()
    # Settings of the optimizer and of the schedule, as text and as tables.
    chosen = ["--optimizer", "adamw,weight_decay=0.5,betas=0.8,0.9", "--schedule", "cosine,warmup=2"]
    trained("--data", "data.npz", *chosen, "--save-config", "d.toml", "--out", "d", capsys=capsys)
    assert (
        'optimizer = { "name" = "adamw", "weight_decay" = 0.5, "betas" = [0.8, 0.9] }\n' in Path("d.toml").read_text()
    )
    tables = (
        '[optimizer]\nname = "adamw"\nweight_decay = 0.5\nbetas = [0.8, 0.9]\n[schedule]\nname = "cosine"\nwarmup = 2'
    )
    Path("e.toml").write_text(f'data = "data.npz"\n{tables}')
    trained("--config", "e.toml", "--out", "e", capsys=capsys)
    assert Path("d", "history.csv").read_text() == Path("e", "history.csv").read_text()
    assert run("train", "--save-config", "empty.toml", capsys=capsys) == (0, "", "")
    assert "# data =\n" in Path("empty.toml").read_text()


def test_adapters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag and a table of a file make the same adapter; the run goes on with it, and all other commands read it."""
    data = ("--data", "data.npz", "--lr", "0.05", "--epochs", "1")
    trained(*data, "--lora", "2,alpha=4,targets=fc1,fc2", "--out", "flag", "--save-config", "lora.toml", capsys=capsys)
    settings = Path("lora.toml").read_text()
    assert '\nlora = { "rank" = 2, "alpha" = 4, "targets" = ["fc1", "fc2"] }\n' in settings
    trained("--config", "lora.toml", "--out", "table", capsys=capsys)
    flag, table = (onnx.load(f"{run}/trained.onnx") for run in ("flag", "table"))
    assert flag == table
    description = ortrain.lora.adapters(flag)
    assert [(layer.weight, layer.rank) for layer in description.layers] == [("fc1.weight", 2), ("fc2.weight", 2)]
    trained("--config", "lora.toml", "--out", "table", "--resume", "--epochs", "2", capsys=capsys)
    status, out, _ = run("evaluate", "table", "--data", "data.npz", capsys=capsys)
    assert status == 0
    assert "accuracy" in out
    status, _, err = run("train", "model.onnx", *data, "--lora", "many", capsys=capsys)
    assert status == 2
    assert "expected RANK, or RANK,SETTING=VALUE" in err
    status, _, err = run("train", "model.onnx", *data, "--lora", "2,ranks=4", capsys=capsys)
    assert status == 1
    assert "lora has no setting 'ranks'; did you mean 'rank'?" in err


def test_quantized_base(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A base goes with an adapter."""
    data = ("--data", "data.npz", "--lr", "0.05", "--epochs", "1")
    trained(*data, "--lora", "2", "--base", "int4", "--out", "int4", capsys=capsys)
    layers = ortrain.lora.adapters("int4/trained.onnx").layers
    assert [(layer.weight, layer.rank) for layer in layers] == [("fc1.weight_Q4", 2)]
    status, _, err = run("train", "model.onnx", *data, "--base", "int4", capsys=capsys)
    assert status == 1
    assert "the base 'int4' is for adapters; set lora, such as --lora 8 --base int4" in err


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("batchsize = 4", "unknown key 'batchsize'; did you mean 'batch_size'?"),
        ('batch_size = "four"', "batch_size: expected an integer, or auto, got 'four'"),
        ("batch_size = 4.5", "batch_size: expected an integer, or auto, got 4.5"),
        ("resume = 1", "resume: expected true or false, got 1"),
        ('mean = ["a"]', "mean: expected numbers with commas between them, got ['a']"),
        ("flip = true", "flip: expected one of horizontal, vertical, both, got True"),
    ],
)
def test_a_file_that_does_not_fit(line: str, sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.toml").write_text(line)
    status, out, err = run("train", "--config", "a.toml", capsys=capsys)
    assert (status, out, err) == (2, "", f"ortrain train: a.toml: {sentence}\n")


def test_wrong_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, sentence in [
        (["train"], "ortrain train: MODEL is missing\n"),
        (["train", "model.onnx"], "ortrain train: --data is missing\n"),
        (["evaluate", "model.onnx"], "ortrain evaluate: --data is missing\n"),
        (
            ["train", "--config", "no.toml"],
            "ortrain train: the file no.toml cannot be read: No such file or directory\n",
        ),
        (["train", "model.onnx", "--data", "data.npz", "--val", "2"], "got 2\n"),
        (
            ["train", "model.onnx", "--lr", "fast"],
            "argument --learning-rate/--lr: expected a number, or find, got 'fast'\n",
        ),
        (["train", "model.onnx", "--size", "8x"], "expected a number of pixels, or HEIGHTxWIDTH, got '8x'\n"),
        (
            ["predict", "model.onnx", "--data", "data.npz", "--out", "a.xml"],
            "--out must end in .csv, .jsonl, .npz, got a.xml\n",
        ),
        (
            ["train", "model.onnx", "--optimzer", "sgd"],
            "ortrain train: error: unrecognized arguments: --optimzer sgd; did you mean '--optimizer'?\n",
        ),
    ]:
        status, out, err = run(*arguments, capsys=capsys)
        assert (status, out) == (2, ""), arguments
        assert err.endswith(sentence)


def test_failures_are_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    np.savez("labels.npz", x=np.zeros((2, 64), np.float32), y=[-1, 0])
    for arguments, sentence in [
        (["train", "nowhere.onnx", "--data", "data.npz"], "there is no file nowhere.onnx"),
        (["train", "model.onnx", "--data", "nowhere.npz"], "there is no file or folder nowhere.npz"),
        (["evaluate", "empty", "--data", "data.npz"], "the folder empty has no trained.onnx; name an ONNX file, or"),
        (["train", "model.onnx", "--data", "data.csv", "--target", "knd"], "did you mean 'kind'?"),
        (
            ["train", "model.onnx", "--data", "data.npz", "--mean", "0.5"],
            "mean is a setting of images; this data is of",
        ),
        (["train", "model.onnx", "--data", "data.npz", "--metrics", "acuracy"], "did you mean 'accuracy'?"),
        (["export", "model.onnx", "a.onnx", "--opset", "99"], "the opset must be from 7 to 28, got 99"),
        (["train", "model.onnx", "--data", "data.npz", "--optimizer", "sgd,momentun=1"], "did you mean 'momentum'?"),
        (
            ["train", "model.onnx", "--data", "data.npz", "--schedule", "cosin", "--verbose", 0],
            "did you mean 'cosine'?",
        ),
        (["train", "model.onnx", "--data", "data.npz", "--out", "data.npz/run"], "cannot be made"),
        (["train", "model.onnx", "--data", "labels.npz", "--verbose", 0], "0 to 9; correct the label\n"),
    ]:
        status, _, err = run(*arguments, capsys=capsys)
        assert status == 1, arguments
        assert err.startswith("ortrain: ")
        assert sentence in err
        assert err.count("\n") == 1
        assert not Path("run").exists()
    status, _, err = run("train", "model.onnx", "--data", "nowhere.npz", "--debug", capsys=capsys)
    assert status == 1
    assert err.startswith("Traceback (most recent call last):\n")


def test_a_folder_of_save(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands take the trained weights of a folder that Model.save wrote."""
    from ortrain._fit.model import Model

    model = Model("model.onnx", learning_rate=0.01, metrics=["accuracy"])
    source = ortrain.data.open("data.npz")
    model.fit(source, epochs=4, verbose=0)
    model.save("saved")
    status, out, err = run("evaluate", "saved", "--data", "data.npz", "--json", capsys=capsys)
    assert status == 0, err
    assert json.loads(out) == model.evaluate(source, return_dict=True)
    assert run("predict", "saved", "--data", "data.npz", "--out", "a.npz", capsys=capsys)[0] == 0
    assert run("export", "saved", "a.onnx", capsys=capsys)[0] == 0
    with np.load("a.npz") as found, np.load("data.npz") as content:
        assert np.array_equal(found["logits"], model.predict(source))
        (logits,) = ortrain.InferenceSession("a.onnx").run(None, {"x": content["x"]})
        assert np.array_equal(found["logits"], logits)
    model.export("b.onnx", opset=15, float16=True, external_data=True)
    assert run("export", "saved", "c.onnx", "--opset", 15, "--float16", "--external-data", capsys=capsys)[0] == 0
    assert Path("b.onnx.data").read_bytes() == Path("c.onnx.data").read_bytes()
    assert onnx.load("b.onnx").opset_import[0].version == 15
    out = trained("--data", "data.npz", "--out", "a", capsys=capsys)
    status, again, err = run("train", "saved", "--data", "data.npz", "--out", "b", capsys=capsys)
    assert status == 0, err
    first, later = (float(re.findall(r"loss ([\d.e-]+)", text)[0]) for text in (out, again))
    assert later < first / 2


def test_a_signal_ends_a_training_after_its_step(folder: Path) -> None:
    command = [sys.executable, "-m", "ortrain", "train", "model.onnx", "--data", "data.npz", "--epochs", "1000000"]
    # A background job of a shell ignores the signal, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        training = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with training as process:
        assert process.stderr is not None
        assert any(line.startswith("epoch 2/") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        messages = process.stderr.read().splitlines()
        assert process.wait() == 130
    assert re.fullmatch(
        r"python -m ortrain: interrupted after .*epoch \d+; saved in run; --resume goes on", messages[-1]
    )
    assert Path("run", "last").is_file()


def test_an_interrupted_training(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from ortrain._fit.model import Model

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt("interrupted after epoch 1; saved in run: fit(..., resume='run') goes on")

    monkeypatch.setattr(Model, "fit", interrupted)
    status, _, err = run("train", "model.onnx", "--data", "data.npz", capsys=capsys)
    assert (status, err) == (130, "ortrain: interrupted after epoch 1; saved in run; --resume goes on\n")


def test_images_in_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with train and val, and other sizes, channels and classes than the model had."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 4)):
        for name, level in (("dark", 60), ("light", 190)):
            Path("pictures", part, name).mkdir(parents=True)
            for number in range(count):
                values = rng.integers(level - 50, level + 50, (12, 12), np.uint8)
                Image.fromarray(values).save(Path("pictures", part, name, f"{number}.png"))
    model = ortrain.examples.convnet()
    status, out, err = run(
        "train", model, "--data", "pictures", "--classes", "auto", "--epochs", 6, "--lr", 0.01, "--batch-size", 8,
        "--flip", "horizontal", "--trainable", "all", "--early-stopping", 5, capsys=capsys,
    )  # fmt: skip
    assert status == 0, err
    assert "data        24 images; 2 classes: dark 12, light 12; " in out
    assert "validation  8 images; 2 classes: dark 4, light 4; " in out
    assert "val_accuracy 1" in out
    status, out, _ = run("predict", "run", "--data", "pictures/val/light", capsys=capsys)
    assert [line.split(",")[:2] for line in out.splitlines()[1:]] == [[f"{number}.png", "light"] for number in range(4)]


def test_preprocessing_of_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folders are classes of the model by name, unless the last layer is new."""
    for name in ("cat", "bee"):
        Path("pets", name).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (8, 8), 60 * number).save(Path("pets", name, f"{number}.png"))
    model = onnx.load(ortrain.examples.convnet())
    onnx.helper.set_model_props(model, {"names": str(["bee", *"abcdefgh", "cat"]), "mean": "[0.5]", "std": "[0.25]"})
    onnx.save(model, "names.onnx")
    status, out, err = run("train", "names.onnx", "--data", "pets", "--out", "kept", capsys=capsys)
    assert status == 0, err
    assert "bee 4, a 0, " in out
    assert "mean (0.5), std (0.25) (from the model's metadata)" in out
    status, out, err = run("train", "names.onnx", "--data", "pets", "--classes", "auto", "--out", "new", capsys=capsys)
    assert status == 0, err
    assert "2 classes: bee 4, cat 4" in out


def test_several_labels_per_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each class is decided by itself, so a prediction names no single class."""
    objects = [{"text": text, "labels": labels} for text, labels in (("a b", ["a", "b"]), ("c", []), ("b", ["b"]))]
    Path("texts.jsonl").write_text("".join(json.dumps(found) + "\n" for found in objects))
    data = ["--data", "texts.jsonl", "--tokenizer", "bytes", "--classes", "auto", "--out", "run"]
    status, _, err = run("train", ortrain.examples.transformer(), *data, capsys=capsys)
    assert status == 0, err
    assert "loss: binary cross-entropy of 'logits'" in err
    _, out, _ = run("predict", "run", "--data", "texts.jsonl", capsys=capsys)
    assert out.splitlines()[0] == "row,logits.a,logits.b"


def test_compare(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = run("compare", "model.onnx", "--data", "data.npz", "--steps", 2, capsys=capsys)
    assert status == 0, err
    assert "\nreference evaluator, steps    18 tensors; largest difference " in out
    assert "\nonnxruntime, forward          3 tensors; largest difference " in out
    assert "\nonnxruntime, gradients        4 tensors; largest difference " in out
    assert out.endswith("no tensor differs by more than 0.0001 of its largest element\n")
    from ortrain._command import compare

    on_onnxruntime = compare._on_onnxruntime

    def wrong(model: Any, names: Any, feeds: Any) -> Any:
        return [
            value * (1 + (name == "hidden"))
            for name, value in zip(names, on_onnxruntime(model, names, feeds), strict=True)
        ]

    monkeypatch.setattr(compare, "_on_onnxruntime", wrong)
    status, out, _ = run("compare", "model.onnx", "--data", "data.npz", "--steps", 1, capsys=capsys)
    assert status == 1
    assert out.endswith("the first tensor that differs: 'hidden', by 5.0e-01 (onnxruntime, forward)\n")


def test_compare_with_torch(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is missing, and an operator without a converter; tests/conform has the comparison."""
    from ortrain._command import compare, on_torch

    arguments = ["compare", "model.onnx", "--data", "data.npz", "--steps", 1]
    monkeypatch.setattr(on_torch, "find_spec", lambda name: None)
    status, out, _ = run(*arguments, capsys=capsys)
    assert status == 0
    assert "\ntorch                         not installed\n" in out
    status, out, err = run(*arguments, "--runtimes", "onnxruntime,torch", capsys=capsys)
    assert (status, out) == (1, "")
    assert err == ("ortrain: the comparison with torch needs torch onnx2torch: pip install torch onnx2torch\n")
    status, _, err = run(*arguments, "--runtimes", "tourch", capsys=capsys)
    assert status == 2
    assert "--runtimes: expected onnxruntime and torch, got 'tourch'; did you mean 'torch'?" in err

    def convert(model: Any) -> Any:
        raise NotImplementedError("Converter is not implemented (Gemm of version 13)\nmore")

    monkeypatch.setattr(on_torch, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    stub = types.ModuleType("onnx2torch")
    stub.convert = convert  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnx2torch", stub)
    sentence = (
        "onnx2torch cannot convert the model: NotImplementedError: Converter is not implemented (Gemm of version 13)\n"
    )
    monkeypatch.setattr(compare, "_runtime_differences", lambda *rest: {})
    status, out, _ = run(*arguments, capsys=capsys)
    assert status == 0
    assert f"\ntorch                         left out: {sentence}" in out
    status, _, err = run(*arguments, "--runtimes", "torch", capsys=capsys)
    assert (status, err) == (1, f"ortrain: {sentence}")


def test_help_says_what_data_is(capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        status, out, _ = run(name, "--help", capsys=capsys)
        assert status == 0
        assert out.startswith(f"usage: ortrain {name} MODEL ")
        assert (ortrain.data.FORMS.splitlines()[0] in out) == (name != "export")


def test_the_page_has_the_flags() -> None:
    assert commands_page.PAGE.read_text(encoding="utf-8") == commands_page.page(), "run make commands"


def test_every_argument_has_a_flag() -> None:
    """Each argument of Model, fit and data.open that a file can hold is a flag."""
    import inspect

    from ortrain._command.settings import FIT, MODEL, READING
    from ortrain._fit.model import Model

    def arguments(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters)

    flags = {option.name for option in MODEL}
    assert arguments(Model) - flags == {"source", "session_options"}
    assert flags - arguments(Model) == {"threads", "bf16_fallback", "base"}
    assert arguments(ortrain.data.open) - {option.name for option in READING} == {
        "path",
        "model",
        "model_inputs",
        "model_classes",
        "like",
        "labelled",
    }
    flags = {option.name for option in FIT} | {"verbose", "resume", "checkpoint_every"}
    rest = arguments(Model.fit) - flags
    assert rest == {"self", "x", "y", "validation_data", "validation_split", "sample_weight", "callbacks"}
