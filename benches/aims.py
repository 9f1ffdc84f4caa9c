"""What the comparison is measured by: the least a step costs, and where it is to arrive."""

from __future__ import annotations

from typing import Any

# What a step is to take at most, as a share of that of onnxruntime-training, and of torch's. With a frozen trunk
# onnxruntime-training computes another function: its normalizations use the statistics of the batch all the same.
AGAINST_REFERENCE = {
    "mlp_tiny": 0.70,
    "mlp": 0.63,
    "lenet": 0.33,
    "mobilenetv2_96": 0.32,
    "mobilenetv2_224": 0.37,
    "resnet18_224": 0.50,
    "bert_mini": 0.43,
    "bert_mini_lora8": 0.53,
    "bert_base": 0.44,
    "gpt2_small6": 0.54,
    "lstm": 0.06,
    "adamw_25m": 0.27,
}
AGAINST_TORCH = {
    "mlp_tiny": 0.08,
    "mlp": 0.80,
    "lenet": 0.60,
    "mobilenetv2_96": 0.60,
    "mobilenetv2_224": 0.60,
    "mobilenetv2_224_head": 0.50,
    "resnet18_224": 0.75,
    "bert_mini": 0.75,
    "bert_mini_lora8": 0.70,
    "bert_base": 0.80,
    "gpt2_small6": 0.80,
    "lstm": 0.75,
    "adamw_25m": 1.00,
}
# With the factors of products in bfloat16, where the machine has AMX, as a share of that of onnxruntime-training in
# float32: 0.9 of PyTorch's autocast.
BF16_AGAINST_REFERENCE = {
    "lenet": 0.31,
    "resnet18_224": 0.27,
    "bert_mini": 0.32,
    "bert_base": 0.25,
    "gpt2_small6": 0.27,
    "lstm": 0.04,
}
# With three products of bfloat16 for one of float32, as a share of our own step in float32.
BF16X3_AGAINST_OURSELVES = {"bert_base": 0.60, "gpt2_small6": 0.60}
# The geometric mean of the ratios to torch, without mlp_tiny.
MEAN_AGAINST_TORCH = 0.7
# Gaps that a shared machine makes by itself.
TIE, TIE_WITH_TORCH = 1.05, 1.10
# Bytes over the state after the import; what is not here is judged by the floor alone.
MEMORY = {
    "mlp": 14e6,
    "lenet": 14e6,
    "mobilenetv2_96": 165e6,
    "mobilenetv2_224": 370e6,
    "mobilenetv2_224_head": 30e6,
    "resnet18_224": 285e6,
    "bert_mini": 275e6,
    "bert_base": 1960e6,
    "gpt2_small6": 475e6,
    "lstm": 40e6,
}
OVER_FLOOR, BESIDES_FLOOR = 1.05, 8e6
# Seconds: the import beyond NumPy's, the creation of a session, the first step.
IMPORT, CREATE = 0.03, 0.1
FIRST_STEP = {"mlp": 0.005, "resnet18_224": 0.3}
# How much longer steps may take with a memory limit, and the bytes that more instructions may take.
SLOWER_WITHIN_LIMIT, BESIDES_LIMIT = 1.35, 4e6
# How far losses in float32 may lie apart in the first twenty steps, relative to themselves.
LOSSES = 1e-4


def floor(about: dict[str, Any]) -> float:
    """The bytes that a training step cannot do without, if it recomputes nothing.

    A trained weight has a gradient and two moments, a frozen one has neither; then what the backward pass reads.
    """
    trained = about["trainable"]
    return float(16 * trained + 4 * (about["params"] - trained) + about["saved_bytes"])


def memory(workload: str, about: dict[str, Any]) -> float:
    """The bytes that a workload is to stay below."""
    return max(MEMORY.get(workload, 0.0), OVER_FLOOR * floor(about) + BESIDES_FLOOR)


def time(workload: str, peer: str, precision: str = "f32") -> float | None:
    """The ratio that a workload is to stay below at a precision of ours; nobody aims at jax."""
    if precision != "f32":
        lists = {
            ("bf16", "onnxruntime-training"): BF16_AGAINST_REFERENCE,
            ("bf16x3", "ortrain"): BF16X3_AGAINST_OURSELVES,
        }
        return lists.get((precision, peer), {}).get(workload)
    if peer == "onnxruntime-training":
        return AGAINST_REFERENCE.get(workload)
    if peer == "torch":
        return AGAINST_TORCH[workload]
    # Its other variants are not to be faster than ours.
    return 1.0 if peer == "torch-channels-last" else None


def tie(peer: str) -> float:
    """By how much an aim may be missed, as a factor."""
    return TIE_WITH_TORCH if peer.startswith("torch") else TIE


def verdict(found: float, aim: float, tie: float = 1.0) -> str:
    """Whether an aim is reached."""
    if found <= aim:
        return "yes"
    return "tie" if found <= aim * tie else "NO"
