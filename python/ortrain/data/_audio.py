"""Audio files in folders as waveforms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._extras import required
from ortrain.data._common import dtype_of, generator, to_sizes
from ortrain.data._folders import FolderSource, find_files, usable_files
from ortrain.data._settings import InputDescription, Settings
from ortrain.data._source import Batch
from ortrain.errors import InvalidArgumentError

__all__ = ["SUFFIXES", "AudioFolder"]

SUFFIXES = (".wav", ".flac", ".ogg")

_DEFAULT_RATE = 16000
# Length of audio for no certain model.
_DEFAULT_SECONDS = 1.0


class AudioFolder(FolderSource):
    """Waveforms in a folder per class, as rows of samples from -1 to 1."""

    kind = "audio"

    def __init__(
        self, folder: Path, settings: Settings, inputs: Sequence[InputDescription], *, labelled: bool = True
    ) -> None:
        self._soundfile = required("soundfile", "soundfile", "audio", "a folder of audio files")
        self._rate = settings.sample_rate or _DEFAULT_RATE
        if self._rate < 1:
            raise InvalidArgumentError(f"sample_rate must be positive, got {self._rate}")
        self._name, self._dtype, self._shape = _form(inputs, settings, self._rate)
        found = find_files(folder, SUFFIXES, "audio files", settings.classes, labelled=labelled)
        self._found, self.skipped = usable_files(
            found, self._problem_of, "audio files", skip_broken=bool(settings.skip_broken)
        )
        self.classes = self._found.classes
        self._settings = replace(
            settings, sample_rate=self._rate, seconds=self._shape[-1] / self._rate, classes=self.classes
        )

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> Batch:
        """Read waveforms: a random part of a long one if ``training``, its middle otherwise."""
        waves = [self._read(int(row), generator(seed, int(row)) if training else None) for row in rows]
        values = np.stack(waves) if waves else np.empty((0, self._shape[-1]), np.float32)
        values = values.reshape(len(rows), *self._shape).astype(self._dtype)
        return self._batch(self._name, values, rows, seed, training)

    def preview(self, row: int) -> str:
        """Return the file of a row."""
        return self.row_name(row)

    def _problem_of(self, path: Path) -> str | None:
        """Read the header of a file; return the problem of a broken one."""
        try:
            info = self._soundfile.info(str(path))
        except (RuntimeError, OSError) as error:
            return str(error).removeprefix(f"Error opening {str(path)!r}: ").rstrip(".")
        return None if info.frames else "no samples"

    def _read(self, row: int, rng: np.random.Generator | None) -> npt.NDArray[np.float32]:
        """Return the samples of a row at the chosen rate and length."""
        path, length = self._found.files[row], self._shape[-1]
        try:
            with self._soundfile.SoundFile(str(path)) as file:
                needed = -(-length * file.samplerate // self._rate)
                spare = max(0, file.frames - needed)
                file.seek(spare // 2 if rng is None else int(rng.integers(0, spare + 1)))
                wave = file.read(needed, dtype="float32", always_2d=True).mean(axis=1)
                wave = _resampled(wave, file.samplerate, self._rate)[:length]
        except (RuntimeError, OSError) as error:
            raise InvalidArgumentError(f"the audio file {path} (row {row}) cannot be read: {error}") from error
        return np.pad(wave, (0, length - len(wave))).astype(np.float32)


def _form(
    inputs: Sequence[InputDescription], settings: Settings, rate: int
) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    """Return name, type and shape of a row of the model's input.

    Raises:
        InvalidArgumentError: if the model does not take waveforms, or takes them of any length and none is chosen.

    """
    chosen = None if settings.seconds is None else round(settings.seconds * rate)
    axes: list[int | None] = [None]
    name, dtype = "x", np.dtype(np.float32)
    if inputs:
        name, dtype, axes = inputs[0].name, dtype_of(inputs[0]), to_sizes(inputs[0])
    if len(inputs) > 1 or dtype.kind != "f" or len(axes) not in (1, 2) or (len(axes) == 2 and axes[0] not in (None, 1)):
        shapes = ", ".join(f"{described.name}: {described.type} {list(described.shape)}" for described in inputs)
        raise InvalidArgumentError(
            "audio files fill one input of floats with the axes (batch, samples) or (batch, 1, samples); the model has "
            f"{shapes}"
        )
    samples = axes[-1]
    if samples is not None and chosen not in (None, samples):
        raise InvalidArgumentError(f"seconds gives {chosen} samples, the model's input {name!r} takes {samples}")
    samples = samples or chosen or (None if inputs else round(_DEFAULT_SECONDS * rate))
    if not samples:
        raise InvalidArgumentError(
            f"the model's input {name!r} takes any number of samples; choose one: seconds=1 (--seconds 1)"
        )
    return name, dtype, (1, samples) if len(axes) == 2 else (samples,)


def _resampled(wave: npt.NDArray[np.float32], rate: int, target: int) -> npt.NDArray[np.float32]:
    """Return a waveform at another rate, by its Fourier transform."""
    if rate == target or not len(wave):
        return wave
    length = max(1, round(len(wave) * target / rate))
    spectrum = np.fft.rfft(wave)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * (length / len(wave))).astype(np.float32)
