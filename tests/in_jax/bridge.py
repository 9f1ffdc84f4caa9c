"""ONNX models as functions of jax, compared with the same networks in jax: bridge.py PACKAGES [OPTION] CHECK...

PACKAGES is the folder that has ortrain. Prints a JSON object: for each check a distance or None, or the error with its
trace. `--anywhere` runs the callbacks of platforms other than the CPU.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import onnx
from jax import numpy as jnp
from onnx import numpy_helper, parser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, sys.argv[1])
import nets
from onnx_in_jax import LOSSES, adamw, cross_entropy, forward

import ortrain
import ortrain.jax
from ortrain import InvalidArgumentError, UnsupportedError
from ortrain.jax import as_function

STEPS, RATE = 20, 3e-3
# Errors of jax for an error in a callback. The second type occurs if a program of one operation runs immediately.
IN_A_PROGRAM = (jax.errors.JaxRuntimeError, ValueError)
# Limit in seconds for a hang, which is an error with the trace of each thread.
SECONDS = 600


def model_of(text: str, opset: int = 17) -> bytes:
    """Return a model from the text form of ONNX."""
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]>\n{text}').SerializeToString()


PERCEPTRON = model_of("""
net (float[n, 3] x) => (float[n, 2] y) <
    float[3, 4] w1 = {0.5, -1, 0.25, 2, 1, 0.75, -0.5, 1, -0.25, 0.5, 1, -1}, float[4] b1 = {0.1, 0.2, -0.3, 0},
    float[4, 2] w2 = {1, -0.5, 0.25, 1, -1, 0.5, 0.75, -0.25}, float[2] b2 = {0.5, -0.5}
> {
    h = Gemm (x, w1, b1)
    a = Tanh (h)
    y = Gemm (a, w2, b2)
}""")
# Floats and integers as inputs and outputs; the first output does not depend on the second input.
SEVERAL = model_of("""
net (int64[n] ids, float[4] scale) => (float[n, 4] rows, int64[n] best, float[n, 4] scaled) <
    float[5, 4] table = {1, 2, -3, 4, 5, -6, 7, 8, 9, 1, 2, 3, -4, 5, 6, 7, 8, 9, -1, 2}
> {
    rows = Gather (table, ids)
    scaled = Mul (rows, scale)
    best = ArgMax <axis = 1, keepdims = 0> (scaled)
}""")
MAX_POOL = "net (float[1, 1, 4, 4] x) => (y) { y = MaxPool <kernel_shape = [2, 2]> (x) }"


def perceptron(weights: Any, x: Any) -> Any:
    """Compute the network of PERCEPTRON."""
    return jnp.tanh(x @ weights["w1"] + weights["b1"]) @ weights["w2"] + weights["b2"]


def transformer(weights: Any, tokens: Any, mask: Any) -> Any:
    """Compute the network of `ortrain.examples.transformer`: two layers with two heads of attention over bytes."""

    def dense(name: str, x: Any) -> Any:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def norm(name: str, x: Any) -> Any:
        apart = x - x.mean(-1, keepdims=True)
        normal = apart / jnp.sqrt((apart**2).mean(-1, keepdims=True) + 1e-5)
        return normal * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def heads(x: Any) -> Any:
        return x.reshape(*x.shape[:2], 2, -1).swapaxes(1, 2)

    h = weights["embedding.tokens"][tokens] + weights["embedding.positions"][: tokens.shape[1]]
    for layer in ("layer1", "layer2"):
        normal = norm(f"{layer}.norm1", h)
        query, key, value = (heads(dense(f"{layer}.{part}", normal)) for part in ("query", "key", "value"))
        scores = query @ key.swapaxes(2, 3) * weights["scale"] + (1 - mask)[:, None, None] * -1e4
        seen = (jax.nn.softmax(scores) @ value).swapaxes(1, 2)
        h = h + dense(f"{layer}.output", seen.reshape(h.shape))
        h = h + dense(f"{layer}.fc2", jax.nn.relu(dense(f"{layer}.fc1", norm(f"{layer}.norm2", h))))
    kept = norm("norm", h) * mask[:, :, None]
    return dense("head", kept.sum(1) / mask.sum(1, keepdims=True))


def distance(got: Any, want: Any) -> float:
    """Return the largest difference of two trees, relative to the largest magnitude of its array."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    largest = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, (a.shape, b.shape)
        assert np.isfinite(a).all()
        assert np.abs(b).max() > 0
        largest = max(largest, float(np.abs(a - b).max() / np.abs(b).max()))
    return largest


