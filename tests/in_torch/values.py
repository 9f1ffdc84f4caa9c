"""Values of ortrain and PyTorch tensors share memory: ``values.py FOLDER``, with ortrain in FOLDER."""

from __future__ import annotations

import sys

import torch

sys.path.insert(0, sys.argv[1])

from ortrain import OrtValue, UnsupportedError
from ortrain.capi import OrtDevice, OrtValueVector

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)
shared = 0
for dtype in DTYPES:
    tensor = torch.ones((2, 3), dtype=dtype)
    for value in (OrtValue.from_dlpack(tensor), OrtValue.from_dlpack(torch.utils.dlpack.to_dlpack(tensor))):
        assert value.data_ptr() == tensor.data_ptr()
        assert value.shape() == [2, 3]
    back = torch.from_dlpack(value)
    assert back.dtype == dtype
    back[1, 2] = 0
    assert not tensor[1, 2]
    shared += back.data_ptr() == tensor.data_ptr()

vector = OrtValueVector()
tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor([True, False])]
vector.push_back_batch(
    tensors,
    [tensor.data_ptr() for tensor in tensors],
    [1, 9],
    [list(tensor.shape) for tensor in tensors],
    [OrtDevice(OrtDevice.cpu(), OrtDevice.default_memory(), 0)] * 2,
)
assert vector.bool_tensor_indices() == [1]
taken = vector.to_dlpacks(torch.utils.dlpack.from_dlpack)
assert [tensor.dtype for tensor in taken] == [torch.float32, torch.uint8]
assert [tensor.data_ptr() for tensor in taken] == [tensor.data_ptr() for tensor in tensors]
del vector, tensors
assert taken[0].sum() == 15

try:
    OrtValue.from_dlpack(torch.zeros(3, device="meta"))
except (UnsupportedError, ValueError, BufferError, RuntimeError):
    pass
else:
    raise AssertionError("a tensor without memory was accepted")
print(shared)
