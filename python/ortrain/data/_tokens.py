"""Tokens of texts, and the inputs of a language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ortrain._extras import required
from ortrain.data._common import dtype_of, generator, listed, to_sizes
from ortrain.data._settings import InputDescription, Settings
from ortrain.errors import InvalidArgumentError, NoSuchFileError

__all__ = [
    "BYTES",
    "IGNORED",
    "TASKS",
    "TextInputs",
    "Tokenizer",
    "Tokens",
    "bucket_of",
    "check_task",
    "language_model_batch",
    "mask_tokens",
    "text_inputs",
]

BYTES = "bytes"
"""Name of the tokenizer whose tokens are the bytes of UTF-8."""
TASKS = ("classification", "causal-lm", "masked-lm")
IGNORED = -100
"""Target of a position that does not count, as in PyTorch and Transformers."""

_DEFAULT_LENGTH = 128
_DEFAULT_MASK_SHARE = 0.15
_SHORTEST_BUCKET = 16
_PADDING = ("[PAD]", "<pad>", "<|padding|>", "<|endoftext|>", "</s>")
_MASKS = ("[MASK]", "<mask>")


@dataclass(frozen=True)
class Tokens:
    """Tokens of a text, or of a part of it."""

    ids: npt.NDArray[np.int64]
    special: npt.NDArray[np.bool_]
    """True for tokens that the tokenizer adds, such as ``[CLS]``."""
    segments: npt.NDArray[np.int64]
    """Index of the text that a token is from: 0, or 1 for the second text of a pair."""


class Tokenizer:
    """Tokenizer of a ``tokenizer.json`` file (package tokenizers), or of bytes."""

    def __init__(self, name: str, max_tokens: int | None, overlap: int = 0) -> None:
        """Open a tokenizer.

        Args:
            name: the file, or ``"bytes"``.
            max_tokens: the number of tokens that a longer text is cut to; ``None`` for any number.
            overlap: the number of tokens that :meth:`parts` repeats at the beginning of the next part.

        """
        self.name = name
        self._native: Any = None
        self._max_tokens, self._overlap = max_tokens, overlap
        if name == BYTES:
            self.size, self.padding, self.mask = 256, 0, None
            return
        if not Path(name).is_file():
            raise NoSuchFileError(f"there is no tokenizer file {name}; give a tokenizer.json, or {BYTES!r}")
        tokenizers = required("tokenizers", "tokenizers", "train", "a tokenizer file")
        try:
            self._native = tokenizers.Tokenizer.from_file(name)
        except Exception as error:
            raise InvalidArgumentError(f"{name} cannot be read as a tokenizer: {error}") from error
        self._native.no_padding()
        self._native.no_truncation()
        if max_tokens is not None:
            self._native.enable_truncation(max_tokens, stride=overlap)
        self.size = self._native.get_vocab_size()
        self.padding = self._first_of(_PADDING) or 0
        self.mask = self._first_of(_MASKS)

    def encode(self, texts: Sequence[str | tuple[str, str]], *, special: bool = True) -> list[Tokens]:
        """Return the tokens of each text or pair of texts; a long one is cut."""
        return [parts[0] for parts in self.parts(texts, special=special)]

    def parts(self, texts: Sequence[str | tuple[str, str]], *, special: bool = True) -> list[list[Tokens]]:
        """Return the tokens of each text in parts of at most ``max_tokens``."""
        if self._native is None:
            return [self._parts_of_bytes(str(text).encode()) for text in texts]
        encoded = self._native.encode_batch(list(texts), add_special_tokens=special)
        return [[_tokens(part) for part in (first, *first.overflowing)] for first in encoded]

    def _parts_of_bytes(self, text: bytes) -> list[Tokens]:
        length = len(text) if self._max_tokens is None else self._max_tokens
        starts = range(0, max(1, len(text) - self._overlap), max(1, length - self._overlap))
        found = [np.frombuffer(text[start : start + length], np.uint8).astype(np.int64) for start in starts]
        return [Tokens(ids, np.zeros(len(ids), bool), np.zeros(len(ids), np.int64)) for ids in found]

    def decode(self, ids: npt.NDArray[Any]) -> str:
        """Return the text of tokens."""
        if self._native is None:
            return bytes(ids.tolist()).decode("utf-8", "replace")
        text: str = self._native.decode(ids.tolist())
        return text

    def _first_of(self, names: Sequence[str]) -> int | None:
        found = (self._native.token_to_id(name) for name in names)
        return next((token for token in found if token is not None), None)


def _tokens(encoded: Any) -> Tokens:
    segments = np.array(encoded.type_ids, np.int64)
    return Tokens(np.array(encoded.ids, np.int64), np.array(encoded.special_tokens_mask, bool), segments)


@dataclass(frozen=True)
class TextInputs:
    """Inputs of a language model by their meaning."""

    tokens: InputDescription
    mask: InputDescription | None
    segments: InputDescription | None
    positions: InputDescription | None
    length: int
    """Most tokens per row."""
    is_fixed: bool
    """True if the model takes rows of exactly this length."""

    def values(
        self,
        rows: Sequence[npt.NDArray[np.int64]],
        width: int,
        padding: int,
        segments: Sequence[npt.NDArray[np.int64]] | None = None,
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs for rows of tokens, padded on the right. Without ``segments``, every token is of text 0."""
        tokens = padded(rows, width, padding)
        found = {self.tokens.name: tokens.astype(dtype_of(self.tokens))}
        if self.mask is not None:
            lengths = np.array([len(row) for row in rows], np.int64)[:, None]
            found[self.mask.name] = (np.arange(width) < lengths).astype(dtype_of(self.mask))
        if self.segments is not None:
            of_tokens = np.zeros(tokens.shape, np.int64) if segments is None else padded(segments, width, 0)
            found[self.segments.name] = of_tokens.astype(dtype_of(self.segments))
        if self.positions is not None:
            found[self.positions.name] = np.broadcast_to(np.arange(width), tokens.shape).astype(
                dtype_of(self.positions)
            )
        return found


