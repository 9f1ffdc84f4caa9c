"""Drawings of four shapes in folders, as a data set of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "star", "triangle")
_PIXELS = 200
_NOISE = 12.0


def write_shapes(folder: Path, images: int) -> None:
    """Write images as FOLDER/CLASS/NUMBER.jpg: a shape of random size, angle, place and colours, with noise."""
    rng = np.random.default_rng(0)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for number in range(images):
            _drawn(name, rng).save(folder / name / f"{number:03}.jpg", quality=90)


def _drawn(name: str, rng: np.random.Generator) -> Image.Image:
    background, colour = _distinct_colours(rng)
    image = Image.new("RGB", (_PIXELS, _PIXELS), background)
    radius = rng.uniform(0.2, 0.45) * _PIXELS
    center = rng.uniform(radius, _PIXELS - radius, 2)
    corners = {"circle": 60, "square": 4, "star": 10, "triangle": 3}[name]
    angles = rng.uniform(0, 2 * np.pi) + np.arange(corners) * 2 * np.pi / corners
    radii = np.where(np.arange(corners) % 2, 0.45, 1) * radius if name == "star" else np.full(corners, radius)
    points = center + radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    ImageDraw.Draw(image).polygon([tuple(point) for point in points.tolist()], fill=colour)
    noise = rng.normal(0, _NOISE, (_PIXELS, _PIXELS, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def _distinct_colours(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw two colours of different brightness."""
    while True:
        pair = rng.integers(0, 256, (2, 3))
        if abs(int(pair[0].sum()) - int(pair[1].sum())) > 150:
            return tuple(pair[0].tolist()), tuple(pair[1].tolist())
