"""Results of a comparison, and their report: tables, JSON, and a list of failures."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aims

SMALLEST = "mlp_tiny"
# Relative tolerance of the first loss, by precision, from the most exact to the least exact. All libraries start from
# the same weights, so only two things differ: the order of float32 sums, and the precision of the factors of products
# (24, 16 or 8 bits). For two libraries the less exact precision applies.
FIRST_TOLERANCE = {"f32": 2e-5, "bf16x6": 2e-5, "bf16x3": 1e-4, "bf16": 2e-2}
# Tolerance of the norm of each parameter's gradient in the first step, relative to the norm itself or to a fraction of
# the largest norm. The floor is necessary: a bias before a normalization has a gradient of rounding errors only.
GRADIENT_TOLERANCE = {"f32": 1e-2, "bf16x6": 1e-2, "bf16x3": 1e-2, "bf16": 0.3}
GRADIENT_FLOOR = 1e-3
# Upper limit of the gradient tolerance. Normalization over batches of a few images amplifies rounding errors in small
# gradients, and the other libraries differ from each other in the same way. Their differences raise the tolerance up to
# this limit. A larger difference is not rounding.
MAX_GRADIENT_TOLERANCE = {"f32": 5e-2, "bf16x6": 5e-2, "bf16x3": 5e-2, "bf16": 0.3}
# Relative tolerance of later losses. The optimizer turns rounding errors into steps: AdamW moves a weight by about the
# learning rate, however small the gradient is. With small normalized batches, the losses of later steps differ between
# any two libraries. A larger difference means another computation. The tolerance does not apply to factors of 8 bits.
LATER_STEPS, LATER_TOLERANCE = 5, 3e-2


@dataclass(frozen=True)
class Limits:
    """Limits of the machine with the threads of the run, in operations and bytes per second."""

    flops: float
    bandwidth: float


@dataclass
class Startup:
    """Time and memory until the end of the first step."""

    seconds: list[dict[str, float]] = field(default_factory=list)
    """Seconds of each start: `import` (beyond NumPy), `create` and `first_step`."""
    anonymous: int | None = None
    """Peak of RssAnon above the state after the import, in bytes."""
    resident: int | None = None
    """Peak of all resident pages, including file pages, in bytes."""

    def best(self, what: str) -> float | None:
        """Returns the shortest time of a phase over all starts."""
        return min((seconds[what] for seconds in self.seconds), default=None)


@dataclass
class Measured:
    """Measurements of a library on a workload."""

    peer: str
    version: str
    rounds: list[float]
    """The median step of each round, in seconds."""
    least: float
    """Time of the fastest step, in seconds."""
    losses: list[float]
    gradients: dict[str, float]
    startup: Startup
    precision: str = "f32"
    """Precision of the factors of products."""
    unit: str | None = None
    """Unit that multiplies bfloat16, if the library reports it."""

    def step(self) -> float:
        """Returns the median step time in seconds."""
        return statistics.median(self.rounds)


@dataclass
class Workload:
    """Measurements of all libraries on a workload."""

    name: str
    about: dict[str, Any]
    limits: Limits
    ours: Measured
    others: list[Measured]
    limit: dict[str, int] | None = None
    """For ortrain with a memory limit, in bytes: the `limit`, the `arena` without it, and the `saved` part."""

    def ratios(self, other: Measured) -> list[float]:
        """Returns the ratios of our step times to the other library's, by round."""
        return [a / b for a, b in zip(self.ours.rounds, other.rounds, strict=True)]

    def ratio(self, other: Measured) -> float:
        """Returns the median ratio to the other library."""
        return statistics.median(self.ratios(other))

    def aim(self, other: Measured) -> float | None:
        """Returns the target for the ratio, if there is one."""
        return aims.time(self.name, other.peer, self.ours.precision)

    def share(self, who: Measured) -> float:
        """Returns the fraction of the machine's limit that a library reaches.

        The fraction is the minimum time for the arithmetic and traffic of a step, divided by the measured time.
        """
        # If only the optimizer is timed, it reads weight, gradient and two moments, and writes all of them but the
        # gradient.
        flops, moved = float(self.about["flops_step"]), float(self.about["min_bytes"])
        if self.about["only"] == "optimizer":
            flops, moved = 0.0, 7 * 4.0 * self.about["trainable"]
        return (flops / self.limits.flops + moved / self.limits.bandwidth) / who.step()

    def other(self, name: str) -> Measured | None:
        """Returns the measurements of a peer."""
        return next((other for other in self.others if other.peer == name), None)


