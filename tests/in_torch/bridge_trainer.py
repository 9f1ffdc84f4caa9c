"""ORTTrainer on modules of PyTorch: rows of the checklist by name, names and buffers, kinds of values, bad input."""

from __future__ import annotations

import copy
import math
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from bridge import refused
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from trainer_nets import (
    DESCRIPTION,
    OPTIMIZERS,
    ROWS,
    TOKENS,
    VOCABULARY,
    batch,
    legacy_trainer_of,
    loss_of,
    losses_of,
    net,
    options_of,
    trained_by_torch,
    trainer_of,
    trainer_on,
)

import ortrain
from ortrain.trainer import ORTTrainer, legacy, postprocess
from ortrain.trainer._dtypes import dtype_onnx_to_torch
from ortrain.trainer._values import native_of_torch
from ortrain.trainer.amp import DynamicLossScaler, LossScaler
from ortrain.trainer.optim import AdamConfig, LambConfig, SGDConfig
from ortrain.trainer.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
)

# Tolerance of float32 on both sides, with sums in another order, over some steps.
CLOSE = 1e-5
# Required tolerance of losses in mixed precision, compared with PyTorch's autocast.
FOLLOWS = 0.02
CONFIGS: dict[str, Any] = {"adam": AdamConfig, "lamb": LambConfig, "sgd": SGDConfig}
NAMES = {"adam": "AdamOptimizer", "lamb": "LambOptimizer", "sgd": "SGDOptimizer"}
RATES = {"adam": 0.003, "lamb": 0.003, "sgd": 0.1}
SCHEDULERS: dict[str, Any] = {
    "none": lambda: None,
    "constant": lambda: ConstantWarmupLRScheduler(10, 0.2),
    "cosine": lambda: CosineWarmupLRScheduler(10, 0.5, 0.2),
    "linear": lambda: LinearWarmupLRScheduler(10, 0.2),
    "poly": lambda: PolyWarmupLRScheduler(10, 1e-7, 1.0, 0.2),
}
# Factor at each of the first steps: two steps of warm-up, then eight of decay.
FACTORS: dict[str, Any] = {
    "none": lambda t: 1.0,
    "constant": lambda t: min(1.0, t / 2),
    "cosine": lambda t: t / 2 if t < 2 else 0.5 * (1 + math.cos(math.pi * (t - 2) / 8)),
    "linear": lambda t: t / 2 if t < 2 else (10 - t) / 8,
    "poly": lambda t: t / 2 if t < 2 else ((0.01 - 1e-7) * (1 - (t - 2) / 8) + 1e-7) / 0.01,
}


class Fixed(LossScaler):
    """A loss scaler with a fixed scale."""

    def update(self, train_step_info: Any) -> float:
        return self.loss_scale


def mixed(scaler: LossScaler | None = None) -> dict[str, Any]:
    return {"mixed_precision": {"enabled": True, "loss_scaler": scaler}}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return true if the tensors of two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def weights_of(trainer: ORTTrainer) -> dict[str, Tensor]:
    return trainer.state_dict(pytorch_format=True)