@contextmanager
def refused(kind: type[Exception] | tuple[type[Exception], ...], *parts: str) -> Iterator[None]:
    """Check that the block raises an error with these texts."""
    text = None
    try:
        yield
    except kind as error:
        text = str(error)
    assert text is not None, f"no error; expected {parts}"
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"


def squares(outputs: Any) -> Any:
    """Return the sum of all squares of a tree."""
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(outputs))


def rows(count: int, width: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


def in_double(tree: Any) -> Any:
    """Return a tree with its floats in float64."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64 if leaf.dtype == np.float32 else leaf.dtype), tree)


class Cnn:
    """Convolutions of several kinds, residuals and normalizations, in ortrain and in jax."""

    def __init__(self) -> None:
        net = nets.separable()
        self.batches = net.batches
        self.function = as_function(net.model, wrt=net.trained)
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in net.model.graph.initializer}
        for name in net.trained:
            del constants[name]
        loss = LOSSES[net.loss]
        self.ours = lambda weights, x, labels: loss(self.function(weights, x), labels)
        self.theirs = lambda weights, x, labels: loss(forward(net.model, {**constants, **weights}, x, {})[0], labels)


class Transformer:
    """Attention over bytes, in ortrain and in jax."""

    def __init__(self) -> None:
        # A bias of the keys does not change scores, so its gradient is only rounding.
        wrt = ["embedding.*", "layer?.[!k]*", "layer?.key.weight", "norm.*", "head.*"]
        self.function = as_function(ortrain.examples.transformer(), wrt)
        initializers = onnx.load(ortrain.examples.transformer()).graph.initializer
        constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in initializers}
        rng = np.random.default_rng(3)
        lengths = (9, 12, 9, 7)
        tokens = [rng.integers(0, 256, (6, length)) for length in lengths]
        masks = [np.ones(some.shape, np.float32) for some in tokens]
        for mask in masks:
            mask[::2, -2:] = 0
        self.batches = [
            (some, mask, (some.sum(1) % 2).astype(np.int64)) for some, mask in zip(tokens, masks, strict=True)
        ]
        self.ours = lambda weights, some, mask, labels: cross_entropy(self.function(weights, some, mask), labels)
        self.theirs = lambda weights, some, mask, labels: cross_entropy(
            transformer({**constants, **weights}, some, mask), labels
        )


def gradients(net: Cnn | Transformer, floats: int) -> float:
    """Compare gradients of weights and of a float input with jax's in float64; returns the distance."""
    weights, batch = net.function.weights, net.batches[0]
    got = jax.grad(net.ours, (0, floats))(weights, *batch)
    with jax.enable_x64(True):
        want = jax.grad(net.theirs, (0, floats))(in_double(weights), *in_double(batch))
    return distance(got, want)


def trained(loss: Callable[..., Any], weights: Any, batches: Any) -> np.ndarray:
    """Return the losses of an ordinary loop in jax."""

    @jax.jit
    def stepped(number: Any, weights: Any, moments: Any, *batch: Any) -> Any:
        value, found = jax.value_and_grad(loss)(weights, *batch)
        updated = {
            name: adamw(number, RATE, (0.9, 0.999), 1e-6, 0.0, weight, found[name], *moments[name])
            for name, weight in weights.items()
        }
        return {name: new[0] for name, new in updated.items()}, {name: new[1:] for name, new in updated.items()}, value

    moments = {name: (jnp.zeros_like(weight), jnp.zeros_like(weight)) for name, weight in weights.items()}
    losses = []
    for step in range(STEPS):
        weights, moments, value = stepped(step + 1.0, weights, moments, *batches[step % len(batches)])
        losses.append(float(value))
    return np.asarray(losses)


def training(net: Cnn | Transformer) -> float:
    """Return the distance of the losses from the same loop in jax; the losses must fall."""
    weights = net.function.weights
    got = trained(net.ours, weights, net.batches)
    with jax.enable_x64(True):
        want = trained(net.theirs, in_double(weights), in_double(net.batches))
    last = len(net.batches)
    assert got[-last:].mean() < 0.8 * got[:last].mean(), got
    return distance(got, want)


def gradients_of_a_cnn() -> float:
    return gradients(Cnn(), 1)


def gradients_of_a_transformer() -> float:
    return gradients(Transformer(), 2)


def training_a_cnn() -> float:
    return training(Cnn())


def training_a_transformer() -> float:
    return training(Transformer())


def transformations() -> float:
    """Check that each transformation of jax gives the result of the same network in jax."""
    function, x = as_function(PERCEPTRON), rows(5)
    weights = function.weights

    def each(net: Callable[..., Any]) -> dict[str, Any]:
        def loss(weights: Any, x: Any) -> Any:
            return squares(net(weights, x))

        def scanned(weights: Any) -> Any:
            return jax.lax.scan(lambda carried, row: (carried + loss(weights, row[None]), None), 0.0, x)[0]

        compiled = jax.jit(net)
        outputs, pull = jax.vjp(net, weights, x)
        return {
            "a call": net(weights, x),
            "jit": compiled(weights, x),
            "grad of jit by weights": jax.grad(lambda weights: squares(compiled(weights, x)))(weights),
            "grad of jit by x": jax.grad(lambda x: squares(compiled(weights, x)))(x),
            "jit of grad": jax.jit(jax.grad(loss, (0, 1)))(weights, x),
            "value_and_grad": jax.value_and_grad(loss)(weights, x),
            "vjp": (outputs, pull(jnp.ones_like(outputs))),
            "vmap": jax.vmap(net, (None, 0))(weights, x[:, None]),
            "vmap over weights": jax.vmap(net, (0, None))(jax.tree.map(lambda w: jnp.stack([w, 2 * w]), weights), x),
            "gradients of each row": jax.vmap(jax.grad(loss), (None, 0))(weights, x[:, None]),
            "grad of vmap": jax.grad(lambda weights: squares(jax.vmap(net, (None, 0))(weights, x[:, None])))(weights),
            "jacobian": jax.jacrev(net)(weights, x),
            "checkpoint": jax.grad(jax.checkpoint(loss))(weights, x),
            "scan": jax.jit(jax.value_and_grad(scanned))(weights),
            "one weight": jax.grad(lambda bias: loss({**weights, "b1": bias}, x))(weights["b1"]),
            "cond": jax.jit(jax.grad(lambda x: jax.lax.cond(x.sum() > 1e9, jnp.sum, lambda x: loss(weights, x), x)))(x),
        }

    got, want = each(function), each(perceptron)
    return max(distance(got[name], want[name]) for name in want)


def inputs_by_name() -> None:
    function = as_function(SEVERAL)
    assert function.input_names == ["ids", "scale"]
    assert function.output_names == ["rows", "best", "scaled"]
    ids, scale = np.array([1, 4]), np.ones(4, np.float32)
    want = function(function.weights, ids, scale)
    for got in (
        function(function.weights, ids, scale=scale),
        function(function.weights, scale=scale, ids=ids),
        jax.jit(function)(function.weights, ids, scale=scale),
    ):
        assert all((a == b).all() for a, b in zip(got, want, strict=True))


def several_outputs() -> None:
    """Check gradients through each output, through all outputs, and through no output."""
    function = as_function(SEVERAL)
    weights, ids = function.weights, jnp.array([1, 4, 1])
    scale = jnp.array([1.0, -2, 3, 0.5])
    outputs = function(weights, ids, scale)
    assert isinstance(outputs, tuple)
    table = weights["table"]
    assert (outputs[0] == table[ids]).all()
    assert (outputs[1] == (table[ids] * scale).argmax(1)).all()
    assert (outputs[2] == table[ids] * scale).all()

    def by_both(of: Callable[..., Any]) -> Any:
        def of_values(weights: Any, scale: Any) -> Any:
            return of(*function(weights, ids, scale)).sum()

        return jax.grad(of_values, (0, 1))(weights, scale)

    counts = jnp.array([0.0, 2, 0, 0, 1])[:, None]
    of_weights, of_scale = by_both(lambda first, best, scaled: scaled)
    assert (of_weights["table"] == counts * scale).all()
    assert (of_scale == table[ids].sum(0)).all()
    of_weights, of_scale = by_both(lambda first, best, scaled: 2 * first)
    assert (of_weights["table"] == jnp.broadcast_to(2 * counts, (5, 4))).all()
    assert (of_scale == 0).all()
    of_weights, of_scale = by_both(lambda first, best, scaled: first + 3 * scaled)
    assert (of_weights["table"] == counts * (1 + 3 * scale)).all()
    assert (of_scale == 3 * table[ids].sum(0)).all()
    of_weights, of_scale = by_both(lambda first, best, scaled: best.astype(jnp.float32))
    assert not of_weights["table"].any()
    assert not of_scale.any()


def integers() -> None:
    """int64 of the model is int32 in jax without 64 bits; integers have float0 gradients."""
    function = as_function(SEVERAL)
    weights, scale = function.weights, jnp.ones(4)
    want = np.asarray(weights["table"])[[3, 0]]
    for kind in (np.int8, np.uint8, np.int16, np.int32, np.int64):
        first, best, _ = function(weights, np.array([3, 0], kind), scale)
        assert (first == want).all()
        assert best.dtype == np.int32
    with jax.enable_x64(True):
        _, best, _ = function(weights, np.array([3, 0]), scale)
        assert best.dtype == np.int64
    ids = jnp.array([3, 0])
    outputs, pull = jax.vjp(function, weights, ids, scale)
    zeros = np.zeros(2, jax.dtypes.float0)
    of_weights, of_ids, of_scale = pull((jnp.ones_like(outputs[0]), zeros, jnp.ones_like(outputs[2])))
    assert of_ids.dtype == jax.dtypes.float0
    assert of_ids.shape == ids.shape
    assert of_weights["table"].sum() == 16
    assert (of_scale == want.sum(0)).all()
    large = as_function(model_of("net (float[1] x, int64[1] i) => (y, j) { y = Mul (x, x) \n j = Mul (i, i) }"), wrt=[])
    one = jnp.ones(1)
    assert large({}, one, jnp.array([40000 // 2]))[1] == 20000**2
    with refused(IN_A_PROGRAM, '"j" has values outside the range of int32', "jax_enable_x64"):
        jax.block_until_ready(large({}, one, jnp.array([2**20])))
    with refused(InvalidArgumentError, 'input "i" has values outside the range of int32', "jax_enable_x64"):
        large({}, one, np.array([2**40]))
    with jax.enable_x64(True):
        assert large({}, one.astype(np.float32), jnp.array([2**20]))[1] == 2**40


def batches_of_any_size() -> None:
    """Check batches with and without rows, and output shapes that do not follow from the names of input axes."""
    function = as_function(PERCEPTRON)
    twice = as_function(model_of("net (float[n, 3] x) => (y) { y = Concat <axis = 0> (x, x) }"), wrt=[])
    compiled = jax.jit(jax.value_and_grad(lambda x: squares(function(function.weights, x))))
    for count in (4, 1, 0, 4, 7):
        x = rows(count)
        value, of_x = compiled(x)
        want, want_of_x = jax.value_and_grad(lambda x: squares(perceptron(function.weights, x)))(x)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        np.testing.assert_allclose(of_x, want_of_x, rtol=1e-4, atol=1e-6)
        assert twice({}, x).shape == (2 * count, 3)
        assert (jax.grad(lambda x: squares(twice({}, x)))(x) == 4 * x).all()


def half_precision() -> None:
    """Check float16 and bfloat16 within the rounding of each, relative to float32."""
    rounded(np.dtype(np.float16), onnx.TensorProto.FLOAT16)
    rounded(np.dtype(ml_dtypes.bfloat16), onnx.TensorProto.BFLOAT16)
    # A Python number takes the type of the input.
    square = as_function(model_of("net (float16 x) => (float16 y) { y = Mul (x, x) }"))
    value, slope = jax.value_and_grad(lambda x: square({}, x))(0.5)
    assert (value.dtype, float(value), float(slope)) == (np.float16, 0.25, 1.0)


def rounded(kind: np.dtype[Any], number: int) -> None:
    model = onnx.load_from_string(PERCEPTRON)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = number
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(kind), tensor.name))
    function = as_function(model)
    weights, x = function.weights, jnp.asarray(rows(6).astype(kind))
    assert {weight.dtype for weight in weights.values()} == {kind}
    assert function(weights, x).dtype == kind
    got = jax.jit(jax.grad(lambda weights, x: squares(function(weights, x)), (0, 1)))(weights, x)
    assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {kind}
    exact = jax.tree.map(lambda leaf: leaf.astype(np.float32), (weights, x))
    want = jax.grad(lambda weights, x: squares(perceptron(weights, x)), (0, 1))(*exact)
    # Each number is rounded several times.
    assert distance(got, want) < 8 * float(ml_dtypes.finfo(kind).eps)
    read = dict(ortrain._ortrain.initializers(function.to_onnx(got[0])))
    assert (read["w1"].array() == np.asarray(got[0]["w1"])).all()


def double_precision() -> float:
    """Compare float64 with central differences. Without 64 bits float64 is an error, never silent float32."""
    text = "net (double[n] x) => (double[n] y) <double[1] w = {0.75}> { e = Exp (x) \n y = Pow (e, w) }"
    function = as_function(model_of(text), ["w"])
    for use in (lambda: function.weights, lambda: function({"w": jnp.ones(1)}, jnp.ones(2))):
        with refused(UnsupportedError, "is float64, which jax does not have by default", "jax_enable_x64"):
            use()
    with jax.enable_x64(True):
        weights, x = function.weights, jnp.array([0.3, -0.2])
        assert function(weights, x).dtype == np.float64
        got = jax.grad(lambda weights, x: function(weights, x).sum(), (0, 1))(weights, x)
        near = 1e-6

        def between(low: Any, high: Any) -> Any:
            return (function(*high) - function(*low)).sum() / (2 * near)

        def moved(by: float) -> Any:
            return {"w": weights["w"] + by}

        of_w = between((moved(-near), x), (moved(near), x))
        of_x = [between((weights, x.at[at].add(-near)), (weights, x.at[at].add(near))) for at in range(x.size)]
        return distance(got, ({"w": of_w[None]}, jnp.stack(of_x)))


def gradients_of_gradients() -> float:
    """Check gradients by all values and some weights, Hessians, a convolution network and attention."""
    function, x = as_function(PERCEPTRON), rows(4)
    weights = function.weights

    def each(net: Callable[..., Any]) -> list[Any]:
        def steep(weights: Any, x: Any) -> Any:
            return squares(jax.grad(lambda *values: jnp.tanh(net(*values)).sum(), (0, 1))(weights, x))

        def of_bias(bias: Any) -> Any:
            return jnp.tanh(net({**weights, "b1": bias}, x)).sum()

        return [
            jax.grad(steep, (0, 1))(weights, x),
            jax.jit(jax.grad(steep, (0, 1)))(weights, x),
            jax.jacrev(jax.grad(of_bias))(weights["b1"]),
            jax.vmap(jax.grad(steep, 1), (None, 0))(weights, x[:, None]),
        ]

    found = distance(each(function), each(perceptron))
    return max(found, steepness(Cnn()), steepness(Transformer()))


def steepness(net: Cnn | Transformer) -> float:
    """Compare the gradient of the squared gradients with jax's in float64; returns the distance."""

    def of(loss: Callable[..., Any], weights: Any, batch: Any) -> Any:
        return jax.jit(jax.grad(lambda weights: squares(jax.grad(loss)(weights, *batch))))(weights)

    weights, batch = net.function.weights, net.batches[0]
    got = of(net.ours, weights, batch)
    with jax.enable_x64(True):
        return distance(got, of(net.theirs, in_double(weights), in_double(batch)))


def gradients_that_are_not_there() -> None:
    old = as_function(model_of(MAX_POOL, 7), wrt=[])
    x = jnp.arange(16.0).reshape(1, 1, 4, 4)
    gradient = jax.grad(lambda x: squares(old({}, x)))
    assert jnp.count_nonzero(gradient(x)) == 9
    with refused(UnsupportedError, "this gradient has no gradient", "MaxPool", "opset 8 or newer"):
        jax.grad(lambda x: squares(gradient(x)))(x)
    function = as_function(PERCEPTRON)

    def of_x(x: Any) -> Any:
        return squares(function(function.weights, x))

    second = jax.grad(lambda x: squares(jax.grad(of_x)(x)))
    with refused(UnsupportedError, "third-order gradients are not supported"):
        jax.grad(lambda x: squares(second(x)))(jnp.asarray(rows(2)))
    with refused(TypeError, "forward-mode"):
        jax.jvp(of_x, (rows(2),), (rows(2),))


# A size at which a pure_callback on the CPU waits for a thread that copies the value.
WIDE = 4_000_000


def wide() -> Any:
    """Return a function of large values: the hyperbolic tangent of each."""
    return as_function(model_of(f"net (float[{WIDE}] x) => (float[{WIDE}] y) {{ y = Tanh (x) }}"))


def large_values() -> float:
    """Make many calls in sequence; no call may wait for its own thread."""
    function, x = wide(), jnp.linspace(-1, 1, WIDE)

    def repeated(net: Callable[..., Any]) -> Any:
        forward = jax.jit(lambda x: net(x * 2))
        backward = jax.jit(jax.grad(lambda x: net(x * 2).sum()))
        after = x
        for _ in range(10):
            after = forward(after * 0.9)
        return after, backward(after * 0.9)

    return distance(repeated(lambda x: function({}, x)), repeated(jnp.tanh))


def threads() -> None:
    """Run two functions in four threads, and one function in all of them."""
    shared = as_function(PERCEPTRON)
    large = wide()
    failed: list[str] = []

    def work(seed: int) -> None:
        try:
            x, own = rows(16, seed=seed), as_function(PERCEPTRON)
            y = jnp.linspace(-1, 1, WIDE) * (1 + seed / 4)
            want = jax.grad(lambda weights: squares(perceptron(weights, x)))(own.weights)
            want_large = jax.grad(lambda y: squares(jnp.tanh(y)))(y)
            for function in (shared, own):
                compiled = jax.jit(jax.grad(lambda weights, x, f=function: squares(f(weights, x))))
                for _ in range(10):
                    assert distance(compiled(function.weights, x), want) < 1e-5
            compiled = jax.jit(jax.grad(lambda y: squares(large({}, y))))
            for _ in range(5):
                assert distance(compiled(y), want_large) < 1e-5
        except BaseException:
            failed.append(traceback.format_exc())

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed, failed[0]


def same_bits() -> None:
    """Every call gives the same bits, compiled or not."""
    net = Cnn()
    weights, (x, labels) = net.function.weights, net.batches[0]
    first = jax.jit(jax.grad(net.ours))(weights, x, labels)
    for _ in range(3):
        again = jax.jit(jax.grad(lambda *values: net.ours(*values)))(weights, x, labels)
        assert all((first[name] == again[name]).all() for name in first)
    assert (net.function(weights, x) == jax.jit(net.function)(weights, x)).all()


def choice_of_gradients() -> None:
    """Gradients that jax does not request are not computed."""
    function, x = as_function(PERCEPTRON), rows(3)
    weights = function.weights
    jax.grad(lambda weights: squares(function(weights, x)))(weights)
    jax.grad(lambda bias: squares(function({**weights, "b2": bias}, x)))(weights["b2"])
    jax.jit(jax.grad(lambda x: squares(function(weights, x))))(x)
    assert list(function._model._pullbacks) == [("w1", "b1", "w2", "b2"), ("b2",), ("x",)]


def choice_of_weights() -> None:
    path = ortrain.examples.perceptron()
    every = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    x = rows(3, 64)
    want = as_function(path)(as_function(path).weights, x)
    for wrt, names in (
        (None, every),
        (["*"], every),
        (["fc2.bias", "fc1.bias"], ["fc1.bias", "fc2.bias"]),
        ("fc2.*", ["fc2.weight", "fc2.bias"]),
        (["fc2.bias", "fc2.*"], ["fc2.weight", "fc2.bias"]),
        ([], []),
    ):
        function = as_function(path, wrt)
        assert function.weight_names == list(function.weights) == names
        assert (function(function.weights, x) == want).all()
    for wrt, text in (
        (["fc3.bias"], "wrt has 'fc3.bias', which fits no initializer; did you mean 'fc2.bias'?"),
        (["fc3.*"], "wrt: 'fc3.*' matches no initializer"),
    ):
        with refused(InvalidArgumentError, text):
            as_function(path, wrt)
    convnet = ortrain.examples.convnet()
    statistics = [name for name in ortrain.inspect(convnet).parameters if name.role == "statistic"]
    assert len(statistics) == 6
    for function in (as_function(convnet), as_function(convnet, ["*"])):
        assert {statistic.name for statistic in statistics}.isdisjoint(function.weight_names)
        assert len(function.weight_names) > 6
    with refused(InvalidArgumentError, "is a running statistic, which has no gradient; remove the name"):
        as_function(convnet, [statistics[0].name])
    with refused(InvalidArgumentError, "wrt: no gradient reaches 'split_heads'"):
        as_function(ortrain.examples.transformer(), ["split_heads"])
    with refused(TypeError, "wrt must contain names of values, of type str, got int"):
        as_function(path, [3])
    with refused(TypeError, "a model must be a path, bytes or an onnx.ModelProto, got int"):
        as_function(3)
    with refused(FileNotFoundError, "there is no file nowhere.onnx"):
        as_function("nowhere.onnx")
    # The function no longer depends on the file.
    Path("moved.onnx").write_bytes(PERCEPTRON)
    function = as_function("moved.onnx")
    Path("moved.onnx").unlink()
    gradient = jax.grad(lambda weights: squares(function(weights, rows(2))))(function.weights)
    assert as_function(function.to_onnx(gradient)).weights["w1"][0, 0] == gradient["w1"][0, 0]


def models_that_are_no_functions() -> None:
    def dropped(on: int) -> bytes:
        constants = f"<float r = {{0.5}}, bool on = {{{on}}}>"
        return model_of(f"net (float[3] x) => (y) {constants} {{ d, mask = Dropout (x, r, on) \n y = Mul (d, d) }}")

    with refused(UnsupportedError, 'Dropout -> "d" may drop elements', "training_mode to false"):
        as_function(dropped(1), wrt=[])
    assert (as_function(dropped(0), wrt=[])({}, jnp.ones(3)) == 1).all()
    plain = model_of("net (float[3] x) => (y) { d = Dropout (x) \n y = Mul (d, d) }")
    assert (as_function(plain)({}, jnp.ones(3)) == 1).all()
    given = model_of("net (float[3] x, bool on) => (y) <float r = {0.5}> { d = Dropout (x, r, on) \n y = Mul (d, d) }")
    with refused(UnsupportedError, 'Dropout -> "d" may drop elements'):
        as_function(given, wrt=[])
    chosen = as_function(
        model_of("net (float[4] x) => (y) <float z = {0.5}> { b = Greater (x, z) \n y = Compress (x, b) }"), wrt=[]
    )
    with refused(UnsupportedError, '"y" is empty, [0], for inputs of zeros'):
        chosen({}, jnp.array([1.0, 0, 0, 0]))
    counted = as_function(model_of("net (float[4] x) => (y) { y = Unique (x) }"), wrt=[])
    assert counted({}, jnp.ones(4)) == 1
    with refused(IN_A_PROGRAM, '"y" has the shape [2], but the shapes of the inputs imply [1]'):
        jax.block_until_ready(counted({}, jnp.array([1.0, 0, 0, 0])))
    sized = as_function(model_of("net (float[4] x, int64[1] size) => (y) { y = Expand (x, size) }"), wrt=[])
    with refused(InvalidArgumentError, "jax needs the shapes of y before a run", "a run on zeros fails", "Expand"):
        sized({}, jnp.ones(4), jnp.array([4]))
    with refused(UnsupportedError, "string"):
        as_function(model_of("net (float[4] x, string[1] s) => (y, t) { y = Mul (x, x) \n t = Identity (s) }"), wrt=[])
    listed = "net (float[4] x) => (seq(float[m]) parts, y) { y = Mul (x, x) \n parts = SplitToSequence (x) }"
    with refused(UnsupportedError, "seq"):
        as_function(model_of(listed), wrt=[])


def wrong_calls() -> None:
    function = as_function(SEVERAL)
    weights, ids, scale = function.weights, jnp.array([1, 2]), jnp.ones(4)
    table = weights["table"]
    invalid = InvalidArgumentError
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: function(ids, scale), TypeError, "the weights must be a dict of arrays by name"),
        (lambda: function({}, ids, scale), invalid, "weights are missing: table"),
        (lambda: function({"tabel": table}, ids, scale), invalid, "no weight 'tabel'; did you mean 'table'?"),
        (lambda: function({"table": table[:3]}, ids, scale), invalid,
         'weight "table" must be float32[5, 4], got float32[3, 4]: axis 0 must be 5, got 3'),
        (lambda: function({"table": table.astype(jnp.bfloat16)}, ids, scale), invalid,
         'weight "table" must be float32[5, 4], got bfloat16[5, 4]: the element types differ'),
        (lambda: function({"table": "words"}, ids, scale), TypeError, 'weight "table" must be an array, got str'),
        (lambda: function(weights, ids), invalid, "(ids, scale); missing: scale"),
        (lambda: function(weights, ids, scale, scale), invalid,
         "expected 2 inputs (ids, scale), got 3"),
        (lambda: function(weights, ids, scale, ids=ids), invalid, "'ids' is given twice: by position and by name"),
        (lambda: function(weights, ids, scael=scale), invalid, "got an input 'scael'; did you mean 'scale'?"),
        (lambda: function(weights, ids * 1.0, scale), invalid,
         'input "ids" must be int64[n], got float32[2]: the element types differ; '
         'to convert it, pass .astype'),
        (lambda: function(weights, ids, ids), invalid, 'input "scale" must be float32[4], got int32[2]'),
        (lambda: function(weights, ids, jnp.ones((2, 2))), invalid,
         'input "scale" must be float32[4], got float32[2, 2]: the numbers of axes differ'),
        (lambda: function(weights, ids, jnp.ones(3)), invalid, "axis 0 must be 4, got 3"),
        (lambda: function(weights, ids, None), TypeError, 'input "scale" must be an array, got NoneType'),
        (lambda: function(weights, ids, jax.random.key(0)), TypeError, 'input "scale" must be an array'),
        (lambda: function.to_onnx({}), invalid, "weights are missing: table"),
        (lambda: function.to_onnx(weights, "no/folder/model.onnx"), FileNotFoundError, "there is no folder no/folder"),
    ]  # fmt: skip
    for use, kind, text in cases:
        with refused(kind, text):
            use()
    with refused(InvalidArgumentError, "axis 0 must be 4, got 3"):
        jax.jit(jax.grad(lambda scale: function(weights, ids, scale)[2].sum()))(jnp.ones(3))
    same = as_function(model_of("net (float[n] x, float[n] z) => (y) { y = Mul (x, z) }"), wrt=[])
    with refused(
        InvalidArgumentError,
        'input "z" must be float32[n], got float32[3]: axis 0 is 3, but "n" is 2 in input "x"',
    ):
        same({}, jnp.ones(2), jnp.ones(3))
    with jax.enable_x64(True), refused(InvalidArgumentError, "float64[4] was given", "astype(jnp.float32)"):
        function(weights, ids, np.ones(4))
    assert same({}, jnp.ones(2), np.ones(2)).dtype == np.float32
    for value in (np.array([np.nan, np.inf], np.float32), jnp.array([np.nan, np.inf])):
        np.testing.assert_array_equal(same({}, value, np.ones(2, np.float32)), value)
    # The compiled program reports errors that depend on values.
    with refused(IN_A_PROGRAM, "InvalidArgumentError", "17"):
        jax.block_until_ready(jax.jit(function)(weights, jnp.array([17, 0]), scale))
    # The function remains usable.
    assert jax.jit(function)(weights, ids, scale)[0].shape == (2, 4)