@dataclass
class Run:
    """Results of a complete run."""

    machine: dict[str, Any]
    date: str
    rounds: int
    seconds: float
    workloads: list[Workload] = field(default_factory=list)

    def precision(self) -> str:
        """Returns the precision of our matrix products."""
        return self.workloads[0].ours.precision

    def peers(self) -> list[str]:
        """Returns the names of all peers in the run."""
        return list(dict.fromkeys(other.peer for found in self.workloads for other in found.others))


def distances(one: Measured, other: Measured) -> list[float]:
    """Returns the relative differences between the first losses of two libraries; infinite if a loss is not finite."""
    pairs = zip(one.losses, other.losses, strict=True)
    found = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
    return [distance if math.isfinite(distance) else math.inf for distance in found]


def gradient_distance(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Returns the largest relative difference of gradient norms; infinite if a gradient is missing or not finite."""
    if ours.keys() != theirs.keys():
        return math.inf
    floor = GRADIENT_FLOOR * max(theirs.values())
    found = [abs(ours[name] - norm) / max(norm, floor) for name, norm in theirs.items()]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def first_losses_agree(one: Measured, other: Measured) -> bool:
    """Returns true if the losses of the first step agree within the tolerance."""
    return distances(one, other)[0] <= FIRST_TOLERANCE[less_exact(one, other)]


def less_exact(one: Measured, other: Measured) -> str:
    """Returns the less exact precision of two libraries."""
    return max(one.precision, other.precision, key=list(FIRST_TOLERANCE).index)


def gradient_limit(found: Workload, theirs: Measured) -> float:
    """Returns the tolerance of our gradients: the fixed tolerance, or the differences among the other libraries.

    Only libraries with the same precision and the same first loss count, and not ortrain itself. A pair with a
    difference above ``MAX_GRADIENT_TOLERANCE`` is ignored, because rounding cannot explain it.
    """
    precision = less_exact(found.ours, theirs)
    peers = [
        other for other in found.others if other.precision == theirs.precision and not other.peer.startswith("ortrain")
    ]
    apart = [
        gradient_distance(one.gradients, other.gradients)
        for one, other in itertools.permutations(peers, 2)
        if first_losses_agree(one, other)
    ]
    most = MAX_GRADIENT_TOLERANCE[precision]
    return max([GRADIENT_TOLERANCE[precision], *(distance for distance in apart if distance <= most)])


def agree(found: Workload, theirs: Measured) -> bool:
    """Returns true if our library and another one computed the same function."""
    _, *later = distances(found.ours, theirs)
    return (
        first_losses_agree(found.ours, theirs)
        and gradient_distance(found.ours.gradients, theirs.gradients) <= gradient_limit(found, theirs)
        and (less_exact(found.ours, theirs) == "bf16" or max(later[: LATER_STEPS - 1]) <= LATER_TOLERANCE)
    )


def disagreements(run: Run) -> list[str]:
    """Returns a message for each library with other results than ours."""
    return [
        f"{found.name}: losses or gradients differ from {other.peer}"
        for found in run.workloads
        for other in found.others
        if not agree(found, other)
    ]


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def means(run: Run, peer: str) -> tuple[float | None, float | None]:
    """Returns the geometric mean of the ratios to a peer, with and without the smallest workload."""
    ratios = {found.name: found.ratio(other) for found in run.workloads for other in found.others if other.peer == peer}
    some = [ratio for name, ratio in ratios.items() if name != SMALLEST]
    return geometric_mean(list(ratios.values())) if ratios else None, geometric_mean(some) if some else None


def missed(run: Run) -> list[str]:
    """Returns a message for each missed target, except ties."""
    lines = []
    for found in run.workloads:
        for other in found.others:
            aim = found.aim(other)
            if aim is not None and aims.verdict(found.ratio(other), aim, aims.tie(other.peer)) == "NO":
                lines.append(f"{found.name}: ratio to {other.peer} {found.ratio(other):.2f}, the aim is {aim:.2f}")
        memory = aims.memory(found.name, found.about)
        if found.ours.startup.anonymous is not None and found.ours.startup.anonymous > memory:
            lines.append(f"{found.name}: {found.ours.startup.anonymous / 1e6:.0f} MB, the aim is {memory / 1e6:.0f}")
        lines += [
            f"{found.name}: {what} takes {seconds:.3f} s, the aim is {aim:.3f}"
            for what, seconds, aim in cold(found)
            if seconds > aim
        ]
    _, mean = means(run, "torch")
    if (
        run.precision() == "f32"
        and mean is not None
        and aims.verdict(mean, aims.MEAN_AGAINST_TORCH, aims.TIE_WITH_TORCH) == "NO"
    ):
        lines.append(f"geometric mean of the ratios to torch {mean:.2f}, the aim is {aims.MEAN_AGAINST_TORCH:.2f}")
    return lines


def cold(found: Workload) -> list[tuple[str, float, float]]:
    """Returns the name, the seconds and the target of each phase of our start that has a target."""
    wanted = {"import": aims.IMPORT, "create": aims.CREATE, "first_step": aims.FIRST_STEP.get(found.name)}
    best = {what: found.ours.startup.best(what) for what in wanted}
    return [
        (what, best[what] or 0.0, aim) for what, aim in wanted.items() if aim is not None and best[what] is not None
    ]


Row = tuple[str, ...]


def table(header: Row, rows: Sequence[Row]) -> str:
    """Returns a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, tuple("-" * width for width in widths), *rows]
    padded = (
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for cells in lines
    )
    return "\n".join(padded) + "\n"


