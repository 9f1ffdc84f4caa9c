"""Options of ``ortrain train`` and of the other commands, by group."""

from __future__ import annotations

from ortrain._command.option import Option

__all__ = ["COMPARE", "DATA", "EVALUATE", "EXPORT", "FIT", "MODEL", "PREDICT", "READING", "RUN"]

READING = (
    Option("target", "texts", "column, array or field of the target", "NAME", default="target, label, class or y"),
    Option(
        "kind",
        "text",
        "kind of the data",
        choices=("images", "table", "arrays", "jsonl", "text", "audio"),
        default="by the path",
    ),
    Option("columns", "texts", "columns or arrays of the inputs", "A,B", default="all but the target"),
    Option("sample_weight", "text", "column or array with the weight of each row", "NAME"),
    Option("size", "size", "height and width of images", "PIXELS|HxW", default="those of the model's input"),
    Option(
        "layout", "text", "order of the axes of images", choices=("NCHW", "NHWC"), default="that of the model's input"
    ),
    Option("channels", "integer", "channels of images: 1, 3 or 4", "N", default="those of the model's input"),
    Option(
        "mean",
        "numbers",
        "mean of each channel, for pixels from 0 to 1",
        "R,G,B",
        default="by the files of the model",
    ),
    Option("std", "numbers", "standard deviation of each channel", "R,G,B", default="by the files of the model"),
    Option("flip", "text", "flip half of the training images", choices=("horizontal", "vertical", "both")),
    Option("crop", "number", "largest share of a training image that is cut away", "SHARE"),
    Option("rotation", "number", "largest angle of training images", "DEGREES"),
    Option("colour", "number", "largest change of brightness, contrast and saturation of training images", "SHARE"),
    Option("mixup", "number", "blend training rows in pairs; the parameter of the beta distribution", "ALPHA"),
    Option("skip_broken", "switch", "leave out files that cannot be read"),
    Option("tokenizer", "text", "tokenizer.json of the package tokenizers, or bytes", "FILE|bytes"),
    Option(
        "task",
        "text",
        "task of texts",
        choices=("classification", "causal-lm", "masked-lm"),
        default="classification if there are labels",
    ),
    Option("text", "text", "field of the text in JSON lines", "NAME", default="text"),
    Option(
        "text_pair", "text", "field of the second text of a pair", "NAME", default="text_pair, if there is such a field"
    ),
    Option("truncate", "switch", "cut long texts of language modelling, rather than split them into several rows"),
    Option("length", "integer", "most tokens per row", "TOKENS", default="the size of the model's input, or 128"),
    Option("buckets", "integers", "lengths that rows are padded to", "N,M", default="16, 24, 32, 48, 64, ..."),
    Option("mask_share", "number", "share of masked tokens of masked-lm", "SHARE", default="0.15"),
    Option("sample_rate", "integer", "samples per second of audio", "HERTZ", default="16000"),
    Option("seconds", "number", "length of audio", "SECONDS", default="the size of the model's input"),
)
"""Options of :func:`ortrain.data.open`."""

DATA = (
    Option("data", "text", "file or folder of the training data", "PATH"),
    Option(
        "val",
        "text",
        "validation data: a path, or the share of the rows that is held out",
        "PATH|SHARE",
        default="the folder val beside train, if there is one",
    ),
    *READING,
)
"""Options of the data of a training."""

MODEL = (
    Option(
        "loss",
        "text",
        "loss: cross_entropy, mse, mae, binary_crossentropy",
        "NAME",
        default="by the model and the targets",
    ),
    Option(
        "optimizer",
        "named",
        "optimizer with its settings, such as adamw,weight_decay=0.05",
        "NAME[,SETTING=VALUE]",
        default="adamw",
    ),
    Option(
        "learning_rate",
        "number",
        "learning rate; find chooses it by a range test",
        "RATE|find",
        ("--lr",),
        ("find",),
        default="the optimizer's",
    ),
    Option("trainable", "texts", "trained parameters: all, head, last:3, names or patterns", "WHICH", default="all"),
    Option("frozen", "texts", "parameters that are not trained: names or patterns", "WHICH"),
    Option(
        "classes",
        "integer",
        "new last layer for this number of classes; auto: for the classes of the data",
        "N|auto",
        choices=("auto",),
    ),
    Option(
        "lora",
        "ranked",
        "train a low-rank adapter of this rank instead of the weights; with settings of ortrain.lora.add, such as "
        "8,alpha=16,targets=q_proj,v_proj",
        "RANK[,SETTING=VALUE]",
    ),
    Option(
        "base",
        "text",
        "form of the weights that get an adapter: as they are, or quantized",
        choices=("keep", "int8", "int4", "nf4"),
        default="keep",
    ),
    Option(
        "metrics", "texts", "metrics, such as accuracy, top5, f1, auroc, mae, r2", "A,B", default="accuracy for labels"
    ),
    Option("weighted_metrics", "texts", "metrics in which a row counts by its weight", "A,B"),
    Option("device", "text", "device: cpu, cuda, vulkan, metal, webgpu, ...", "NAME", default="auto"),
    Option(
        "precision",
        "text",
        "precision of inner products",
        choices=("float32", "bfloat16", "bf16x3", "bf16x6"),
        default="float32",
    ),
    Option(
        "bf16_fallback",
        "text",
        "unit for bfloat16 on a processor without AMX",
        choices=("none", "avx512_bf16", "emulated"),
        default="none",
    ),
    Option("seed", "integer", "seed of the order of rows, of augmentation and of a new last layer", "N", default="0"),
    Option("memory_limit", "bytes", "most memory of a step", "BYTES"),
    Option("threads", "integer", "threads of the processor", "N", default="all cores"),
)
"""Options of ``Model``."""

