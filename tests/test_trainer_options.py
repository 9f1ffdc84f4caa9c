"""Options of the trainer: defaults, limits, messages, attributes, and imported modules."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ortrain import SessionOptions
from ortrain.trainer.amp.loss_scaler import DynamicLossScaler, LossScaler
from ortrain.trainer.optim.lr_scheduler import ConstantWarmupLRScheduler
from ortrain.trainer.orttrainer_options import ORTTrainerOptions, PropagateCastOpsStrategy

DEFAULTS: dict[str, Any] = {
    "batch": {"gradient_accumulation_steps": 1},
    "device": {"id": "cuda", "mem_limit": 0},
    "distributed": {
        "world_rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "data_parallel_size": 1,
        "horizontal_parallel_size": 1,
        "pipeline_parallel": {
            "pipeline_parallel_size": 1,
            "num_pipeline_micro_batches": 1,
            "pipeline_cut_info_string": "",
            "sliced_schema": {},
            "sliced_axes": {},
            "sliced_tensor_names": [],
        },
        "allreduce_post_accumulation": False,
        "deepspeed_zero_optimization": {"stage": 0},
        "enable_adasum": False,
    },
    "lr_scheduler": None,
    "mixed_precision": {"enabled": False, "loss_scaler": None},
    "graph_transformer": {
        "attn_dropout_recompute": False,
        "gelu_recompute": False,
        "transformer_layer_recompute": False,
        "number_recompute_layers": 0,
        "propagate_cast_ops_config": {"strategy": PropagateCastOpsStrategy.FLOOD_FILL, "level": 1, "allow": []},
    },
    "utils": {
        "frozen_weights": [],
        "grad_norm_clip": True,
        "memory_efficient_gradient": False,
        "run_symbolic_shape_infer": False,
    },
    "debug": {
        "deterministic_compute": False,
        "check_model_export": False,
        "graph_save_paths": {
            "model_after_graph_transforms_path": "",
            "model_with_gradient_graph_path": "",
            "model_with_training_graph_path": "",
            "model_with_training_graph_after_optimization_path": "",
        },
    },
    "_internal_use": {
        "enable_internal_postprocess": True,
        "extra_postprocess": None,
        "onnx_opset_version": 14,
        "enable_onnx_contrib_ops": True,
    },
    "provider_options": {},
    "session_options": None,
}

# Settings with the default None, which therefore accept None.
NULLABLE = {
    "lr_scheduler",
    "mixed_precision.loss_scaler",
    "graph_transformer.propagate_cast_ops_config.strategy",
    "_internal_use.extra_postprocess",
    "session_options",
}

# Minimum and maximum of the integers.
LIMITS: dict[str, tuple[int, int | None]] = {
    "batch.gradient_accumulation_steps": (1, None),
    "device.mem_limit": (0, None),
    "distributed.world_rank": (0, None),
    "distributed.world_size": (1, None),
    "distributed.local_rank": (0, None),
    "distributed.data_parallel_size": (1, None),
    "distributed.horizontal_parallel_size": (1, None),
    "distributed.pipeline_parallel.pipeline_parallel_size": (1, None),
    "distributed.pipeline_parallel.num_pipeline_micro_batches": (1, None),
    "distributed.deepspeed_zero_optimization.stage": (0, 1),
    "graph_transformer.number_recompute_layers": (0, None),
    "graph_transformer.propagate_cast_ops_config.level": (-1, None),
    "_internal_use.onnx_opset_version": (12, 14),
}


def leaves(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Return the defaults by dotted paths."""
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= leaves(value, f"{above}{key}.")
        else:
            found[above + key] = value
    return found


LEAVES = leaves(DEFAULTS)
SECTIONS = sorted({path.rpartition(".")[0] for path in LEAVES} - {""})
FLAGS = [path for path, value in LEAVES.items() if isinstance(value, bool)]
COUNTS = list(LIMITS)
TEXTS = [path for path, value in LEAVES.items() if isinstance(value, str)]
LISTS = [path for path, value in LEAVES.items() if value == [] and isinstance(value, list)]
TABLES = [path for path, value in LEAVES.items() if value == {} and isinstance(value, dict)]


