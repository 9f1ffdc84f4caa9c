"""Images in folders: decoding, augmentation, normalization."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._extras import required
from ortrain.data._common import dtype_of, generator, to_sizes
from ortrain.data._folders import FolderSource, find_files, usable_files
from ortrain.data._preprocessing import Preprocessing
from ortrain.data._settings import InputDescription, Settings
from ortrain.data._source import Batch
from ortrain.errors import InvalidArgumentError

__all__ = ["SUFFIXES", "ImageFolder"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# Normalization of ImageNet, which models exported from PyTorch expect.
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Tag of EXIF for the orientation of the camera.
_ORIENTATION = 0x0112
# Height and width of images for no certain model.
_DEFAULT_PIXELS = 224
# Pixels of a preview along its longer side.
_PREVIEW_PIXELS = 160


@dataclass(frozen=True)
class Format:
    """Form of the tensor that the model takes."""

    name: str
    dtype: np.dtype[Any]
    height: int
    width: int
    channels: int
    layout: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of an image in the layout of the model."""
        if self.layout == "NCHW":
            return self.channels, self.height, self.width
        return self.height, self.width, self.channels

    def fill(self, target: npt.NDArray[Any], pixels: npt.NDArray[np.uint8]) -> None:
        """Write pixels to the row of a batch, in the layout of the model; floats are normalized."""
        is_first = self.layout == "NCHW"
        source = pixels.transpose(2, 0, 1) if is_first else pixels
        if self.dtype.kind != "f":
            target[...] = source
            return
        mean, std = (np.array(values, np.float32) for values in (self.mean, self.std))
        scale, offset = 1 / (255 * std), -mean / std
        if is_first:
            scale, offset = scale[:, None, None], offset[:, None, None]
        np.multiply(source, scale, out=target)
        target += offset


def format_of(
    inputs: Sequence[InputDescription], settings: Settings, preprocessing: Preprocessing | None = None
) -> Format:
    """Return the form of the images from the model's input; settings override it.

    The preprocessing gives an open size and the normalization.

    Raises:
        InvalidArgumentError: if the model does not take one batch of images, or its sizes are open and not chosen.

    """
    found = [described for described in inputs if len(described.shape or []) == 4]
    if len(inputs) > 1 or len(found) != len(inputs):
        shapes = ", ".join(f"{described.name}: {list(described.shape)}" for described in inputs)
        raise InvalidArgumentError(f"a folder of images fills one input with 4 axes; the model has {shapes}")
    name = found[0].name if found else "x"
    dtype = dtype_of(found[0]) if found else np.dtype(np.float32)
    axes = to_sizes(found[0]) if found else [None, None, None]
    layout = settings.layout or ("NHWC" if axes[2] in _MODES and axes[0] not in _MODES else "NCHW")
    if layout not in ("NCHW", "NHWC"):
        raise InvalidArgumentError(f'layout must be "NCHW" or "NHWC", got {layout!r}')
    channels, height, width = axes if layout == "NCHW" else (axes[2], axes[0], axes[1])
    if settings.size is not None:
        for chosen, size in zip(settings.size, (height, width), strict=True):
            if size not in (None, chosen):
                raise InvalidArgumentError(
                    f"size is {settings.size}, the model's input {name!r} takes {height} x {width} pixels"
                )
        height, width = settings.size
    elif height is None and width is None and preprocessing is not None and preprocessing.size is not None:
        height, width = preprocessing.size
    elif not found:
        height = width = _DEFAULT_PIXELS
    if height is None or width is None:
        raise InvalidArgumentError(
            f"the model's input {name!r} takes images of any size; choose one: size=224 (--size 224)"
        )
    if settings.channels is not None:
        if channels not in (None, settings.channels):
            raise InvalidArgumentError(f"channels is {settings.channels}, the model's input {name!r} has {channels}")
        channels = settings.channels
    channels = 3 if channels is None else channels
    if channels not in _MODES:
        raise InvalidArgumentError(f"images have 1, 3 or 4 channels, the model's input {name!r} has {channels}")
    mean, std = _normalization(dtype, channels, layout, settings, preprocessing)
    return Format(name, dtype, height, width, channels, layout, mean, std)


