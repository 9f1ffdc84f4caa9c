"""Wrapped models as PyTorch modules: names, modes, copies, processes, and the operations of ordinary loops."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from bridge import dropout, embedding, model_of, normalization, perceptron, refused, relative_distance
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import ortrain
from ortrain.torch import as_module

# Tolerance of float32 on both sides, with sums in another order.
CLOSE = 1e-5
# Difficult names: attributes of modules, names that are groups and parameters, parts without a letter.
NASTY = ("training", "a", "a.b", "a..c", "forward.weight", "layer/0::w:0", "_parameters.x", "b.", "type.to.half")


def small() -> Any:
    return as_module(perceptron(np.float32))


def twin(net: Any) -> nn.Module:
    """Return the same network in torch."""
    own = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    own.load_state_dict(dict(zip(own.state_dict(), net.state_dict().values(), strict=True)))
    return own


def nasty() -> bytes:
    """Return ``y = x + all weights``."""
    nodes, last = [], "x"
    for k, name in enumerate(NASTY):
        nodes.append(helper.make_node("Add", [last, name], [f"sum{k}" if k + 1 < len(NASTY) else "y"]))
        last = f"sum{k}"
    weights = {name: np.full(2, k + 1, np.float32) for k, name in enumerate(NASTY)}
    return model_of(nodes, {"x": (TensorProto.FLOAT, [2])}, {"y": (TensorProto.FLOAT, [2])}, weights)


def check_names_of_any_kind() -> None:
    net = as_module(nasty())
    assert list(net._plan.weights) == list(NASTY)
    assert dict(net.named_parameters()).keys() == net.state_dict().keys() == set(NASTY)
    for k, name in enumerate(NASTY):
        assert net.get_parameter(name)[0] == k + 1
    x = torch.zeros(2)
    assert net(x)[0] == sum(range(len(NASTY) + 1))
    state = {name: torch.full((2,), 10.0) for name in NASTY}
    net.load_state_dict(state, strict=True)
    assert net(x)[0] == 10 * len(NASTY)
    outer = nn.ModuleDict({"net": net})
    assert set(outer.state_dict()) == {f"net.{name}" for name in NASTY}
    outer.load_state_dict({f"net.{name}": value / 10 for name, value in state.items()})
    assert net(x)[0] == len(NASTY)
    with_weights = {name: torch.full((2,), 5.0) for name in ("training", "a", "a.b", "a..c")}
    assert functional_call(net, with_weights, (x,))[0] == 20 + len(NASTY) - 4
    assert net.training is True


def check_memory_is_shared() -> None:
    net = small()
    x = torch.randn(4, 5)
    net(x).sum().backward()
    (passes,) = net._engine.known.values()
    weights = [net._engine.given[at].value(value) for at, value in zip(passes._weights, net.parameters(), strict=True)]
    assert [value.data_ptr() for value in weights] == [value.data_ptr() for value in net.parameters()]
    before = net(x).detach()
    with torch.no_grad():
        net.get_parameter("fc2.bias").add_(1)
    assert torch.allclose(net(x), before + 1)
    # The module reads a replaced parameter, also one with another memory layout.
    net.get_parameter("fc2.bias").data = torch.zeros(3)
    own = twin(net)
    assert torch.allclose(net(x), own(x), atol=CLOSE)
    net.get_parameter("fc1.weight").data = net.get_parameter("fc1.weight").data.t().contiguous().t()
    assert torch.allclose(net(x), own(x), atol=CLOSE)
    with torch.no_grad():
        net.get_parameter("fc1.weight").mul_(2)
        own[0].weight.mul_(2)
    assert torch.allclose(net(x), own(x), atol=CLOSE)
    # A square parameter that is transposed in place.
    square = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": (TensorProto.FLOAT, ["n", 2])},
        {"y": (TensorProto.FLOAT, ["n", 2])},
        {"w": np.asarray([[1, 2], [3, 4]], np.float32)},
    )
    net = as_module(square)
    eye = torch.eye(2)
    assert net(eye).tolist() == [[1, 2], [3, 4]]
    net.get_parameter("w").data = net.get_parameter("w").data.t()
    assert net(eye).tolist() == [[1, 3], [2, 4]]


def check_memory_of_gradients() -> None:
    """Memory of unreferenced gradients is reused; referenced gradients do not change."""
    net = small()
    x = torch.randn(4, 5)

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(net(x).sum(), list(net.parameters())))

    first = gradients()
    addresses, values = [value.data_ptr() for value in first], [value.clone() for value in first]
    second = gradients()
    assert not {value.data_ptr() for value in second} & set(addresses)
    assert all(map(torch.equal, first, values))
    view = first[0][1:2]
    row = view.clone()
    del first, second
    gc.collect()
    kept = [gradients() for _ in range(3)]
    assert torch.equal(view, row)
    del kept
    gc.collect()
    for _ in range(3):
        net.zero_grad()
        net(x).sum().backward()
        used = {value.grad.data_ptr() for value in net.parameters()}
    net.zero_grad()
    net(x).sum().backward()
    assert {value.grad.data_ptr() for value in net.parameters()} == used


def check_accumulation_clipping_and_one_optimizer() -> None:
    """Gradients of two batches are added, their norm is clipped, and one optimizer also updates other modules."""
    net = small()
    own = twin(net)
    heads = [nn.Linear(3, 2) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    batches = [torch.randn(4, 5) for _ in range(6)]
    for module, head in zip((net, own), heads, strict=True):
        parameters = [*module.parameters(), *head.parameters()]
        optimizer = torch.optim.AdamW(parameters, 0.05)
        for at in range(0, len(batches), 2):
            optimizer.zero_grad(set_to_none=at % 4 == 0)
            for x in batches[at : at + 2]:
                head(module(x).relu()).square().mean().backward()
            clip_grad_norm_(parameters, 0.1)
            optimizer.step()
    found, others = ([*module.parameters(), *head.parameters()] for module, head in zip((net, own), heads, strict=True))
    for mine, other in zip(found, others, strict=True):
        assert torch.allclose(mine, other, atol=CLOSE)


def check_several_passes_wait() -> None:
    net = small()
    own = twin(net)
    xs = [torch.randn(rows, 5, requires_grad=True) for rows in (2, 6, 3)]
    results = []
    for module in (net, own):
        outputs = [module(x).square().sum() for x in xs]
        results.append([torch.autograd.grad(outputs[at], xs[at])[0] for at in (1, 0, 2)])
    assert all(torch.allclose(mine, other, atol=CLOSE) for mine, other in zip(*results, strict=True))
    # Nested passes: the output of one pass is the input of another.
    looped = model_of(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])],
        {"x": (TensorProto.DOUBLE, ["n", 3])},
        {"y": (TensorProto.DOUBLE, ["n", 3])},
        {"w": np.random.default_rng(0).standard_normal((3, 3))},
    )
    net = as_module(looped)
    weight = net.get_parameter("w")
    x = torch.randn(2, 3, dtype=torch.float64)
    (mine,) = torch.autograd.grad(net(net(net(x))).sum(), weight)
    (other,) = torch.autograd.grad((((x @ weight).tanh() @ weight).tanh() @ weight).tanh().sum(), weight)
    assert torch.allclose(mine, other)


def check_backward_twice() -> None:
    """With retain_graph a second backward pass runs the forward pass again."""
    net = small()
    x = torch.randn(4, 5, requires_grad=True)
    y = net(x)
    seeds = [torch.randn(4, 3) for _ in range(3)]
    found = [torch.autograd.grad(y, x, seed, retain_graph=True)[0] for seed in seeds]
    want = [torch.autograd.grad(twin(net)(x), x, seed)[0] for seed in seeds]
    assert all(torch.allclose(mine, other, atol=CLOSE) for mine, other in zip(found, want, strict=True))
    # Statistics are not updated a second time.
    net = as_module(normalization())
    x = torch.randn(6, 3, requires_grad=True)
    y = net(x)
    after = net.get_buffer("bn.running_mean").clone()
    first, second = (torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(net.get_buffer("bn.running_mean"), after)


def check_without_gradients() -> None:
    net = small()
    x = torch.randn(4, 5)
    want = twin(net)(x)
    with torch.no_grad():
        assert torch.allclose(net(x), want, atol=CLOSE)
        assert not net(x).requires_grad
    with torch.inference_mode():
        assert torch.allclose(net(x), want, atol=CLOSE)
    net.requires_grad_(False)
    assert not net(x).requires_grad
    # Only the input has a gradient then.
    x.requires_grad_()
    net(x).sum().backward()
    assert x.grad is not None
    assert all(value.grad is None for value in net.parameters())


def check_frozen_parameters() -> None:
    """Frozen parameters have no gradient, but their values may change."""
    net = small()
    x = torch.randn(4, 5)
    net.get_submodule("fc1").requires_grad_(False)
    for change in range(3):
        with torch.no_grad():
            net.get_parameter("fc1.weight").mul_(1 - 0.1 * change)
        own = twin(net)
        net.zero_grad()
        for module in (net, own):
            module(x).square().sum().backward()
        assert net.get_parameter("fc1.weight").grad is None
        assert torch.allclose(net.get_parameter("fc2.weight").grad, own[2].weight.grad, atol=1e-4)
    (passes,) = net._engine.known.values()
    assert passes.native.gradient_names() == ["fc2.weight_grad", "fc2.bias_grad"]
    assert x.grad is None
    # More gradient sets than the cache can contain.
    names = [name for name, _ in net.named_parameters()]
    for chosen in range(1, 2 ** len(names)):
        for k, name in enumerate(names):
            net.get_parameter(name).requires_grad_(bool(chosen >> k & 1))
        net.zero_grad()
        net(x).sum().backward()
        reached = [net.get_parameter(name).grad is not None for name in names]
        assert reached == [bool(chosen >> k & 1) for k in range(len(names))]
    assert len(net._engine.known) <= 8


def running(net: Any) -> list[Tensor]:
    return [net.get_buffer("bn.running_mean"), net.get_buffer("bn.running_var")]


def like_batch_norm(net: Any) -> nn.BatchNorm1d:
    """Return torch's BatchNorm with the values of the model."""
    own = nn.BatchNorm1d(4)
    own.load_state_dict(
        {name.removeprefix("bn."): value for name, value in net.state_dict().items() if "bn" in name}, strict=False
    )
    return own


