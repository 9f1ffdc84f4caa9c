"""Architectures of transformers and timm, small and with random weights: trained here, exported by both exporters.

architectures.py FOLDER [NAME...] writes, for each export mode, FOLDER/NAME/WAY.onnx, or FOLDER/NAME/WAY.txt with the
reason of an error. FOLDER/NAME/record.npz has torch's results for the network (training.py). For each optimizing mode
FOLDER/NAME/WAY.npz has the results for the weights in the model. torch trains in float64, so that only the rounding of
the other library is visible.
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import training
import transformers
from folded import Weights, tied
from small_settings import DECODER, ENCODER, SMALL, WHISPER, WORDS
from torch import Tensor, nn

STEPS, RATE = 10, 1e-4
# Minimum distance of an argument of a Relu from zero, relative to the mean size: ten times the rounding of float32.
KINK = 1e-6
# Modes of export: the exporter, and true if it optimizes the model.
WAYS = {
    "script": (False, False),
    "script-folded": (False, True),
    "export": (True, False),
    "export-optimized": (True, True),
}
OPSETS = {False: 17, True: 20}
BATCH, TOKENS = 3, 12

NetworkAndInputs = tuple[nn.Module, Tensor]


class Only(nn.Module):
    """One output of a model with one input."""

    def __init__(self, net: nn.Module, argument: str, output: str) -> None:
        super().__init__()
        self.net, self.argument, self.output = net, argument, output

    def forward(self, x: Tensor) -> Tensor:
        given = {self.argument: x}
        if self.argument == "input_ids":
            # Otherwise decoders check for packed sequences, which the older exporter cannot write.
            given["attention_mask"] = torch.ones_like(x)
        value: Tensor = getattr(self.net(**given), self.output)
        return value


def ids() -> Tensor:
    # No token is padding, because the row of padding has no gradient in torch.
    return torch.randint(8, WORDS, (BATCH, TOKENS))


def images(size: int = 64, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def language(kind: str, **settings: Any) -> Callable[[], NetworkAndInputs]:
    """Return a function that makes a token model of transformers, without dropout and without a cache."""

    def make() -> NetworkAndInputs:
        off = dict.fromkeys(
            """attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout dropout dropout_rate
            embd_pdrop embed_dropout hidden_dropout hidden_dropout_prob resid_dropout resid_pdrop activation_dropout
            layerdrop summary_last_dropout""".split(),
            0.0,
        )
        config = transformers.AutoConfig.for_model(kind, vocab_size=WORDS)
        for key, value in off.items():
            if hasattr(config, key):
                settings.setdefault(key, value)
        config = transformers.AutoConfig.for_model(kind, **({"vocab_size": WORDS} | settings))
        config._attn_implementation = settings.get("attn_implementation", "eager")
        if hasattr(config, "use_cache"):
            config.use_cache = False
        made = transformers.T5EncoderModel(config) if kind == "t5" else transformers.AutoModel.from_config(config)
        return Only(made, "input_ids", "last_hidden_state"), ids()

    return make


def signals(kind: str, argument: str, batch: Callable[[], Tensor], **settings: Any) -> Callable[[], NetworkAndInputs]:
    """Return a function that makes an audio or vision model of transformers."""

    def make() -> NetworkAndInputs:
        config = transformers.AutoConfig.for_model(kind, **settings)
        made: Any = transformers.AutoModel.from_config(config)
        made = made.encoder if kind == "whisper" else made
        return Only(made, argument, "last_hidden_state"), batch()

    return make


def of_timm(name: str, size: int = 64, **settings: Any) -> Callable[[], NetworkAndInputs]:
    return lambda: (timm.create_model(name, num_classes=5, **settings), images(size))


ARCHITECTURES: dict[str, Callable[[], NetworkAndInputs]] = {
    "albert": language("albert", embedding_size=16, **ENCODER),
    "electra": language("electra", embedding_size=16, **ENCODER),
    "deberta-v2": language(
        "deberta-v2", relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], **ENCODER
    ),
    "mobilebert": language(
        "mobilebert",
        embedding_size=16,
        intra_bottleneck_size=16,
        true_hidden_size=16,
        num_feedforward_networks=2,
        **ENCODER,
    ),
    "squeezebert": language("squeezebert", embedding_size=32, **ENCODER),
    "roformer": language("roformer", embedding_size=32, **ENCODER),
    "convbert": language("convbert", embedding_size=32, conv_kernel_size=3, **ENCODER),
    "xlnet": language("xlnet", d_model=32, n_layer=2, n_head=4, d_inner=48),
    "opt": language("opt", ffn_dim=48, word_embed_proj_dim=32, **ENCODER),
    "bloom": language("bloom", hidden_size=32, n_layer=2, n_head=4),
    "gpt-neo": language(
        "gpt_neo",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
    ),
    "gptj": language("gptj", n_embd=32, n_layer=2, n_head=4, n_inner=48, rotary_dim=4, n_positions=64),
    "codegen": language("codegen", n_embd=32, n_layer=2, n_head=4, n_inner=48, rotary_dim=4, n_positions=64),
    "phi": language("phi", **DECODER),
    "qwen2": language("qwen2", **DECODER),
    "gemma": language("gemma", head_dim=8, **DECODER),
    "mistral": language("mistral", sliding_window=4, **DECODER),
    "t5-encoder": language("t5", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    "mpnet": language("mpnet", **ENCODER),
    "fnet": language("fnet", tpu_short_seq_length=TOKENS, **ENCODER),
    "wav2vec2": signals(
        "wav2vec2",
        "input_values",
        lambda: torch.randn(BATCH, 400),
        conv_dim=[16, 16],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        layerdrop=0.0,
        mask_time_prob=0.0,
        attn_implementation="eager",
        **SMALL,
    ),
    "whisper-encoder": signals(
        "whisper",
        "input_features",
        lambda: torch.randn(BATCH, 8, 24),
        attn_implementation="eager",
        **WHISPER,
    ),
    "segformer": signals(
        "segformer",
        "pixel_values",
        images,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=16,
        hidden_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_attention_heads=[1, 2, 2, 4],
    ),
    "dinov2": signals(
        "dinov2",
        "pixel_values",
        lambda: images(28),
        image_size=28,
        patch_size=7,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        attn_implementation="eager",
    ),
    "swinv2": signals(
        "swinv2",
        "pixel_values",
        lambda: images(32),
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
    ),
    "nfnet": of_timm("test_nfnet", 96),
    "byobnet": of_timm("test_byobnet", 96),
    "resnet": of_timm("test_resnet", 96),
    "efficientnet-evos": of_timm("test_efficientnet_evos", 96),
    "convnext": of_timm("test_convnext", 96),
    "mambaout": of_timm("test_mambaout", 96),
    "edgenext": of_timm("edgenext_xx_small", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), heads=(2, 2, 2, 2)),
    "cait": of_timm("cait_xxs24_224", img_size=64, embed_dim=32, depth=2, num_heads=4),
    "xcit": of_timm("xcit_nano_12_p16_224", img_size=64, embed_dim=32, depth=2, num_heads=4),
    "beit": of_timm("beit_base_patch16_224", img_size=64, embed_dim=32, depth=2, num_heads=4),
    "densenet": of_timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)),
    "mobilenetv3": of_timm("mobilenetv3_small_050", 96),
}


def prepared(name: str) -> NetworkAndInputs:
    """Return a model and its batch, equal at every call. Parameters have distinct elements; no Relu is at its kink."""
    for draw in itertools.count():
        torch.manual_seed(zlib.crc32(name.encode()) + draw)
        net, x = ARCHITECTURES[name]()
        training.disturb(net, 0.02)
        if training.nearest_kink(*training.doubled(net.eval(), x)) > KINK:
            return net, x
    raise AssertionError


def export(net: nn.Module, x: Tensor, way: str, path: Path) -> None:
    """Write the model file. The batch size is dynamic if the exporter supports this."""
    exports, optimizes = WAYS[way]
    if not exports:
        # In other modes a BatchNormalization becomes part of the previous convolution.
        mode = torch.onnx.TrainingMode.EVAL if optimizes else torch.onnx.TrainingMode.PRESERVE
        settings: dict[str, Any] = {"training": mode, "do_constant_folding": optimizes}
        training.export(copy.deepcopy(net), x, path, dynamo=False, opset_version=OPSETS[exports], **settings)
        return
    settings = {"dynamo": True, "opset_version": OPSETS[exports], "optimize": optimizes}
    try:
        program = training.export(copy.deepcopy(net), x, path, **settings)
    except Exception:
        program = training.export(copy.deepcopy(net), x, path, dynamic=False, **settings)
    program.save(path)


def write(folder: Path, net: nn.Module, x: Tensor) -> None:
    """Write the files of an architecture."""
    target = training.drawn_target(*training.doubled(net, x))

    def record(path: Path, weights: Weights | None = None) -> None:
        found = training.record(net, x, target, training.adamw(RATE), STEPS, weights)
        np.savez(path, **found)  # type: ignore[arg-type]

    for way, (_, optimizes) in WAYS.items():
        path = folder / f"{way}.onnx"
        try:
            export(net, x, way, path)
        except Exception as error:
            (folder / f"{way}.txt").write_text(f"{type(error).__name__}: {error}")
            continue
        if optimizes:
            record(folder / f"{way}.npz", tied(path))
    # The record is written last, so its existence marks a complete folder.
    record(folder / "record.npz")


def main() -> None:
    """Write all architectures, or the named ones."""
    folder, wanted = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in ARCHITECTURES:
        if wanted and name not in wanted:
            continue
        here = folder / name
        here.mkdir(parents=True, exist_ok=True)
        write(here, *prepared(name))
    print("done")


if __name__ == "__main__":
    main()
