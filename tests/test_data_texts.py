"""JSON lines and plain texts as sources of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_language_model import check_losses
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from ortrain import InferenceSession, Model, NodeArg, data, examples
from ortrain.errors import InvalidArgumentError, NoSuchFileError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"the film was good bad very long and short".split()]
LINES = [
    {"text": "the film was good", "label": "positive"},
    {"text": "very bad", "label": "negative"},
    {"text": "the film was very very long and the film was bad", "label": "negative"},
]
BERT = [
    NodeArg(name, "tensor(int64)", ["batch", "tokens"]) for name in ("input_ids", "attention_mask", "token_type_ids")
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of words that adds [CLS] and [SEP]."""
    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    found.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def lines(folder: Path, objects: list[Any], name: str = "films.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(found)}\n" for found in objects), encoding="utf-8")
    return path


def take_rows(source: Any, rows: list[int] | None = None, seed: int = 0, *, training: bool = True) -> Any:
    return source.take(np.array(range(len(source)) if rows is None else rows, np.int64), seed, training)


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(InvalidArgumentError) as error:
        data.open(path, **settings)
    return str(error.value).replace(str(path), path.name)


def test_classification(tmp_path: Path, tokenizer: Path) -> None:
    source = data.open(lines(tmp_path, LINES), tokenizer=tokenizer, model_inputs=BERT)
    assert source.classes == ("negative", "positive")
    batch = take_rows(source)
    assert batch.targets["target"].tolist() == [1, 0, 0]
    # Padded to the first bucket.
    assert batch.inputs["input_ids"].shape == (3, 16)
    assert batch.inputs["input_ids"][1].tolist() == [2, 10, 9, 3] + [0] * 12
    assert batch.inputs["attention_mask"].sum(axis=1).tolist() == [6, 4, 13]
    assert not batch.inputs["token_type_ids"].any()
    assert source.preview(1) == "very bad"


def test_rows_are_padded_to_buckets_and_cut(tmp_path: Path, tokenizer: Path) -> None:
    path = lines(tmp_path, LINES)
    source = data.open(path, tokenizer=tokenizer, buckets=(4, 8), length=10)
    assert [take_rows(source, [row]).inputs["input_ids"].shape[1] for row in range(3)] == [8, 4, 10]
    # A long row keeps its end token.
    assert take_rows(source, [2]).inputs["input_ids"][0, -1] == 3
    fixed = [NodeArg("ids", "tensor(int32)", ["batch", 5])]
    batch = take_rows(data.open(path, tokenizer=tokenizer, model_inputs=fixed))
    assert batch.inputs["ids"].shape == (3, 5)
    assert batch.inputs["ids"].dtype == np.int32


def test_other_lines_are_read_like_the_training_lines(tmp_path: Path, tokenizer: Path) -> None:
    train = data.open(lines(tmp_path, LINES), tokenizer=tokenizer)
    other = lines(tmp_path, [{"text": "good", "label": "positive"}], "val.jsonl")
    assert take_rows(data.open(other, like=train)).targets["target"].tolist() == [1]
    description = json.loads(json.dumps(train.describe()))
    new = lines(tmp_path, [{"text": "good"}], "new.jsonl")
    assert take_rows(data.open(new, like=description, labelled=False)).targets == {}
    unknown = lines(tmp_path, [{"text": "good", "label": "positiv"}], "val.jsonl")
    assert refused(unknown, like=train) == (
        "val.jsonl: row 0 has the class 'positiv', which the training data does not have; it has negative, positive; "
        "did you mean 'positive'?"
    )


def test_numbers_as_targets(tmp_path: Path) -> None:
    path = lines(tmp_path, [{"sentence": "a", "score": 0.5}, {"sentence": "b", "score": 2}])
    source = data.open(path, target="score", tokenizer="bytes")
    assert take_rows(source).targets["target"].tolist() == [0.5, 2]
    assert take_rows(source).targets["target"].dtype == np.float32


