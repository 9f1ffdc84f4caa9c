"""Choice of the reader by the path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from ortrain import _ortrain
from ortrain._data_forms import FORMS
from ortrain._model_source import ModelLike, PathLike, model_source
from ortrain._suggest import hint
from ortrain.data import _array_files, _audio, _images, _json_lines, _table_file, _text_file
from ortrain.data._common import check_exists, listed
from ortrain.data._file_source import FileSource
from ortrain.data._folders import files_below, subfolders_of
from ortrain.data._preprocessing import class_order, preprocessing_of
from ortrain.data._settings import InputDescription, common_settings, settings_for
from ortrain.data._source import Source
from ortrain.errors import InvalidArgumentError
from ortrain.inference import InferenceSession

__all__ = ["open"]

_READERS = {
    "images": ("_images", "ImageFolder"),
    "table": ("_table", "Table"),
    "arrays": ("_arrays", "Arrays"),
    "jsonl": ("_json_lines", "JsonLines"),
    "text": ("_text_file", "TextFile"),
    "audio": ("_audio", "AudioFolder"),
}
_FILE_KINDS = {
    "table": _table_file.SUFFIXES,
    "arrays": _array_files.SUFFIXES,
    "jsonl": _json_lines.SUFFIXES,
    "text": _text_file.SUFFIXES,
}
# Kinds of texts: a model of language is trained on one and evaluated on the other.
_LANGUAGE_KINDS = {"jsonl", "text"}
_FOLDER_KINDS = {"images": _images.SUFFIXES, "audio": _audio.SUFFIXES}


def open(  # noqa: A001  (the name that callers of a reader expect)
    path: PathLike,
    *,
    target: str | Sequence[str] | None = None,
    kind: str | None = None,
    model: ModelLike | None = None,
    model_inputs: Sequence[InputDescription] = (),
    model_classes: bool = True,
    like: Source | Mapping[str, Any] | None = None,
    labelled: bool = True,
    columns: Sequence[str] | None = None,
    sample_weight: str | None = None,
    size: int | tuple[int, int] | None = None,
    layout: str | None = None,
    channels: int | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    flip: str | bool | None = None,
    crop: float | None = None,
    rotation: float | None = None,
    colour: float | None = None,
    mixup: float | None = None,
    skip_broken: bool | None = None,
    tokenizer: PathLike | None = None,
    task: str | None = None,
    text: str | None = None,
    text_pair: str | None = None,
    truncate: bool | None = None,
    length: int | None = None,
    buckets: Sequence[int] | None = None,
    mask_share: float | None = None,
    sample_rate: int | None = None,
    seconds: float | None = None,
) -> FileSource:
    r"""Open files as rows for training, evaluation or prediction.

    Args:
        path: a file or a folder; :data:`FORMS` lists the forms.
        target: the column, array or field of the target; several names for several numbers. Default: the one that is
            named ``target``, ``label``, ``class`` or ``y``.
        kind: ``images``, ``table``, ``arrays``, ``jsonl``, ``text`` or ``audio``. Default: by the path.
        model: the model, as a path, bytes or an ``onnx.ModelProto``. Its inputs give the names, types, sizes and layout
            of the rows. For images, its metadata and the files ``preprocessor_config.json`` and ``config.json`` beside
            it give size, normalization and class names. Default: rows for no certain model: float32 named
            ``x``, or int64 named ``input_ids``; images of 224 x 224 pixels in RGB, audio of one second.
        model_inputs: the inputs alone, instead of ``model``: ``session.get_inputs()``.
        model_classes: False to sort the classes by name for a new last layer. By default a model with
            class names gives their order, if its names contain each folder.
        like: the training data, or its description in ``config.json``: classes, columns, categories and all settings
            are its.
        labelled: False for rows without targets, for a prediction.
        columns: the columns or arrays of the inputs. Default: all but the target. Texts become one number per category
            for an input of floats, and the index of the category for an input of integers.
        sample_weight: the column or array with the weight of each row.
        size: height and width of images in pixels. Default: the sizes of the model's input.
        layout: ``"NCHW"`` or ``"NHWC"``. Default: by the model's input.
        channels: 1, 3 or 4 channels of images.
        mean: the mean per channel, for pixels from 0 to 1. Default: by the model's files. Without them ImageNet's
            for three channels in ``NCHW``, 0.5 for three in ``NHWC``, 0 otherwise. Pixels of an input of uint8 stay as
            they are.
        std: the standard deviation per channel, likewise.
        flip: ``"horizontal"``, ``"vertical"`` or ``"both"``: flips half of the training images.
        crop: the largest share of a training image that is cut away, below 1.
        rotation: the largest angle of training images in degrees.
        colour: the largest relative change of brightness, contrast and saturation of training images.
        mixup: the parameter of mixup: training rows are blended in pairs, and targets are probabilities.
        skip_broken: True to leave out files that cannot be read.
        tokenizer: a ``tokenizer.json``, or ``"bytes"``.
        task: ``"classification"``, ``"causal-lm"`` or ``"masked-lm"``. Default: classification if there are labels.
        text: the field of the text in JSON lines.
        text_pair: the field of the second text of a pair, such as a question and an answer, for a classification.
            Default: ``text_pair``, ``sentence2``, ``hypothesis`` or ``question2``, beside the field of the first one.
        truncate: True to cut a long text of language modelling. Default: the text becomes several rows. A text of a
            classification is always cut.
        length: the most tokens per row. Default: the size of the model's input, or 128.
        buckets: the lengths that rows are padded to. Default: 16, 24, 32, 48, 64 and so on.
        mask_share: the share of masked tokens. Default: 0.15.
        sample_rate: the samples per second of audio. Default: 16000.
        seconds: the length of audio. Default: the size of the model's input.

    Raises:
        NoSuchFileError: if there is no such path.
        InvalidArgumentError: if the data does not fit the model, or is broken; with its row.
        ImportError: if a package is missing; the error names the extra.

    >>> import ortrain
    >>> from pathlib import Path
    >>> _ = Path("flowers.csv").write_text("width,colour,label\n1.5,red,rose\n0.5,blue,iris\n")
    >>> source = ortrain.data.open("flowers.csv")
    >>> source.classes
    ('iris', 'rose')
    >>> source.take(np.array([0, 1]), seed=0, training=False).inputs["x"]
    array([[1.5, 0. , 1. ],
           [0.5, 1. , 0. ]], dtype=float32)

    """
    chosen = {
        "target": target,
        "columns": columns,
        "sample_weight": sample_weight,
        "size": size,
        "layout": layout,
        "channels": channels,
        "mean": mean,
        "std": std,
        "flip": flip,
        "crop": crop,
        "rotation": rotation,
        "colour": colour,
        "mixup": mixup,
        "skip_broken": skip_broken,
        "tokenizer": tokenizer,
        "task": task,
        "text": text,
        "text_pair": text_pair,
        "truncate": truncate,
        "length": length,
        "buckets": buckets,
        "mask_share": mask_share,
        "sample_rate": sample_rate,
        "seconds": seconds,
    }
    found = Path(path)
    check_exists(found)
    kind = _kind_of(found) if kind is None else kind
    if kind not in _READERS:
        raise InvalidArgumentError(f"kind must be one of {listed(_READERS)}, got {kind!r}{hint(kind, _READERS)}")
    settings = settings_for(kind, chosen, _settings_of(like, kind, found))
    more: dict[str, Any] = {}
    if model is not None:
        if model_inputs:
            raise InvalidArgumentError("pass model or model_inputs, not both")
        model_inputs = _ortrain.describe_model(model_source(model)).inputs
        if kind == "images":
            metadata = InferenceSession(model).get_modelmeta().custom_metadata_map
            more["preprocessing"] = preprocessing_of(model, metadata)
            if settings.classes is None and labelled and model_classes and found.is_dir():
                names = class_order(found, subfolders_of(found), more["preprocessing"].names)
                settings = replace(settings, classes=names)
    module, name = _READERS[kind]
    reader = getattr(import_module(f"ortrain.data.{module}"), name)
    return cast("FileSource", reader(found, settings, model_inputs, labelled=labelled, **more))


def _settings_of(like: Source | Mapping[str, Any] | None, kind: str, path: Path) -> Mapping[str, Any] | None:
    """Return the settings of other data of the same kind. JSON lines and texts have common settings.

    Raises:
        InvalidArgumentError: if the data is of another kind, or a plain text would need labels.

    """
    if like is None:
        return None
    description: Mapping[str, Any] = like if isinstance(like, Mapping) else like.describe()  # type: ignore[attr-defined]
    settings: Mapping[str, Any] = description.get("settings", {})
    other = description.get("kind", kind)
    if other == kind:
        return settings
    if {kind, other} != _LANGUAGE_KINDS:
        raise InvalidArgumentError(f"{path} is data of the kind {kind}, the training data is {other}")
    if settings.get("task") == "classification":
        raise InvalidArgumentError(
            f'{path}: a plain text has no labels, the training data has; write JSON lines: {{"text": "..."}}'
        )
    return common_settings(settings, kind, other)


def _kind_of(path: Path) -> str:
    """Return the kind of data at a path.

    Raises:
        InvalidArgumentError: if no reader fits; the error lists all forms.

    """
    if path.is_dir():
        if any(path.glob("*.npy")):
            return "arrays"
        for kind, suffixes in _FOLDER_KINDS.items():
            if files_below(path, suffixes):
                return kind
        what = "an empty folder" if not any(path.iterdir()) else "a folder without images, audio files and arrays"
    else:
        name = path.name.lower()
        for kind, suffixes in _FILE_KINDS.items():
            if name.endswith(suffixes):
                return kind
        what = f"a file {path.suffix}" if path.suffix else "a file without an extension"
    raise InvalidArgumentError(f"{path} is {what}; data is one of:\n{FORMS}")
