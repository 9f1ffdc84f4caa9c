"""Scripts of the ranks in ``test_ranks.py``: ``mpiexec -n N python rank_jobs.py JOB FOLDER SETTINGS``.

A job is a function of this module. Each rank writes its results to ``rank<R>.npz`` in the folder.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from classic_models import Feeds, Graph, Net, classifier, fed, softmax_net
from classic_models import session as session_of
from test_trainer_legacy import legacy_of
from trainer_nets import normalizing, trainer_of

from ortrain.trainer import ORTTrainer
from ortrain.trainer.amp import DynamicLossScaler
from ortrain.trainer.optim import AdamConfig, LambConfig, LinearWarmupLRScheduler, SGDConfig, _OptimizerConfig

ROWS = 16
UPDATES = 10
SCHEDULED_STEPS = 40
# Loss scale without overflow of float16 for the tests' networks.
LOSS_SCALE = 128.0
Arrays = dict[str, npt.NDArray[Any]]


def config(name: str) -> _OptimizerConfig:
    return {"sgd": SGDConfig(lr=0.1), "adam": AdamConfig(lr=0.01), "lamb": LambConfig(lr=0.01)}[name]


def wide() -> Net:
    """Return a network with several buckets of gradients."""
    return classifier(512, 1024, 300)


def segmented() -> Net:
    """Return a perceptron of sorted inputs: TopK runs on the host, before a second program."""
    graph = Graph()
    graph.nodes_of("TopK", ["x", graph.constant("count", [12], np.int64)], ["sorted", "order"], axis=1)
    hidden = graph.node("Relu", [graph.linear("fc1", "sorted", 12, 16)], "active")
    return softmax_net(graph, graph.linear("fc2", hidden, 16, 10), [12], 10)


NETS: dict[str, Callable[[], Net]] = {
    "segmented": segmented,
    "classifier": classifier,
    "wide": wide,
    "normalizing": lambda: normalizing(drops=False),
    "dropping": lambda: classifier(dropout=0.5, training_mode=True),
}


def trainer(settings: Mapping[str, Any]) -> ORTTrainer:
    """Return the trainer of a job, or of the same training in one process."""
    distributed: dict[str, Any] = {"allreduce_post_accumulation": not settings.get("overlap", True)}
    if settings.get("strategy") == "zero":
        distributed["deepspeed_zero_optimization"] = {"stage": 1}
    if settings.get("strategy") == "adasum":
        distributed["enable_adasum"] = True
    options: dict[str, Any] = {
        "batch": {"gradient_accumulation_steps": settings.get("window", 1)},
        "utils": {"grad_norm_clip": settings.get("clip", False)},
        "distributed": distributed,
    }
    if settings.get("schedule"):
        options["lr_scheduler"] = LinearWarmupLRScheduler(SCHEDULED_STEPS, 0.3)
    more = {}
    precision = settings.get("precision")
    if precision is not None:
        scale = settings.get("loss_scale", LOSS_SCALE)
        scaler = DynamicLossScaler(loss_scale=scale) if precision == "float16" else None
        options["mixed_precision"] = {"enabled": True, "loss_scaler": scaler}
        more["mixed_precision_dtype"] = precision
    net = NETS[settings.get("net", "classifier")]()
    return trainer_of(net, config(settings.get("optimizer", "adam")), options, **more)


def batch(settings: Mapping[str, Any], step: int, rank: int = 0, size: int = 1) -> Feeds:
    """Return the part of a rank in the batch of a step."""
    rows = settings.get("rows")
    net = NETS[settings.get("net", "classifier")]()
    if rows is not None:
        # Ranks with batches of different sizes.
        return net.batch(100 * step + rank, rows[rank])
    complete = net.batch(step, ROWS)
    if settings.get("same_batches"):
        return complete
    return {name: value[rank * ROWS // size : (rank + 1) * ROWS // size] for name, value in complete.items()}


def state_of(trained: ORTTrainer) -> Arrays:
    """Return weights, moments and running statistics by name."""
    state = trained.state_dict()
    arrays = {f"weight/{name}": value for name, value in state["model"]["full_precision"].items()}
    arrays |= {f"statistic/{name}": value for name, value in state.get("running_statistics", {}).items()}
    for weight, values in state["optimizer"].items():
        arrays |= {f"{name}/{weight}": value for name, value in values.items()}
    return arrays


def train(settings: Mapping[str, Any], rank: int = 0, size: int = 1) -> Arrays:
    """Train some steps. Return the losses, the bytes of the weights after each update, and the final state."""
    first, window = settings.get("first", 0), settings.get("window", 1)
    trained = trainer(settings)
    if "load" in settings:
        trained.load_checkpoint(*settings["load"])
    losses, weights = [], []
    for step in range(first, first + settings.get("updates", UPDATES) * window):
        results = trained.train_step(*batch(settings, step, rank, size).values())
        losses.append(float(results[0]))
        if settings.get("every_update") and (step + 1) % window == 0:
            full = trained.state_dict()["model"]["full_precision"]
            weights.append(np.concatenate([full[name].reshape(-1) for name in sorted(full)]))
    if "save" in settings:
        trained.save_checkpoint(f"{settings['save']}{rank}.ortcp", {"rank": rank})
    assert trained._training_session is not None
    extra = {"losses": np.array(losses), "weights": np.array(weights)}
    extra["partition"] = np.array(sorted(trained._training_session.get_partition_info_map()))
    extra["counts"] = np.array([trained._train_step_info.step, trained._train_step_info.optimization_step])
    extra["moments"] = np.array(trained._training_session.memory().moments)
    return extra | state_of(trained)


def trainings(settings: Mapping[str, Any], rank: int, size: int) -> Arrays:
    """Run several trainings, one after the other."""
    results: Arrays = {}
    for index, each in enumerate(settings["trainings"]):
        results |= {f"{index}/{name}": value for name, value in train(each, rank, size).items()}
    return results


def failing(settings: Mapping[str, Any], rank: int, size: int) -> Arrays:
    """Train with a fault of rank 1: at the start, or at step 3."""
    kind = settings["kind"]
    faulty = rank == 1
    net = NETS[settings.get("net", "classifier")]()
    if faulty and kind == "weights":
        values = np.frombuffer(net.model.graph.initializer[0].raw_data, np.float32).copy()
        values[0] += 1
        net.model.graph.initializer[0].raw_data = values.tobytes()
    options: dict[str, Any] = {"utils": {"grad_norm_clip": not (faulty and kind == "options")}}
    if kind == "frozen":
        options["utils"]["frozen_weights"] = [tensor.name for tensor in net.model.graph.initializer]
    trained = trainer_of(net, AdamConfig(lr=0.01, alpha=0.8 if faulty and kind == "optimizer" else 0.9), options)
    if kind == "load" and rank == 0:
        state = trained.state_dict()
        state["model"]["full_precision"]["fc1.b"] += 1
        assert trained._training_session is not None
        trained._training_session.load_state(state["model"]["full_precision"])
    messages = []
    for step in range(6):
        feeds = batch({}, step, rank, size)
        if faulty and step == 3:
            if kind == "raise":
                raise ValueError("there is no more data")
            if kind == "exit":
                sys.exit(settings["code"])
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "label":
                feeds["labels"] = feeds["labels"] + 100
            if kind == "shape":
                feeds["x"] = feeds["x"][:, :3]
            if kind == "rate":
                trained.optim_config.lr = 0.5
        if settings.get("caught"):
            try:
                trained.train_step(*feeds.values())
            except Exception as error:
                messages.append(f"{type(error).__name__}: {error}")
        else:
            trained.train_step(*feeds.values())
    if kind == "evaluate" and rank == 0:
        time.sleep(settings["seconds"])
        trained.eval_step(*batch({}, 0, rank, size).values())
    return state_of(trained) | {"messages": np.array(messages)}


def faces(settings: Mapping[str, Any], rank: int = 0, size: int = 1) -> Arrays:
    """Train with the classic session and the legacy trainer. Return their weights, and the errors of a bad batch."""
    session = session_of(classifier(), "AdamOptimizer")
    legacy = legacy_of(classifier())
    errors = []
    for step in range(4):
        feeds = batch({}, step, rank, size)
        if step == 2 and rank == 1:
            # The first error is found before a run, the second one during the run.
            for name, fault in (("y", feeds["x"]), ("labels", feeds["labels"] + 100)):
                try:
                    session.run(["loss"], fed({**feeds, name: fault}, 0.01))
                except RuntimeError as error:
                    errors.append(f"{type(error).__name__}: {error}")
        elif step == 2 and size > 1:
            for _ in range(2):
                try:
                    session.run(["loss"], fed(feeds, 0.01))
                except RuntimeError as error:
                    errors.append(f"{type(error).__name__}: {error}")
        session.run(["loss"], fed(feeds, 0.01))
        legacy.train_step(*feeds.values(), 0.01)
    weights = {f"weight/classic/{name}": value for name, value in session.get_model_state()["full_precision"].items()}
    trained = legacy._trainer.state_dict()["model"]["full_precision"]
    weights |= {f"weight/legacy/{name}": value for name, value in trained.items()}
    return weights | {"errors": np.array(errors), "sizes": np.array([legacy.world_rank, legacy.world_size])}


def collectives(settings: Mapping[str, Any], rank: int, size: int) -> Arrays:
    """Run the operations of the communicator that no strategy uses, on arrays of this rank."""
    from mpi4py import MPI

    from ortrain.trainer._mpi import Communicator, Operand

    def operand(array: npt.NDArray[Any]) -> Operand:
        return array.ctypes.data, array.size, str(array.dtype)

    communicator = Communicator(MPI.COMM_WORLD.Dup())
    counts = [rank + 1 for rank in range(size)]
    values, own = np.arange(sum(counts), dtype=np.float32) + rank, np.zeros(counts[rank], np.float32)
    communicator.reduce_scatter(operand(values), counts, operand(own)).wait()
    group = communicator.group([size - 1, 0]) if rank in (0, size - 1) else None
    largest = np.array([rank], np.int64)
    if group is not None:
        group.all_reduce(operand(largest), "max").wait()
    root = np.full(3, rank, np.float64)
    communicator.broadcast(operand(root), 1).wait()
    errors = []
    for array in (np.zeros(2, np.float16), np.zeros(2, bool)):
        try:
            communicator.all_reduce(operand(array), "sum")
        except TypeError as error:
            errors.append(str(error))
    groups = [-1, -1] if group is None else [group.rank, group.size]
    return {"own": own, "largest": largest, "root": root, "group": np.array(groups), "errors": np.array(errors)}


def start(settings: Mapping[str, Any], rank: int, size: int) -> Arrays:
    """Create trainers with options that name other sizes, and return their warnings and their options."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = trainer_of(classifier(), options={"distributed": settings["options"]})
    own = [str(warning.message) for warning in caught if warning.category is UserWarning]
    distributed = trained.options.distributed
    names = ("world_rank", "world_size", "local_rank", "data_parallel_size")
    world = trained._world
    return {
        "warnings": np.array(own),
        "sizes": np.array([getattr(distributed, name) for name in names]),
        "threads": np.array(0 if world is None else world.threads),
    }


