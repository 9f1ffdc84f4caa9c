"""Networks of timm, transformers and our own, exported with fresh weights, and the names of their parameters.

    zoo.py FOLDER [NAME...]      NAME is a key of NETWORKS; without one, all of them
    zoo.py --list                the names

Writes FOLDER/NAME/{script,export,export-optimized}.onnx, or a .txt with the reason of an export error.
FOLDER/NAME/parameters.json has the names of parameters: with a gradient from the output, without one, and declared
frozen. It also has the names of constants that an optimizing exporter computed from parameters.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import timm
import torch
import transformers
from small_settings import DECODER, ENCODER, SMALL, WHISPER, WORDS
from torch import Tensor, nn
from zoo_networks import OWN

NetworkAndInputs = tuple[nn.Module, tuple[Tensor, ...]]
WAYS = ("script", "export", "export-optimized")
OPSETS = {"script": 17, "export": 20, "export-optimized": 20}
BATCH, TOKENS = 2, 12
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "window_size": 4}
VISION = {"image_size": 32, "patch_size": 8}
# Unchanged models of timm, each with the size of its images.
TIMM: dict[str, int] = {
    name: int(size)
    for name, size in (
        word.split(":")
        for word in """
    botnet26t_256:256 bat_resnext26ts:256 halonet26t:256 lambda_resnet26t:256 gcresnet33ts:64 eca_resnext26ts:64
    coat_lite_tiny:224 convit_tiny:224 convmixer_768_32:224 convnext_atto:64 crossvit_9_240:240 csatv2:512
    cs3darknet_focus_s:64 davit_tiny:224 densenetblur121d:64 dla46_c:64 dpn48b:64 edgenext_xx_small:64
    efficientformer_l1:224 efficientformerv2_s0:224 efficientnet_b0:64 efficientnet_b0_gn:64 efficientvim_m1:224
    efficientvit_b0:64 efficientvit_m0:224 eva02_tiny_patch14_224:224 fasternet_t0:64 fastvit_t8:64
    focalnet_tiny_srf:224
    gcvit_xxtiny:224 ghostnet_050:64 ghostnetv2_100:224 hardcorenas_a:64 hgnetv2_b0:64 hiera_tiny_224:224
    hrnet_w18_small:64
    inception_next_atto:64 inception_v3:299 levit_128s:224 mambaout_femto:64 maxvit_rmlp_pico_rw_256:256
    coatnet_pico_rw_224:224 coatnet_bn_0_rw_224:224 poolformer_s12:64 poolformerv2_s12:64 caformer_s18:224
    convformer_s18:224 mixer_s32_224:224 gmixer_12_224:224 gmlp_ti16_224:224 resmlp_12_224:224 mobilenetv2_050:64
    mobilenetv3_small_050:64 mobilenetv4_conv_small_050:64 mobilevit_xxs:256 mobilevitv2_050:256 mvitv2_tiny:224
    nest_tiny:224 nextvit_small:224 nf_regnet_b0:64 nf_resnet26:64 pit_ti_224:224 pvt_v2_b0:224 regnetx_002:64
    regnety_002:64 repghostnet_050:64 repvit_m0_9:224 repvgg_a0:64 resnest14d:64 resnet18:64 resnetv2_18:64
    res2net50_14w_8s:64
    rexnet_100:64 rexnetr_100:64 selecsls42:64 legacy_seresnet18:64 sequencer2d_s:224 shvit_s1:224 skresnet18:64
    starnet_s050:64 swiftformer_xs:224 swin_tiny_patch4_window7_224:224 swinv2_tiny_window8_256:256
    swinv2_cr_tiny_224:224 tiny_vit_5m_224:224 tnt_s_patch16_224:224 twins_pcpvt_small:224 twins_svt_small:224 vgg11:64
    visformer_tiny:224 vit_tiny_patch16_224:224 vit_relpos_small_patch16_224:224 vit_relpos_small_patch16_rpn_224:224
    vit_srelpos_small_patch16_224:224 vit_medium_patch16_rope_reg1_gap_256:256 vitamin_small_224:224 volo_d1_224:224
    ese_vovnet19b_dw:64 legacy_xception:64 xcit_nano_12_p16_224:224 test_vit:160 test_resnet:64 test_byobnet:64
    test_efficientnet_evos:64 test_nfnet:96 cait_xxs24_224:224 beit_base_patch16_224:224
    deit_tiny_distilled_patch16_224:224 tresnet_m:224 naflexvit_base_patch16_gap:384
    vit_base_patch16_siglip_gap_224:224
    """.split()
    )
}


class Only(nn.Module):
    """One output of a model of transformers with one input."""

    def __init__(self, net: nn.Module, argument: str, more: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.argument, self.more = net, argument, more

    def forward(self, x: Tensor) -> Tensor:
        given = {self.argument: x, **self.more}
        if self.argument == "input_ids":
            given["attention_mask"] = torch.ones_like(x)
        found = self.net(**given)
        value: Tensor = found[0]
        return value


def text(kind: str, **settings: Any) -> Callable[[], NetworkAndInputs]:
    """Return a function that makes a token model of transformers."""

    def make() -> NetworkAndInputs:
        config = transformers.AutoConfig.for_model(kind, **({"vocab_size": WORDS} | settings))
        config._attn_implementation = "eager"
        if hasattr(config, "use_cache"):
            config.use_cache = False
        net = transformers.T5EncoderModel(config) if kind == "t5" else transformers.AutoModel.from_config(config)
        return Only(net, "input_ids", {}), (torch.randint(8, WORDS, (BATCH, TOKENS)),)

    return make


def signal(
    kind: str, argument: str, shape: tuple[int, ...], part: str = "", **settings: Any
) -> Callable[[], NetworkAndInputs]:
    """Return a function that makes a vision or audio model of transformers."""

    def make() -> NetworkAndInputs:
        config = transformers.AutoConfig.for_model(kind, **settings)
        config._attn_implementation = "eager"
        net: Any = transformers.AutoModel.from_config(config)
        return Only(getattr(net, part) if part else net, argument, {}), (torch.randn(BATCH, *shape),)

    return make


def pictures(name: str, size: int) -> Callable[[], NetworkAndInputs]:
    """Return a function that makes a model of timm."""
    return lambda: (timm.create_model(name, num_classes=5), (torch.randn(BATCH, 3, size, size),))


IMAGE = (3, 32, 32)
NETWORKS: dict[str, Callable[[], NetworkAndInputs]] = {
    **OWN,
    **{name: pictures(name, size) for name, size in TIMM.items()},
    "bert": text("bert", **ENCODER),
    "distilbert": text("distilbert", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    "albert": text("albert", embedding_size=16, **ENCODER),
    "electra": text("electra", embedding_size=16, **ENCODER),
    "deberta-v2": text(
        "deberta-v2", relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"], **ENCODER
    ),
    "gpt2": text("gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "gpt-neo": text(
        "gpt_neo",
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=64,
    ),
    "gptj": text("gptj", n_embd=32, n_layer=2, n_head=4, n_inner=48, rotary_dim=4, n_positions=64),
    "gpt-neox": text("gpt_neox", **ENCODER),
    "bloom": text("bloom", hidden_size=32, n_layer=2, n_head=4),
    "opt": text("opt", ffn_dim=48, word_embed_proj_dim=32, **ENCODER),
    "llama": text("llama", **DECODER),
    "qwen2": text("qwen2", **DECODER),
    "qwen3": text("qwen3", head_dim=8, **DECODER),
    "gemma": text("gemma", head_dim=8, **DECODER),
    "gemma2": text("gemma2", head_dim=8, **DECODER),
    "mistral": text("mistral", sliding_window=4, **DECODER),
    "phi": text("phi", **DECODER),
    "olmo2": text("olmo2", **DECODER),
    "roformer": text("roformer", embedding_size=32, **ENCODER),
    "t5-encoder": text("t5", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    "mpnet": text("mpnet", **ENCODER),
    "mamba": text("mamba", hidden_size=32, num_hidden_layers=2, state_size=4),
    "rwkv": text("rwkv", hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=48),
    "vit": signal("vit", "pixel_values", IMAGE, **VISION, **SMALL),
    "swin": signal("swin", "pixel_values", IMAGE, **WINDOWS, num_heads=[2, 4]),
    "swinv2": signal("swinv2", "pixel_values", IMAGE, **WINDOWS, num_heads=[1, 4]),
    "convnextv2": signal("convnextv2", "pixel_values", IMAGE, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
    "poolformer": signal("poolformer", "pixel_values", (3, 64, 64), hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
    "segformer": signal(
        "segformer",
        "pixel_values",
        (3, 64, 64),
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
    ),
    "cvt": signal("cvt", "pixel_values", (3, 64, 64), embed_dim=[16, 32, 32], num_heads=[1, 2, 2], depth=[1, 2, 3]),
    "dinov2": signal(
        "dinov2", "pixel_values", IMAGE, **VISION, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
    "wav2vec2": signal(
        "wav2vec2",
        "input_values",
        (400,),
        conv_dim=[16, 16],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        **SMALL,
    ),
    "whisper-encoder": signal("whisper", "input_features", (8, 24), "encoder", **WHISPER),
    "audio-spectrogram": signal(
        "audio-spectrogram-transformer", "input_values", (32, 16), max_length=32, num_mel_bins=16, patch_size=8, **SMALL
    ),
}


def names(net: nn.Module, x: tuple[Tensor, ...]) -> dict[str, list[str]]:
    """Return the names of the parameters by their gradient; shared parameters have all their names."""
    net.zero_grad()
    found = net(*x)
    found = found if isinstance(found, Tensor) else found[0]
    (found.float() * torch.randn_like(found.float())).sum().backward()  # type: ignore[no-untyped-call]
    out: dict[str, list[str]] = {"trained": [], "unreached": [], "frozen": []}
    for name, value in net.named_parameters(remove_duplicate=False):
        kind = "frozen" if not value.requires_grad else "unreached" if value.grad is None else "trained"
        out[kind].append(name)
    net.zero_grad()
    return out


def export(net: nn.Module, x: tuple[Tensor, ...], way: str, path: Path) -> None:
    """Write a model file; the batch has a dynamic size."""
    inputs = [f"x{index}" for index in range(len(x))]
    if way == "script":
        torch.onnx.export(
            net,
            x,
            str(path),
            dynamo=False,
            opset_version=OPSETS[way],
            do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE,
            input_names=inputs,
            output_names=["y"],
        )
        return
    program = torch.onnx.export(
        net,
        x,
        dynamo=True,
        opset_version=OPSETS[way],
        optimize=way == "export-optimized",
        verbose=False,
        input_names=inputs,
        output_names=["y"],
    )
    assert program is not None
    program.save(path)


def constants(path: Path) -> dict[str, np.ndarray]:
    """Return the float initializers of a model, by name."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
    stored = onnx.load(path).graph.initializer
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in stored if tensor.data_type in floats}


