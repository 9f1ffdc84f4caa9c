"""Files in a folder per class."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._suggest import hint
from ortrain.data._common import fingerprint, generator, listed
from ortrain.data._mixup import mix
from ortrain.data._settings import Settings
from ortrain.data._source import Batch
from ortrain.errors import InvalidArgumentError

__all__ = ["FolderSource", "LabelledFiles", "files_below", "find_files", "subfolders_of", "usable_files"]

# Threads that check files when a folder is opened.
_CHECKING_THREADS = max(1, min(8, os.cpu_count() or 1))


@dataclass(frozen=True)
class LabelledFiles:
    """Files with the index of their class. Files without labels have no classes."""

    folder: Path
    files: list[Path]
    labels: npt.NDArray[np.int64] | None
    classes: tuple[str, ...] | None


class FolderSource:
    """Part of the sources of files in folders: rows, classes and targets."""

    kind: str
    classes: tuple[str, ...] | None
    skipped: int
    _found: LabelledFiles
    _settings: Settings

    def __len__(self) -> int:
        return len(self._found.files)

    @property
    def labels(self) -> npt.NDArray[np.int64] | None:
        """Class of each row."""
        return self._found.labels

    def row_name(self, row: int) -> str:
        """Return the file of a row, relative to the folder."""
        return self._found.files[row].relative_to(self._found.folder).as_posix()

    def describe(self) -> Mapping[str, Any]:
        """Return kind, sizes, settings and a hash of the files."""
        return {
            "kind": self.kind,
            "rows": len(self),
            "skipped": self.skipped,
            "hash": fingerprint(sorted(self._found.files), self._found.folder),
            "settings": self._settings.as_json(),
        }

    def _batch(
        self, name: str, values: npt.NDArray[Any], rows: npt.NDArray[np.int64], seed: int, training: bool
    ) -> Batch:
        """Return values with the targets of their rows; both are mixed if the settings say so."""
        if self.labels is None or self.classes is None:
            return Batch({name: values}, {})
        targets: npt.NDArray[Any] = self.labels[rows]
        if training and self._settings.mixup:
            values, targets = mix(values, targets, len(self.classes), self._settings.mixup, seed)
        return Batch({name: values}, {"target": targets})


def files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return files with one of the suffixes in a folder and its subfolders, sorted by path."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            Path(root, name) for name in names if not name.startswith(".") and name.lower().endswith(tuple(suffixes))
        ]
    return sorted(found)


def subfolders_of(folder: Path) -> list[str]:
    """Return the names of the visible subfolders, sorted."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def find_files(
    folder: Path, suffixes: Sequence[str], what: str, classes: Sequence[str] | None, *, labelled: bool
) -> LabelledFiles:
    """Return the files of a folder with a subfolder per class, or of any folder if they need no labels.

    The classes are sorted by name. The files of a folder with classes are in a fixed random order that depends on their
    names alone, so that every part of the rows is a fair sample.

    Raises:
        InvalidArgumentError: for an empty folder, a class without files, and classes that differ from ``classes``.

    """
    subfolders = subfolders_of(folder)
    if not labelled:
        files = files_below(folder, suffixes)
        if not files:
            raise InvalidArgumentError(f"the folder {folder} has no {what}")
        return LabelledFiles(folder, files, None, None if classes is None else tuple(classes))
    expected = f"expected a folder per class with {what} in it ({folder.name}/CLASS/FILE{suffixes[0]})"
    if not subfolders:
        files = files_below(folder, suffixes)
        found = f"{what} without folders" if files else "an empty folder" if not any(folder.iterdir()) else f"no {what}"
        raise InvalidArgumentError(f"{folder}: {expected}, got {found}")
    if classes is not None:
        unknown = [name for name in subfolders if name not in classes]
        if unknown:
            near = hint(unknown[0], classes)
            raise InvalidArgumentError(
                f"{folder} has the folder {unknown[0]!r}, which is no class of the training data: "
                f"{listed(classes)}{near}"
            )
    by_class = {name: files_below(folder / name, suffixes) for name in subfolders}
    empty = [name for name, files in by_class.items() if not files]
    if len(empty) == len(subfolders):
        raise InvalidArgumentError(f"{folder}: {expected}, got no {what}")
    if len(subfolders) == 1 and classes is None:
        raise InvalidArgumentError(
            f"{folder} has one folder, {subfolders[0]}; {expected}, for two classes or more (or is it "
            f"{folder / subfolders[0]}?)"
        )
    if empty:
        noun = "class" if len(empty) == 1 else "classes"
        raise InvalidArgumentError(f"{folder}: the {noun} {listed(empty)} has no {what}; remove the folder, or fill it")
    names = tuple(subfolders if classes is None else classes)
    files = [path for found in by_class.values() for path in found]
    labels = np.repeat([names.index(name) for name in subfolders], [len(found) for found in by_class.values()])
    order = generator(0, len(files)).permutation(len(files))
    return LabelledFiles(folder, [files[row] for row in order], labels[order].astype(np.int64), names)


def usable_files(
    found: LabelledFiles, problem_of: Callable[[Path], str | None], what: str, *, skip_broken: bool
) -> tuple[LabelledFiles, int]:
    """Check every file. Return the usable files and the number of skipped ones.

    Raises:
        InvalidArgumentError: if a file is broken and ``skip_broken`` is false, or no file of a class is left.

    """
    with ThreadPoolExecutor(_CHECKING_THREADS) as pool:
        problems = list(pool.map(problem_of, found.files))
    broken = [
        f"{path.relative_to(found.folder)} ({problem})"
        for path, problem in zip(found.files, problems, strict=True)
        if problem is not None
    ]
    if not broken:
        return found, 0
    if not skip_broken:
        raise InvalidArgumentError(
            f"{found.folder}: {len(broken)} of {len(found.files)} {what} cannot be read: {listed(sorted(broken))}; "
            "remove them, or pass skip_broken=True (--skip-broken)"
        )
    kept = np.array([problem is None for problem in problems])
    files = [path for path, keep in zip(found.files, kept, strict=True) if keep]
    labels = None if found.labels is None else found.labels[kept]
    if found.labels is not None and labels is not None and found.classes is not None:
        lost = sorted(set(found.labels.tolist()) - set(labels.tolist()))
        if lost:
            raise InvalidArgumentError(f"{found.folder}: all {what} of the class {found.classes[lost[0]]} are broken")
    if not files:
        raise InvalidArgumentError(f"{found.folder}: all {len(broken)} {what} are broken")
    return LabelledFiles(found.folder, files, labels, found.classes), len(broken)
