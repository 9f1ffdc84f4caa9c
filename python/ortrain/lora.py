"""Low-rank adapters (LoRA): training of a large model through two small factors beside each weight.

A layer ``y = W x`` becomes ``y = W x + scale * B A x``. ``A`` has the shape ``[rank, inputs]``, ``B`` has the shape
``[outputs, rank]``, and ``scale`` is ``alpha / rank``. ``W`` is frozen: it has no gradient and no optimizer values, and
checkpoints omit it. (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.)

The adapter ``name`` of the weight ``w`` consists of the initializers ``w.lora_A.name``, ``w.lora_B.name`` and
``w.lora_scale.name``. All functions take a model before :func:`~ortrain.artifacts.generate_artifacts` and a trained,
exported model alike.

>>> import ortrain
>>> model, description = ortrain.lora.add(ortrain.examples.perceptron(), rank=4)
>>> print(description)
weight      kind    inputs  outputs  rank  parameters
fc1.weight  linear      64       96     4         640
>>> tuned = ortrain.Model(model, loss="cross_entropy")
>>> history = tuned.fit(x, labels, epochs=2)
>>> tuned.export("adapted.onnx")
>>> ortrain.lora.merge("adapted.onnx", output="merged.onnx")
>>> ortrain.lora.save_adapter("adapted.onnx", "adapter")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, overload

from ortrain import _files, _ortrain
from ortrain._adapter_options import Texts, core_options
from ortrain._model_source import ModelLike, PathLike, model_source
from ortrain._records import record_of

if TYPE_CHECKING:
    import onnx

__all__ = [
    "AdaptedLayer",
    "Description",
    "MergedWeight",
    "activate",
    "active",
    "adapters",
    "add",
    "inspect",
    "load_adapter",
    "merge",
    "remove",
    "save_adapter",
    "unmerge",
    "with_row_adapters",
]


@dataclass(frozen=True)
class AdaptedLayer:
    """Layer with an adapter.

    >>> import ortrain
    >>> _, description = ortrain.lora.add(ortrain.examples.perceptron(), rank=4)
    >>> layer = description.layers[0]
    >>> layer.weight, layer.rank, layer.bytes
    ('fc1.weight', 4, 2560)
    """

    adapter: str
    """Name of the adapter."""
    weight: str
    """Name of the weight: of the constant before any Transpose, Cast or Reshape."""
    node: str
    """Name of the node; of its output if the node has no name."""
    kind: Literal["linear", "embedding", "convolution", "recurrent"]
    """Kind of the layer."""
    inputs: int
    """Number of input features, of input channels, or of rows of an embedding."""
    outputs: int
    """Number of output features, of output channels, or of columns of an embedding; gates times hidden features."""
    rank: int
    """Rank of the adapter."""
    parameters: int
    """Number of trained elements."""
    bytes: int
    """Size of the trained elements in bytes."""


@dataclass(frozen=True)
class Description:
    """Layers with adapters. Its text is a table.

    >>> import ortrain
    >>> description = ortrain.lora.inspect(ortrain.examples.perceptron(), targets=["fc1", "fc2"])
    >>> [layer.weight for layer in description.layers], description.parameters
    (['fc1.weight', 'fc2.weight'], 2128)
    """

    layers: tuple[AdaptedLayer, ...]
    """Layers in the order of the nodes. Layers that share a weight share its factors."""

    @property
    def parameters(self) -> int:
        """Number of trained elements; shared factors count once.

        >>> import ortrain
        >>> ortrain.lora.inspect(ortrain.examples.perceptron(), rank=1).parameters
        160
        """
        return sum(layer.parameters for layer in self._distinct())

    @property
    def bytes(self) -> int:
        """Size of all factors in bytes; shared factors count once.

        >>> import ortrain
        >>> ortrain.lora.inspect(ortrain.examples.perceptron(), rank=1).bytes
        640
        """
        return sum(layer.bytes for layer in self._distinct())

    def _distinct(self) -> list[AdaptedLayer]:
        return list({(layer.adapter, layer.weight): layer for layer in self.layers}.values())

    def __str__(self) -> str:
        columns = ["weight", "kind", "inputs", "outputs", "rank", "parameters"]
        if len({layer.adapter for layer in self.layers}) > 1:
            columns.insert(0, "adapter")
        rows = [columns, *([str(getattr(layer, name)) for name in columns] for layer in self.layers)]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        texts = ("adapter", "weight", "kind")
        lines = [
            "  ".join(
                cell.ljust(width) if name in texts else cell.rjust(width)
                for cell, width, name in zip(row, widths, columns, strict=True)
            )
            for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


@overload
def add(
    model: ModelLike,
    *,
    rank: int = ...,
    alpha: float | None = ...,
    targets: Texts = ...,
    exclude: Texts = ...,
    dropout: float = ...,
    init: Literal["kaiming", "gaussian", "pissa", "olora"] = ...,
    use_rslora: bool = ...,
    use_dora: bool = ...,
    bias: Literal["none", "all", "lora_only"] = ...,
    train_also: Texts = ...,
    base: Literal["keep", "int8", "int4", "nf4"] = ...,
    name: str = ...,
    seed: int = ...,
    output: None = None,
) -> tuple[onnx.ModelProto, Description]: ...
@overload
def add(
    model: ModelLike,
    *,
    rank: int = ...,
    alpha: float | None = ...,
    targets: Texts = ...,
    exclude: Texts = ...,
    dropout: float = ...,
    init: Literal["kaiming", "gaussian", "pissa", "olora"] = ...,
    use_rslora: bool = ...,
    use_dora: bool = ...,
    bias: Literal["none", "all", "lora_only"] = ...,
    train_also: Texts = ...,
    base: Literal["keep", "int8", "int4", "nf4"] = ...,
    name: str = ...,
    seed: int = ...,
    output: PathLike,
    embed: bool = ...,
) -> tuple[None, Description]: ...
def add(
    model: ModelLike,
    *,
    rank: int = 8,
    alpha: float | None = None,
    targets: Texts = "auto",
    exclude: Texts = (),
    dropout: float = 0.0,
    init: Literal["kaiming", "gaussian", "pissa", "olora"] = "kaiming",
    use_rslora: bool = False,
    use_dora: bool = False,
    bias: Literal["none", "all", "lora_only"] = "none",
    train_also: Texts = (),
    base: Literal["keep", "int8", "int4", "nf4"] = "keep",
    name: str = "default",
    seed: int = 0,
    output: PathLike | None = None,
    embed: bool = False,
) -> tuple[onnx.ModelProto | None, Description]:
    """Return a model with an adapter beside each selected weight, and a description of the adapter.

    The model computes the same as before, because ``B`` is zero; for an embedding ``A`` is zero. With ``init="pissa"``
    or ``"olora"`` the difference is a rounding error. By default, factors of adapters, their biases and ``train_also``
    are trained, and all other parameters of the new model are frozen. A model may have several adapters with different
    names. Their results are added.

    A recurrent layer has adapters for its weights ``W`` of the inputs and ``R`` of the states. The layer reads
    ``W[d] + scale * B[d] A[d]`` for each direction ``d``. ``A`` has the shape ``[directions, rank, inputs]``, and ``B``
    has the shape ``[directions, gates * hidden, rank]``. Each gate is a block of rows of ``B``. PEFT has no such form.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``. Its opset is at least 7.
        rank: the rank: from 1 to the rank of the smallest selected weight. For a convolution with groups it is a
            multiple of their number.
        alpha: the numerator of the scale of the adapter; ``None`` for the rank, so that the scale is 1.
        targets: ``"auto"`` for all linear layers but the last one, or names and patterns (``*``, ``?``, ``[...]``) of
            weights, nodes or modules. The last parts of a name are enough (``"q_proj"``), as in PEFT's
            ``target_modules``. A layer is a MatMul, Gemm, FusedMatMul, MatMulNBits, MatMulBnb4, Conv, Gather, LSTM,
            GRU or RNN with a constant weight. Nodes such as Transpose, Cast, Reshape and DequantizeLinear may be
            between the constant and the layer.
        exclude: names and patterns of layers without an adapter.
        dropout: the share of the inputs of ``A`` that a training step sets to zero, from 0 to less than 1. It needs
            opset 12, and embeddings and recurrent layers have none.
        init: the values of ``A``: ``"kaiming"`` for a uniform distribution from ``-1 / sqrt(inputs)`` to
            ``1 / sqrt(inputs)``, or ``"gaussian"`` for a normal distribution of standard deviation ``1 / rank``.
            These are the distributions of PEFT. With ``"pissa"`` and ``"olora"`` the adapter takes a part of the
            weight, and the weight in the model becomes the rest ``W - scale * B A``. ``"pissa"`` takes the largest
            singular values (Meng et al., "PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large
            Language Models", 2024); ``"olora"`` takes the first columns of a QR factorization (Büyükakyüz, "OLoRA:
            Orthonormal Low-Rank Adaptation of Large Language Models", 2024). Both need linear layers with weights of
            floats, and no other reader of the weights. For an embedding, ``B`` has a standard normal distribution for
            every method.
        use_rslora: True to divide ``alpha`` by the square root of the rank (Kalajdzievski, "A Rank Stabilization
            Scaling Factor for Fine-Tuning with LoRA", 2023).
        use_dora: True to train the length of each row of ``W + scale * B A``, too (Liu et al., "DoRA: Weight-Decomposed
            Low-Rank Adaptation", 2024). The weights must be floats, and dropout must be 0.
        bias: the trained biases, as in PEFT: ``"none"``, ``"lora_only"`` for the biases of adapted layers, or ``"all"``
            for the biases of all layers and other parameters with the name ``bias``. Only one adapter of a model can
            have biases.
        train_also: names and patterns of other parameters that are trained, such as ``"classifier.*"``.
        base: the form of the adapted weights of linear layers (Dettmers et al., "QLoRA: Efficient Finetuning of
            Quantized LLMs", 2023). ``"keep"`` leaves them as they are. ``"int4"`` makes them integers of 4 bits in
            blocks of 32 (MatMulNBits). ``"nf4"`` makes them 4-bit normal floats in blocks of 64 (MatMulBnb4).
            ``"int8"`` makes them integers of 8 bits with a scale for each output (DequantizeLinear). onnxruntime's
            quantizers write the same bytes. Weights that other nodes read, and weights of integers, stay as they are.
            The weights must be float32, float16 or bfloat16; ``"int8"`` needs opset 13, or 19 for 16-bit floats.
        name: the name of the adapter: letters, digits, ``_`` and ``-``.
        seed: the seed of the initial values, which are the same on every machine.
        output: a path to write the model to; the first result is then ``None``. Without it, the function needs the
            package ``onnx``. If the files of the base are in the folder of ``output`` or below, they are not written
            again: constants of the new file refer to them. It has their SHA-1, and ortrain compares it before it uses
            the model. The base is mapped into memory: while the function or a program uses the model, no process may
            write to these files or truncate them. ONNX readers accept no files outside the folder of a model, so that a
            new file elsewhere has the base, too.
        embed: True to write the base into ``output``, up to 2 GiB.

    Raises:
        InvalidArgumentError: for an option outside of its range, a rank that a weight cannot have, and a second adapter
            of one name. Also for a name without a match; the message has the nearest name. Also for a layer that cannot
            have the values of ``init``.
        InvalidModelError, UnsupportedError: if the model cannot be read.
        NoSuchFileError, OrtrainError: if a file does not exist or cannot be written.
        TypeError: for arguments of other types.

    >>> import ortrain
    >>> model, description = ortrain.lora.add(ortrain.examples.perceptron(), rank=2, targets="fc2")
    >>> [info.name for info in ortrain.inspect(model).parameters if info.role == "trained"]
    ['fc2.weight.lora_A.default', 'fc2.weight.lora_B.default']

    """
    options = core_options(
        rank=rank,
        alpha=alpha,
        targets=targets,
        exclude=exclude,
        dropout=dropout,
        init=init,
        use_rslora=use_rslora,
        use_dora=use_dora,
        bias=bias,
        train_also=train_also,
        base=base,
        name=name,
        seed=seed,
    )
    if output is not None:
        layers = _ortrain.add_adapter_to_file(model_source(model), options, os.fspath(output), bool(embed))
        return None, _description(layers)
    adapted, layers = _ortrain.add_adapter(model_source(model), options)
    return _result(adapted, None), _description(layers)


def inspect(
    model: ModelLike,
    *,
    rank: int = 8,
    targets: Texts = "auto",
    exclude: Texts = (),
) -> Description:
    """Return the layers that :func:`add` would give an adapter. :func:`adapters` lists present adapters.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        rank: the rank, as for :func:`add`.
        targets: the selected layers, as for :func:`add`. ``"*"`` selects every layer that can have an adapter.
        exclude: layers without an adapter, as for :func:`add`.

    Raises:
        InvalidArgumentError, InvalidModelError, UnsupportedError, NoSuchFileError, TypeError: as :func:`add`.

    >>> import ortrain
    >>> print(ortrain.lora.inspect(ortrain.examples.perceptron(), targets="*"))
    weight      kind    inputs  outputs  rank  parameters
    fc1.weight  linear      64       96     8        1280
    fc2.weight  linear      96       10     8         848

    """
    options = core_options(rank=rank, targets=targets, exclude=exclude)
    return _description(_ortrain.adapter_targets(model_source(model), options))


def adapters(model: ModelLike) -> Description:
    """Return the adapters of a model.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.

    Raises:
        InvalidModelError, UnsupportedError: if the model cannot be read.
        NoSuchFileError: if there is no such file.

    >>> import ortrain
    >>> model, description = ortrain.lora.add(ortrain.examples.perceptron(), rank=4, name="style")
    >>> ortrain.lora.adapters(model) == description
    True

    """
    return _description(_ortrain.present_adapters(model_source(model)))


@overload
def remove(model: ModelLike, name: str = ..., *, output: None = None) -> onnx.ModelProto: ...
@overload
def remove(model: ModelLike, name: str = ..., *, output: PathLike) -> None: ...
def remove(model: ModelLike, name: str = "default", *, output: PathLike | None = None) -> onnx.ModelProto | None:
    """Return a model without an adapter: the base with its other adapters.

    After ``init="pissa"`` and ``"olora"`` the weights of the base lack the part that the adapter took.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        name: the name of the adapter.
        output: a path to write the model to; the result is then ``None``.

    Raises:
        InvalidArgumentError: if the model has no adapter of this name.
        InvalidModelError, UnsupportedError: if the model cannot be read.
        NoSuchFileError, OrtrainError: if a file does not exist or cannot be written.

    >>> import ortrain
    >>> model, _ = ortrain.lora.add(ortrain.examples.perceptron())
    >>> base = ortrain.lora.remove(model)
    >>> ortrain.lora.adapters(base).layers
    ()

    """
    return _result(_ortrain.remove_adapter(model_source(model), name), output)


@dataclass(frozen=True)
class MergedWeight:
    """Weight of a merge, with its differences from the exact sum of the weight and its adapters.

    >>> import ortrain
    >>> model, _ = ortrain.lora.add(ortrain.examples.perceptron(), base="int4")
    >>> _ = ortrain.lora.merge(model, report=print)
    MergedWeight(weight='fc1.weight_Q4', largest_error=0.0, rms_error=0.0)
    """

    weight: str
    """Name of the weight."""
    largest_error: float
    """Largest absolute difference of an element."""
    rms_error: float
    """Root of the mean of the squares of the differences."""


Weights: TypeAlias = str | Sequence[str] | Mapping[str, float] | None
Report: TypeAlias = Callable[[MergedWeight], object] | None


@overload
def merge(
    model: ModelLike, weights: Weights = ..., *, report: Report = ..., output: None = None
) -> onnx.ModelProto: ...
@overload
def merge(model: ModelLike, weights: Weights = ..., *, report: Report = ..., output: PathLike) -> None: ...
def merge(
    model: ModelLike,
    weights: Weights = None,
    *,
    report: Report = None,
    output: PathLike | None = None,
) -> onnx.ModelProto | None:
    """Return a model in which adapters are added to their weights: ``W + scale * B A``. Each sum is rounded once.

    The merged adapters are no longer in the model. A model without adapters computes as fast as its base.

    A quantized weight (MatMulNBits, MatMulBnb4, DequantizeLinear) is quantized again, with the same block size and the
    same kind of zero points. Blocks that the adapters do not change keep their bits. The weight of a convolution with
    groups becomes the larger weight of a convolution without groups, because ``A`` reads all channels.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        weights: the merged adapters: ``None`` for all, a name, names, or a dict with a factor for each adapter, such as
            ``{"style": 0.7, "facts": 0.3}``. Other adapters stay in the model.
        report: a function that receives a :class:`MergedWeight` for each weight, in the order of the nodes.
        output: a path to write the model to; the result is then ``None``.

    Raises:
        InvalidArgumentError: if the model has no adapter of a name, or a node without the adapter reads the weight.
            Also if the layout of a quantized weight is unknown, and for a factor of DoRA other than 1.
        InvalidModelError, UnsupportedError: if the model cannot be read.
        NoSuchFileError, OrtrainError: if a file does not exist or cannot be written.

    >>> import ortrain
    >>> model, _ = ortrain.lora.add(ortrain.examples.perceptron())
    >>> merged = ortrain.lora.merge(model, {"default": 0.5})
    >>> len(merged.graph.node) == len(onnx.load(ortrain.examples.perceptron()).graph.node)
    True

    """
    source = model_source(model)
    encoded, errors = _ortrain.merge_adapters(source, _weights(source, weights))
    if report is not None:
        for error in errors:
            report(MergedWeight(*error))
    return _result(encoded, output)


@overload
def unmerge(
    merged: ModelLike, adapted: ModelLike, weights: Weights = ..., *, output: None = None
) -> onnx.ModelProto: ...
@overload
def unmerge(merged: ModelLike, adapted: ModelLike, weights: Weights = ..., *, output: PathLike) -> None: ...
def unmerge(
    merged: ModelLike,
    adapted: ModelLike,
    weights: Weights = None,
    *,
    output: PathLike | None = None,
) -> onnx.ModelProto | None:
    """Return the model before a merge, with the bits of the base.

    The weights of the base come from ``adapted``. ``merged`` is compared with the merge of ``adapted`` bit by bit.

    Args:
        merged: the result of :func:`merge`: a path, the bytes of a model, or an ``onnx.ModelProto``.
        adapted: the model that was merged, in one of the same forms.
        weights: the merged adapters, as for :func:`merge`. Other adapters of ``adapted`` stay in the result.
        output: a path to write the model to; the result is then ``None``.

    Raises:
        InvalidArgumentError: if ``merged`` is not the merge of ``adapted``; the message has the first weight that
            differs. Also as :func:`merge`.
        InvalidModelError, UnsupportedError: if a model cannot be read.
        NoSuchFileError, OrtrainError: if a file does not exist or cannot be written.

    >>> import ortrain
    >>> model, _ = ortrain.lora.add(ortrain.examples.perceptron())
    >>> ortrain.lora.unmerge(ortrain.lora.merge(model), model) == ortrain.lora.remove(model)
    True

    """
    source = model_source(adapted)
    return _result(_ortrain.unmerge_adapters(model_source(merged), source, _weights(source, weights)), output)


@overload
def activate(
    model: ModelLike, weights: str | Sequence[str] | Mapping[str, float] | None = ..., *, output: None = None
) -> onnx.ModelProto: ...
@overload
def activate(
    model: ModelLike, weights: str | Sequence[str] | Mapping[str, float] | None = ..., *, output: PathLike
) -> None: ...
def activate(
    model: ModelLike,
    weights: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    output: PathLike | None = None,
) -> onnx.ModelProto | None:
    """Return a model in which each adapter has a weight: the factor of its contribution.

    Only the scales ``w.lora_scale.name`` change, and the metadata keeps the original ones: a weight of 1 restores the
    bits of the model. An adapter with the weight 0 is switched off: it has no effect, and is not trained.
    :func:`save_adapter` writes the original scales; :func:`merge` uses the weights.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.
        weights: a name or names of adapters with the weight 1, or a dict with the weight of each, such as
            ``{"style": 0.7, "facts": 0.3}``. Other adapters get the weight 0. ``None`` gives all the weight 1.
        output: a path to write the model to; the result is then ``None``.

    Raises:
        InvalidArgumentError: if the model has no adapter of a name, a weight is not finite, or an adapter of DoRA gets
            a weight other than 1.
        InvalidModelError, UnsupportedError: if the model cannot be read.
        NoSuchFileError, OrtrainError: if a file does not exist or cannot be written.

    >>> import ortrain
    >>> model, _ = ortrain.lora.add(ortrain.examples.perceptron(), name="style")
    >>> weaker = ortrain.lora.activate(model, {"style": 0.7})
    >>> ortrain.lora.active(weaker)
    {'style': 0.7}
    >>> ortrain.lora.activate(weaker) == model
    True

    """
    source = model_source(model)
    return _result(_ortrain.activate_adapters(source, _weights(source, weights)), output)


def active(model: ModelLike) -> dict[str, float]:
    """Return the weight of each adapter of a model, in alphabetical order. Without :func:`activate` it is 1.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``.

    Raises:
        InvalidModelError, UnsupportedError: if the model cannot be read.
        NoSuchFileError: if there is no such file.

    >>> import ortrain
    >>> model, _ = ortrain.lora.add(ortrain.examples.perceptron(), name="style")
    >>> ortrain.lora.active(model)
    {'style': 1.0}

    """
    return dict(_ortrain.active_adapters(model_source(model)))


@overload
def with_row_adapters(model: ModelLike, names: Sequence[str] = ..., *, output: None = None) -> onnx.ModelProto: ...
@overload
def with_row_adapters(model: ModelLike, names: Sequence[str] = ..., *, output: PathLike) -> None: ...
def with_row_adapters(
    model: ModelLike, names: Sequence[str] = (), *, output: PathLike | None = None
) -> onnx.ModelProto | None:
    """Return a model that takes weights of its adapters for each row of a batch, as its last input.

    The input ``adapter_weights`` has the shape ``[rows, adapters]`` and the type float32. Each number is the factor of
    the contribution of an adapter to a row; the shape ``[1, adapters]`` is for all rows. A running
    :class:`~ortrain.InferenceSession` or :class:`~ortrain.api.Module`, or a session of onnxruntime, so switches and
    mixes adapters from one call to the next without a copy of any weight.

    The rows are the first axis of the first input. They may be another axis of the result of an adapted layer. If a
    layer merges rows and positions into one axis, the positions of a row must follow each other.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``, of opset 8 or later.
        names: the adapters, in the order of the columns; by default all, in alphabetical order. Adapters without a
            column stay as they are.
        output: a path to write the model to; the result is then ``None``.

    Raises:
        InvalidArgumentError: if the model has no adapter of a name, an adapter of DoRA, or a value of the name of the
            input. Also if the result of an adapted layer has no axis with the rows.
        InvalidModelError, UnsupportedError: if the model cannot be read.
        NoSuchFileError, OrtrainError: if a file does not exist or cannot be written.

    >>> import numpy as np
    >>> import ortrain
    >>> model, _ = ortrain.lora.add(ortrain.examples.perceptron(), name="style")
    >>> model, _ = ortrain.lora.add(model, name="facts")
    >>> model = ortrain.lora.with_row_adapters(model, ["style", "facts"])
    >>> session = ortrain.InferenceSession(model.SerializeToString())
    >>> weights = np.array([[1, 0], [0, 1], [0.7, 0.3]], np.float32)
    >>> session.run(None, {"x": x[:3], "adapter_weights": weights})[0].shape
    (3, 10)

    """
    names = [names] if isinstance(names, str) else list(names)
    return _result(_ortrain.row_adapters(model_source(model), names), output)


def save_adapter(
    model: ModelLike, folder: PathLike, *, name: str = "default", modules: Mapping[str, str] | None = None
) -> None:
    """Write an adapter in PEFT's files: ``adapter_model.safetensors`` and ``adapter_config.json``.

    The files have the biases that are trained beside the adapter, too.

    The tensor of the weight ``encoder.q.weight`` is ``base_model.model.encoder.q.lora_A.weight``. If an exporter gave
    the weight another name, such as ``onnx::MatMul_12``, the name of its node is the source of the module.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``, with the adapter.
        folder: the folder, which is created.
        name: the name of the adapter in the model.
        modules: the names of PyTorch's modules for weights with other names: ``{"weight": "module"}``.

    Raises:
        InvalidArgumentError: if the model has no adapter of this name, or no weight of a name in ``modules``.
        InvalidModelError, UnsupportedError: if the model cannot be read.
        NoSuchFileError, OrtrainError: if a file does not exist or cannot be written.

    >>> import ortrain
    >>> model, _ = ortrain.lora.add(ortrain.examples.perceptron())
    >>> ortrain.lora.save_adapter(model, "adapter")
    >>> from pathlib import Path
    >>> sorted(path.name for path in Path("adapter").iterdir())
    ['adapter_config.json', 'adapter_model.safetensors']

    """
    _ortrain.save_peft(model_source(model), os.fspath(folder), name, list((modules or {}).items()))


@overload
def load_adapter(
    model: ModelLike,
    folder: PathLike,
    *,
    name: str = ...,
    modules: Mapping[str, str] | None = ...,
    check_base: bool = ...,
    output: None = None,
) -> onnx.ModelProto: ...
@overload
def load_adapter(
    model: ModelLike,
    folder: PathLike,
    *,
    name: str = ...,
    modules: Mapping[str, str] | None = ...,
    check_base: bool = ...,
    output: PathLike,
    embed: bool = ...,
) -> None: ...
def load_adapter(
    model: ModelLike,
    folder: PathLike,
    *,
    name: str = "default",
    modules: Mapping[str, str] | None = None,
    check_base: bool = True,
    output: PathLike | None = None,
    embed: bool = False,
) -> onnx.ModelProto | None:
    """Return a model with an adapter from the files of :func:`save_adapter` or PEFT.

    An adapter of ``init="pissa"`` or ``"olora"`` belongs to the rest of the weights. The model is the original base,
    and the function subtracts the part of the initial adapter, as PEFT does.

    Args:
        model: a path, the bytes of a model, or an ``onnx.ModelProto``: the base, which may have other adapters.
        folder: the folder with ``adapter_model.safetensors`` and ``adapter_config.json``.
        name: the name of the adapter in the model.
        modules: the names of PyTorch's modules for weights with other names: ``{"weight": "module"}``.
        check_base: True to compare the adapted weights with the hash in a file of :func:`save_adapter`. False for
            another form of the base: quantized, transposed, or from another exporter. PEFT's own files have no hash.
        output: a path to write the model to; the result is then ``None``. Constants of the new file refer to the files
            of the base, as for :func:`add`.
        embed: True to write the base into ``output``, up to 2 GiB.

    Raises:
        InvalidArgumentError: if a module is no layer of the model, or its factors have other sizes or infinite values.
            Also if the adapter was trained on other weights, if the configuration has an unsupported or unknown field,
            or if the weights are a pickle.
        InvalidModelError, UnsupportedError: if the model cannot be read.
        NoSuchFileError, OrtrainError: if a file does not exist, is damaged, or cannot be written.

    >>> import ortrain
    >>> model, _ = ortrain.lora.add(ortrain.examples.perceptron())
    >>> ortrain.lora.save_adapter(model, "adapter")
    >>> ortrain.lora.load_adapter(ortrain.examples.perceptron(), "adapter") == model
    True

    """
    table = list((modules or {}).items())
    source = model_source(model)
    if output is not None:
        _ortrain.load_peft_to_file(source, os.fspath(folder), name, table, check_base, os.fspath(output), embed)
        return None
    return _result(_ortrain.load_peft(source, os.fspath(folder), name, table, check_base), None)


def _weights(source: bytes | str, weights: str | Sequence[str] | Mapping[str, float] | None) -> list[tuple[str, float]]:
    """Return the weights of adapters as pairs. Names have the weight 1, and ``None`` stands for all adapters."""
    if weights is None:
        weights = [name for name, _ in _ortrain.active_adapters(source)]
    elif isinstance(weights, str):
        weights = [weights]
    pairs = weights.items() if isinstance(weights, Mapping) else ((name, 1.0) for name in weights)
    return [(name, float(weight)) for name, weight in pairs]


def _description(layers: Sequence[_ortrain.AdaptedLayer]) -> Description:
    return Description(tuple(record_of(AdaptedLayer, layer) for layer in layers))


@overload
def _result(encoded: bytes, output: None) -> onnx.ModelProto: ...
@overload
def _result(encoded: bytes, output: PathLike | None) -> onnx.ModelProto | None: ...
def _result(encoded: bytes, output: PathLike | None) -> onnx.ModelProto | None:
    """Write an encoded model, or decode it if there is no path."""
    if output is not None:
        _files.write(output, encoded)
        return None
    import onnx

    return onnx.load_model_from_string(encoded)