def check_statistics_of_a_batch_normalization() -> None:
    """After some steps, statistics and evaluation equal torch's BatchNorm."""
    net = as_module(normalization())
    assert [name for name, _ in net.named_buffers()] == ["bn.running_mean", "bn.running_var"]
    assert list(net.state_dict()) == ["W", "bn.weight", "bn.bias", "bn.running_mean", "bn.running_var"]
    own, start = like_batch_norm(net), [value.clone() for value in running(net)]
    weight = net.get_parameter("W").detach().clone().requires_grad_()
    pairs = [
        (net, torch.optim.SGD(net.parameters(), 0.05)),
        (lambda x: own(x @ weight), torch.optim.SGD([weight, *own.parameters()], 0.05)),
    ]
    rows, steps = 32, 8
    for _ in range(steps):
        x = torch.randn(rows, 3) + 0.5
        losses = []
        for call, optimizer in pairs:
            loss = call(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        assert torch.allclose(*losses, atol=CLOSE)
    mean, var = running(net)
    assert torch.allclose(mean, own.running_mean, atol=CLOSE)
    # ONNX uses the biased variance of a batch, PyTorch the unbiased one; the influence of the initial value decays.
    rest = 0.9**steps * start[1]
    own.running_var.copy_(rest + (own.running_var - rest) * (rows - 1) / rows)
    assert torch.allclose(var, own.running_var, atol=CLOSE)
    net.eval()
    own.eval()
    x = torch.randn(5, 3)
    want = own(x @ weight)
    assert torch.allclose(net(x), want, atol=1e-4)
    with torch.no_grad():
        assert torch.allclose(net(x), want, atol=1e-4)
    # Gradients exist in eval mode, and statistics do not change.
    before = mean.clone()
    for module in (net, own):
        module.zero_grad()
    net(x).square().sum().backward()
    want.square().sum().backward()
    for name, value in own.named_parameters():
        assert relative_distance(net.get_parameter(f"bn.{name}").grad, value.grad) <= 1e-4
    assert torch.equal(mean, before)
    # Written statistics are used.
    with torch.no_grad():
        mean.zero_()
        own.running_mean.zero_()
    assert torch.allclose(net(x), own(x @ weight), atol=1e-4)


def check_statistics_of_frozen_normalizations() -> None:
    """With ``batch_norm="auto"`` frozen normalizations use the running statistics of earlier steps."""
    net = as_module(normalization())
    x = torch.randn(16, 3) + 1
    for _ in range(3):
        net(x).sum().backward()
    moved = [value.clone() for value in running(net)]
    net.get_submodule("bn").requires_grad_(False)
    y = net(x)
    assert torch.allclose(y, net.eval()(x), atol=CLOSE)
    y.sum().backward()
    assert all(map(torch.equal, running(net), moved))
    # With "train" frozen normalizations update the statistics; with "freeze" no normalization does.
    net = as_module(normalization(), batch_norm="train")
    net.get_submodule("bn").requires_grad_(False)
    net(x)
    assert not torch.equal(running(net)[0], running(as_module(normalization()))[0])
    net = as_module(normalization(), batch_norm="freeze")
    assert not list(net.named_buffers())
    assert torch.equal(net(x), net.eval()(x))


def check_statistics_move_without_gradients() -> None:
    """A training forward pass updates statistics under no_grad as well; a copy has its own statistics."""
    net = as_module(normalization())
    other = copy.deepcopy(net)
    x = torch.randn(16, 3)
    with torch.no_grad():
        net(x)
    other(x)
    assert not torch.equal(running(net)[0], running(as_module(normalization()))[0])
    assert all(map(torch.equal, running(net), running(other)))


def check_to_onnx() -> None:
    net = as_module(normalization())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(16, 3)).square().sum().backward()
        optimizer.step()
    x = torch.randn(4, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trained.onnx"
        made = net.to_onnx(path)
        assert path.read_bytes() == made
    trained = onnx.load_from_string(made)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in trained.graph.initializer}
    assert values.keys() == net.state_dict().keys()
    for name, value in net.state_dict().items():
        assert np.array_equal(values[name], value.numpy())
    original = onnx.load_from_string(normalization())
    assert [node.SerializeToString() for node in trained.graph.node] == [
        node.SerializeToString() for node in original.graph.node
    ]
    (y,) = ortrain.InferenceSession(made).run(None, {"x": x.numpy()})
    assert torch.allclose(torch.from_numpy(y), net.eval()(x), atol=CLOSE)
    # Frozen parameters and constants did not change; the export becomes a module again.
    assert torch.equal(as_module(made).eval()(x), net(x))