def models_with_new_weights() -> None:
    """The written model computes the results of the function."""
    net = Cnn()
    weights = jax.tree.map(lambda weight: weight * 1.01, net.function.weights)
    x = net.batches[0][0]
    content = net.function.to_onnx(weights, "written.onnx")
    assert Path("written.onnx").read_bytes() == content
    model = onnx.load_from_string(content)
    onnx.checker.check_model(model, full_check=True)
    (got,) = ortrain.InferenceSession(content).run(None, {"x": x})
    assert (got == np.asarray(net.function(weights, x))).all()
    again = as_function(content, wrt=net.function.weight_names)
    assert all((again.weights[name] == weight).all() for name, weight in weights.items())
    before = {tensor.name: tensor for tensor in nets.separable().model.graph.initializer}
    kept = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name not in weights}
    assert kept
    assert all(
        numpy_helper.to_array(before[name]).tobytes() == numpy_helper.to_array(tensor).tobytes()
        for name, tensor in kept.items()
    )
    # External data is embedded.
    onnx.save_model(model, "beside.onnx", save_as_external_data=True, location="beside.data", size_threshold=0)
    function = as_function("beside.onnx", wrt=net.function.weight_names)
    (got,) = ortrain.InferenceSession(function.to_onnx(function.weights)).run(None, {"x": x})
    assert (got == np.asarray(net.function(weights, x))).all()
    # Each access makes new arrays, so that a program may donate its own.
    donated = jax.jit(lambda weights: jax.tree.map(lambda weight: weight + 1, weights), donate_argnums=0)
    donated(net.function.weights)
    assert net.function(net.function.weights, x).shape == (6, 5)


def options() -> None:
    """Threads and memory limits are session options; operators may be custom."""
    settings = ortrain.SessionOptions()
    settings.memory_limit = 1000
    function = as_function(ortrain.examples.perceptron(), session_options=settings)
    with refused(IN_A_PROGRAM, "MemoryLimitError", "memory_limit is 1000"):
        jax.block_until_ready(function(function.weights, rows(8, 64)))
    library = ortrain.OperatorLibrary()
    library.add_function(
        parser.parse_function(
            '<domain: "own", opset_import: ["" : 17]> Cube (x) => (y) { s = Mul (x, x) \n y = Mul (s, x) }'
        )
    )
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "own" : 1]> net (float[n] x) => (float[n] y) { y = own.Cube (x) }'
    )
    cube = as_function(model, operators=library)
    x = jnp.array([1.0, -2, 3])
    assert (cube({}, x) == x**3).all()
    assert (jax.grad(lambda x: cube({}, x).sum())(x) == 3 * x**2).all()


def main() -> None:
    """Run the named checks."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    names = sys.argv[2:]
    if names[0] == "--anywhere":
        ortrain.jax.buffer_callback = None
        names = names[1:]
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = globals()[name]()
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
