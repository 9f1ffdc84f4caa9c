"""Gradients of wrapped models, compared with finite differences and with PyTorch."""

from __future__ import annotations

import copy
import io
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nets
import numpy as np
import onnx
import torch
import training
from bridge import dropout, embedding, model_of, normalization, perceptron, relative_distance
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from ortrain.torch import as_module

# Tolerance relative to the largest gradient, and to a loss: float32 on both sides.
GRADIENT, LOSS = 1e-4, 1e-4
STEPS = 20
# Relative tolerance of one layer: numbers with 11 and 8 bits.
HALF = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


def checked(net: Any, *inputs: Tensor, second: bool = True) -> None:
    """Compare gradients of inputs and parameters with differences, and optionally second-order gradients."""
    names, values = zip(*net.named_parameters(), strict=True)

    def call(*tensors: Tensor) -> Any:
        given, parameters = tensors[: len(inputs)], tensors[len(inputs) :]
        outputs = functional_call(net, dict(zip(names, parameters, strict=True)), given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(output for output in outputs if output.is_floating_point())

    points = (*inputs, *(value.detach().clone().requires_grad_() for value in values))
    assert gradcheck(call, points)
    if second:
        assert gradgradcheck(call, points)


def check_gradcheck_of_a_perceptron() -> None:
    checked(as_module(perceptron()), torch.randn(2, 5, dtype=torch.float64, requires_grad=True))
    # An input without requires_grad has no gradient.
    checked(as_module(perceptron()), torch.randn(2, 5, dtype=torch.float64))


def check_gradcheck_of_several_outputs_and_an_integer_input() -> None:
    net = as_module(embedding())
    scale = torch.randn(4, dtype=torch.float64, requires_grad=True)
    checked(net, torch.tensor([1, 6, 1, 0]), scale)
    best, y, z = outputs = net(torch.tensor([1, 6]), scale)
    assert outputs._fields == ("best", "Y", "Z")
    assert (best.dtype, best.requires_grad, y.requires_grad, z.requires_grad) == (torch.int64, False, True, True)
    # Outputs without a contribution have zero gradients.
    (of_scale,) = torch.autograd.grad(z.sum(), scale)
    assert torch.allclose(of_scale, 2 * scale)
    # First-order gradients exist even if one output is unused.
    outputs = net(torch.tensor([1, 6]), scale)
    (of_scale,) = torch.autograd.grad(outputs.Z.sum(), scale, create_graph=True)
    (of_gradient,) = torch.autograd.grad(of_scale.sum(), scale)
    assert torch.allclose(of_gradient, torch.full_like(scale, 2))


def check_gradcheck_of_normalizations() -> None:
    net = as_module(normalization(np.float64))
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    checked(net, x, second=False)
    checked(net.eval(), x)


def exported(net: nn.Module, x: Tensor, *, dynamo: bool, mode: Any = torch.onnx.TrainingMode.PRESERVE) -> bytes:
    """Return the bytes of a model with the names of the network, from one of PyTorch's exporters."""
    logging.disable(logging.WARNING)
    net = copy.deepcopy(net)
    if dynamo:
        made = io.BytesIO()
        program = training.export(net, x, Path(), dynamo=True, opset_version=18, optimize=False)
        program.save(made)
        return made.getvalue()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        settings = {"opset_version": 17, "training": mode, "do_constant_folding": False}
        training.export(net, x, path, dynamo=False, **settings)
        return path.read_bytes()


def like_torch(own: nn.Module, net: Any, x: Tensor) -> None:
    """Compare gradients of all parameters and of the input, then losses of twenty steps by SGD and by AdamW."""
    assert set(dict(own.named_parameters())) == set(dict(net.named_parameters()))
    # A forward pass in training changes statistics, so a copy computes the target.
    target = torch.randn_like(copy.deepcopy(own)(x))
    points = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    losses = [F.mse_loss(module(point), target) for module, point in zip((own, net), points, strict=True)]
    for loss in losses:
        loss.backward()
    largest = max(float(value.grad.abs().max()) for value in own.parameters())
    for name, value in own.named_parameters():
        assert (net.get_parameter(name).grad - value.grad).abs().max() <= GRADIENT * largest, name
    if x.is_floating_point():
        assert relative_distance(points[1].grad, points[0].grad) <= GRADIENT
    for make in (lambda some: torch.optim.SGD(some, 0.02, momentum=0.9), lambda some: torch.optim.AdamW(some, 1e-3)):
        pairs = [(module, make(module.parameters())) for module in (own, net)]
        for _ in range(STEPS):
            found = []
            for module, optimizer in pairs:
                optimizer.zero_grad()
                loss = F.mse_loss(module(x), target)
                loss.backward()
                optimizer.step()
                found.append(float(loss.detach()))
            assert abs(found[1] - found[0]) <= LOSS * abs(found[0]), found


def small_cnn(*, dynamo: bool) -> None:
    own = nets.cnn()
    training.disturb(own, 0.1)
    own.eval()
    x = torch.randn(3, 3, 8, 8)
    net = as_module(exported(own, x, dynamo=dynamo)).eval()
    like_torch(own, net, x)


def check_cnn_of_the_old_exporter_is_like_torch() -> None:
    small_cnn(dynamo=False)


def check_cnn_of_the_new_exporter_is_like_torch() -> None:
    small_cnn(dynamo=True)


def check_cnn_in_training_mode_is_like_torch() -> None:
    own = nets.cnn()
    training.disturb(own, 0.1)
    x = torch.randn(4, 3, 8, 8)
    net = as_module(exported(own.eval(), x, dynamo=False))
    own.train()
    assert torch.allclose(net(x), own(x), atol=GRADIENT)
    for name, value in own.named_buffers():
        if name.endswith("running_mean"):
            assert relative_distance(net.get_buffer(name), value) <= GRADIENT, name
    like_torch(own, net, x)


class Block(nn.Module):
    """A transformer block on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm0, self.norm1 = nn.Embedding(11, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nets.Attention(8, 2, causal=True)
        self.wide, self.narrow = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        h = h + self.attention(self.norm0(h))
        return h + self.narrow(F.gelu(self.wide(self.norm1(h))))


def check_transformer_block_of_the_new_exporter_is_like_torch() -> None:
    own = Block()
    x = torch.randint(0, 11, (3, 5))
    net = as_module(exported(own, x, dynamo=True))
    # The exporter writes products of transposed weights, with their names.
    like_torch(own, net, x)


def check_transformer_block_of_the_old_exporter_is_like_torch() -> None:
    own = Block()
    x = torch.randint(0, 11, (3, 5))
    like_torch(own, as_module(exported(own, x, dynamo=False)), x)


def check_second_order_is_like_torch() -> None:
    """Gradients match for a penalty on the gradient norm, as in Wasserstein networks."""
    net = as_module(perceptron(np.float32))
    own = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    own.load_state_dict(dict(zip(own.state_dict(), net.state_dict().values(), strict=True)))
    x = torch.randn(6, 5)

    def penalty(module: Callable[[Tensor], Tensor]) -> Tensor:
        points = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(points).sum(), points, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    for module in (net, own):
        penalty(module).backward()
    for mine, other in zip(net.parameters(), own.parameters(), strict=True):
        # The last bias does not affect the penalty.
        if other.grad is not None:
            assert relative_distance(mine.grad, other.grad) <= GRADIENT


def check_second_order_of_a_power() -> None:
    model = model_of(
        [helper.make_node("Mul", ["x", "x"], ["square"]), helper.make_node("Mul", ["square", "square"], ["y"])],
        {"x": (TensorProto.DOUBLE, [2])},
        {"y": (TensorProto.DOUBLE, [2])},
        {},
    )
    x = torch.tensor([1.5, -2.0], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(as_module(model)(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(first, 4 * x**3)
    assert torch.allclose(second, 12 * x**2)


def check_half_precision() -> None:
    for dtype, tolerance in HALF.items():
        own = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).to(dtype)
        kind = {torch.float16: TensorProto.FLOAT16, torch.bfloat16: TensorProto.BFLOAT16}[dtype]
        names = [name for name, _ in own.named_parameters()]
        graph = helper.make_graph(
            [
                helper.make_node("Gemm", ["x", *names[:2]], ["h"], transB=1),
                helper.make_node("Relu", ["h"], ["a"]),
                helper.make_node("Gemm", ["a", *names[2:]], ["y"], transB=1),
            ],
            "half",
            [helper.make_tensor_value_info("x", kind, ["n", 6])],
            [helper.make_tensor_value_info("y", kind, ["n", 3])],
            [
                helper.make_tensor(name, kind, value.shape, value.detach().float().flatten().tolist())
                for name, value in own.named_parameters()
            ],
        )
        net = as_module(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
        assert all(value.dtype is dtype for value in net.parameters())
        points = [torch.linspace(-1, 1, 30).reshape(5, 6).to(dtype).requires_grad_() for _ in range(2)]
        for module, x in zip((own, net), points, strict=True):
            y = module(x)
            assert y.dtype is dtype
            (y.float() ** 2).sum().backward()
        for mine, other in [(points[1], points[0]), *zip(net.parameters(), own.parameters(), strict=True)]:
            assert mine.grad.dtype is dtype
            assert relative_distance(mine.grad.float(), other.grad.float()) <= tolerance
        trained = onnx.load_from_string(net.to_onnx())
        assert {tensor.data_type for tensor in trained.graph.initializer} == {kind}


def check_batches_of_any_size() -> None:
    net = as_module(perceptron(np.float32))
    weight, bias, last, offset = (value.detach() for value in net.parameters())
    for rows in (1, 7, 2, 0, 7):
        x = torch.randn(rows, 5)
        want = torch.tanh(x @ weight.T + bias) @ last.T + offset
        assert torch.allclose(net(x), want, atol=1e-5)


def check_masks_of_dropout() -> None:
    net = as_module(dropout(), seed=3)
    x = torch.ones(512, 64, requires_grad=True)
    masks = []
    for _ in range(2):
        y = net(x)
        (of_x,) = torch.autograd.grad(y.sum(), x)
        # Remaining elements are scaled, and their gradient is the weight.
        assert set(y.unique().tolist()) == {0.0, 4.0}
        assert torch.equal(of_x, y.detach())
        masks.append(y.detach() > 0)
    assert not torch.equal(*masks)
    assert abs(masks[0].double().mean() - 0.75) < 0.01
    again = as_module(dropout(), seed=3)
    assert torch.equal(again(x) > 0, masks[0])
    assert not torch.equal(as_module(dropout(), seed=4)(x) > 0, masks[0])
    with torch.no_grad():
        assert set(again(x).unique().tolist()) == {0.0, 4.0}
        assert torch.equal(again.eval()(x), torch.full_like(x, 3))
    assert torch.equal(net.eval()(x), torch.full_like(x, 3))