def check_chosen_weights() -> None:
    net = as_module(perceptron(np.float32), wrt="fc2.*")
    assert list(net.state_dict()) == ["fc2.weight", "fc2.bias"]
    assert list(as_module(perceptron(np.float32), wrt=["fc2.bias", "fc1.*"]).state_dict()) == [
        "fc1.weight",
        "fc1.bias",
        "fc2.bias",
    ]
    x = torch.randn(2, 5, requires_grad=True)
    y = as_module(perceptron(np.float32), wrt=[])(x)
    y.sum().backward()
    assert torch.allclose(y, net(x))
    net(x).sum().backward()
    values = {tensor.name: tensor for tensor in onnx.load_from_string(net.to_onnx()).graph.initializer}
    for tensor in onnx.load_from_string(perceptron(np.float32)).graph.initializer:
        assert np.array_equal(numpy_helper.to_array(values[tensor.name]), numpy_helper.to_array(tensor))
    # Ids are read, not trained; the table is trained.
    assert list(as_module(embedding()).state_dict()) == ["table"]


def check_models_from_files() -> None:
    """A module depends only on files of external data."""
    with tempfile.TemporaryDirectory() as folder:
        plain, split = Path(folder) / "plain.onnx", Path(folder) / "split.onnx"
        plain.write_bytes(perceptron(np.float32))
        onnx.save(onnx.load(plain), split, save_as_external_data=True, location="weights.bin", size_threshold=0)
        nets = [as_module(plain), as_module(split), as_module(onnx.load(plain))]
        x = torch.randn(2, 5)
        nets[1](x).sum().backward()
        assert all(torch.equal(net(x), nets[0](x)) for net in nets)
        whole = onnx.load_from_string(nets[1].to_onnx())
        assert not any(tensor.external_data for tensor in whole.graph.initializer)
    nets[0](x).sum().backward()
    assert nets[0].get_parameter("fc1.weight").grad is not None


