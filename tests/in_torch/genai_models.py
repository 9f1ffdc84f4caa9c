"""Small decoders of transformers with random weights, converted by the model builder of onnxruntime-genai.

genai_models.py FOLDER NAME writes FOLDER/NAME/EXPORT/model.onnx for each export. FOLDER/NAME/record.npz has the tokens,
the logits and the loss of torch, which computes in float64. For the gradients, it writes two more conversions:
FOLDER/NAME/gradients/model.onnx has GRADIENT_FACTOR times torch's gradients in place of the weights, and
FOLDER/NAME/zeros/model.onnx has zeros. The builder transposes and packs weights and adds constants, but scales none.
Thus the difference of an initializer in both files is its gradient, times the factor.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

# All files are local. The variable is read when transformers is imported.
os.environ["HF_HUB_OFFLINE"] = "1"
import training
import transformers
from onnxruntime_genai.models import builder

BATCH, TOKENS = 2, 12
# Unlike the number of outputs of any other Linear: the builder recognizes the last layer by this number.
WORDS = 100
# Less than TOKENS, so that the window hides some tokens.
WINDOW = 5
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama"},
    "llama-tied": {"kind": "llama", "tie_word_embeddings": True},
    "qwen2": {"kind": "qwen2"},
    "qwen3": {"kind": "qwen3", "head_dim": 16},
    "phi3": {"kind": "phi3", "original_max_position_embeddings": 128},
    "gemma2": {"kind": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW},
    "gpt-oss": {
        "kind": "gpt_oss",
        # The ramp of its rotations, between short and long wavelengths, needs heads and positions of this size.
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    },
    "mistral": {"kind": "mistral"},
}
# Exports: precision, execution provider, and options of the builder. At accuracy level 1 the CPU multiplies floats.
WITHOUT_WINDOW_CACHE = "windowed_kv_cache=false"
EXPORTS: dict[str, tuple[str, str, list[str]]] = {
    "fp32": ("fp32", "cpu", [WITHOUT_WINDOW_CACHE]),
    "fp16": ("fp16", "cpu", [WITHOUT_WINDOW_CACHE]),
    "fp16-cuda": ("fp16", "cuda", [WITHOUT_WINDOW_CACHE]),
    "int4": ("int4", "cpu", [WITHOUT_WINDOW_CACHE]),
    "int4-floats": ("int4", "cpu", [WITHOUT_WINDOW_CACHE, "accuracy_level=1"]),
    "int4-asymmetric": ("int4", "cpu", [WITHOUT_WINDOW_CACHE, "accuracy_level=1", "is_symmetric=false"]),
    "int8": ("int8", "cpu", [WITHOUT_WINDOW_CACHE]),
}
WINDOW_EXPORTS: dict[str, tuple[str, str, list[str]]] = {"window-cache": ("fp32", "cpu", [])}
# The builder adds one to the norms of Gemma: the factor, a power of two, keeps digits of small gradients.
GRADIENT_FACTOR = 1024.0
# Magnitudes of the floats of four bits (E2M1), by their lower three bits.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Typical exponent of the scale of a block, and the bias of stored exponents.
SCALE_EXPONENT, EXPONENT_BIAS = -5, 127


def network(name: str) -> nn.Module:
    """Return a model of transformers, equal at every call. Its biases and norms are random, too."""
    settings = SIZES | ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(settings.pop("kind"), **settings)
    # Other implementations ignore the caps of scores and the sinks, or compute in float32.
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    torch.manual_seed(zlib.crc32(name.encode()))
    net: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    training.disturb(net, 0.1)
    return net.eval()


def block_floats(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return random blocks of 32 floats of four bits, their stored exponents, and their values in place of a weight.

    The weight has its inputs before its outputs; blocks are along the inputs: [experts, outputs, blocks, 16 bytes].
    """
    experts, inputs, outputs = weight.shape
    codes = torch.randint(16, (experts, outputs, inputs // 32, 32))
    exponents = SCALE_EXPONENT + torch.randint(-1, 2, codes.shape[:-1])
    values = torch.tensor(MAGNITUDES)[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** exponents.unsqueeze(-1)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    scales = exponents + EXPONENT_BIAS
    return blocks.to(torch.uint8), scales.to(torch.uint8), values.reshape(experts, outputs, inputs).transpose(1, 2)


def with_block_floats(net: nn.Module) -> dict[str, Tensor]:
    """Change the experts to values of block floats, and return these blocks by their names in files of gpt-oss.

    The builder quantizes to integers from these blocks only.
    """
    found = {}
    for name, value in net.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            found[f"{name}_blocks"], found[f"{name}_scales"], values = block_floats(value)
            with torch.no_grad():
                value.copy_(values)
    return found


def save(net: nn.Module, folder: Path, more: dict[str, Tensor]) -> None:
    """Write the files of a model, a tokenizer of numbers, and more tensors beside the weights."""
    net.save_pretrained(folder)  # type: ignore[operator]
    (weights,) = folder.glob("*.safetensors")
    save_file(load_file(weights) | more, weights, metadata={"format": "pt"})
    words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)


def convert(source: Path, target: Path, precision: str, provider: str, options: list[str]) -> None:
    """Run the builder, which prints a lot."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        common = (None, str(source), str(target), precision, provider, str(target / "cache"))
        builder.create_model(*common, **builder.parse_extra_options(*common, ["hf_token=false", *options]))


def record(net: nn.Module, tokens: Tensor) -> dict[str, np.ndarray]:
    """Compute the gradients of the loss of the next tokens, and return the other results."""
    logits = net(tokens, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    for name, value in net.named_parameters():
        assert value.grad is not None, f"{name} does not reach the loss"
    return {
        "tokens": tokens.numpy(),
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
        "gradient_factor": np.array(GRADIENT_FACTOR),
        "elements": np.array(sum(value.numel() for value in net.parameters())),
    }


def convert_values(net: nn.Module, values: list[Tensor], folder: Path, name: str) -> None:
    """Convert a model with other values of its parameters."""
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), values, strict=True):
            parameter.copy_(value)
    save(net, folder / f"{name}-weights", {})
    convert(folder / f"{name}-weights", folder / name, *EXPORTS["fp32"])


def main() -> None:
    """Convert one architecture."""
    folder, name = Path(sys.argv[1]) / sys.argv[2], sys.argv[2]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    net = network(name)
    blocks = with_block_floats(net)
    save(net, folder / "weights", blocks)
    exports = EXPORTS | (WINDOW_EXPORTS if "sliding_window" in ARCHITECTURES[name] else {})
    for export, settings in exports.items():
        convert(folder / "weights", folder / export, *settings)
    tokens = torch.randint(3, WORDS, (BATCH, TOKENS))
    exact = copy.deepcopy(net).double()
    np.savez(folder / "record.npz", **record(exact, tokens))  # type: ignore[arg-type]
    gradients = [value.grad for value in exact.parameters() if value.grad is not None]
    convert_values(net, [GRADIENT_FACTOR * value for value in gradients], folder, "gradients")
    convert_values(net, [torch.zeros_like(value) for value in gradients], folder, "zeros")
    print(folder)


if __name__ == "__main__":
    main()
