"""What a comparison found, and how it is told: tables, JSON, what is wrong."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aims

SMALLEST = "mlp_tiny"
# The loss of the first step is that of the same weights: what differs is the order of float32 sums, and how exactly
# the factors of products are taken (24, 16 or 8 bits). Of two the less exact one counts: the later one.
FIRST_TOLERANCE = {"f32": 2e-5, "bf16x6": 2e-5, "bf16x3": 1e-4, "bf16": 2e-2}
# The norm of each parameter's gradient in the first step, relative to itself or to a share of the largest one: a bias
# in front of a normalization has no gradient but rounding.
GRADIENT_TOLERANCE = {"f32": 1e-2, "bf16x6": 1e-2, "bf16x3": 1e-2, "bf16": 0.3}
GRADIENT_FLOOR = 1e-3
# Where batches of a few images are normalized, rounding moves a small gradient by more: the other libraries lie as far
# from one another. What they differ by is the limit then, but for a library that this far off is no rounding any more.
GRADIENT_TOLERANCE_AT_MOST = {"f32": 5e-2, "bf16x6": 5e-2, "bf16x3": 5e-2, "bf16": 0.3}
# Then the optimizer turns rounding into steps: AdamW moves a weight by about the learning rate, however small its
# gradient is. Where batches of a few images are normalized, losses of later steps lie apart between any two libraries.
# Beyond this they do not compute the same thing; with 8 bits that cannot be said.
LATER_STEPS, LATER_TOLERANCE = 5, 3e-2


@dataclass(frozen=True)
class Limits:
    """Of the machine, with the threads of the run: operations and bytes per second."""

    flops: float
    bandwidth: float


@dataclass
class Startup:
    """What it takes until a first step is done."""

    seconds: list[dict[str, float]] = field(default_factory=list)
    """Of each start, `import` (beyond NumPy), `create` and `first_step`."""
    anonymous: int | None = None
    """Peak of RssAnon over the state after the import, in bytes."""
    resident: int | None = None
    """The same of all resident pages, files among them."""

    def best(self, what: str) -> float | None:
        """The least time."""
        return min((seconds[what] for seconds in self.seconds), default=None)


@dataclass
class Measured:
    """A library on a workload."""

    peer: str
    version: str
    rounds: list[float]
    """The median step of each round, in seconds."""
    least: float
    """The fastest step of all."""
    losses: list[float]
    gradients: dict[str, float]
    startup: Startup
    precision: str = "f32"
    """How exactly it takes the factors of products."""
    unit: str | None = None
    """What multiplies bfloat16, where it says it."""

    def step(self) -> float:
        """Seconds."""
        return statistics.median(self.rounds)


@dataclass
class Workload:
    """What was measured on a workload."""

    name: str
    about: dict[str, Any]
    limits: Limits
    ours: Measured
    others: list[Measured]
    limit: dict[str, int] | None = None
    """Of ortrain with a memory limit, in bytes: the `limit`, the `arena` without one, and what is `saved` of that."""

    def ratios(self, other: Measured) -> list[float]:
        """Ours by theirs, round by round."""
        return [a / b for a, b in zip(self.ours.rounds, other.rounds, strict=True)]

    def ratio(self, other: Measured) -> float:
        """The median of them."""
        return statistics.median(self.ratios(other))

    def aim(self, other: Measured) -> float | None:
        """What the ratio is to stay below."""
        return aims.time(self.name, other.peer, self.ours.precision)

    def share(self, who: Measured) -> float:
        """Of what the machine can do: the least time for the arithmetic and the traffic of a step, by that taken."""
        # Where the optimizer alone is timed, it reads weight, gradient and moments, and writes all but the gradient.
        flops, moved = float(self.about["flops_step"]), float(self.about["min_bytes"])
        if self.about["only"] == "optimizer":
            flops, moved = 0.0, 7 * 4.0 * self.about["trainable"]
        return (flops / self.limits.flops + moved / self.limits.bandwidth) / who.step()

    def other(self, name: str) -> Measured | None:
        """A peer's part."""
        return next((other for other in self.others if other.peer == name), None)