def test_causal_language_modelling(tmp_path: Path) -> None:
    """The target of a token is the token after it; padding does not count."""
    source = data.open(lines(tmp_path, [{"text": "abcd"}, {"text": "ab"}]), tokenizer="bytes", buckets=(3,), length=4)
    batch = take_rows(source)
    assert batch.inputs["input_ids"].tolist() == [[97, 98, 99], [97, 0, 0]]
    assert batch.targets["target"].tolist() == [[98, 99, 100], [98, -100, -100]]


def test_masked_language_modelling(tmp_path: Path, tokenizer: Path) -> None:
    path = lines(tmp_path, LINES * 20)
    source = data.open(path, tokenizer=tokenizer, task="masked-lm", mask_share=0.5)
    first, again, other = (take_rows(source, seed=seed) for seed in (1, 1, 2))
    ids, targets = first.inputs["input_ids"], first.targets["target"]
    plain = take_rows(data.open(path, tokenizer=tokenizer)).inputs["input_ids"]
    chosen = targets != -100
    assert np.array_equal(targets[chosen], plain[chosen])
    assert np.array_equal(ids[~chosen], plain[~chosen])
    # Special tokens are never chosen.
    assert targets[chosen].min() > 4
    share = chosen.sum() / (plain > 4).sum()
    assert 0.4 < share < 0.6
    assert 0.7 < (ids[chosen] == 4).mean() < 0.9
    assert np.array_equal(ids, again.inputs["input_ids"])
    assert not np.array_equal(ids, other.inputs["input_ids"])
    # An evaluation masks the same tokens every time.
    evaluated = [take_rows(source, seed=seed, training=False).inputs["input_ids"] for seed in (1, 2)]
    assert np.array_equal(*evaluated)


def test_a_text_is_cut_into_blocks(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("abcdefghij\nk", encoding="utf-8")
    source = data.open(path, tokenizer="bytes", length=4)
    batch = take_rows(source)
    assert bytes(batch.inputs["input_ids"].astype(np.uint8).reshape(-1).tolist()) == b"abcdefgh"
    assert bytes(batch.targets["target"].astype(np.uint8).reshape(-1).tolist()) == b"bcdefghi"
    assert source.preview(1) == "efgh"
    assert source.describe()["tokens"] == 12
    gpt = [NodeArg("input_ids", "tensor(int64)", ["batch", 8]), NodeArg("position_ids", "tensor(int64)", ["batch", 8])]
    batch = take_rows(data.open(path, tokenizer="bytes", model_inputs=gpt))
    assert batch.inputs["position_ids"].tolist() == [list(range(8))]


PAIRS = [
    {"sentence1": "the film was good", "sentence2": "very good", "label": "same"},
    {"sentence1": "the film was very very very long", "sentence2": "bad", "label": "other"},
]


def test_pairs_of_texts(tmp_path: Path, tokenizer: Path) -> None:
    source = data.open(lines(tmp_path, PAIRS), tokenizer=tokenizer, model_inputs=BERT, length=9)
    batch = take_rows(source)
    assert batch.inputs["input_ids"][0].tolist() == [2, 5, 6, 7, 8, 3, 10, 8, 3]
    assert batch.inputs["token_type_ids"][0].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 1]
    # The longer text is cut.
    assert batch.inputs["input_ids"][1].tolist() == [2, 5, 6, 7, 10, 10, 3, 9, 3]
    assert source.preview(1) == "the film was very very very long\nbad"
    again = lines(tmp_path, [{"sentence1": "bad", "sentence2": "good"}], "new.jsonl")
    new = take_rows(data.open(again, like=source, labelled=False, model_inputs=BERT))
    assert new.inputs["token_type_ids"][0, :6].tolist() == [0, 0, 0, 1, 1, 0]
    path = lines(tmp_path, [{"question": "a", "answer": "b", "label": 0}])
    chosen = data.open(path, tokenizer=tokenizer, text="question", text_pair="answer")
    assert take_rows(chosen).inputs["input_ids"][0, :5].tolist() == [2, 1, 3, 1, 3]
    assert refused(path, tokenizer=tokenizer, text="question", text_pair="anwser") == (
        "films.jsonl has no text field 'anwser'; it has question, answer; did you mean 'answer'?"
    )
    assert "has no separator" in refused(path, tokenizer="bytes", text="question", text_pair="answer")


