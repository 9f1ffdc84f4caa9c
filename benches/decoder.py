"""Memory and time of training adapters on a decoder of TinyLlama's shape with 4-bit weights.

``python benches/decoder.py build FOLDER`` writes the decoder with random weights (1.1 * 10^9 parameters; fewer with
``--layers``), and ``python benches/decoder.py train FOLDER`` trains adapters of rank 8 on all its linear layers but the
head. It prints the largest resident memory, the time until the first step has ended, and tokens per second.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY, LAYERS = 2048, 5632, 32, 4, 32000, 22
HEAD = HIDDEN // HEADS
BLOCK = 32
"""Number of weights with one scale."""
LONGEST = 2048
"""Number of positions with rotary angles."""


def build(folder: Path, layers: int) -> None:
    """Write ``model.onnx`` with ``model.onnx.data``: embedding, blocks of attention and gated layers, head."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(name: str, array: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(array, name))
        return name

    def node(kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        domain = "com.microsoft" if kind in ("MatMulNBits", "GroupQueryAttention") else ""
        nodes.append(helper.make_node(kind, inputs, [output], name=output, domain=domain, **attributes))
        return output

    def linear(x: str, module: str, inputs: int, outputs: int) -> str:
        blocks = inputs // BLOCK
        packed = random.integers(0, 256, (outputs, blocks, BLOCK // 2), dtype=np.uint8)
        scales = np.full((outputs, blocks), 0.2 / inputs**0.5, np.float32)
        names = [
            constant(f"{module}.weight_Q4", packed),
            constant(f"{module}.weight_scales", scales.reshape(-1)),
        ]
        return node("MatMulNBits", [x, *names], f"/{module}/MatMul", K=inputs, N=outputs, bits=4, block_size=BLOCK)

    def norm(x: str, module: str) -> str:
        weight = constant(f"{module}.weight", np.ones(HIDDEN, np.float32))
        return node("SimplifiedLayerNormalization", [x, weight], f"/{module}/Norm", epsilon=1e-5, axis=-1)

    angles = np.arange(LONGEST)[:, None] / 10000.0 ** (np.arange(HEAD // 2) * 2 / HEAD)
    cos, sin = (constant(name, f(angles).astype(np.float32)) for name, f in (("cos", np.cos), ("sin", np.sin)))
    node("Shape", ["input_ids"], "shape")
    node("Cast", ["shape"], "shape32", to=TensorProto.INT32)
    node("Split", ["shape32"], "batch", num_outputs=2)
    nodes[-1].output.append("length")
    node("Squeeze", ["length"], "total")
    node("Sub", ["length", constant("one", np.array([1], np.int32))], "last")
    node("Cast", ["batch"], "batch64", to=TensorProto.INT64)
    seqlens = node("Expand", ["last", "batch64"], "seqlens")

    table = constant("embed_tokens.weight", random.standard_normal((VOCABULARY, HIDDEN), np.float32) * np.float32(0.02))
    x = node("Gather", [table, "input_ids"], "/embed_tokens/Gather")
    for at in range(layers):
        prefix = f"layers.{at}"
        y = norm(x, f"{prefix}.input_layernorm")
        q = linear(y, f"{prefix}.q_proj", HIDDEN, HIDDEN)
        k = linear(y, f"{prefix}.k_proj", HIDDEN, KV_HEADS * HEAD)
        v = linear(y, f"{prefix}.v_proj", HIDDEN, KV_HEADS * HEAD)
        inputs = [q, k, v, "", "", seqlens, "total", cos, sin]
        attended = node(
            "GroupQueryAttention", inputs, f"/{prefix}/attention", num_heads=HEADS, kv_num_heads=KV_HEADS, do_rotary=1
        )
        nodes[-1].output.extend([f"/{prefix}/present_key", f"/{prefix}/present_value"])
        x = node("Add", [x, linear(attended, f"{prefix}.o_proj", HIDDEN, HIDDEN)], f"/{prefix}/Add")
        y = norm(x, f"{prefix}.post_attention_layernorm")
        gate = linear(y, f"{prefix}.gate_proj", HIDDEN, INNER)
        up = linear(y, f"{prefix}.up_proj", HIDDEN, INNER)
        gate = node("Mul", [gate, node("Sigmoid", [gate], f"/{prefix}/sigmoid")], f"/{prefix}/silu")
        gated = node("Mul", [gate, up], f"/{prefix}/gated")
        x = node("Add", [x, linear(gated, f"{prefix}.down_proj", INNER, HIDDEN)], f"/{prefix}/Add_2")
    head = constant("lm_head.weight", random.standard_normal((HIDDEN, VOCABULARY), np.float32) * np.float32(0.02))
    node("MatMul", [norm(x, "norm"), head], "logits")

    graph = helper.make_graph(
        nodes,
        "decoder",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", VOCABULARY])],
        constants,
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(
        model, folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=1024
    )


def report(name: str, start: float, first: float, seconds: list[float], tokens: int) -> None:
    """Print one line."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    rate = tokens / min(seconds)
    print(f"{name}: {peak:.2f} GiB at most, first step after {first - start:.1f} s, {rate:.0f} tokens/s", flush=True)


def resident(place: str) -> None:
    """Print the resident memory, apart from mapped files, and with them."""
    found = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    sizes = [int(found[key].split()[0]) / 1024**2 for key in ("RssAnon", "VmRSS", "VmHWM")]
    print(f"  {place}: {sizes[0]:.2f} GiB own, {sizes[1]:.2f} GiB resident, {sizes[2]:.2f} GiB at most", flush=True)


def train(folder: Path, length: int, steps: int, verbose: bool, memory_limit: int | None = None) -> None:
    """Train adapters with ortrain."""
    import ortrain

    start = time.perf_counter()
    show = resident if verbose else lambda place: None
    show("import")
    tuned = ortrain.Model(
        folder / "model.onnx",
        lora=8,
        loss="cross_entropy",
        optimizer="adamw",
        learning_rate=1e-4,
        memory_limit=memory_limit,
    )
    show("model")
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (1, length + 1))
    x, labels = tokens[:, :-1], tokens[:, 1:]
    module = tuned.module
    show("module")
    module.train()
    seconds, first = [], 0.0
    for _ in range(steps):
        before = time.perf_counter()
        loss = module(x, labels)
        tuned.optimizer.step()
        module.lazy_reset_grad()
        after = time.perf_counter()
        first = first or after
        seconds.append(after - before)
        show(f"step, loss {float(np.asarray(loss)):.3f}")
    report("ortrain", start, first, seconds, length)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["build", "train"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--length", type=int, default=256, help="tokens of the sequence")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--memory-limit", type=int, help="bytes of parameters, gradients and activations")
    parser.add_argument("--verbose", action="store_true", help="print the memory after each stage")
    arguments = parser.parse_args()
    if arguments.action == "build":
        build(arguments.folder, arguments.layers)
    else:
        train(arguments.folder, arguments.length, arguments.steps, arguments.verbose, arguments.memory_limit)


if __name__ == "__main__":
    main()