def tree_of(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    tree: dict[str, Any] = value
    return tree


def text_of(path: str, problems: Any) -> str:
    """Return the full text of an error with these problems at one path."""
    *sections, leaf = path.split(".")
    layout: Any = {leaf: problems}
    for key in reversed(sections):
        layout = {key: [layout]}
    return f"Invalid options: {layout}"


def at(options: Any, path: str) -> Any:
    for key in path.split("."):
        options = getattr(options, key)
    return options


def error_of(given: Any) -> str:
    with pytest.raises(ValueError, match=r"^Invalid options: ") as caught:
        ORTTrainerOptions(given)
    return str(caught.value)


def test_all_leaves_are_of_a_kind() -> None:
    assert {path for path, value in LEAVES.items() if type(value) is int} == set(LIMITS)
    strategy = "graph_transformer.propagate_cast_ops_config.strategy"
    assert {path for path, value in LEAVES.items() if value is None} | {strategy} == NULLABLE
    assert set(LEAVES) == {*FLAGS, *COUNTS, *TEXTS, *LISTS, *TABLES, *NULLABLE}


# Defaults.


@pytest.mark.parametrize(
    "options",
    [{}, *[tree_of(section, {}) for section in SECTIONS], {section.partition(".")[0]: {} for section in SECTIONS}],
    ids=str,
)
def testORTTrainerOptionsDefaultValues(options: dict[str, Any]) -> None:  # noqa: N802
    """F1."""
    assert ORTTrainerOptions(options)._validated_opts == DEFAULTS


def test_no_argument_is_all_defaults() -> None:
    assert ORTTrainerOptions()._validated_opts == DEFAULTS


@pytest.mark.parametrize("section", SECTIONS)
def test_none_for_a_section_is_its_defaults(section: str) -> None:
    assert ORTTrainerOptions(tree_of(section, None))._validated_opts == DEFAULTS


@pytest.mark.parametrize("path", sorted(set(LEAVES) - NULLABLE))
def test_none_for_a_setting_is_its_default(path: str) -> None:
    assert ORTTrainerOptions(tree_of(path, None))._validated_opts == DEFAULTS


@pytest.mark.parametrize("path", sorted(NULLABLE))
def test_none_is_a_valid_value(path: str) -> None:
    assert at(ORTTrainerOptions(tree_of(path, None)), path) is None


@pytest.mark.parametrize("path", LEAVES)
def test_defaults_are_attributes(path: str) -> None:
    got = at(ORTTrainerOptions(), path)
    assert getattr(got, "_validated_opts", got) == LEAVES[path]
    assert type(got) is type(LEAVES[path]) or path in TABLES


def test_two_objects_share_no_default() -> None:
    first, second = ORTTrainerOptions(), ORTTrainerOptions()
    for path in LISTS:
        at(first, path).append("w")
        assert at(second, path) == at(ORTTrainerOptions(), path) == []
    assert first._validated_opts == DEFAULTS


# Types and limits.


def testORTTrainerOptionsInvalidMixedPrecisionEnabledSchema() -> None:  # noqa: N802
    """F2."""
    expected = "Invalid options: {'mixed_precision': [{'enabled': ['must be of boolean type']}]}"
    assert error_of({"mixed_precision": {"enabled": 1}}) == expected


@pytest.mark.parametrize("path", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "True", [], np.True_], ids=repr)
def test_flags_are_booleans(path: str, value: Any) -> None:
    assert error_of(tree_of(path, value)) == text_of(path, ["must be of boolean type"])
    other = not LEAVES[path]
    assert at(ORTTrainerOptions(tree_of(path, other)), path) is other


@pytest.mark.parametrize("path", COUNTS)
@pytest.mark.parametrize("value", [1.0, "1", [1], np.int64(1)], ids=repr)
def test_counts_are_integers(path: str, value: Any) -> None:
    assert error_of(tree_of(path, value)) == text_of(path, ["must be of integer type"])


@pytest.mark.parametrize("path", COUNTS)
def test_limits_of_counts(path: str) -> None:
    least, greatest = LIMITS[path]
    assert at(ORTTrainerOptions(tree_of(path, least)), path) == least
    assert error_of(tree_of(path, least - 1)) == text_of(path, [f"min value is {least}"])
    if greatest is None:
        assert at(ORTTrainerOptions(tree_of(path, 2**40)), path) == 2**40
    else:
        assert at(ORTTrainerOptions(tree_of(path, greatest)), path) == greatest
        assert error_of(tree_of(path, greatest + 1)) == text_of(path, [f"max value is {greatest}"])


