"""Plain text as blocks of tokens for language modelling."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain.data._common import fingerprint
from ortrain.data._settings import InputDescription, Settings
from ortrain.data._source import Batch
from ortrain.data._tokens import Tokenizer, Tokens, check_task, language_model_batch, text_inputs
from ortrain.errors import InvalidArgumentError

__all__ = ["SUFFIXES", "TextFile"]

SUFFIXES = (".txt", ".md")

# Characters that are tokenized at once, up to the end of their line.
_BLOCK_CHARACTERS = 1 << 20


class TextFile:
    """Consecutive blocks of the tokens of a text. A last block that is not full is left out."""

    kind = "text"
    classes = None
    labels = None

    def __init__(
        self, path: Path, settings: Settings, inputs: Sequence[InputDescription], *, labelled: bool = True
    ) -> None:
        if settings.tokenizer is None:
            raise InvalidArgumentError(
                f"{path}: a text needs a tokenizer: tokenizer='tokenizer.json' (--tokenizer tokenizer.json), or 'bytes'"
            )
        if settings.task == "classification":
            raise InvalidArgumentError(f"{path}: a plain text has no labels; use JSON lines, or task='causal-lm'")
        self._path = path
        self._inputs = text_inputs(inputs, settings)
        self._tokenizer = Tokenizer(settings.tokenizer, None)
        self._settings = replace(settings, task=settings.task or "causal-lm", length=self._inputs.length)
        check_task(self._settings, self._tokenizer)
        self._tokens = self._tokenized()
        # The target of the last token of a block is the first token of the next one.
        self._shift = int(self._settings.task == "causal-lm")
        if len(self) == 0:
            raise InvalidArgumentError(
                f"{path} has {len(self._tokens)} tokens, a row takes {self._inputs.length + self._shift}; choose a "
                "smaller length= (--length)"
            )

    def __len__(self) -> int:
        return (len(self._tokens) - self._shift) // self._inputs.length

    def take(self, rows: npt.NDArray[np.int64], seed: int, training: bool) -> Batch:
        """Read blocks. Without ``training`` the masked tokens of a block are always the same."""
        blocks = [self._block(int(row)) for row in rows]
        encoded = [Tokens(ids, np.zeros(len(ids), bool), np.zeros(len(ids), np.int64)) for ids in blocks]
        seed = seed if training else 0
        inputs, targets = language_model_batch(encoded, rows, seed, self._inputs, self._tokenizer, self._settings)
        return Batch(inputs, {"target": targets})

    def row_name(self, row: int) -> str:
        """Return the number of a block, from 0."""
        return f"block {row}"

    def preview(self, row: int) -> str:
        """Return the text of a block."""
        return self._tokenizer.decode(self._block(row)[: self._inputs.length])

    def describe(self) -> Mapping[str, Any]:
        """Return kind, sizes, settings and a hash of the file."""
        return {
            "kind": self.kind,
            "rows": len(self),
            "tokens": len(self._tokens),
            "hash": fingerprint([self._path], self._path),
            "settings": self._settings.as_json(),
        }

    def _block(self, row: int) -> npt.NDArray[np.int64]:
        start = row * self._inputs.length
        return np.asarray(self._tokens[start : start + self._inputs.length + self._shift]).astype(np.int64)

    def _tokenized(self) -> npt.NDArray[np.uint32]:
        """Tokenize the text into an array on disk."""
        with tempfile.TemporaryFile() as spool:
            for text in self._blocks_of_text():
                (tokens,) = self._tokenizer.encode([text], special=False)
                spool.write(tokens.ids.astype(np.uint32).tobytes())
            count = spool.tell() // 4
            spool.flush()
            # The map has its own handle of the file, which it outlives.
            return np.memmap(spool, np.uint32, "r", shape=(count,)) if count else np.empty(0, np.uint32)

    def _blocks_of_text(self) -> Iterator[str]:
        try:
            with self._path.open(encoding="utf-8", newline="") as file:
                while lines := file.readlines(_BLOCK_CHARACTERS):
                    yield "".join(lines)
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(f"{self._path} is not a text in UTF-8: {error}") from error