def number(value: float | None, how: str) -> str:
    """Formats a number, or returns an empty text for None."""
    return "" if value is None else f"{value:{how}}"


def times(run: Run) -> str:
    """Returns the table of step times."""
    rows = []
    for found in run.workloads:
        for other in found.others:
            ratio, ratios, aim = found.ratio(other), found.ratios(other), found.aim(other)
            rows.append(
                (
                    found.name,
                    other.peer,
                    f"{found.ours.step() * 1e3:.3f}",
                    f"{other.step() * 1e3:.3f}",
                    f"{ratio:.2f}",
                    f"{min(ratios):.2f}-{max(ratios):.2f}",
                    f"{found.ours.least / other.least:.2f}",
                    number(aim, ".2f"),
                    "" if aim is None else aims.verdict(ratio, aim, aims.tie(other.peer)),
                    f"{found.share(found.ours):.0%}",
                    f"{found.share(other):.0%}",
                )
            )
    header = (
        "workload",
        "peer",
        "ours ms",
        "theirs ms",
        "ratio",
        "rounds",
        "fastest",
        "aim",
        "met",
        "ours/bound",
        "theirs/bound",
    )
    return table(header, rows)


def mean_lines(run: Run) -> str:
    """Returns the list of geometric means."""
    lines = []
    for peer in run.peers():
        every, some = means(run, peer)
        lines.append(f"- {peer}: {number(every, '.2f')}; without {SMALLEST} {number(some, '.2f')}")
    return "\n".join(lines) + "\n"


