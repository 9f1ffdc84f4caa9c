"""Text dumps of a model at each stage of its compilation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ortrain import _ortrain
from ortrain._model_source import ModelLike, model_source
from ortrain._operators import OperatorLibrary, with_operators
from ortrain.errors import InvalidArgumentError

__all__ = ["dump"]


def dump(
    model: ModelLike,
    stage: str = "graph",
    shapes: Mapping[str, Sequence[int]] | None = None,
    *,
    device: str | None = None,
    operators: OperatorLibrary | None = None,
) -> str:
    """Return a model as text, at one stage of its compilation.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        stage: the form of the model: ``"onnx"``: as read, in the text syntax of ONNX; ``"graph"``: with the newest
            operator versions and all types; ``"gradient"``: the same with the gradients of its first output;
            ``"lowered"``: each program before the first compiler pass; the name of a pass, such as ``"fusion"``: each
            program after that pass; ``"passes"``: a description of each pass, with the amount of its changes in each
            program; ``"program"``: the schedule that runs (segments, instructions, offsets, peak bytes);
            ``"memory"``: the offset, the bytes and the live range of each buffer of the arena; ``"cpu_kernels"``: the
            kernel that this processor selects for each instruction; ``"kernels"``: each program as GPU launches, with
            the WGSL of their kernels; ``"cuda_kernels"``: the same with CUDA C.
        shapes: sizes of inputs with open dimensions, by name, for the stages of programs. A dimension without a size
            is 1.
        device: the GPU of the stage ``"kernels"``: ``"vulkan"``, ``"metal"``, ``"dx12"`` or ``"webgpu"``, which run the
            same kernels, or ``"cuda"``, which selects the stage ``"cuda_kernels"``. This machine need not have the GPU.
        operators: operators and gradients of your own.

    Raises:
        InvalidArgumentError: for an unknown stage or input, a wrong rank, a device without kernels, and a device
            for another stage.
        InvalidModelError, UnsupportedError: if the model cannot be compiled up to the stage.

    >>> import ortrain
    >>> print(ortrain.dump(ortrain.examples.perceptron()))
    graph "perceptron"
      input    x: float32[batch, 64]
      constant fc1.weight: float32[96, 64]
      constant fc1.bias: float32[96]
      constant fc2.weight: float32[10, 96]
      constant fc2.bias: float32[10]
      fc1: float32[batch, 96] = Gemm(x, fc1.weight, fc1.bias) {transB=1}
      hidden: float32[batch, 96] = Relu(fc1)
      logits: float32[batch, 10] = Gemm(hidden, fc2.weight, fc2.bias) {transB=1}
      output   logits: float32[batch, 10]
    <BLANKLINE>
    >>> "MatMul" in ortrain.dump(ortrain.examples.perceptron(), "program", {"x": [32, 64]})
    True
    >>> passes = ("compact_pool_indices", "fusion")
    >>> before, after = (ortrain.dump(ortrain.examples.perceptron(), name) for name in passes)
    >>> before.count("Map"), after.count("Map")  # the activation is computed where the product is made
    (1, 0)
    >>> "@compute" in ortrain.dump(ortrain.examples.perceptron(), "kernels", {"x": [32, 64]})
    True
    >>> "__global__" in ortrain.dump(ortrain.examples.perceptron(), "kernels", {"x": [32, 64]}, device="cuda")
    True

    """
    if device is not None:
        stage = _stage_for(device, stage)
    input_shapes = {name: [int(size) for size in sizes] for name, sizes in (shapes or {}).items()}
    return _ortrain.dump(with_operators(model_source(model), operators), stage, input_shapes)


def _stage_for(device: str, stage: str) -> str:
    """Return the stage of kernels for a device."""
    from ortrain._devices import is_cuda, is_gpu

    if stage != "kernels":
        raise InvalidArgumentError(f'a device requires the stage "kernels", got the stage {stage!r}')
    if is_cuda(device):
        return "cuda_kernels"
    if not is_gpu(device):
        raise InvalidArgumentError(
            f"device must be 'cuda', 'vulkan', 'metal', 'dx12' or 'webgpu' for the stage of kernels, got {device!r}"
        )
    return stage