FIT = (
    Option("epochs", "integer", "passes over the data", "N", default="1"),
    Option(
        "batch_size",
        "integer",
        "rows of a step; auto: as many as fit into the memory",
        "N|auto",
        choices=("auto",),
        default="32",
    ),
    Option("shuffle", "switch", "new order of the rows in each epoch", default="yes"),
    Option(
        "class_weight",
        "weights",
        "weight of each class; balanced: each class counts the same",
        "A=2,B=1|balanced",
        choices=("balanced",),
    ),
    Option("accumulate", "integer", "batches whose gradients are averaged for one update", "N", default="1"),
    Option("clip_norm", "number", "maximum norm of all gradients together", "NORM"),
    Option(
        "schedule",
        "named",
        "schedule of the learning rate: cosine, linear, one_cycle, ...; with settings, such as cosine,warmup=100",
        "NAME[,SETTING=VALUE]",
        default="constant",
    ),
    Option("early_stopping", "integer", "end when the validation loss has not improved for some epochs", "EPOCHS"),
    Option(
        "reduce_on_plateau",
        "integer",
        "divide the learning rate by 10 when the validation loss has not improved for some epochs",
        "EPOCHS",
    ),
    Option("tensorboard", "text", "write curves for TensorBoard", "FOLDER"),
    Option("initial_epoch", "integer", "number of the first epoch", "N", default="0"),
    Option("steps_per_epoch", "integer", "batches of an epoch", "N", default="one pass over the data"),
    Option("validation_steps", "integer", "batches of a validation", "N", default="all"),
    Option("validation_batch_size", "integer", "rows of a batch of the validation", "N", default="the batch size"),
    Option("validation_freq", "integer", "epochs from one validation to the next", "N", default="1"),
)
"""Options of ``fit``."""

RUN = (
    Option(
        "out",
        "text",
        "folder of the run: checkpoints, history, trained.onnx, report.html",
        "FOLDER",
        default="run, or run-2, run-3, ... if it exists",
    ),
    Option("resume", "switch", "go on with the run in the folder"),
    Option("checkpoint_every", "number", "seconds between two checkpoints within an epoch", "SECONDS", default="60"),
    Option(
        "verbose",
        "integer",
        "1: a bar, 2: a line per epoch, 0: neither",
        "0|1|2",
        default="a bar on a terminal, otherwise lines",
    ),
)
"""Options of the folder of a run and of the output."""

_DATA = Option("data", "text", "file or folder of the data", "PATH")
_BATCH_SIZE = Option("batch_size", "integer", "rows of a batch", "N", default="32")


def _of_model(*names: str) -> tuple[Option, ...]:
    return tuple(option for option in MODEL if option.name in names)


EVALUATE = (
    _DATA,
    _BATCH_SIZE,
    *_of_model(
        "loss", "metrics", "weighted_metrics", "device", "precision", "bf16_fallback", "memory_limit", "threads"
    ),
    Option("json", "switch", "print a JSON object"),
)
"""Options of ``ortrain evaluate``."""

PREDICT = (
    _DATA,
    _BATCH_SIZE,
    *_of_model("device", "precision", "bf16_fallback", "memory_limit", "threads"),
    Option("out", "text", "file to write: .csv, .jsonl or .npz", "FILE", default="CSV on the standard output"),
)
"""Options of ``ortrain predict``."""

EXPORT = (
    Option("opset", "integer", "version of the operators", "N", default="that of the model"),
    Option("external_data", "switch", "store the weights in a second file"),
    Option("float16", "switch", "store the weights as float16, and compute in it"),
)
"""Options of ``ortrain export``."""

COMPARE = (
    _DATA,
    Option("batch_size", "integer", "rows of a step", "N", default="8"),
    Option("steps", "integer", "steps", "N", default="3"),
    Option(
        "runtimes",
        "texts",
        "onnxruntime, torch or both, beside the reference evaluator",
        "NAMES",
        default="those that are installed",
    ),
    *_of_model("loss", "optimizer", "learning_rate", "trainable", "frozen", "classes", "device", "precision", "seed"),
    Option(
        "tolerance",
        "number",
        "largest difference of a tensor, relative to its largest element",
        "SHARE",
        default="1e-4",
    ),
)
"""Options of ``ortrain compare``."""