def test_several_labels_per_text(tmp_path: Path) -> None:
    objects = [{"text": "a", "labels": ["long", "bad"]}, {"text": "b", "labels": []}, {"text": "c", "labels": ["bad"]}]
    source = data.open(lines(tmp_path, objects), tokenizer="bytes")
    assert source.classes == ("bad", "long")
    assert take_rows(source).targets["target"].tolist() == [[1, 1], [0, 0], [1, 0]]
    assert source.labels is None
    unknown = lines(tmp_path, [{"text": "a", "labels": ["bed"]}], "val.jsonl")
    assert "row 0 has the class 'bed'" in refused(unknown, like=source)
    numbers = lines(tmp_path, [{"text": "a", "y": [0.5, 1]}, {"text": "b", "y": [2, 3]}], "numbers.jsonl")
    assert take_rows(data.open(numbers, tokenizer="bytes")).targets["target"].tolist() == [[0.5, 1], [2, 3]]
    for rows, sentence in [
        ([[1, 2], [1]], "the field 'y' has 2 numbers in row 0 and 1 in row 1"),
        ([["a"], "b"], "the field 'y' has 'b' in row 1, its other rows have lists"),
        ([["a"], [1]], "the field 'y' has lists of other elements"),
        ([[], []], "the field 'y' has no class in any row"),
    ]:
        path = lines(tmp_path, [{"text": "a", "y": value} for value in rows], "wrong.jsonl")
        assert sentence in refused(path, tokenizer="bytes")


def test_a_list_of_one_label_is_a_list(tmp_path: Path) -> None:
    """The type of the label decides: a list means several labels, a word or a number means one."""

    def losses(*labels: Any, loss: Any = None) -> str:
        rows = [{"text": "good" * number, "y": label} for number, label in enumerate(labels * 2, 1)]
        source = data.open(lines(tmp_path, rows), model_inputs=inputs, tokenizer="bytes")
        model = Model(examples.transformer(), loss=loss, classes=2)
        for each in (source, *data.split(source, 0.5)):
            model.evaluate(each)
        assert model._choice is not None
        (target,) = model._choice.targets
        return f"{target.kind}: {target.reason.partition(' and ')[0]}"

    inputs = InferenceSession(examples.transformer()).get_inputs()
    assert losses(["a"], ["b"]) == "binary: the labels are lists (multi-hot)"
    assert losses([1, 0], [0, 1]) == "binary: the labels are lists (multi-hot)"
    assert losses("a", "b") == "labels: the targets are integers"
    assert losses(1, 0) == "labels: the targets are integers"
    assert losses([0.5, 0.5], [0, 1]) == "soft: each row is a distribution over the classes"
    assert losses(["a"], ["b"], loss="cross_entropy") == "labels: "


def test_plain_texts_and_json_lines_share_settings(tmp_path: Path) -> None:
    """A model of language that is trained on one form is evaluated and used on the other."""
    text = tmp_path / "book.txt"
    text.write_text("the film was good. " * 9)
    reviews = lines(tmp_path, [{"text": "the film was bad", "label": "bad"}, {"text": "good", "label": "good"}])
    book = data.open(text, tokenizer="bytes", length=8, task="causal-lm")
    description = json.loads(json.dumps(book.describe()))
    source = data.open(reviews, like=description)
    assert source.describe()["settings"] == {
        "tokenizer": "bytes",
        "task": "causal-lm",
        "text": "text",
        "length": 8,
        "header": ["text", "label"],
    }
    assert source.labels is None
    assert bytes(take_rows(source, [1]).inputs["input_ids"][0].astype(np.uint8)).rstrip(b"\0") == b" was ba"
    assert len(data.open(reviews, like=book, labelled=False)) == 2
    found = data.open(text, like=json.loads(json.dumps(source.describe())))
    assert found.describe() == book.describe()
    labelled = data.open(reviews, tokenizer="bytes")
    for is_labelled in (True, False):
        assert refused(text, like=labelled, labelled=is_labelled) == (
            'book.txt: a plain text has no labels, the training data has; write JSON lines: {"text": "..."}'
        )
    assert "is data of the kind text, the training data is table" in refused(text, like={"kind": "table"})