def check_copies_and_pickles() -> None:
    net = small()
    x = torch.randn(4, 5)
    loss = net(x).sum()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(file, weights_only=False)]
    loss.backward()
    for other in copies:
        assert type(other) is type(net)
        assert torch.equal(other(x), net(x))
        other(x).sum().backward()
        assert torch.allclose(other.get_parameter("fc1.weight").grad, net.get_parameter("fc1.weight").grad)
        with torch.no_grad():
            other.get_parameter("fc2.bias").add_(1)
        assert torch.allclose(other(x), net(x) + 1, atol=CLOSE)
        assert other.to_onnx() != net.to_onnx()
    assert copy.deepcopy(net.eval()).training is False


def check_averages_and_parametrizations() -> None:
    net = small()
    averaged = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    x = torch.randn(4, 5)
    averaged.update_parameters(net)
    with torch.no_grad():
        net.get_parameter("fc2.bias").add_(2)
    averaged.update_parameters(net)
    assert torch.allclose(averaged(x), net(x) - 1, atol=CLOSE)

    class Doubled(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return 2 * value

    own = twin(net)
    parametrize.register_parametrization(net.get_submodule("fc1"), "weight", Doubled())
    parametrize.register_parametrization(own[0], "weight", Doubled())
    for module in (net, own):
        module(x).square().sum().backward()
    assert torch.allclose(net(x), own(x), atol=CLOSE)
    mine = net.get_submodule("fc1").parametrizations.weight.original
    assert torch.allclose(mine.grad, own[0].parametrizations.weight.original.grad, atol=1e-4)
    first = {tensor.name: tensor for tensor in onnx.load_from_string(net.to_onnx()).graph.initializer}
    assert np.allclose(numpy_helper.to_array(first["fc1.weight"]), 2 * mine.detach().numpy())


def check_a_parameter_of_two_modules() -> None:
    """Tied weights: another module has the same parameter."""
    net = small()
    other = nn.Linear(5, 4, bias=False)
    other.weight = net.get_parameter("fc1.weight")
    x = torch.randn(4, 5)
    (net(x).sum() + other(x).sum()).backward()
    own = twin(net)
    (own(x).sum() + (x @ own[0].weight.T).sum()).backward()
    assert torch.allclose(other.weight.grad, own[0].weight.grad, atol=CLOSE)
    assert len({*net.parameters(), *other.parameters()}) == 4
    # In the other direction: the module reads a parameter of another module.
    mine = nn.Parameter(torch.zeros(3))
    net.get_submodule("fc2").register_parameter("bias", mine)
    net(x).sum().backward()
    assert torch.equal(mine.grad, torch.full((3,), 4.0))


class Features(Dataset):
    """Items that a wrapped model computes, in any process."""

    def __init__(self, net: Any) -> None:
        self.net = net

    def __len__(self) -> int:
        return 6

    def __getitem__(self, at: int) -> Tensor:
        x = torch.full((1, 5), float(at), requires_grad=True)
        y = self.net(x)
        # Backward runs in the process as well.
        (gradient,) = torch.autograd.grad(y.sum(), x)
        return torch.cat([y.detach()[0], gradient[0]])


def in_workers(context: str) -> None:
    net = small()
    net(torch.zeros(64, 5)).sum().backward()
    items = Features(net)
    want = torch.stack([items[at] for at in range(len(items))])
    with warnings.catch_warnings():
        # Newer Python versions warn about a fork with several threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        loader = DataLoader(items, batch_size=2, num_workers=2, multiprocessing_context=context)
        found = torch.cat(list(loader))
    assert torch.allclose(found, want, atol=CLOSE)
    net(torch.zeros(64, 5)).sum().backward()


def check_workers_that_fork() -> None:
    in_workers("fork")


def check_workers_that_spawn() -> None:
    # The processes import this file and its dependencies from the same path.
    assert sys.path[0] == sys.argv[1]
    in_workers("spawn")


def check_a_dropout_is_not_run_again() -> None:
    net = as_module(dropout())
    x = torch.ones(2, 64, requires_grad=True)
    y = net(x).sum()
    y.backward(retain_graph=True)
    refused(y.backward, ortrain.UnsupportedError, "draws random numbers")
    # In eval mode no random numbers are drawn.
    y = net.eval()(x).sum()
    y.backward(retain_graph=True)
    y.backward()


def check_autocast() -> None:
    """The surrounding modules may run in bfloat16; the model computes in its own types."""
    net = small()
    first = nn.Linear(5, 5)
    x = torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        h = first(x)
        assert h.dtype is torch.bfloat16
        y = net(h)
        assert y.dtype is torch.float32
        y.sum().backward()
    assert torch.allclose(y, twin(net)(h.detach().float()), atol=CLOSE)
    assert first.weight.grad is not None


def check_compiled_around() -> None:
    """PyTorch's compiler skips the call, and compiles the code before and after it."""
    net = small()

    def around(x: Tensor) -> Tensor:
        return net(x * 2).relu() + 1

    x = torch.randn(4, 5, requires_grad=True)
    found = torch.compile(around, backend="eager")(x)
    assert torch.allclose(found, around(x))
    (mine,) = torch.autograd.grad(found.sum(), x)
    (other,) = torch.autograd.grad(around(x).sum(), x)
    assert torch.allclose(mine, other)


def check_hooks_and_inputs_by_name() -> None:
    net = as_module(embedding())
    seen = []
    net.register_forward_hook(lambda _module, _args, outputs: seen.append(outputs.Y.shape))
    scale = torch.ones(4, dtype=torch.float64)
    ids = torch.tensor([1, 2])
    ways = [net(ids, scale), net(ids, scale=scale), net(scale=scale, ids=ids)]
    assert all(torch.equal(way.Y, ways[0].Y) for way in ways)
    assert seen == [torch.Size([2, 4])] * 3
    # Strided, transposed, read-only and expanded inputs have their visible values.
    wide = torch.arange(8.0, dtype=torch.float64)[::2]
    assert torch.equal(net(ids, wide).Z, wide**2)
    assert torch.equal(net(ids, torch.tensor(2.0, dtype=torch.float64).expand(4)).Z, torch.full((4,), 4.0).double())
    table = np.arange(4.0)
    table.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(net(ids, torch.from_numpy(table)).Z, torch.arange(4.0).double() ** 2)


def check_threads() -> None:
    """Concurrent passes on one module do not share gradient memory."""
    import threading

    net = small()
    xs = [torch.randn(8, 5) for _ in range(4)]
    want = [torch.autograd.grad(net(x).square().sum(), list(net.parameters())) for x in xs]
    wrong = []

    def work(at: int) -> None:
        for _ in range(50):
            found = torch.autograd.grad(net(xs[at]).square().sum(), list(net.parameters()))
            if not all(map(torch.equal, found, want[at])):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def check_close() -> None:
    net = small()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    loss = net(torch.randn(2, 5)).sum()
    net.close()
    net.close()
    # Parameters remain, and a pending backward pass completes.
    loss.backward()
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    assert "closed" in repr(net)