def checkpoint_at_one_path(settings: Mapping[str, Any], rank: int, size: int) -> Arrays:
    """Save the checkpoints of all ranks at one path, and return the errors."""
    from mpi4py import MPI

    trained, message = trainer({}), ""
    for turn in range(size):
        if turn == rank:
            try:
                trained.save_checkpoint(settings["path"])
            except FileExistsError as error:
                message = str(error)
        MPI.COMM_WORLD.Barrier()
    return {"message": np.array(message)}


def resident(settings: Mapping[str, Any], rank: int, size: int) -> Arrays:
    """Train a large network. Return the bytes of its moments, and the resident set of the process."""
    net = classifier(4096, settings["hidden"], 10)
    options = {"deepspeed_zero_optimization": {"stage": 1}} if settings["zero"] else {}
    trained = trainer_of(net, AdamConfig(lr=0.01), {"distributed": options})
    for step in range(2):
        trained.train_step(*net.batch(step, 4).values())
    assert trained._training_session is not None
    moments = trained._training_session.memory().moments
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"moments": np.array(moments), "resident": np.array(pages * resource.getpagesize())}


def main(job: str, folder: str, settings: str) -> None:
    from mpi4py import MPI

    warnings.filterwarnings("ignore", "ORTTrainer", FutureWarning)
    world = MPI.COMM_WORLD
    results: Arrays = globals()[job](json.loads(settings), world.rank, world.size)
    np.savez(Path(folder) / f"rank{world.rank}.npz", **results)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