def memory(run: Run) -> str:
    """Returns the table of memory peaks."""
    peers = run.peers()

    def megabytes(who: Measured | None) -> str:
        return number(None if who is None or who.startup.anonymous is None else who.startup.anonymous / 1e6, ".0f")

    rows = []
    for found in run.workloads:
        aim, ours = aims.memory(found.name, found.about), found.ours.startup
        met = "" if ours.anonymous is None else aims.verdict(ours.anonymous, aim)
        resident = number(None if ours.resident is None else ours.resident / 1e6, ".0f")
        cells = [f"{aims.floor(found.about) / 1e6:.0f}", megabytes(found.ours), f"{aim / 1e6:.0f}", met, resident]
        rows.append((found.name, *cells, *(megabytes(found.other(peer)) for peer in peers)))
    return table(("workload", "floor", "ours", "aim", "met", "ours with files", *peers), rows)


def peak_within(found: Workload, limit: dict[str, int]) -> float:
    """Returns the maximum memory of a step with a memory limit, in bytes of anonymous memory."""
    return (found.ours.startup.anonymous or 0) - limit["saved"] + aims.BESIDES_LIMIT


def limit_violations(run: Run) -> list[str]:
    """Returns a message for each exceeded memory limit, each changed loss, and each slowdown above the limit."""
    lines = []
    for found in run.workloads:
        limited = found.other("ortrain-limited")
        if limited is None or found.limit is None:
            continue
        peak, slower = limited.startup.anonymous, 1 / found.ratio(limited)
        if peak is not None and peak > peak_within(found, found.limit):
            lines.append(f"{found.name}: {peak / 1e6:.0f} MB with memory_limit {found.limit['limit'] / 1e6:.0f} MB")
        if limited.losses != found.ours.losses:
            lines.append(f"{found.name}: a memory limit changes the losses")
        if slower > aims.SLOWER_WITHIN_LIMIT:
            lines.append(f"{found.name}: slowdown {slower:.2f} with a memory limit")
    return lines


def memory_limit_table(run: Run) -> str:
    """Returns the table of runs with a memory limit."""

    def megabytes(value: float | None) -> str:
        return number(None if value is None else value / 1e6, ".0f")

    rows = []
    for found in run.workloads:
        limited = found.other("ortrain-limited")
        if limited is None or found.limit is None:
            continue
        peaks = (found.ours.startup.anonymous, limited.startup.anonymous, peak_within(found, found.limit))
        same = "yes" if limited.losses == found.ours.losses else "NO"
        arena = megabytes(found.limit["arena"])
        rows.append((found.name, arena, *map(megabytes, peaks), same, f"{1 / found.ratio(limited):.2f}"))
    return table(("workload", "arena", "peak", "limited peak", "allowed peak", "same losses", "slowdown"), rows)


def starts(run: Run) -> str:
    """Returns the table of cold starts."""

    def cell(who: Measured) -> Row:
        return tuple(number(who.startup.best(what), ".3f") for what in ("import", "create", "first_step"))

    rows = []
    for found in run.workloads:
        met = [aims.verdict(seconds, aim) for _, seconds, aim in cold(found)]
        verdict = "" if not met else "NO" if "NO" in met else "yes"
        rows.append((found.name, found.ours.peer, *cell(found.ours), verdict))
        rows += [(found.name, other.peer, *cell(other), "") for other in found.others]
    return table(("workload", "library", "import", "create", "first step", "met"), rows)