def graph_of(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without the values of its weights."""
    bare = copy.deepcopy(model)
    for tensor in bare.graph.initializer:
        tensor.ClearField("raw_data")
    return bare


def assert_follows(trainer: ORTTrainer, module: nn.Module, name: str, **how: Any) -> None:
    """Check that a trainer equals PyTorch in 12 steps of the same model."""
    expected = list(trained_by_torch(module, OPTIMIZERS[name], RATES[name], 12, **how))
    np.testing.assert_allclose(losses_of(trainer, 12), expected, rtol=CLOSE)
    found = weights_of(trainer)
    for key, value in module.state_dict().items():
        # An element with a gradient close to its rounding may move by another share of the rate.
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=0.05 * RATES[name], msg=key)


# Rows of the checklist.


def check_f13_instantiate() -> None:
    for scheduler, factor in FACTORS.items():
        trainer = trainer_of(lr_scheduler=SCHEDULERS[scheduler]())
        assert trainer._onnx_model is None
        for k in range(5):
            loss, predictions = trainer.train_step(*batch(k))
            assert (loss.shape, predictions.shape) == ((), (TOKENS, ROWS, VOCABULARY))
            if scheduler != "none":
                (rate,) = trainer.options.lr_scheduler.get_last_lr()
                assert abs(rate - 0.01 * factor(k)) < 1e-9, (scheduler, k)
        loss, predictions = trainer.eval_step(*batch())
        assert (loss.shape, predictions.shape) == ((), (TOKENS, ROWS, VOCABULARY))
        model = trainer._onnx_model
        for kind, values in (("inputs", model.graph.input), ("outputs", model.graph.output)):
            described = getattr(trainer.model_desc, kind)
            for value, (name, shape, *_), about in zip(values, DESCRIPTION[kind], described, strict=True):
                assert value.name == about.name == name
                assert [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim] == shape
                assert dtype_onnx_to_torch(value.type.tensor_type.elem_type) == about.dtype
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "trained.onnx")
            trainer.save_as_onnx(path)
            loaded = onnx.load(path)
        assert loaded == trainer._onnx_model
        again = trainer_on(loaded, DESCRIPTION, None, utils={"frozen_weights": ["positions"]})
        assert again._onnx_model == trainer._onnx_model
        assert same(weights_of(again), weights_of(trainer))
        assert float(again.eval_step(*batch())[0]) == float(loss)


def check_f15_mixed_precision_loss_scaler() -> None:
    expected = list(trained_by_torch(net(), OPTIMIZERS["adam"], 0.003, 8))
    for scaler in (None, DynamicLossScaler(), Fixed(1024.0)):
        trainer = trainer_of(config=AdamConfig(lr=0.003), **mixed(scaler))
        np.testing.assert_allclose(losses_of(trainer, 8), expected, rtol=FOLLOWS)
        trainer._train_step_info.fetches = ["predictions"]
        predictions = trainer.train_step(*batch())
        assert (predictions.shape, predictions.dtype) == ((TOKENS, ROWS, VOCABULARY), torch.float16)
        trainer._train_step_info.fetches = ["loss"]
        loss = trainer.eval_step(*batch())
        assert (loss.shape, loss.dtype) == ((), torch.float32)
        assert trainer.model_desc.outputs[1].dtype_amp == torch.float16
        assert trainer.options.mixed_precision.loss_scaler.input_name == trainer.model_desc.loss_scale_input.name


def check_f16_recompute() -> None:
    plain = losses_of(trainer_of(net(dropout=0.1)), 6)
    for flag in ("attn_dropout_recompute", "gelu_recompute", "transformer_layer_recompute"):
        for layers in (0, 1):
            options = {flag: True, "number_recompute_layers": layers}
            found = losses_of(trainer_of(net(dropout=0.1), graph_transformer=options), 6)
            np.testing.assert_allclose(found, plain, rtol=CLOSE, err_msg=flag)


def check_f17_gradient_accumulation() -> None:
    for name, config in CONFIGS.items():
        for window in (1, 3, 4):
            trainer = trainer_of(config=config(lr=RATES[name]), batch={"gradient_accumulation_steps": window})
            assert_follows(trainer, net(), name, clip=None if name == "sgd" else 1.0, window=window)
            assert trainer._train_step_info.optimization_step == 12 // window


def check_f19_internal_use_contrib_ops() -> None:
    """Before opset 14 only com.microsoft has an operator for triu."""
    for opset in (12, 13, 14):
        trainer = trainer_of(_internal_use={"onnx_opset_version": opset, "enable_onnx_contrib_ops": True})
        losses = losses_of(trainer, 3)
        model = trainer._onnx_model
        assert {"Trilu", "Gelu"} <= {node.op_type for node in model.graph.node if node.domain == "com.microsoft"}
        assert model.opset_import[0].version == opset
        without = trainer_of(_internal_use={"onnx_opset_version": opset, "enable_onnx_contrib_ops": False})
        if opset < 14:
            refused(lambda trainer=without: trainer.train_step(*batch()), ortrain.UnsupportedError, "aten::triu")
            refused(lambda trainer=without: trainer.train_step(*batch()), RuntimeError, f"opset {opset}")
            assert (without._onnx_model, without._train_step_info.step) == (None, 0)
            assert without.options.utils.frozen_weights == []
        else:
            np.testing.assert_allclose(losses_of(without, 3), losses, rtol=CLOSE)
            assert not any(node.domain for node in without._onnx_model.graph.node)


def check_f21_state_dict_wrap_model_loss_fn() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    description = {"inputs": [("x", [2, 2]), ("label", [2])], "outputs": [("loss", [], True), ("output", [2, 4])]}
    values = torch.randn(2, 2), torch.tensor([0, 3])
    combinations = [
        (lambda: AdamConfig(lr=0.01), {}),
        (lambda: AdamConfig(lr=0.01), mixed()),
        (lambda: LambConfig(lr=0.01), {}),
        (lambda: LambConfig(lr=0.01), mixed()),
        (lambda: SGDConfig(lr=0.01), {}),
    ]
    for config, given in combinations:
        first = trainer_on(Linear(), description, nn.CrossEntropyLoss(), config(), **given)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert first.state_dict() == {}
        assert "not initialized yet" in str(seen[0].message)
        first.train_step(*values)
        state = first.state_dict()
        assert set(state["model"]["full_precision"]) == {"linear.bias", "linear.weight"}
        second = trainer_on(Linear(), description, nn.CrossEntropyLoss(), config(), **given)
        second.load_state_dict(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert second.state_dict() is state
        for _ in range(2):
            one, other = first.train_step(*values), second.train_step(*values)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
        assert same(weights_of(first), weights_of(second))
        assert second._train_step_info.step == first._train_step_info.step == 3
        assert second._train_step_info.optimization_step == first._train_step_info.optimization_step


def check_a_deferred_state_that_does_not_fit() -> None:
    trainer = trainer_of()
    state = {"model": {"full_precision": {"strange": np.zeros(3, np.float32)}}}
    trainer.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(2):
            refused(lambda: trainer.train_step(*batch()), RuntimeError, "Missing keys")
    assert (trainer._onnx_model, trainer._train_step_info.step) == (None, 0)
    other = trainer_of(net(5))
    other.train_step(*batch())
    trainer.load_state_dict(other.state_dict())
    assert float(trainer.eval_step(*batch())[0]) == float(other.eval_step(*batch())[0])


def check_f22_non_pickable_model() -> None:
    module = net()
    module.lock = threading.Lock()
    trainer = trainer_of(module)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", UserWarning)
        losses = losses_of(trainer, 4)
    (copying,) = [str(warning.message) for warning in seen if "deep copied" in str(warning.message)]
    assert copying.startswith("This model cannot be deep copied (or pickled), which is a required step for stateful ")
    assert losses == losses_of(trainer_of(), 4)


def check_f23_legacy_and_experimental_weights() -> None:
    older = legacy_trainer_of(net(), "LambOptimizer", lambda step: 0.003)
    trainer = trainer_of(config=LambConfig(lr=0.003))
    assert losses_of(older, 5) == losses_of(trainer, 5)
    assert same(older.state_dict(include_optimizer_state=False), weights_of(trainer))


def check_f24_legacy_and_experimental_precision_loss_scaler() -> None:
    """The scale starts at an overflow of gradients, and increases every five updates."""
    start, window = 2.0**24, 5
    scaler = DynamicLossScaler(loss_scale=start, up_scale_window=window)
    older = legacy_trainer_of(
        net(),
        "AdamOptimizer",
        lambda step: 0.003,
        use_mixed_precision=True,
        loss_scaler=legacy.LossScaler("ort_test_input_loss_scaler", True, start, window),
    )
    trainer = trainer_of(config=AdamConfig(lr=0.003), **mixed(scaler))
    for k in range(128):
        one, other = older.train_step(*batch(k)), trainer.train_step(*batch(k))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
        assert [value.dtype for value in one] == [value.dtype for value in other] == [torch.float32, torch.float16]
        assert older.loss_scaler_.loss_scale_ == scaler.loss_scale
    assert older.global_step_ == trainer._train_step_info.optimization_step < 128
    assert same(older.state_dict(include_optimizer_state=False), weights_of(trainer))


def check_f25_legacy_and_experimental_gradient_accumulation() -> None:
    for window in (1, 3, 7, 12):
        older = legacy_trainer_of(net(), "LambOptimizer", lambda step: 0.003, gradient_accumulation_steps=window)
        trainer = trainer_of(config=LambConfig(lr=0.003), batch={"gradient_accumulation_steps": window})
        assert losses_of(older, 24) == losses_of(trainer, 24)
        assert older.global_step_ == trainer._train_step_info.optimization_step == 24 // window


def check_f26_legacy_and_experimental_lr_scheduler() -> None:
    for name, config in CONFIGS.items():
        for scheduler in ("constant", "cosine", "linear", "poly"):
            trainer = trainer_of(config=config(lr=0.01), lr_scheduler=SCHEDULERS[scheduler]())
            older = legacy_trainer_of(net(), NAMES[name], lambda step, f=FACTORS[scheduler]: 0.01 * f(step))
            np.testing.assert_allclose(losses_of(older, 9), losses_of(trainer, 9), rtol=CLOSE)


def check_f28_run_symbolic_shape_infer() -> None:
    plain = losses_of(trainer_of(), 6)
    assert losses_of(trainer_of(utils={"run_symbolic_shape_infer": True}), 6) == plain


def check_f32_max_norm_clip() -> None:
    for name in ("adam", "lamb"):
        for clip in (0.1, 1.0):
            for seed in (0, 42):
                trainer = trainer_of(net(seed), CONFIGS[name](lr=RATES[name], max_norm_clip=clip))
                assert_follows(trainer, net(seed), name, clip=clip)
        trainer = trainer_of(config=CONFIGS[name](lr=RATES[name]), utils={"grad_norm_clip": False})
        assert_follows(trainer, net(), name, clip=None)


def check_autocast() -> None:
    for dtype, name in ((torch.float16, "float16"), (torch.bfloat16, "bfloat16")):
        expected = list(trained_by_torch(net(), OPTIMIZERS["adam"], 0.003, 50, narrow=dtype))
        trainer = trainer_of(config=AdamConfig(lr=0.003), mixed_precision_dtype=name, **mixed())
        found = losses_of(trainer, 50)
        worst = max(abs(mine / theirs - 1) for mine, theirs in zip(found, expected, strict=True))
        assert worst <= FOLLOWS, (name, worst)
        assert found[-1] < 0.8 * found[0]


def check_d4_register_ep() -> None:
    trainer = trainer_of(provider_options={"reference": {}})
    trainer.train_step(*batch())
    assert "reference" in trainer._training_session.get_providers()
    strange = trainer_of(provider_options={"TestExecutionProvider": {"option": "1"}})
    refused(lambda: strange.train_step(*batch()), ortrain.UnsupportedError, "TestExecutionProvider")


def check_d5_postprocess() -> None:
    class Likelihood(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return F.log_softmax(self.linear(x + torch.full((), 0.5).expand_as(x)), dim=1)

    def likelihood(logs: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(logs, y)

    def as_before(model: onnx.ModelProto) -> onnx.ModelProto:
        """Exporters up to PyTorch 1.7 wrote the loss of log-probabilities, without ignore_index."""
        loss = model.graph.node[-1]
        assert (loss.op_type, loss.input[1], loss.output[0]) == ("SoftmaxCrossEntropyLoss", "y", "loss")
        loss.op_type, loss.input[0] = "NegativeLogLikelihoodLoss", "logs"
        kept = [attribute for attribute in loss.attribute if attribute.name != "ignore_index"]
        del loss.attribute[:]
        loss.attribute.extend(kept)
        return postprocess.run_postprocess(model)

    description = {"inputs": [("x", ["N", 4]), ("y", ["N"])], "outputs": [("loss", [], True), ("logs", ["N", 6])]}
    torch.manual_seed(0)
    module, x, y = Likelihood(), torch.randn(5, 4), torch.tensor([0, -100, 3, 5, 1])
    plain = trainer_on(module, description, likelihood)
    loss, _ = plain.train_step(x, y)
    assert abs(float(loss) - float(likelihood(module(x), y).detach())) < CLOSE
    graph = plain._onnx_model.graph
    assert [node.name for node in graph.node] == [f"{node.op_type}_{place}" for place, node in enumerate(graph.node)]
    (wide,) = [node.output[0] for node in graph.node if node.op_type == "Expand"]
    (written,) = [value for value in graph.value_info if value.name == wide]
    assert written.type == graph.input[0].type
    y = torch.tensor([0, 2, 3, 5, 1])
    fused = trainer_on(module, description, likelihood, _internal_use={"extra_postprocess": as_before})
    loss, logs = fused.train_step(x, y)
    last = fused._onnx_model.graph.node[-1]
    assert (last.op_type, last.name) == ("SparseSoftmaxCrossEntropy", "nll_loss_node_1")
    assert abs(float(loss) - float(likelihood(module(x), y).detach())) < CLOSE
    torch.testing.assert_close(logs, module(x).detach())
    bare = trainer_on(module, description, likelihood, _internal_use={"enable_internal_postprocess": False})
    bare.train_step(x, y)
    assert any("/" in node.name for node in bare._onnx_model.graph.node), "names of the exporter"


# Values that a trainer reads from a module.


class Everything(nn.Module):
    """Tied weights, unused weights, two kinds of buffers, a plain tensor, statistics, an own default."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.norm, self.unused = nn.BatchNorm1d(8), nn.Linear(3, 3)
        self.register_buffer("kept", torch.randn(8))
        self.register_buffer("passing", torch.randn(8), persistent=False)
        self.plain = torch.randn(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 2.0, shift: Tensor | None = None) -> dict[str, Any]:
        h = self.third(torch.tanh(self.second(self.norm(self.first(x))))) + self.kept + self.passing + self.plain
        return {"result": self.dropout(h) * scale, "nothing": shift, "all": (h, [h.sum(), None])}


EVERYTHING: dict[str, Any] = {
    "inputs": [("x", ["N", 6]), ("y", ["N"])],
    "outputs": [("loss", [], True), ("result", ["N", 8]), ("h", ["N", 8])],
}


def loss_of_everything(results: dict[str, Any], y: Tensor) -> Tensor:
    return F.cross_entropy(results["result"], y)


def check_a_module_with_everything() -> None:
    torch.manual_seed(3)
    module, x, y = Everything(), torch.randn(7, 6), torch.randint(0, 8, (7,))
    module.unused.eval()
    before = copy.deepcopy(module.state_dict())
    generator = torch.get_rng_state()
    trainer = trainer_on(module, EVERYTHING, loss_of_everything, SGDConfig(lr=0.1), debug={"check_model_export": True})
    trainer.eval_step(x, y)
    assert same(module.state_dict(), before), "the module does not change"
    assert torch.equal(torch.get_rng_state(), generator)
    assert module.training
    assert not module.unused.training
    names = [tensor.name for tensor in trainer._onnx_model.graph.initializer]
    assert set(names) <= before.keys()
    frozen = {"kept", "norm.running_mean", "norm.running_var"}
    assert set(trainer.options.utils.frozen_weights) == frozen
    assert same(weights_of(trainer), before)
    trainer.train_step(x, y)
    state = weights_of(trainer)
    assert list(state) == list(before)
    same_names = {name for name, value in state.items() if torch.equal(value, before[name])}
    assert same_names == {"kept", "unused.weight", "unused.bias", "norm.num_batches_tracked"}
    assert torch.equal(state["second.weight"], state["third.weight"])
    mean = before["norm.running_mean"] * 0.9 + 0.1 * F.linear(x, before["first.weight"], before["first.bias"]).mean(0)
    torch.testing.assert_close(state["norm.running_mean"], mean)
    assert module.load_state_dict(state).missing_keys == []


class Normalized(nn.Module):
    """Normalized channels and features, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.of_channels = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.hidden, self.of_features = nn.Linear(4 * 25, 8), nn.BatchNorm1d(8, momentum=0.3, eps=1e-3)
        self.dropout, self.head = nn.Dropout(0.25), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.of_channels(self.conv(x))).flatten(1)
        return self.head(self.dropout(torch.tanh(self.of_features(self.hidden(h)))))


NORMALIZED: dict[str, Any] = {
    "inputs": [("x", ["N", 2, 5, 5]), ("y", ["N"])],
    "outputs": [("loss", [], True), ("p", ["N", 3])],
}


def check_an_evaluation_is_that_of_the_module() -> None:
    """The outputs agree before and after training, in each opset, and for one row without batch statistics."""
    for opset in (12, 13, 14):
        torch.manual_seed(3)
        module, x, y = Normalized(), torch.randn(9, 2, 5, 5) + 1.0, torch.randint(0, 3, (9,))
        trainer = trainer_on(
            module, NORMALIZED, nn.CrossEntropyLoss(), SGDConfig(lr=0.1), _internal_use={"onnx_opset_version": opset}
        )
        module = copy.deepcopy(module).eval()
        for steps in (0, 4):
            for _ in range(steps):
                trainer.train_step(x, y)
            before = trainer.state_dict() if steps else None
            if before is not None:
                module.load_state_dict(weights_of(trainer))
                assert module.of_features.running_mean.abs().max() > 0.01, "the statistics changed"
            for rows in (9, 1):
                loss, found = trainer.eval_step(x[:rows], y[:rows])
                expected = module(x[:rows]).detach()
                torch.testing.assert_close(found, expected, rtol=CLOSE, atol=CLOSE)
                torch.testing.assert_close(loss, F.cross_entropy(expected, y[:rows]), rtol=CLOSE, atol=CLOSE)
            if before is not None:
                statistics = trainer.state_dict()["running_statistics"]
                assert statistics.keys() == before["running_statistics"].keys()
                assert len(statistics) == 4
                for name, value in statistics.items():
                    assert np.array_equal(value, before["running_statistics"][name]), name


def check_buffers_of_other_types() -> None:
    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("narrow", torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16))
            self.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))
            self.register_buffer("places", torch.tensor([2, 0, 1]))
            self.register_buffer("kept", torch.tensor([True, False, True]))

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)[:, self.places] * self.scale.float() + self.narrow.float()
            return torch.where(self.kept, h, torch.zeros(()))

    description = {"inputs": [("x", [2, 4]), ("y", [2])], "outputs": [("loss", [], True), ("p", [2, 3])]}
    module = Typed()
    values = torch.randn(2, 4), torch.tensor([0, 2])
    trainer = trainer_on(module, description, nn.CrossEntropyLoss(), debug={"check_model_export": True})
    _, found = trainer.train_step(*values)
    torch.testing.assert_close(found, module(values[0]).detach())
    state = weights_of(trainer)
    for name, buffer in module.named_buffers():
        assert state[name].dtype == buffer.dtype
        assert torch.equal(state[name], buffer)
    assert module.load_state_dict(state).missing_keys == []


def check_the_weights_of_a_loss() -> None:
    """The loss is a module: its buffers do not change, and its parameters are trained under their own names."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(3))
            self.register_buffer("target", torch.ones(3))

        def forward(self, predictions: Tensor, y: Tensor) -> Tensor:
            return ((predictions * self.factor - y * self.target) ** 2).mean()

    description = {"inputs": [("input", [2, 4]), ("y", [2, 3])], "outputs": [("loss", [], True), ("p", [2, 3])]}
    module = nn.Linear(4, 3)
    trainer = trainer_on(module, description, Scaled(), SGDConfig(lr=0.1))
    trainer.train_step(torch.randn(2, 4), torch.randn(2, 3))
    assert set(trainer.state_dict()["model"]["full_precision"]) == {
        "weight",
        "bias",
        "loss_fn.factor",
        "loss_fn.target",
    }
    assert trainer.options.utils.frozen_weights == ["loss_fn.target"]
    assert module.load_state_dict(weights_of(trainer)).unexpected_keys == []


def check_arguments_by_name() -> None:
    """The description may have another order than forward, and omit arguments with defaults."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, a: Tensor, b: Tensor, c: float = 3.0, *, d: Tensor) -> tuple[Tensor, Tensor]:
            total = (self.w * (a - 2 * b + c * d)).sum()
            return total, total + 1

    description = {
        "inputs": [("d", [3]), ("b", [3]), ("a", [3])],
        "outputs": [("loss", [], True), ("other", [])],
    }
    a, b, d = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), torch.full((3,), 10.0)
    for args, kwargs in (((d, b, a), {}), ((), {"a": a, "b": b, "d": d}), ((d,), {"a": a, "b": b}), (([d, b, a],), {})):
        trainer = trainer_on(Sum(), description, None)
        loss, other = trainer.eval_step(*args, **kwargs)
        assert (float(loss), float(other)) == (90.0, 91.0)
        assert [value.name for value in trainer._onnx_model.graph.input] == ["d", "b", "a"]


def check_kinds_of_values() -> None:
    plain, trainer = trainer_of(), trainer_of()
    arrays = [value.numpy() for value in batch()]
    for _ in range(2):
        found, expected = plain.train_step(*arrays), trainer.train_step(*batch())
        assert [type(value) for value in found] == [np.ndarray, np.ndarray]
        assert [type(value) for value in expected] == [Tensor, Tensor]
        assert [value.tobytes() for value in found] == [value.numpy().tobytes() for value in expected]
    assert type(plain.eval_step(batch()[0], arrays[1])[0]) is Tensor
    kept = found[1].copy()
    plain.train_step(*arrays)
    np.testing.assert_array_equal(kept, found[1], "outputs of a step stay as they are")


def check_sparse_tensors_are_refused() -> None:
    """The error is the same before and after the export."""
    description = {"inputs": [("input", [1, 4])], "outputs": [("loss", [1, 1], True)]}
    trainer = trainer_on(nn.Sequential(nn.Linear(4, 1), nn.Flatten()), description, None)
    text = "input 'input' has the layout torch.sparse_coo, but must be dense: pass x.to_dense()"
    for _ in range(2):
        refused(lambda: trainer.train_step(torch.ones(1, 4).to_sparse()), ortrain.UnsupportedError, text)
        trainer.train_step(torch.ones(1, 4))


def check_memory_is_shared() -> None:
    values = torch.randn(3, 4)
    native = native_of_torch("x", values)
    values[1, 2] = 7
    assert native.array()[1, 2] == 7
    turned = native_of_torch("x", values.t())
    np.testing.assert_array_equal(turned.array(), values.t().numpy())
    trainer = trainer_of()
    seen: list[Any] = []
    run = trainer.train_step(*batch())
    answer = trainer._runner.answer

    def watched(names: Any, results: Any, given: Any) -> Any:
        seen.extend(results[name].array().ctypes.data for name in names)
        return answer(names, results, given)

    trainer._runner.answer = watched  # type: ignore[method-assign]
    run = trainer.train_step(*batch())
    assert [value.data_ptr() for value in run] == seen
    assert all(not value.requires_grad for value in run)


def check_dynamic_sizes() -> None:
    trainer = trainer_of()
    for time, rows in ((TOKENS, ROWS), (3, 5), (12, 1), (1, 2)):
        _, predictions = trainer.train_step(*batch(0, time, rows))
        assert predictions.shape == (time, rows, VOCABULARY)
    module = net()
    assert_same = trainer_of(module).eval_step(*batch(1, 6, 3))
    torch.testing.assert_close(assert_same[1], module(batch(1, 6, 3)[0]).detach())


def check_dropout_is_active_in_training_only() -> None:
    trainer = trainer_of(net(dropout=0.5), SGDConfig(lr=0.0))
    evaluated = {float(trainer.eval_step(*batch())[0]) for _ in range(3)}
    assert len(evaluated) == 1
    trained = {float(trainer.train_step(*batch())[0]) for _ in range(3)}
    assert len(trained) == 3
    assert abs(evaluated.pop() - float(trainer_of().eval_step(*batch())[0])) < CLOSE


def check_model_export_is_checked() -> None:
    class Other(nn.Module):
        """A module with another function in training."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * (2.0 if self.training else 1.0)

    description = {"inputs": [("x", [2, 3]), ("y", [2])], "outputs": [("loss", [], True), ("p", [2, 2])]}
    values = torch.randn(2, 3), torch.tensor([0, 1])
    trainer = trainer_on(Other(), description, nn.CrossEntropyLoss(), debug={"check_model_export": True})
    for _ in range(2):
        refused(lambda: trainer.train_step(*values), AssertionError, "in output 'loss'")
    assert trainer._onnx_model is None
    trainer_on(Other(), description, nn.CrossEntropyLoss()).train_step(*values)
    for given in ({}, mixed(), {"batch": {"gradient_accumulation_steps": 2}}):
        trainer_of(debug={"check_model_export": True}, **given).train_step(*batch())


def check_frozen_parameters() -> None:
    module = net()
    module.decoder.bias.requires_grad = False
    trainer = trainer_of(module)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", UserWarning)
        trainer.train_step(*batch())
    assert "decoder.bias; add the names to utils.frozen_weights" in "".join(str(warning.message) for warning in seen)
    frozen = trainer_of(module, utils={"frozen_weights": ["decoder.bias"]})
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", UserWarning)
        frozen.train_step(*batch())
    assert not [warning for warning in seen if "requires_grad" in str(warning.message)]
    assert frozen.options.utils.frozen_weights == ["decoder.bias", "positions"]
    assert torch.equal(weights_of(frozen)["decoder.bias"], module.decoder.bias)
    assert not torch.equal(weights_of(trainer)["decoder.bias"], module.decoder.bias)


def check_two_trainers_of_one_options_object() -> None:
    options = options_of()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        first, second = (
            ORTTrainer(net(seed), copy.deepcopy(DESCRIPTION), AdamConfig(lr=0.01), loss_of, options) for seed in (1, 2)
        )
    expected = [losses_of(trainer_of(net(seed)), 3) for seed in (1, 2)]
    assert [losses_of(first, 3), losses_of(second, 3)] == expected
    assert options.utils.frozen_weights == ["positions"]


def check_files_and_states() -> None:
    trainer = trainer_of()
    losses_of(trainer, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "checkpoint.ortcp")
        trainer.save_checkpoint(path, {"epoch": 2})
        expected = losses_of(trainer, 3, 3)
        again = trainer_of(net(99))
        assert again.load_checkpoint(path) == {"epoch": 2}
    assert losses_of(again, 3, 3) == expected
    initial = {tensor.name: numpy_helper.to_array(tensor) for tensor in again._onnx_model.graph.initializer}
    np.testing.assert_array_equal(initial["positions"], net().positions)
    module = net(7)
    module.load_state_dict(weights_of(again))
    torch.testing.assert_close(again.eval_step(*batch())[1], module(batch()[0]).detach(), rtol=1e-4, atol=1e-5)


# Bad input.


def described(inputs: list[Any], outputs: list[Any] | None = None) -> dict[str, Any]:
    return {"inputs": inputs, "outputs": outputs or DESCRIPTION["outputs"]}


def check_descriptions_that_do_not_fit() -> None:
    tokens, following = DESCRIPTION["inputs"]
    cases: list[tuple[Any, list[Tensor], type[Exception], str]] = [
        (described([("token", tokens[1]), following]), [*batch()], AssertionError, "did you mean 'tokens'"),
        (described([following]), [batch()[1]], AssertionError, "requires the argument 'tokens' by name"),
        (described([tokens, ("x", [1]), following]), [batch()[0], torch.ones(1), batch()[1]], AssertionError, "'x'"),
        (described([tokens, ("following", ["time", 3])]), [*batch()], ortrain.InvalidArgumentError, "'following'"),
        (described([tokens, ("following", ["time", "time"])]), [*batch()], AssertionError, "dynamic shape time"),
        (
            described([tokens, ("following", ["time"])]),
            [*batch()],
            ortrain.InvalidArgumentError,
            "numbers of axes differ",
        ),
        (
            described([tokens, following], [*DESCRIPTION["outputs"], ("more", [1])]),
            [*batch()],
            ortrain.InvalidArgumentError,
            "model_desc has 3 outputs (loss, predictions, more), but the module and loss_fn return 2",
        ),
        (
            described([tokens, following], [("predictions", ["time", "batch", VOCABULARY]), ("loss", [], True)]),
            [*batch()],
            ortrain.InvalidArgumentError,
            "output 'predictions' has the shape",
        ),
        (described([tokens, following], [("loss", [])]), [*batch()], AssertionError, "Only one loss output"),
        (
            described([tokens, following], [("loss", [], True), ("predictions", ["time", "batch", 29])]),
            [*batch()],
            ortrain.InvalidArgumentError,
            "'predictions'",
        ),
        (
            described([tokens, following]),
            [batch()[0]],
            AssertionError,
            "expected 2 inputs of model_desc (tokens, following), got 1",
        ),
    ]
    for description, values, kind, text in cases:
        trainer = trainer_on(net(), description, loss_of)
        for _ in range(2):
            refused(lambda step=trainer.train_step, values=values: step(*values), kind, text)
        assert trainer._training_session is trainer._onnx_model is None
        assert trainer._train_step_info.step == 0
        assert trainer.options.utils.frozen_weights == []


def check_names_that_collide() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.x * x).sum()

    trainer = trainer_on(Named(), {"inputs": [("x", [3])], "outputs": [("loss", [], True)]}, None)
    refused(lambda: trainer.train_step(torch.ones(3)), ortrain.InvalidArgumentError, "parameter or buffer 'x'")


def check_losses_that_do_not_fit() -> None:
    def three(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a

    for loss in (three, 5):
        refused(lambda loss=loss: trainer_on(net(), DESCRIPTION, loss), AssertionError, "two parameters")
    trainer = trainer_on(net(), DESCRIPTION, lambda predictions, following: predictions)
    refused(lambda: trainer.train_step(*batch()), ortrain.InvalidArgumentError, "must be one floating-point number")


def check_a_step_before_there_is_a_model() -> None:
    trainer = trainer_of()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.save_as_onnx("never.onnx")
    assert "not initialized yet" in str(seen[0].message)
    assert not Path("never.onnx").exists()
    refused(trainer.checkpoint_state, ortrain.OrtrainError, "no session yet")


def check_random_numbers_repeat() -> None:
    """The same seeds give the same weights."""
    first, second = (trainer_of(net(dropout=0.2), debug={"deterministic_compute": True}) for _ in range(2))
    assert losses_of(first, 4) == losses_of(second, 4)
    assert same(weights_of(first), weights_of(second))