@pytest.mark.parametrize("path", sorted(set(COUNTS) - {"_internal_use.onnx_opset_version"}))
def test_true_is_a_count(path: str) -> None:
    assert at(ORTTrainerOptions(tree_of(path, True)), path) == 1


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize("value", [1, b"cpu", ["cpu"]], ids=repr)
def test_texts_are_strings(path: str, value: Any) -> None:
    assert error_of(tree_of(path, value)) == text_of(path, ["must be of string type"])
    assert at(ORTTrainerOptions(tree_of(path, "cpu")), path) == "cpu"


@pytest.mark.parametrize("path", LISTS)
@pytest.mark.parametrize("value", ["fc1", b"fc1", {"fc1"}, 1], ids=repr)
def test_lists_are_lists(path: str, value: Any) -> None:
    assert error_of(tree_of(path, value)) == text_of(path, ["must be of list type"])


@pytest.mark.parametrize("path", LISTS)
def test_a_tuple_becomes_a_list(path: str) -> None:
    """A trainer appends to some lists."""
    assert at(ORTTrainerOptions(tree_of(path, ("a", "b"))), path) == ["a", "b"]


@pytest.mark.parametrize("path", LISTS)
def test_elements_of_lists(path: str) -> None:
    given = tree_of(path, ["a", 3, "b", None])
    if path == "utils.frozen_weights":
        assert at(ORTTrainerOptions(given), path) == ["a", 3, "b", None]
    else:
        problems = [{1: ["must be of string type"], 3: ["null value not allowed"]}]
        assert error_of(given) == text_of(path, problems)


@pytest.mark.parametrize("path", SECTIONS + TABLES)
@pytest.mark.parametrize("value", [3, "cpu", [1], [{"id": "cpu"}], True], ids=repr)
def test_sections_are_dictionaries(path: str, value: Any) -> None:
    assert error_of(tree_of(path, value)) == text_of(path, ["must be of dict type"])


@pytest.mark.parametrize(
    ("path", "kind", "good"),
    [
        ("lr_scheduler", "lr_scheduler", ConstantWarmupLRScheduler(total_steps=10)),
        ("mixed_precision.loss_scaler", "loss_scaler", DynamicLossScaler()),
        ("session_options", "session_options", SessionOptions()),
        ("session_options", "session_options", onnxruntime.SessionOptions()),
        (
            "graph_transformer.propagate_cast_ops_config.strategy",
            "propagate_cast_ops_strategy",
            PropagateCastOpsStrategy.INSERT_AND_REDUCE,
        ),
    ],
)
@pytest.mark.parametrize("bad", [1, "FLOOD_FILL", ConstantWarmupLRScheduler, threading.Lock(), iter(())])
def test_instances(path: str, kind: str, good: Any, bad: Any) -> None:
    """Errors also name values that cannot be copied."""
    assert at(ORTTrainerOptions(tree_of(path, good)), path) is good
    assert error_of(tree_of(path, bad)) == text_of(path, [f"must be of {kind} type"])


def test_a_scaler_of_ones_own() -> None:
    class Fixed(LossScaler):
        pass

    scaler = Fixed(4.0)
    assert ORTTrainerOptions({"mixed_precision": {"loss_scaler": scaler}}).mixed_precision.loss_scaler is scaler


def test_the_post_processing_is_callable() -> None:
    path = "_internal_use.extra_postprocess"
    assert at(ORTTrainerOptions(tree_of(path, print)), path) is print
    for value in (1, "print", []):
        assert error_of(tree_of(path, value)) == text_of(path, ["Must be callable or None"])


PIPELINE = "distributed.pipeline_parallel."