def losses(run: Run) -> str:
    """Returns the table of differences in losses and gradients, between all pairs of libraries."""
    rows = []
    for found in run.workloads:
        for other in found.others:
            relative = distances(found.ours, other)
            exact = sum(distance <= aims.LOSSES for distance in relative)
            rows.append(
                (
                    found.name,
                    f"{found.ours.peer}, {other.peer}",
                    "agree" if agree(found, other) else "DIFFER",
                    f"{relative[0]:.0e}",
                    f"{gradient_distance(found.ours.gradients, other.gradients):.0e}",
                    f"{gradient_limit(found, other):.0e}",
                    f"{max(relative):.0e}",
                    f"{exact} of {len(relative)}",
                )
            )
        for index, one in enumerate(found.others):
            for other in found.others[index + 1 :]:
                relative = distances(one, other)
                exact = sum(distance <= aims.LOSSES for distance in relative)
                both = f"{one.peer}, {other.peer}"
                cells = (f"{relative[0]:.0e}", f"{gradient_distance(one.gradients, other.gradients):.0e}", "")
                rows.append((found.name, both, "", *cells, f"{max(relative):.0e}", f"{exact} of {len(relative)}"))
    exact_losses = f"within {aims.LOSSES:.0e}"
    header = (
        "workload",
        "libraries",
        "verdict",
        "first loss",
        "gradients",
        "gradient limit",
        "worst loss",
        exact_losses,
    )
    return table(header, rows)


def text(run: Run) -> str:
    """Returns the report in Markdown."""
    about = dict(run.machine)
    processor, cores, threads = about.pop("processor"), about.pop("cores"), about.pop("threads")
    flops = max(found.limits.flops for found in run.workloads) / 1e9
    bandwidth = max(found.limits.bandwidth for found in run.workloads) / 1e9
    versions = {
        who.peer: who.version + (f" ({who.precision} by {who.unit})" if who.unit else "")
        for found in run.workloads
        for who in (found.ours, *found.others)
    }
    facts = [
        f"{key} {', '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        for key, value in about.items()
    ]
    parts: list[tuple[str, Callable[[Run], str]]] = [
        ("Milliseconds of a step", times),
        ("Geometric means of the ratios", mean_lines),
        ("Memory: peak over the state after the import, MB", memory),
        ("Cold start: seconds", starts),
        *([("With a memory limit, MB", memory_limit_table)] if any(found.limit for found in run.workloads) else []),
        ("First losses and gradients: relative distances", losses),
    ]
    lines = [
        f"# {processor}, {cores} cores, {threads} threads, {run.date}\n",
        f"{'; '.join(facts)}.",
        f"Limits: {flops:.0f} GFLOP/s in float32, {bandwidth:.1f} GB/s beyond the caches.",
        f"{', '.join(f'{peer} {version}' for peer, version in versions.items())}.",
        f"{run.rounds} rounds of {run.seconds} s; ours in {run.precision()}; AdamW in adam_mode 0. "
        "Ratios below 1: ours is faster.\n",
    ]
    return "\n".join(lines) + "".join(f"\n## {title}\n\n{part(run)}" for title, part in parts)


def as_json(run: Run) -> dict[str, Any]:
    """Returns all measurements and derived numbers for JSON."""
    found = asdict(run)
    for cells, workload in zip(found["workloads"], run.workloads, strict=True):
        cells["ours"]["share"] = workload.share(workload.ours)
        cells["memory_floor"] = aims.floor(workload.about)
        cells["memory_aim"] = aims.memory(workload.name, workload.about)
        cells["about"].pop("trainable_names")
        for their, other in zip(cells["others"], workload.others, strict=True):
            their |= {
                "share": workload.share(other),
                "ratios": workload.ratios(other),
                "ratio": workload.ratio(other),
                "aim": workload.aim(other),
                "loss_distances": distances(workload.ours, other),
                "gradient_distance": gradient_distance(workload.ours.gradients, other.gradients),
                "gradient_limit": gradient_limit(workload, other),
                "agrees": agree(workload, other),
            }
            del their["gradients"]
        del cells["ours"]["gradients"]
    found["means"] = {peer: means(run, peer) for peer in run.peers()}
    found["precision"], found["optimizer"] = run.precision(), "AdamW, adam_mode 0"
    return found