def _normalization(
    dtype: np.dtype[Any], channels: int, layout: str, settings: Settings, preprocessing: Preprocessing | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, for values from 0 to 1."""
    if dtype.kind != "f":
        if settings.mean is not None or settings.std is not None:
            raise InvalidArgumentError(f"mean and std need an input of floats; the model takes {dtype} pixels")
        return (0.0,) * channels, (1.0,) * channels
    described = None if preprocessing is None else preprocessing.normalization(channels)
    if described is not None:
        default = described
    elif channels != 3:
        default = ((0.0,) * channels, (1.0,) * channels)
    elif layout == "NCHW":
        default = _IMAGENET
    else:
        default = ((0.5,) * 3, (0.5,) * 3)
    chosen = []
    for name, value, other in (("mean", settings.mean, default[0]), ("std", settings.std, default[1])):
        value = other if value is None else value * channels if len(value) == 1 else value
        if len(value) != channels:
            raise InvalidArgumentError(f"{name} has {len(value)} numbers, the image has {channels} channels")
        chosen.append(tuple(map(float, value)))
    if not all(chosen[1]):
        raise InvalidArgumentError("std must not be zero")
    return chosen[0], chosen[1]


class ImageFolder(FolderSource):
    """Images in a folder per class, as rows."""

    kind = "images"

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        inputs: Sequence[InputDescription],
        *,
        labelled: bool = True,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        self._image = required("PIL.Image", "Pillow", "train", "a folder of images")
        self._enhance = required("PIL.ImageEnhance", "Pillow", "train", "a folder of images")
        self._transpose = required("PIL.ImageOps", "Pillow", "train", "a folder of images").exif_transpose
        self._format = format_of(inputs, settings, preprocessing)
        self._preprocessing = preprocessing if self._uses(preprocessing, settings) else None
        _check_augmentation(settings, self._format.dtype)
        found = find_files(folder, SUFFIXES, "images", settings.classes, labelled=labelled)
        self._found, self.skipped = usable_files(
            found, self._problem_of, "images", skip_broken=bool(settings.skip_broken)
        )
        self.classes = self._found.classes
        form = self._format
        self._settings = replace(
            settings,
            size=(form.height, form.width),
            layout=form.layout,
            channels=form.channels,
            mean=form.mean if form.dtype.kind == "f" else None,
            std=form.std if form.dtype.kind == "f" else None,
            classes=self.classes,
        )

    def describe(self) -> Mapping[str, Any]:
        """Return kind, sizes, settings and a hash of the files, and the file of the normalization."""
        found = super().describe()
        return found if self._preprocessing is None else {**found, "preprocessing": self._preprocessing.origin}

    def _uses(self, preprocessing: Preprocessing | None, settings: Settings) -> bool:
        """Return True if size or normalization come from the files of the model."""
        form = self._format
        if preprocessing is None:
            return False
        normalizes = form.dtype.kind == "f" and preprocessing.normalization(form.channels) is not None
        return (normalizes and None in (settings.mean, settings.std)) or (
            settings.size is None and preprocessing.size == (form.height, form.width)
        )

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> Batch:
        """Read images; augmented if ``training``."""
        form = self._format
        values = np.empty((len(rows), *form.shape), np.float32 if form.dtype.kind == "f" else form.dtype)
        for target, row in zip(values, rows, strict=True):
            form.fill(target, self._read(int(row), generator(seed, int(row)) if training else None))
        values = values.astype(form.dtype, copy=False)
        return self._batch(form.name, values, rows, seed, training)

    def preview(self, row: int) -> bytes:
        """Return a small PNG of the image of a row, without normalization and augmentation."""
        image = self._image.fromarray(np.squeeze(self._read(row, None)))
        image.thumbnail((_PREVIEW_PIXELS, _PREVIEW_PIXELS))
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()

    def _problem_of(self, path: Path) -> str | None:
        """Decode an image at its smallest scale; return the problem of a broken one."""
        try:
            with self._image.open(path) as image:
                image.draft(image.mode, (1, 1))
                image.load()
        except Exception as error:
            return "not an image" if "cannot identify" in str(error) else str(error) or type(error).__name__
        return None

    def _read(self, row: int, rng: np.random.Generator | None) -> npt.NDArray[np.uint8]:
        """Return the pixels of a row: height, width, channels."""
        path = self._found.files[row]
        try:
            with self._image.open(path) as opened:
                opened.draft(None, (2 * self._format.width, 2 * self._format.height))
                opened.load()
                # Without an orientation, the transpose would be a copy.
                is_turned = opened.getexif().get(_ORIENTATION, 1) != 1
                image = self._in_mode(self._transpose(opened) if is_turned else opened)
        except Exception as error:
            raise InvalidArgumentError(f"the image {path} (row {row}) cannot be read: {error}") from error
        image = self._resized(image, rng)
        if rng is not None:
            image = self._augmented(image, rng)
        pixels = np.asarray(image, np.uint8)
        return pixels[:, :, None] if pixels.ndim == 2 else pixels

    def _in_mode(self, image: Any) -> Any:
        """Convert an image to the channels of the model. Pixels of 16 and 32 bits are scaled to 8."""
        if image.mode.startswith(("I", "F")):
            values = np.asarray(image, np.float64)
            scale = 255 / 65535 if image.mode.startswith("I") else 255
            image = self._image.fromarray(np.clip(values * scale, 0, 255).round().astype(np.uint8))
        mode = _MODES[self._format.channels]
        return image if image.mode == mode else image.convert(mode)

    def _resized(self, image: Any, rng: np.random.Generator | None) -> Any:
        """Cut the largest box of the model's proportions, or a random one, and resize it."""
        width, height = image.size
        form = self._format
        box_width = min(width, height * form.width / form.height)
        box_height = box_width * form.height / form.width
        left, top = 0.5, 0.5
        if rng is not None and self._settings.crop:
            scale = np.sqrt(1 - self._settings.crop * rng.random())
            stretch = np.exp(rng.uniform(-1, 1) * self._settings.crop * np.log(4 / 3))
            box_width, box_height = min(width, box_width * scale * stretch), min(height, box_height * scale / stretch)
            left, top = rng.random(), rng.random()
        x, y = (width - box_width) * left, (height - box_height) * top
        box = (x, y, min(width, x + box_width), min(height, y + box_height))
        return image.resize((form.width, form.height), self._image.Resampling.BILINEAR, box, reducing_gap=2.0)

    def _augmented(self, image: Any, rng: np.random.Generator) -> Any:
        """Flip, rotate and recolour an image."""
        settings = self._settings
        flips = self._image.Transpose
        if settings.flip in ("horizontal", "both") and rng.random() < 0.5:
            image = image.transpose(flips.FLIP_LEFT_RIGHT)
        if settings.flip in ("vertical", "both") and rng.random() < 0.5:
            image = image.transpose(flips.FLIP_TOP_BOTTOM)
        if settings.rotation:
            angle = rng.uniform(-settings.rotation, settings.rotation)
            mean = np.asarray(image).reshape(-1, self._format.channels).mean(0).round().astype(int).tolist()
            fill = tuple(mean) if len(mean) > 1 else mean[0]
            image = image.rotate(angle, self._image.Resampling.BILINEAR, fillcolor=fill)
        if settings.colour:
            changes = [self._enhance.Brightness, self._enhance.Contrast]
            changes += [self._enhance.Color] if self._format.channels > 1 else []
            for change in changes:
                image = change(image).enhance(rng.uniform(1 - settings.colour, 1 + settings.colour))
        return image


def _check_augmentation(settings: Settings, dtype: np.dtype[Any]) -> None:
    """Check the ranges of the augmentation."""
    for name, limit in (("crop", 1.0), ("colour", 1.0), ("rotation", 180.0)):
        value = getattr(settings, name)
        if value is not None and not 0 <= value <= limit:
            raise InvalidArgumentError(f"{name} must be from 0 to {limit:g}, got {value}")
    if settings.crop == 1:
        raise InvalidArgumentError("crop must be below 1: it is the largest share of the image that is cut away")
    if settings.mixup is not None and settings.mixup < 0:
        raise InvalidArgumentError(f"mixup must not be negative, got {settings.mixup}")
    if settings.mixup and dtype.kind != "f":
        raise InvalidArgumentError(f"mixup needs an input of floats; the model takes {dtype} pixels")