@pytest.mark.parametrize(
    ("path", "value", "problems"),
    [
        ("sliced_schema", {1: [2]}, [{1: ["must be of string type"]}]),
        ("sliced_schema", {"x": 2}, [{"x": ["must be of list type"]}]),
        ("sliced_schema", {"x": [2, "batch"]}, [{"x": [{1: ["must be of integer type"]}]}]),
        ("sliced_axes", {1: 0}, [{1: ["must be of string type"]}]),
        ("sliced_axes", {"x": 0.0}, [{"x": ["must be of integer type"]}]),
    ],
)
def test_slices_of_a_pipeline(path: str, value: Any, problems: Any) -> None:
    assert error_of(tree_of(PIPELINE + path, value)) == text_of(PIPELINE + path, problems)


def test_tables_are_stored_unchanged() -> None:
    schema, axes = {"x": [2, 64], "labels": [2]}, {"x": 0, "__class__": -1}
    options = ORTTrainerOptions({"distributed": {"pipeline_parallel": {"sliced_schema": schema, "sliced_axes": axes}}})
    pipeline = options.distributed.pipeline_parallel
    assert pipeline.sliced_schema.x == [2, 64]
    assert pipeline._validated_opts["sliced_schema"] == pipeline.sliced_schema._validated_opts == schema
    assert pipeline.sliced_axes._validated_opts == axes


# Keys.


@pytest.mark.parametrize("section", [""] + [f"{section}." for section in SECTIONS])
@pytest.mark.parametrize("key", ["unheard_of", "enable", 7, None], ids=repr)
def test_unknown_keys(section: str, key: Any) -> None:
    layout: Any = {key: ["unknown field"]}
    given: Any = {key: 1}
    for above in reversed(section.split(".")[:-1]):
        layout, given = {above: [layout]}, {above: given}
    assert error_of(given) == f"Invalid options: {layout}"


@pytest.mark.parametrize("path", ["device.id", "mixed_precision.enabled"])
def test_no_dotted_keys(path: str) -> None:
    assert error_of({path: LEAVES[path]}) == f"Invalid options: {{'{path}': ['unknown field']}}"


@pytest.mark.parametrize("key", ["strategy", "level", "allow"])
@pytest.mark.parametrize("as_default", [True, False])
def test_the_keys_that_documents_have_for_casts(key: str, as_default: bool) -> None:
    path = "graph_transformer.propagate_cast_ops_config."
    value = LEAVES[path + key] if as_default else None
    problems = [f"unknown field: the key is '{key}'"]
    assert error_of(tree_of(f"{path}propagate_cast_ops_{key}", value)) == text_of(
        f"{path}propagate_cast_ops_{key}", problems
    )


@pytest.mark.parametrize(
    "path", ["graph_transformer.allow_layer_norm_mod_precision", "utils.invertible_layer_norm_gradient"]
)
def test_keys_of_other_releases(path: str) -> None:
    assert error_of(tree_of(path, False)) == text_of(path, ["unknown field"])


def test_several_errors_are_one() -> None:
    given = {
        "mixed_precision": {"enabled": 1, "loss_scaler": 2.0},
        "debug": {"graph_save_paths": {"model_with_gradient_graph_path": 3}, "deterministic": True},
        "device": 4,
        "devise": {},
        "_internal_use": {"onnx_opset_version": 11, "extra_postprocess": 5},
    }
    expected = {
        "_internal_use": [
            {"extra_postprocess": ["Must be callable or None"], "onnx_opset_version": ["min value is 12"]}
        ],
        "debug": [
            {
                "deterministic": ["unknown field"],
                "graph_save_paths": [{"model_with_gradient_graph_path": ["must be of string type"]}],
            }
        ],
        "device": ["must be of dict type"],
        "devise": ["unknown field"],
        "mixed_precision": [{"enabled": ["must be of boolean type"], "loss_scaler": ["must be of loss_scaler type"]}],
    }
    assert error_of(given) == f"Invalid options: {expected}"