def test_long_texts_become_several_rows(tmp_path: Path, tokenizer: Path) -> None:
    """Every token but the first is a target once."""
    path = lines(tmp_path, [{"text": "abcdefghi"}, {"text": "x"}, {"text": "jk"}])
    source = data.open(path, tokenizer="bytes", length=4)
    targets = take_rows(source).targets["target"]
    assert [bytes(row[row >= 0].tolist()) for row in targets] == [b"bcde", b"fghi", b"k"]
    assert [source.row_name(row) for row in range(3)] == ["row 0, part 0", "row 0, part 1", "row 2"]
    assert source.preview(1) == "efghi"
    assert len(data.open(path, tokenizer="bytes", length=4, truncate=True)) == 2
    # A prediction has one row per line.
    assert len(data.open(path, like=source, labelled=False)) == 3
    # Each part has the special tokens.
    masked = data.open(lines(tmp_path, LINES), tokenizer=tokenizer, task="masked-lm", length=8, mask_share=1e-9)
    ids = take_rows(masked).inputs["input_ids"]
    assert ids[2].tolist() == [2, 5, 6, 7, 10, 10, 11, 3]
    assert ids[-1].tolist() == [2, 12, 5, 6, 7, 9, 3, 0]


def test_texts_that_do_not_fit(tmp_path: Path, tokenizer: Path) -> None:
    path = lines(tmp_path, LINES)
    floats = [NodeArg("x", "tensor(float)", ["n", 4])]
    for settings, sentence in [
        ({}, "films.jsonl: texts need a tokenizer: tokenizer='tokenizer.json' (--tokenizer tokenizer.json)"),
        (
            {"tokenizer": "bytes", "task": "masked-lm"},
            "the tokenizer bytes has no token [MASK] or <mask> for masked-lm",
        ),
        ({"tokenizer": "bytes", "task": "x"}, "task must be one of classification, causal-lm, masked-lm, got 'x'"),
        (
            {"tokenizer": "bytes", "model_inputs": floats},
            "a text fills one input of integers with the axes (batch, tokens), and inputs named attention_mask, "
            "token_type_ids and position_ids; the model has x: tensor(float)",
        ),
        (
            {"tokenizer": "bytes", "text": "txt"},
            "films.jsonl has no text field 'txt'; it has text; did you mean 'text'?",
        ),
        (
            {"tokenizer": tokenizer, "model_inputs": BERT, "target": "lable"},
            "films.jsonl has no field 'lable'; it has text, label; did you mean 'label'?",
        ),
    ]:
        assert refused(path, **settings) == sentence
    with pytest.raises(NoSuchFileError, match="there is no tokenizer file"):
        data.open(path, tokenizer="nowhere.json")
    for content, sentence in [
        ("", "films.jsonl is empty; expected one JSON object per line"),
        ("{\n", "films.jsonl: row 0 is not JSON: "),
        ("[1]\n", 'films.jsonl: row 0 must be an object such as {"text": "...", "label": "..."}, got list'),
        ('{"text": "a", "label": 1}\n{"label": 1}\n', "films.jsonl: row 1 has no text in the field 'text'"),
        (
            '{"text": "a", "label": 1}\n{"text": "b"}\n',
            "films.jsonl: row 1 has no label or number in the field 'label'",
        ),
        (
            '{"text": "a", "label": 1}\n{"text": "b", "label": "x"}\n',
            "films.jsonl: the field 'label' has both texts and numbers",
        ),
    ]:
        path.write_text(content, encoding="utf-8")
        assert refused(path, tokenizer="bytes").startswith(sentence)
    story = tmp_path / "story.txt"
    story.write_bytes(b"abc")
    assert refused(story, tokenizer="bytes", length=8) == (
        "story.txt has 3 tokens, a row takes 9; choose a smaller length= (--length)"
    )
    story.write_bytes(b"\xff\xfe")
    assert "story.txt is not a text in UTF-8" in refused(story, tokenizer="bytes")


@pytest.mark.parametrize("kind", ["text", "lines"])
def test_perplexity_falls_as_in_torch(kind: str) -> None:
    perplexities = check_losses(Path(__file__).parent / "data" / "torch" / "language-model", kind)
    assert perplexities[0] > 40
    assert perplexities[-1] < 6
