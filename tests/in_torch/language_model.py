"""Losses of torch for a small GPT-2 that learns a text, with the files that `fit` repeats the training from.

language_model.py FOLDER writes story.txt, lines.jsonl, tokenizer.json, model.onnx and losses.json. The batches are
consecutive rows: blocks of the text, and lines with padding that does not count.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import sys
import warnings
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

LENGTH, BATCH, EPOCHS, RATE = 32, 8, 4, 1e-2
BLOCKS, LINES, WORDS = 64, 64, 128
IGNORED = -100


class Scores(nn.Module):
    """The scores of GPT-2, with a mask of ones."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.net(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).logits
        return found


def drawn_sentence(rng: random.Random) -> str:
    """Return a sentence of a small grammar."""
    who, verb, thing = (
        rng.choice(words.split())
        for words in ("baker sailor teacher gardener", "finds paints sells carries repairs", "boat garden lamp letter")
    )
    place = rng.choice(("in the morning", "by the river", "after the rain", "for a friend"))
    return f"The {who} {verb} the {rng.choice(('old', 'green', 'small'))} {thing} {place}."


def trained_tokenizer(text: str) -> Tokenizer:
    """Return a tokenizer of pairs of bytes, as GPT-2 has, with few tokens."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.train_from_iterator([text], trainers.BpeTrainer(vocab_size=WORDS, show_progress=False))
    return found


def batches_of(rows: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and targets of consecutive rows; the target of a token is the next one."""
    found = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        inputs = torch.tensor([row[:-1] + [0] * (LENGTH + 1 - len(row)) for row in part])
        targets = torch.tensor([row[1:] + [IGNORED] * (LENGTH + 1 - len(row)) for row in part])
        found.append((inputs, targets))
    return found


def losses_of(net: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train a copy of a network by AdamW with the settings of torch, and return the loss of each step."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    losses = []
    for inputs, targets in batches * EPOCHS:
        loss = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    sentences = [drawn_sentence(rng) for _ in range(400)]
    tokenizer = trained_tokenizer("\n".join(sentences))
    # The text ends after the last block, and its target.
    count = next(
        n for n in range(len(sentences)) if len(tokenizer.encode("\n".join(sentences[:n])).ids) > BLOCKS * LENGTH
    )
    text = "\n".join(sentences[:count])
    (folder / "story.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps({"text": sentence}) + "\n" for sentence in sentences[:LINES]]
    (folder / "lines.jsonl").write_text("".join(lines), encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"))

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 24, "n_layer": 2, "n_head": 2}
    without_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    config = transformers.GPT2Config(**sizes, **without_dropout, bos_token_id=None, eos_token_id=None)
    config._attn_implementation = "eager"
    config.use_cache = False
    net = Scores(transformers.GPT2LMHeadModel(config))
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    axes = {"input_ids": {0: "batch", 1: "tokens"}, "logits": {0: "batch", 1: "tokens"}}
    torch.onnx.export(
        copy.deepcopy(net).eval(),
        (torch.zeros(2, LENGTH, dtype=torch.long),),
        str(folder / "model.onnx"),
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_axes=axes,
        opset_version=17,
        do_constant_folding=False,
        dynamo=False,
    )
    ids = tokenizer.encode(text).ids
    blocks = [ids[start : start + LENGTH + 1] for start in range(0, BLOCKS * LENGTH, LENGTH)]
    cut = [tokenizer.encode(sentence).ids[: LENGTH + 1] for sentence in sentences[:LINES]]
    record = {
        "length": LENGTH,
        "batch": BATCH,
        "epochs": EPOCHS,
        "rate": RATE,
        "text": losses_of(net, batches_of(blocks)),
        "lines": losses_of(net, batches_of(cut)),
    }
    (folder / "losses.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    print(len(ids), max(map(len, cut)), f"{record['text'][0]:.3f} {record['text'][-1]:.3f} {record['lines'][-1]:.3f}")


if __name__ == "__main__":
    main()