@pytest.mark.parametrize("value", [None, 1, [1], ["abc"], object()])
def test_values_that_are_no_dictionary(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as of_dict:
        dict(value)
    with pytest.raises(of_dict.type) as caught:
        ORTTrainerOptions(value)
    assert str(caught.value) == str(of_dict.value)


@pytest.mark.parametrize(
    "value",
    [
        [("device", {"id": "cpu"})],
        OrderedDict(device=OrderedDict(id="cpu")),
        MappingProxyType({"device": MappingProxyType({"id": "cpu"})}),
    ],
)
def test_accepted_kinds_of_dictionary(value: Any) -> None:
    assert ORTTrainerOptions(value)._validated_opts == DEFAULTS | {"device": {"id": "cpu", "mem_limit": 0}}


def test_sizes_are_not_compared() -> None:
    """The trainer, not the options, checks that ranks and sizes are consistent."""
    sizes = {"world_rank": 7, "world_size": 4, "horizontal_parallel_size": 3}
    distributed = ORTTrainerOptions({"distributed": sizes}).distributed
    assert (distributed.world_rank, distributed.world_size, distributed.horizontal_parallel_size) == (7, 4, 3)


def test_settings_of_providers_are_free() -> None:
    settings = {"arena": 1 << 20, "nested": [{"a": None}, (1, {"b": 2})], "hints": {"x"}, "odd": {3: "three"}}
    options = ORTTrainerOptions({"provider_options": {"CPUExecutionProvider": settings, "Own": None}})
    assert options._validated_opts["provider_options"] == {"CPUExecutionProvider": settings, "Own": None}
    provider = options.provider_options.CPUExecutionProvider
    assert provider.nested[0].a is None
    assert provider.nested[1][1].b == 2
    assert (provider.arena, provider.hints, provider.odd) == (1 << 20, {"x"}, {3: "three"})
    assert options.provider_options.Own is None
    assert error_of({"provider_options": {1: {}}}) == text_of("provider_options", [{1: ["must be of string type"]}])


# The object.


def test_dictionary_of_the_user_is_unchanged() -> None:
    given: dict[str, Any] = {"utils": {"frozen_weights": ["a"]}, "device": None, "provider_options": {"P": {"k": [1]}}}
    before = copy.deepcopy(given)
    options = ORTTrainerOptions(given)
    options.utils.frozen_weights.append("b")
    options.utils.grad_norm_clip = False
    options.provider_options.P.k.append(2)
    assert given == before
    assert options._original_opts == before
    given["utils"]["frozen_weights"].append("c")
    given["provider_options"]["P"]["k"].append(3)
    assert options.utils.frozen_weights == ["a", "b"]
    assert options._validated_opts["utils"]["frozen_weights"] == ["a"]
    assert options._validated_opts["provider_options"] == {"P": {"k": [1]}}


def test_attributes_are_set_without_a_check() -> None:
    options = ORTTrainerOptions({"device": {"id": "cpu"}})
    options.device.id = "cuda:1"
    options.mixed_precision.enabled = 1
    options.lr_scheduler = scheduler = ConstantWarmupLRScheduler(total_steps=3)
    assert (options.device.id, options.mixed_precision.enabled) == ("cuda:1", 1)
    assert options.lr_scheduler is scheduler
    assert options.device._validated_opts == {"id": "cpu", "mem_limit": 0}
    assert options._validated_opts == DEFAULTS | {"device": {"id": "cpu", "mem_limit": 0}}


def test_set_attributes_are_noted() -> None:
    """`_assigned` distinguishes a value that was set to the default; nothing else does."""
    options = ORTTrainerOptions()
    assert options._assigned == options.device._assigned == set()
    before = repr(options)
    options.device.id = "cuda"
    assert (options._assigned, options.device._assigned) == (set(), {"id"})
    assert repr(options) == before
    assert options._validated_opts == DEFAULTS
    assert copy.deepcopy(options).device._assigned == {"id"}


def test_names_beside_the_settings() -> None:
    options = ORTTrainerOptions({"batch": {}})
    assert options._original_opts == {"batch": {}}
    assert options._main_class_name == options.batch._main_class_name == "ORTTrainerOptions"
    assert type(options.batch).__name__ == "_ORTTrainerOptionsInternal"
    assert not isinstance(options.batch, ORTTrainerOptions)


def test_no_subscripts() -> None:
    options: Any = ORTTrainerOptions()
    for part in (options, options.device):
        with pytest.raises(TypeError, match="not subscriptable"):
            part["id"]


def test_missing_attributes() -> None:
    options: Any = ORTTrainerOptions()
    with pytest.raises(AttributeError, match=r"'ORTTrainerOptions' object has no attribute 'mixed'$"):
        options.mixed  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'devise'; did you mean 'device'\?$"):
        options.devise  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'enable'; did you mean 'enabled'\?$"):
        options.mixed_precision.enable  # noqa: B018
    assert not hasattr(options, "_anything")


def test_repr_has_the_settings() -> None:
    options = ORTTrainerOptions({"device": {"id": "cpu", "mem_limit": 3}})
    assert repr(options.device) == "{'id': 'cpu', 'mem_limit': 3}"
    assert "'device': {'id': 'cpu', 'mem_limit': 3}" in repr(options)
    assert not any(name in repr(options) for name in ("_validated_opts", "_original_opts", "_main_class_name"))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda options: pickle.loads(pickle.dumps(options))])