def padded(rows: Sequence[npt.NDArray[np.int64]], width: int, value: int) -> npt.NDArray[np.int64]:
    """Return rows of different lengths as one array."""
    found = np.full((len(rows), width), value, np.int64)
    for target, row in zip(found, rows, strict=True):
        target[: len(row)] = row
    return found


def text_inputs(inputs: Sequence[InputDescription], settings: Settings) -> TextInputs:
    """Return the inputs of a language model by their names.

    Raises:
        InvalidArgumentError: if the model has no input of tokens, or one of unknown meaning.

    """
    left = list(inputs)

    def take_input(*parts: str) -> InputDescription | None:
        for described in left:
            if any(part in described.name.lower() for part in parts):
                left.remove(described)
                return described
        return None

    mask = take_input("mask")
    segments = take_input("token_type", "segment")
    positions = take_input("position")
    names = ", ".join(f"{described.name}: {described.type}" for described in inputs)
    if not inputs:
        left = [_Tokens()]
    if len(left) != 1 or dtype_of(left[0]).kind not in "iu" or len(left[0].shape or []) != 2:
        raise InvalidArgumentError(
            "a text fills one input of integers with the axes (batch, tokens), and inputs named attention_mask, "
            f"token_type_ids and position_ids; the model has {names}"
        )
    (fixed,) = to_sizes(left[0])
    if fixed is not None and settings.length not in (None, fixed):
        raise InvalidArgumentError(f"length is {settings.length}, the model takes {fixed} tokens per row")
    length = fixed or settings.length or _DEFAULT_LENGTH
    if length < 1:
        raise InvalidArgumentError(f"length must be positive, got {length}")
    return TextInputs(left[0], mask, segments, positions, length, fixed is not None)


@dataclass(frozen=True)
class _Tokens:
    """Description of the input of tokens where no model is known."""

    name: str = "input_ids"
    type: str = "tensor(int64)"
    shape: tuple[int | None, ...] = (None, None)


def bucket_of(length: int, inputs: TextInputs, buckets: Sequence[int] | None) -> int:
    """Return the width that rows of a length are padded to. Few widths mean few compiled programs."""
    if inputs.is_fixed:
        return inputs.length
    if buckets is None:
        buckets = []
        size = _SHORTEST_BUCKET
        while size < inputs.length:
            buckets += [size, size + size // 2]
            size *= 2
    fitting = [bucket for bucket in buckets if length <= bucket < inputs.length]
    return min(fitting, default=inputs.length)


def mask_tokens(
    ids: npt.NDArray[np.int64],
    special: npt.NDArray[np.bool_],
    tokenizer: Tokenizer,
    share: float | None,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return masked tokens, and the original tokens at the chosen positions (Devlin et al., 2019).

    Of the chosen positions, 80 % become the mask token, 10 % a random token, and 10 % stay.
    """
    assert tokenizer.mask is not None
    share = _DEFAULT_MASK_SHARE if share is None else share
    chosen = (rng.random(len(ids)) < share) & ~special
    fate = rng.random(len(ids))
    random = rng.integers(0, tokenizer.size, len(ids))
    changed = np.where(chosen & (fate < 0.8), tokenizer.mask, np.where(chosen & (fate >= 0.9), random, ids))
    return changed.astype(np.int64), np.where(chosen, ids, IGNORED)


def check_task(settings: Settings, tokenizer: Tokenizer) -> None:
    """Check the task, and the tokens that it needs.

    Raises:
        InvalidArgumentError: for an unknown task, and for a tokenizer without a mask token.

    """
    if settings.task not in (None, *TASKS):
        raise InvalidArgumentError(f"task must be one of {listed(TASKS)}, got {settings.task!r}")
    if settings.task == "masked-lm" and tokenizer.mask is None:
        raise InvalidArgumentError(f"the tokenizer {tokenizer.name} has no token {' or '.join(_MASKS)} for masked-lm")
    if settings.mask_share is not None and not 0 < settings.mask_share <= 1:
        raise InvalidArgumentError(f"mask_share must be above 0 and at most 1, got {settings.mask_share}")


def language_model_batch(
    rows: Sequence[Tokens],
    numbers: npt.NDArray[np.int64],
    seed: int,
    inputs: TextInputs,
    tokenizer: Tokenizer,
    settings: Settings,
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.int64]]:
    """Return inputs and targets of causal or masked language modelling."""
    if settings.task == "causal-lm":
        tokens, targets = [row.ids[:-1] for row in rows], [row.ids[1:] for row in rows]
    else:
        masked = [
            mask_tokens(row.ids, row.special, tokenizer, settings.mask_share, generator(seed, int(number)))
            for row, number in zip(rows, numbers, strict=True)
        ]
        tokens, targets = [found for found, _ in masked], [found for _, found in masked]
    width = bucket_of(max(map(len, tokens), default=0), inputs, settings.buckets)
    return inputs.values(tokens, width, tokenizer.padding), padded(targets, width, IGNORED)
