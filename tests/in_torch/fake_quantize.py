"""Record torch's fake quantization with its gradients: fake_quantize.py FILE.npz, for tests/test_fake_quantize.py.

Keys of the file are CASE/NAME. The names are ``x``, ``scale``, ``zero_point`` and ``g``, the gradient of the result;
``y`` and ``dx`` of torch.fake_quantize_per_tensor_affine or torch.fake_quantize_per_channel_affine; ``learned_dx`` and
``learned_dscale`` of the learnable functions, with a factor of 1 for the gradient of the scale.
"""

from __future__ import annotations

import sys
import zlib

import numpy as np
import torch

# Case: element type of ONNX, axis of the scales, shape.
CASES: dict[str, tuple[str, int | None, tuple[int, ...]]] = {
    "uint8": ("uint8", None, (5, 7)),
    "int8": ("int8", None, (3, 4, 6)),
    "uint16": ("uint16", None, (6, 9)),
    "int16": ("int16", None, (6, 9)),
    "uint4": ("uint4", None, (8, 9)),
    "int4": ("int4", None, (4, 3, 5)),
    "uint8 of filters": ("uint8", 0, (5, 3, 3, 2)),
    "int8 of filters": ("int8", 0, (6, 2, 3, 3)),
    "int8 of channels": ("int8", 1, (3, 4, 5)),
    "uint8 of columns": ("uint8", 2, (2, 5, 4)),
    "int4 of rows": ("int4", 0, (7, 12)),
}
# Standard deviation of the numbers, in steps, relative to the number of integers: a part is outside of the range.
SPREAD = 0.5
# Minimum distance of a quotient from the middle of two integers, where libraries round to different sides.
MARGIN = 1e-3


def limits(dtype: str) -> tuple[int, int]:
    """Return the smallest and the largest integer of a type."""
    bits = int(dtype.lstrip("uint"))
    return (0, 2**bits - 1) if dtype.startswith("u") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def record(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a case."""
    dtype, axis, shape = CASES[name]
    low, high = limits(dtype)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    count = () if axis is None else (shape[axis],)
    scale = rng.uniform(0.5, 2, count).astype(np.float32) / np.float32(high - low)
    # Positive: the gradient of the learnable function per tensor truncates zero_point + 0.5 toward zero.
    zero_point = (low + high + 1) // 2 + rng.integers(0, high - low, count, endpoint=True) // 8
    wide = [1 if k != axis else -1 for k in range(len(shape))]
    steps = rng.normal(0, SPREAD * (high - low), shape)
    halves = np.abs(steps - np.floor(steps) - 0.5) < MARGIN
    x = ((steps + halves * 3 * MARGIN) * scale.reshape(wide if count else ())).astype(np.float32)
    g = rng.standard_normal(shape).astype(np.float32)
    arrays = {"x": x, "scale": scale, "zero_point": zero_point, "g": g}

    t, gradient = torch.tensor(x, requires_grad=True), torch.tensor(g)
    zeros = torch.tensor(zero_point, dtype=torch.int32)
    if axis is None:
        y = torch.fake_quantize_per_tensor_affine(t, torch.tensor(scale), zeros, low, high)
    else:
        y = torch.fake_quantize_per_channel_affine(t, torch.tensor(scale), zeros, axis, low, high)
    y.backward(gradient)
    arrays |= {"y": y.detach().numpy(), "dx": t.grad.numpy()}

    t = torch.tensor(x, requires_grad=True)
    learned = torch.tensor(scale.reshape(-1), requires_grad=True)
    zeros = torch.tensor(zero_point.reshape(-1).astype(np.float32))
    if axis is None:
        y = torch._fake_quantize_learnable_per_tensor_affine(t, learned, zeros, low, high, 1.0)
    else:
        y = torch._fake_quantize_learnable_per_channel_affine(t, learned, zeros, axis, low, high, 1.0)
    y.backward(gradient)
    return arrays | {"learned_dx": t.grad.numpy(), "learned_dscale": learned.grad.numpy().reshape(count)}


def main() -> None:
    torch.set_num_threads(1)
    np.savez(sys.argv[1], **{f"{case}/{key}": value for case in CASES for key, value in record(case).items()})
    print("done")


if __name__ == "__main__":
    main()
