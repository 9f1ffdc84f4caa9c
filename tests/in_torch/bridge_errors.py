"""Errors of wrapped models, each with its text."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bridge import dropout, embedding, model_of, normalization, perceptron, refused
from onnx import TensorProto, helper

import ortrain
from ortrain.torch import as_module


def invalid(call: Callable[[], Any], text: str) -> None:
    refused(call, ortrain.InvalidArgumentError, text)


def check_inputs_that_do_not_fit() -> None:
    net = as_module(perceptron(np.float32))
    x = torch.zeros(2, 5)
    invalid(lambda: net(x.numpy()), "input 'x' must be a torch.Tensor, got ndarray; torch.as_tensor makes one")
    invalid(
        lambda: net(x.double()),
        "input 'x' is torch.float64, but the model has torch.float32; convert it with to(torch.float32)",
    )
    invalid(lambda: net(x.long()), "input 'x' is torch.int64, but the model has torch.float32")
    invalid(
        lambda: net(x.to("meta")),
        "input 'x' is on device 'meta', but the model runs on the CPU; convert it with to('cpu')",
    )
    invalid(lambda: net(x.to_sparse()), "input 'x' has the layout torch.sparse_coo; convert it with to_dense()")
    invalid(lambda: net(torch.zeros(2, 6)), 'input "x" must be float32[batch, 5], got float32[2, 6]')
    invalid(lambda: net(torch.zeros(5)), 'input "x" must be float32[batch, 5], got float32[5]')
    invalid(lambda: net(torch.zeros(2, 6, requires_grad=True)), 'input "x"')
    with torch.no_grad():
        invalid(lambda: net(torch.zeros(2, 6)), 'input "x"')
    # The module did not change.
    assert net(x).shape == (2, 3)


def check_another_number_of_inputs() -> None:
    net = as_module(embedding())
    ids, scale = torch.tensor([1]), torch.ones(4, dtype=torch.float64)
    invalid(lambda: net(), "expected 2 inputs (ids, scale); missing: ids, scale")
    invalid(lambda: net(ids), "expected 2 inputs (ids, scale); missing: scale")
    invalid(lambda: net(ids, scale, scale), "expected 2 inputs (ids, scale), got 3")
    invalid(
        lambda: net(ids, scales=scale),
        "expected 2 inputs (ids, scale), got an input 'scales'; did you mean 'scale'?",
    )
    invalid(lambda: net(ids, scale, ids=ids), "input 'ids' is given twice: by position and by name")
    invalid(lambda: as_module(perceptron())(), "expected 1 input (x); missing: x")
    invalid(lambda: net(torch.tensor([9]), scale), "index")


def check_parameters_that_were_moved() -> None:
    net = as_module(perceptron(np.float32))
    x = torch.zeros(2, 5)
    net.half()
    text = (
        "parameter 'fc1.weight' is torch.float16, but the model has torch.float32; call the module's to(torch.float32)"
    )
    invalid(lambda: net(x), text)
    invalid(net.to_onnx, text)
    net.float()
    assert net(x).shape == (2, 3)
    net.to("meta")
    invalid(lambda: net(x), "parameter 'fc1.weight' is on device 'meta', but the model runs on the CPU")
    net = as_module(normalization())
    net.get_submodule("bn").double()
    invalid(lambda: net(torch.zeros(2, 3)), "statistic 'bn.running_mean' is torch.float64")
    net.get_submodule("bn").float()
    net.get_submodule("bn")._buffers["running_var"] = torch.ones(4, dtype=torch.float64)
    for mode in (net.train(), net.eval()):
        text = "statistic 'bn.running_var' is torch.float64"
        invalid(lambda mode=mode: mode(torch.zeros(2, 3, requires_grad=True)), text)
    # A parameter of another shape.
    net = as_module(perceptron(np.float32))
    net.get_parameter("fc2.bias").data = torch.zeros(4)
    invalid(lambda: net(x), '"fc2.bias" should be float32[3], but it is float32[4]')
    refused(
        lambda: net.load_state_dict(as_module(perceptron(names=("fc1.weight", "fc1.bias", "w", "b"))).state_dict()),
        RuntimeError,
        'Missing key(s) in state_dict: "fc2.weight"',
    )


def check_closed_modules() -> None:
    net = as_module(perceptron(np.float32))
    net.close()
    text = "this module is closed; make another one with ortrain.torch.as_module"
    for call in (lambda: net(torch.zeros(2, 5)), net.to_onnx, lambda: net.eval()(torch.zeros(2, 5))):
        refused(call, ortrain.OrtrainError, text)


def check_names_of_weights() -> None:
    model = perceptron(np.float32)
    invalid(
        lambda: as_module(model, wrt=["fc2.wieght"]),
        "wrt: 'fc2.wieght' matches no initializer; did you mean 'fc2.weight'?",
    )
    invalid(lambda: as_module(model, wrt="fc9.*"), "wrt: 'fc9.*' matches no initializer")
    refused(lambda: as_module(model, wrt=[3]), TypeError, "wrt must contain names of values, of type str, got int")
    refused(lambda: as_module(model, wrt=3), TypeError, "wrt must be a set of names, got int")
    invalid(
        lambda: as_module(normalization(), wrt=["bn.running_mean"]),
        "wrt: 'bn.running_mean' is a running statistic, which has no gradient; remove the name",
    )
    shaped = model_of(
        [helper.make_node("Mul", ["x", "w"], ["h"]), helper.make_node("Reshape", ["h", "shape"], ["y"])],
        {"x": (TensorProto.FLOAT, [4])},
        {"y": (TensorProto.FLOAT, [2, 2])},
        {"w": np.ones(4, np.float32), "shape": np.asarray([2, 2])},
    )
    invalid(lambda: as_module(shaped, wrt=["shape"]), "wrt: no gradient reaches 'shape': it is not a float")
    invalid(
        lambda: as_module(perceptron(names=(".w", "b", "c", "d"))),
        "PyTorch cannot use the name '.w', which begins with a dot; rename the parameter",
    )


def check_models_that_do_not_fit() -> None:
    refused(lambda: as_module(3), TypeError, "a model must be a path, bytes or an onnx.ModelProto, got int")
    refused(lambda: as_module(b"model"), ortrain.InvalidModelError, "not an ONNX model")
    refused(lambda: as_module("nowhere.onnx"), ortrain.NoSuchFileError, "there is no file nowhere.onnx")
    stuck = model_of(
        [helper.make_node("Mul", ["x", "w"], ["h"]), helper.make_node("Unheard", ["h"], ["y"], name="last")],
        {"x": (TensorProto.FLOAT, [2, 2])},
        {"y": (TensorProto.FLOAT, [2, 2])},
        {"w": np.ones((2, 2), np.float32)},
    )
    refused(lambda: as_module(stuck), ortrain.UnsupportedError, "Unheard")
    rounds = model_of(
        [helper.make_node("Shape", ["x"], ["y"])],
        {"x": (TensorProto.FLOAT, ["n"])},
        {"y": (TensorProto.INT64, [1])},
        {},
    )
    refused(lambda: as_module(rounds), ortrain.InvalidModelError, "it has no float output")
    invalid(
        lambda: as_module(perceptron(), batch_norm="on"),
        "batch_norm must be one of 'auto', 'train', 'freeze', got 'on'",
    )
    refused(lambda: as_module(perceptron(), seed=1.5), TypeError, "seed must be an integer, got float")
    net = as_module(perceptron())
    with tempfile.TemporaryDirectory() as folder:
        refused(lambda: net.to_onnx(Path(folder) / "sub" / "model.onnx"), ortrain.NoSuchFileError, "there is no folder")
    refused(lambda: net.get_parameter("fc1.wait"), AttributeError, "the module has no parameter 'fc1.wait'")
    refused(lambda: net.get_buffer("fc1.weight"), AttributeError, "the module has no buffer 'fc1.weight'")
    refused(lambda: net.get_submodule("fc3"), AttributeError, "no name that begins with 'fc3'")


def check_errors_of_pytorch() -> None:
    """Weights that change between the two passes, and a second backward pass without a retained graph, are errors."""
    net = as_module(perceptron(np.float32))
    x = torch.zeros(2, 5, requires_grad=True)
    y = net(x).sum()
    with torch.no_grad():
        net.get_parameter("fc1.weight").add_(1)
    refused(y.backward, RuntimeError, "modified by an inplace operation")
    z = x * 1
    y = net(z).sum()
    z.detach().add_(1)
    refused(y.backward, RuntimeError, "modified by an inplace operation")
    y = net(x).sum()
    y.backward()
    refused(y.backward, RuntimeError, "Trying to backward through the graph a second time")


def create_graph(net: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient with a graph for its own gradient."""
    (found,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return found


def check_where_no_second_order_exists() -> None:
    for model, shape in ((dropout(), (2, 64)), (normalization(), (2, 3))):
        net, x = as_module(model), torch.ones(shape, requires_grad=True)
        refused(
            lambda net=net, x=x: create_graph(net, x),
            ortrain.UnsupportedError,
            "this backward pass has no second-order gradient: in training mode",
        )
        assert create_graph(net.eval(), x).shape == shape
    # The gradient can be trained, but no operator of this old opset can express it.
    pool = model_of(
        [helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2], strides=[1])],
        {"x": (TensorProto.FLOAT, [1, 1, 4])},
        {"y": (TensorProto.FLOAT, [1, 1, 3])},
        {},
        opset=8,
    )
    net, x = as_module(pool), torch.arange(4.0).reshape(1, 1, 4).requires_grad_()
    assert torch.autograd.grad(net(x).sum(), x)[0].flatten().tolist() == [0, 1, 1, 1]
    refused(lambda: create_graph(net, x), ortrain.UnsupportedError, "this backward pass has no second-order gradient")
    refused(lambda: create_graph(net, x), ortrain.UnsupportedError, "(ScatterElements)")
    x = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    first = create_graph(as_module(perceptron()), x)
    refused(
        lambda: torch.autograd.grad(first.sum(), x, create_graph=True),
        ortrain.UnsupportedError,
        "third-order gradients are not supported",
    )