def computed(net: nn.Module, x: tuple[Tensor, ...], here: Path) -> dict[str, bool]:
    """Return the constants that depend on parameters: an export with other parameters has other values.

    A constant is true if it has the size of a parameter; expanded, looked-up and picked values are other tensors. The
    parameters of the network are changed.
    """
    sizes = {value.numel() for value in net.parameters()}
    before = here / "export-optimized.onnx"
    if not before.exists():
        return {}
    with torch.no_grad():
        for value in net.parameters():
            if value.is_floating_point():
                value.copy_(value * 1.25 + 0.01 * torch.randn_like(value))
    # Some networks of timm cache lookups in tables until they are trained.
    net.train().eval()
    other = here / "other.onnx"
    export(net, x, "export-optimized", other)
    old, new = constants(before), constants(other)
    other.unlink()
    Path(f"{other}.data").unlink(missing_ok=True)
    return {
        name: value.size in sizes
        for name, value in old.items()
        if name not in new or value.tobytes() != new[name].tobytes()
    }


def main() -> None:
    if sys.argv[1] == "--list":
        print("\n".join(NETWORKS))
        return
    folder, wanted = Path(sys.argv[1]), sys.argv[2:] or list(NETWORKS)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for name in wanted:
        here = folder / name
        if (here / "parameters.json").exists():
            continue
        here.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        torch.manual_seed(7)
        net, x = NETWORKS[name]()
        net.eval()
        # Our own networks are small enough for a third export, by the new exporter without optimization.
        for way in WAYS if name in OWN else (WAYS[0], WAYS[2]):
            try:
                export(net, x, way, here / f"{way}.onnx")
            except Exception as error:
                (here / f"{way}.onnx").unlink(missing_ok=True)
                (here / f"{way}.txt").write_text(f"{type(error).__name__}: {error}"[:4000])
        found: dict[str, Any] = {**names(net, x), "computed": computed(net, x, here)}
        (here / "parameters.json").write_text(json.dumps(found, indent=1))
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
