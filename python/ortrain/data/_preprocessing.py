"""Preprocessing of images that the files of a model describe: size, normalization, names of the classes."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ortrain._model_source import ModelLike
from ortrain._suggest import hint
from ortrain.data._common import listed
from ortrain.errors import InvalidArgumentError

__all__ = ["Preprocessing", "class_order", "preprocessing_of"]

# Largest file of settings that is read.
_MAX_BYTES = 1 << 24


@dataclass(frozen=True)
class Preprocessing:
    """Values for images that a model's files give; ``None`` for a value that no file has."""

    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    """Mean per channel, for pixels from 0 to 1."""
    std: tuple[float, ...] | None = None
    names: tuple[str, ...] | None = None
    """Name of each class in the order of the model's scores."""
    origin: str | None = None
    """File of size and normalization, for messages."""

    def normalization(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Return mean and standard deviation, if they are known for this number of channels."""
        if self.mean is None or self.std is None or len(self.mean) != channels:
            return None
        return self.mean, self.std


def preprocessing_of(model: ModelLike, metadata: Mapping[str, str]) -> Preprocessing:
    """Return the preprocessing of images that the files of a model describe.

    Hugging Face and timm write ``preprocessor_config.json`` and ``config.json`` beside the model; Ultralytics writes
    metadata into the model. Files beside the model override the metadata.

    Args:
        model: the model; only a path has files beside it.
        metadata: the ``metadata_props`` of the model.

    """
    found = [_of_metadata(metadata)]
    if isinstance(model, (bytes, bytearray, memoryview)) or hasattr(model, "SerializeToString"):
        return found[0]
    folder = Path(model).resolve().parent
    # optimum writes onnx/model.onnx, with the settings in the folder above.
    folders = [folder, folder.parent] if folder.name == "onnx" else [folder]
    for place in folders:
        config = _json_of(place / "config.json")
        found = [_of_preprocessor(_json_of(place / "preprocessor_config.json")), _of_config(config), *found]
    with_values = [each for each in found if each.mean is not None or each.size is not None]
    # Size and normalization are from one file.
    chosen = with_values[0] if with_values else Preprocessing()
    return replace(chosen, names=next((each.names for each in found if each.names is not None), None))


def class_order(folder: Path, folders: Sequence[str], names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the model's names of the classes if a data set has them; ``None`` if its folders are other classes.

    Raises:
        InvalidArgumentError: if some folders are classes of the model, and others are not.

    """
    if names is None or not folders:
        return None
    unknown = [name for name in folders if name not in names]
    if len(unknown) == len(folders):
        return None
    if unknown:
        raise InvalidArgumentError(
            f"{folder} has the folder {unknown[0]!r}, which is no class of the model: {listed(names)}"
            f"{hint(unknown[0], names)}; rename it, or train a new last layer (--classes auto)"
        )
    return tuple(names)


def _of_metadata(metadata: Mapping[str, str]) -> Preprocessing:
    """Read the metadata of an exporter. Ultralytics scales pixels to the range from 0 to 1."""
    values = {name: _literal(metadata[name]) for name in ("names", "imgsz") if name in metadata}
    values |= {
        name: _literal(metadata.get(f"image_{name}", metadata.get(name, "")))
        for name in ("mean", "std")
        if f"image_{name}" in metadata or name in metadata
    }
    mean, std = _numbers(values.get("mean")), _numbers(values.get("std"))
    if mean is None and metadata.get("author") == "Ultralytics":
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    size = _size(values.get("imgsz"))
    return _checked(Preprocessing(size, mean, std, _names(values.get("names")), "the model's metadata"))


def _of_preprocessor(config: Mapping[str, Any]) -> Preprocessing:
    """Read ``preprocessor_config.json`` of transformers."""
    crops = config.get("do_center_crop") or ("crop_size" in config and "do_center_crop" not in config)
    size = _size(config.get("crop_size") if crops and config.get("crop_size") else config.get("size"))
    mean, std = _numbers(config.get("image_mean")), _numbers(config.get("image_std"))
    if config.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    # Pixels are multiplied by this factor, where ours are divided by 255.
    factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
    if mean is not None and std is not None and isinstance(factor, (int, float)) and factor > 0:
        scale = 255 * factor
        mean, std = (tuple(round(value / scale, 9) for value in values) for values in (mean, std))
    return _checked(Preprocessing(size, mean, std, None, "preprocessor_config.json"))


def _of_config(config: Mapping[str, Any]) -> Preprocessing:
    """Read ``config.json``: ``pretrained_cfg`` of timm, and the names of the classes."""
    trained = config.get("pretrained_cfg")
    trained = trained if isinstance(trained, dict) else {}
    sizes = trained.get("input_size")
    size = _size(sizes[1:]) if isinstance(sizes, list) and len(sizes) == 3 else None
    labels = config.get("label_names", config.get("id2label"))
    found = Preprocessing(size, _numbers(trained.get("mean")), _numbers(trained.get("std")), _names(labels))
    return _checked(replace(found, origin="config.json"))


def _checked(found: Preprocessing) -> Preprocessing:
    """Leave out a normalization that is not complete, or not for pixels from 0 to 1 or -1 to 1."""
    if found.mean is None or found.std is None or len(found.mean) != len(found.std) or min(found.std) <= 0:
        return replace(found, mean=None, std=None)
    return found


def _json_of(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _literal(text: str) -> Any:
    """Return a value that an exporter wrote as JSON or as Python."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _numbers(value: Any) -> tuple[float, ...] | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [value] * 3
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if not all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in value):
        return None
    return tuple(map(float, value))


def _size(value: Any) -> tuple[int, int] | None:
    """Return height and width: a number, a pair, or the sizes of transformers by name."""
    if isinstance(value, dict):
        edge = value.get("shortest_edge")
        value = [value.get("height", edge), value.get("width", edge)]
    pair = [value, value] if isinstance(value, int) else value
    if not isinstance(pair, (list, tuple)) or len(pair) != 2:
        return None
    if not all(isinstance(each, int) and each > 0 for each in pair):
        return None
    return int(pair[0]), int(pair[1])


def _names(value: Any) -> tuple[str, ...] | None:
    """Return the names of the classes from a list, or from a mapping of indices."""
    if isinstance(value, dict):
        try:
            by_index = {int(key): name for key, name in value.items()}
        except (TypeError, ValueError):
            return None
        if sorted(by_index) != list(range(len(by_index))):
            return None
        value = [by_index[index] for index in range(len(by_index))]
    if not isinstance(value, (list, tuple)) or not value or not _are_names(value):
        return None
    return tuple(value)


def _are_names(values: Iterable[Any]) -> bool:
    """Return True for different texts that are not the placeholders of transformers, ``LABEL_0`` and so on."""
    found = list(values)
    is_text = all(isinstance(name, str) and name for name in found)
    return is_text and len(set(found)) == len(found) and not all(name.startswith("LABEL_") for name in found)