def test_copies(again: Any) -> None:
    options = ORTTrainerOptions({"device": {"id": "cpu"}, "utils": {"frozen_weights": ["a"]}})
    other = again(options)
    assert repr(other) == repr(options)
    assert other._validated_opts == options._validated_opts


@pytest.mark.parametrize(
    "options", [{}, {"distributed": {}}, {"distributed": {"enable_adasum": False}}], ids=["none", "empty", "false"]
)
def testORTTrainerOptionsDisabledAdasumFlag(options: dict[str, Any]) -> None:  # noqa: N802
    """F29."""
    assert ORTTrainerOptions(options).distributed.enable_adasum is False


def testORTTrainerOptionsEnabledAdasumFlag() -> None:  # noqa: N802
    """F29."""
    assert ORTTrainerOptions({"distributed": {"enable_adasum": True}}).distributed.enable_adasum is True


def test_numbers_of_strategies() -> None:
    assert {member.name: member.value for member in PropagateCastOpsStrategy} == {
        "NONE": 0,
        "INSERT_AND_REDUCE": 1,
        "FLOOD_FILL": 2,
    }


# Imports, in separate interpreters.


def after(statements: str) -> list[str]:
    """Return the output of some statements in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", statements], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("ortrain", ("cerberus", "h5py", "torch", "ortrain.trainer")),
        ("ortrain.trainer.orttrainer_options", ("cerberus", "torch")),
        ("ortrain.trainer.model_desc_validation", ("cerberus", "torch")),
    ],
)
def test_modules_that_an_import_leaves_out(module: str, absent: tuple[str, ...]) -> None:
    found = after(f"import sys, {module}\nprint('\\n'.join(sys.modules))")
    assert module in found
    assert not set(absent) & set(found)


@pytest.mark.parametrize(
    "statement",
    [
        "orttrainer_options.ORTTrainerOptions()",
        "model_desc_validation._ORTTrainerModelDesc({'inputs': [('x', [])], 'outputs': [('y', [])]})",
    ],
)
def test_without_cerberus(statement: str) -> None:
    (text,) = after(
        "import sys\nsys.modules['cerberus'] = None\n"
        "from ortrain.trainer import model_desc_validation, orttrainer_options\n"
        f"try:\n    {statement}\nexcept ImportError as error:\n    print(error.name, error)\n"
    )
    assert text == (
        "cerberus ortrain.trainer needs cerberus, which is not installed here: pip install ortrain[trainer]"
    )


def test_the_page_has_all_options_with_their_defaults() -> None:
    """The table states the effect of each option."""
    page = (Path(__file__).parent.parent / "docs" / "orttrainer.md").read_text()
    rows = page.partition("| option | effect here |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    found: dict[str, str] = {}
    for row in rows:
        cells, effect = row.removeprefix("| ").split(" | ", 1)
        assert effect.startswith(("Has its effect", "Refused", "No effect", "No numerical effect")), row
        above, waiting = "", []
        for name, default in re.findall(r"`([\w.]+)`|\[(`\[\]`|[^\]]+)\]", cells):
            if name:
                path = above + name if name.startswith(".") else name
                above = path.rpartition(".")[0]
                waiting.append(path)
            else:
                found |= dict.fromkeys(waiting, default.strip("`"))
                waiting = []
        assert not waiting, row
    shown = {
        path: value.name if isinstance(value, PropagateCastOpsStrategy) else repr(value).replace("'", '"')
        for path, value in LEAVES.items()
    }
    assert found == shown
