"""Targets of the comparison, and the minimum cost of a step."""

from __future__ import annotations

from typing import Any

# Maximum ratios of our step to the steps of onnxruntime-training (first table) and torch (second table). With a frozen
# trunk there is no target against onnxruntime-training, which computes another function: its normalizations still use
# the statistics of the batch.
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
# Targets with bfloat16 factors on a machine with AMX, as a ratio to onnxruntime-training in float32. They are 0.9 of
# the time of PyTorch's autocast.
BF16_AGAINST_REFERENCE = {
    "lenet": 0.31,
    "resnet18_224": 0.27,
    "bert_mini": 0.32,
    "bert_base": 0.25,
    "gpt2_small6": 0.27,
    "lstm": 0.04,
}
# Targets with three bfloat16 products for each float32 product, as a ratio to our own step in float32.
BF16X3_AGAINST_OURSELVES = {"bert_base": 0.60, "gpt2_small6": 0.60}
# Target for the geometric mean of the ratios to torch, without mlp_tiny.
MEAN_AGAINST_TORCH = 0.7
# Tolerances of a target, as factors: the noise of a shared machine.
TIE, TIE_WITH_TORCH = 1.05, 1.10
# Maximum memory in bytes above the state after the import. For other workloads only the floor counts.
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
# Maximum seconds of the import (beyond NumPy's), the creation of a session, and the first step.
IMPORT, CREATE = 0.03, 0.1
FIRST_STEP = {"mlp": 0.005, "resnet18_224": 0.3}
# Maximum slowdown with a memory limit, and the bytes that additional instructions may take.
SLOWER_WITHIN_LIMIT, BESIDES_LIMIT = 1.35, 4e6
# Maximum relative difference of float32 losses in the first twenty steps.
LOSSES = 1e-4


def floor(about: dict[str, Any]) -> float:
    """Returns the minimum memory of a training step without recomputation, in bytes.

    A trained weight has a gradient and two moments, a frozen weight has neither. Values saved for the backward pass are
    added.
    """
    trained = about["trainable"]
    return float(16 * trained + 4 * (about["params"] - trained) + about["saved_bytes"])


def memory(workload: str, about: dict[str, Any]) -> float:
    """Returns the maximum memory of a workload, in bytes."""
    return max(MEMORY.get(workload, 0.0), OVER_FLOOR * floor(about) + BESIDES_FLOOR)


def time(workload: str, peer: str, precision: str = "f32") -> float | None:
    """Returns the maximum ratio for a workload at our precision, or None. jax has no targets."""
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
    # Other variants of PyTorch must not be faster than ours.
    return 1.0 if peer == "torch-channels-last" else None


def tie(peer: str) -> float:
    """Returns the factor by which a target may be missed."""
    return TIE_WITH_TORCH if peer.startswith("torch") else TIE


def verdict(found: float, aim: float, tie: float = 1.0) -> str:
    """Returns "yes" if a target is reached, "tie" if it is missed within the tolerance, and "NO" otherwise."""
    if found <= aim:
        return "yes"
    return "tie" if found <= aim * tie else "NO"