@dataclass
class Run:
    """All of it."""

    machine: dict[str, Any]
    date: str
    rounds: int
    seconds: float
    workloads: list[Workload] = field(default_factory=list)

    def precision(self) -> str:
        """Of our inner products."""
        return self.workloads[0].ours.precision

    def peers(self) -> list[str]:
        """The names of those who took part."""
        return list(dict.fromkeys(other.peer for found in self.workloads for other in found.others))


def distances(one: Measured, other: Measured) -> list[float]:
    """How far the first losses lie apart, relative to the other's; infinite where one is not a number."""
    pairs = zip(one.losses, other.losses, strict=True)
    found = [abs(a - b) / max(abs(b), 1e-12) for a, b in pairs]
    return [distance if math.isfinite(distance) else math.inf for distance in found]


def gradient_distance(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """The largest difference of norms, infinite where a gradient is missing or not a number."""
    if ours.keys() != theirs.keys():
        return math.inf
    floor = GRADIENT_FLOOR * max(theirs.values())
    found = [abs(ours[name] - norm) / max(norm, floor) for name, norm in theirs.items()]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def first_losses_agree(one: Measured, other: Measured) -> bool:
    """Whether the losses of the first step are those of the same function."""
    return distances(one, other)[0] <= FIRST_TOLERANCE[less_exact(one, other)]


def less_exact(one: Measured, other: Measured) -> str:
    """The precision that counts of two."""
    return max(one.precision, other.precision, key=list(FIRST_TOLERANCE).index)


def gradient_limit(found: Workload, theirs: Measured) -> float:
    """How far our gradients may lie from theirs: the tolerance, or what the others differ by among themselves.

    These are libraries of their precision that start from the same loss, and not ortrain itself. A pair that lies
    further apart than rounding can explain says nothing.
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
    most = GRADIENT_TOLERANCE_AT_MOST[precision]
    return max([GRADIENT_TOLERANCE[precision], *(distance for distance in apart if distance <= most)])


def agree(found: Workload, theirs: Measured) -> bool:
    """Whether ours and another library computed the same thing."""
    _, *later = distances(found.ours, theirs)
    return (
        first_losses_agree(found.ours, theirs)
        and gradient_distance(found.ours.gradients, theirs.gradients) <= gradient_limit(found, theirs)
        and (less_exact(found.ours, theirs) == "bf16" or max(later[: LATER_STEPS - 1]) <= LATER_TOLERANCE)
    )


def disagreements(run: Run) -> list[str]:
    """Who did not compute what ours did."""
    return [
        f"{found.name}: losses or gradients differ from those of {other.peer}"
        for found in run.workloads
        for other in found.others
        if not agree(found, other)
    ]


def geometric_mean(values: Sequence[float]) -> float:
    """Of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def means(run: Run, peer: str) -> tuple[float | None, float | None]:
    """The geometric mean of the ratios to a peer, and that without the smallest workload."""
    ratios = {found.name: found.ratio(other) for found in run.workloads for other in found.others if other.peer == peer}
    some = [ratio for name, ratio in ratios.items() if name != SMALLEST]
    return geometric_mean(list(ratios.values())) if ratios else None, geometric_mean(some) if some else None


def missed(run: Run) -> list[str]:
    """The aims that were not reached, but for ties."""
    lines = []
    for found in run.workloads:
        for other in found.others:
            aim = found.aim(other)
            if aim is not None and aims.verdict(found.ratio(other), aim, aims.tie(other.peer)) == "NO":
                lines.append(f"{found.name}: {found.ratio(other):.2f} of {other.peer}, the aim is {aim:.2f}")
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
    """What of our start has an aim: its name, seconds, and the aim."""
    wanted = {"import": aims.IMPORT, "create": aims.CREATE, "first_step": aims.FIRST_STEP.get(found.name)}
    best = {what: found.ours.startup.best(what) for what in wanted}
    return [
        (what, best[what] or 0.0, aim) for what, aim in wanted.items() if aim is not None and best[what] is not None
    ]


Row = tuple[str, ...]


def table(header: Row, rows: Sequence[Row]) -> str:
    """Markdown whose columns line up."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, tuple("-" * width for width in widths), *rows]
    padded = (
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for cells in lines
    )
    return "\n".join(padded) + "\n"


def number(value: float | None, how: str) -> str:
    """A number, or nothing."""
    return "" if value is None else f"{value:{how}}"


def times(run: Run) -> str:
    """Steps."""
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
        "beside",
        "ours ms",
        "theirs ms",
        "ratio",
        "rounds",
        "fastest",
        "aim",
        "met",
        "ours of bound",
        "theirs",
    )
    return table(header, rows)


def mean_lines(run: Run) -> str:
    """The geometric means."""
    lines = []
    for peer in run.peers():
        every, some = means(run, peer)
        lines.append(f"- {peer}: {number(every, '.2f')}; without {SMALLEST} {number(some, '.2f')}")
    return "\n".join(lines) + "\n"


def memory(run: Run) -> str:
    """Peaks."""
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
    """The bytes that a limited step stays below, as the system counts them."""
    return (found.ours.startup.anonymous or 0) - limit["saved"] + aims.BESIDES_LIMIT


def not_kept(run: Run) -> list[str]:
    """Where a memory limit was not kept, changed a loss, or made steps longer than they may become."""
    lines = []
    for found in run.workloads:
        limited = found.other("ortrain-limited")
        if limited is None or found.limit is None:
            continue
        peak, slower = limited.startup.anonymous, 1 / found.ratio(limited)
        if peak is not None and peak > peak_within(found, found.limit):
            lines.append(f"{found.name}: {peak / 1e6:.0f} MB with a limit of {found.limit['limit'] / 1e6:.0f}")
        if limited.losses != found.ours.losses:
            lines.append(f"{found.name}: other losses with a memory limit")
        if slower > aims.SLOWER_WITHIN_LIMIT:
            lines.append(f"{found.name}: {slower:.2f} times as long with a memory limit")
    return lines


def limits_kept(run: Run) -> str:
    """What a memory limit does."""

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
    return table(("workload", "arena", "peak", "limited", "at most", "same losses", "times as long"), rows)


def starts(run: Run) -> str:
    """Cold starts."""

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
    """How far the first losses and gradients lie apart: ours from each, and the others from one another."""
    rows = []
    for found in run.workloads:
        for other in found.others:
            apart = distances(found.ours, other)
            exact = sum(distance <= aims.LOSSES for distance in apart)
            rows.append(
                (
                    found.name,
                    f"{found.ours.peer}, {other.peer}",
                    "agree" if agree(found, other) else "DIFFER",
                    f"{apart[0]:.0e}",
                    f"{gradient_distance(found.ours.gradients, other.gradients):.0e}",
                    f"{gradient_limit(found, other):.0e}",
                    f"{max(apart):.0e}",
                    f"{exact} of {len(apart)}",
                )
            )
        for index, one in enumerate(found.others):
            for other in found.others[index + 1 :]:
                apart = distances(one, other)
                exact = sum(distance <= aims.LOSSES for distance in apart)
                both = f"{one.peer}, {other.peer}"
                cells = (f"{apart[0]:.0e}", f"{gradient_distance(one.gradients, other.gradients):.0e}", "")
                rows.append((found.name, both, "", *cells, f"{max(apart):.0e}", f"{exact} of {len(apart)}"))
    exact_losses = f"within {aims.LOSSES:.0e}"
    header = ("workload", "between", "", "first loss", "gradients", "at most", "worst loss", exact_losses)
    return table(header, rows)


def text(run: Run) -> str:
    """The report, in Markdown."""
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
        *([("With a memory limit, MB", limits_kept)] if any(found.limit for found in run.workloads) else []),
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
    """All numbers, and what was made of them."""
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
