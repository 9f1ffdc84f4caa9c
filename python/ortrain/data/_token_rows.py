"""Rows of tokens on disk: the parts of long texts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable

import numpy as np

from ortrain.data._tokens import Tokens

__all__ = ["TokenRows"]

# Bit of a stored token that the tokenizer added.
_SPECIAL = np.uint32(1 << 31)


class TokenRows:
    """Parts of texts as rows, stored in a temporary file.

    Args:
        texts: the parts of each text.
        shortest: the number of tokens below which a part is left out.

    """

    def __init__(self, texts: Iterable[list[Tokens]], shortest: int) -> None:
        bounds, self._text_of_row, self._part_of_row = [0], [], []
        self._has_parts = set()
        with tempfile.TemporaryFile() as spool:
            for text, parts in enumerate(texts):
                if len(parts) > 1:
                    self._has_parts.add(text)
                for part, tokens in enumerate(parts):
                    if len(tokens.ids) < shortest:
                        continue
                    spool.write(np.where(tokens.special, tokens.ids | _SPECIAL, tokens.ids).astype(np.uint32).tobytes())
                    bounds.append(bounds[-1] + len(tokens.ids))
                    self._text_of_row.append(text)
                    self._part_of_row.append(part)
            spool.flush()
            # The map has its own handle of the file, which it outlives.
            count = bounds[-1]
            self._stored = np.memmap(spool, np.uint32, "r", shape=(count,)) if count else np.empty(0, np.uint32)
        self._bounds = np.array(bounds, np.int64)

    def __len__(self) -> int:
        return len(self._text_of_row)

    def tokens(self, row: int) -> Tokens:
        """Return the tokens of a row."""
        stored = np.asarray(self._stored[self._bounds[row] : self._bounds[row + 1]])
        ids = (stored & ~_SPECIAL).astype(np.int64)
        return Tokens(ids, (stored & _SPECIAL) != 0, np.zeros(len(ids), np.int64))

    def name(self, row: int) -> str:
        """Return the number of the text of a row, with the number of the part if the text has several."""
        text = self._text_of_row[row]
        return f"row {text}, part {self._part_of_row[row]}" if text in self._has_parts else f"row {text}"
