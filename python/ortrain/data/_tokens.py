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

__all__ = ["BYTES", "IGNORED", "TASKS", "TextInputs", "Tokenizer", "bucket_of", "mask_tokens", "text_inputs"]

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


class Tokenizer:
    """Tokenizer of a ``tokenizer.json`` file (package tokenizers), or of bytes."""

    def __init__(self, name: str, max_tokens: int | None) -> None:
        self.name = name
        self._native: Any = None
        self._max_tokens = max_tokens
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
            self._native.enable_truncation(max_tokens)
        self.size = self._native.get_vocab_size()
        self.padding = self._first_of(_PADDING) or 0
        self.mask = self._first_of(_MASKS)

    def encode(self, texts: Sequence[str], *, special: bool = True) -> list[tuple[npt.NDArray[np.int64], Any]]:
        """Return the tokens of each text, and a mask of its special tokens."""
        if self._native is None:
            found = [np.frombuffer(text.encode()[: self._max_tokens], np.uint8).astype(np.int64) for text in texts]
            return [(ids, np.zeros(len(ids), bool)) for ids in found]
        encoded = self._native.encode_batch(list(texts), add_special_tokens=special)
        return [(np.array(one.ids, np.int64), np.array(one.special_tokens_mask, bool)) for one in encoded]

    def decode(self, ids: npt.NDArray[Any]) -> str:
        """Return the text of tokens."""
        if self._native is None:
            return bytes(ids.tolist()).decode("utf-8", "replace")
        text: str = self._native.decode(ids.tolist())
        return text

    def _first_of(self, names: Sequence[str]) -> int | None:
        found = (self._native.token_to_id(name) for name in names)
        return next((token for token in found if token is not None), None)


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

    def values(self, rows: Sequence[npt.NDArray[np.int64]], width: int, padding: int) -> dict[str, npt.NDArray[Any]]:
        """Return the inputs for rows of tokens, padded on the right."""
        tokens = padded(rows, width, padding)
        found = {self.tokens.name: tokens.astype(dtype_of(self.tokens))}
        if self.mask is not None:
            lengths = np.array([len(row) for row in rows], np.int64)[:, None]
            found[self.mask.name] = (np.arange(width) < lengths).astype(dtype_of(self.mask))
        if self.segments is not None:
            found[self.segments.name] = np.zeros(tokens.shape, dtype_of(self.segments))
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
    rows: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]],
    numbers: npt.NDArray[np.int64],
    seed: int,
    inputs: TextInputs,
    tokenizer: Tokenizer,
    settings: Settings,
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.int64]]:
    """Return inputs and targets of causal or masked language modelling."""
    if settings.task == "causal-lm":
        tokens, targets = [ids[:-1] for ids, _ in rows], [ids[1:] for ids, _ in rows]
    else:
        masked = [
            mask_tokens(ids, special, tokenizer, settings.mask_share, generator(seed, int(number)))
            for (ids, special), number in zip(rows, numbers, strict=True)
        ]
        tokens, targets = [found for found, _ in masked], [found for _, found in masked]
    width = bucket_of(max(map(len, tokens), default=0), inputs, settings.buckets)
    return inputs.values(tokens, width, tokenizer.padding), padded(targets, width, IGNORED)
