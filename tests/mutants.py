"""Mutation tests for the passes of ortrain-program: small random mistakes, each of which a test must catch.

``make mutants`` runs it; ``ARGUMENTS="--count 5 --seed 7"`` draws other mutants than the default ones. cargo-mutants
lists all mutants (a condition negated, an operator exchanged, a function that returns a constant). Each drawn mutant is
applied to a copy of the repository, and the tests run, the quickest first, until one fails: the tests of
ortrain-program, the tests of the test kit, then random graphs (tests/random_graphs) with the extension that is built
from the copy. A mutant that passes all of them has survived. Survivors are listed and make the exit status 1, unless
they change nothing (EQUIVALENT).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"
SOURCE = "crates/ortrain-program/src"
# Passes between the program as it is assembled and the program that runs.
PASSES = ["passes", "rewrite", "editor.rs", "liveness.rs", "uses.rs", "versions.rs"]
# Path fragments of test files.
TESTS = ("/tests", "/snapshots")
# Default seed and number of mutants, and the random graphs of CI.
SEED = 23
COUNT = 30
GRAPHS, FIRST_GRAPH = 300, 230023
# Equivalent mutants, by their names without the positions in the file, with the reason.
EQUIVALENT = {
    f"{SOURCE}/passes/mask_packing.rs: replace > with >= in Choice<'a>::across": (
        "no instruction reads a buffer that it writes first, and a later check rejects reads at this position"
    ),
}
# Seconds after which a build or its tests count as hung.
TIMEOUT = 1800


def mutants() -> list[dict[str, Any]]:
    """Return all mutants of the passes, in cargo-mutants' order."""
    command = ["cargo", "mutants", "--list", "--json", "--diff", "--no-config"]
    for name in PASSES:
        path = f"{SOURCE}/{name}"
        command += ["--file", path if name.endswith(".rs") else f"{path}/**/*.rs"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(listed.stdout)
    return [mutant for mutant in found if not any(part in mutant["file"] for part in TESTS)]


def copy() -> None:
    """Copy the tracked files of the repository; build outputs of earlier mutants stay in the copy."""
    COPY.mkdir(parents=True, exist_ok=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, COPY / name
        if not source.exists():
            target.unlink(missing_ok=True)
        elif not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)


def apply(mutant: dict[str, Any], *, back: bool) -> None:
    command = ["patch", "--quiet", "--no-backup-if-mismatch", *(["--reverse"] if back else []), mutant["file"]]
    subprocess.run(command, cwd=COPY, input=mutant["diff"], text=True, check=True)


def tests(graphs: int) -> list[tuple[str, list[str]]]:
    """Return the test commands, the quickest first."""
    python = ROOT / ".venv" / "bin" / "python"
    nextest = ["cargo", "nextest", "run"]
    found = [
        ("ortrain-program", [*nextest, "-p", "ortrain-program"]),
        ("ortrain-testkit", [*nextest, "-p", "ortrain-testkit"]),
    ]
    if graphs > 0:
        check = f'VIRTUAL_ENV="{COPY}/.venv" "{python.parent}/maturin" develop --quiet --extras test && cd tests && '
        check += f'"{COPY}/.venv/bin/python" -m random_graphs --count {graphs} --seed {FIRST_GRAPH} --shrink 0'
        found.append(("random graphs", ["bash", "-c", check]))
    return found


def passes(command: list[str], log: Path) -> bool:
    """Return True if a command succeeds in the copy. A command that runs into the timeout has failed."""
    with log.open("w") as out:
        try:
            variables = os.environ | {"PYO3_PYTHON": f"{COPY}/.venv/bin/python"}
            done = subprocess.run(
                command, cwd=COPY, env=variables, stdout=out, stderr=out, timeout=TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def caught_by(mutant: dict[str, Any], number: int, graphs: int) -> str | None:
    """Return the name of the first tests that fail with a mutant; None if the mutant survives."""
    apply(mutant, back=False)
    try:
        for name, command in tests(graphs):
            if not passes(command, ROOT / "build" / f"mutant-{number}.log"):
                return name
    finally:
        apply(mutant, back=True)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=COUNT, help="number of random mutants")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of the selection")
    parser.add_argument("--first", type=int, default=0, help="number of selected mutants to skip")
    parser.add_argument(
        "--graphs", type=int, default=GRAPHS, help="number of random graphs for each mutant; 0 disables them"
    )
    options = parser.parse_args()
    every = mutants()
    drawn = random.Random(options.seed).sample(every, min(options.count, len(every)))[options.first :]
    copy()
    if not (COPY / ".venv").exists():
        subprocess.run([ROOT / ".venv" / "bin" / "python", "-m", "venv", COPY / ".venv"], check=True)
    for name, command in tests(options.graphs):
        if not passes(command, ROOT / "build" / "mutant-none.log"):
            print(f"without a mutant, {name} fails: build/mutant-none.log", file=sys.stderr)
            return 1
    print(f"{len(drawn)} of {len(every)} mutants, seed {options.seed}")
    survivors = []
    for number, mutant in enumerate(drawn, options.first):
        start = time.monotonic()
        found = caught_by(mutant, number, options.graphs)
        print(f"{number:3} {found or 'SURVIVED':16} {time.monotonic() - start:5.0f} s  {mutant['name']}", flush=True)
        name = re.sub(r":\d+:\d+:", ":", mutant["name"])
        if found is None and name in EQUIVALENT:
            print(f"    equivalent mutant: {EQUIVALENT[name]}")
        elif found is None:
            survivors.append(mutant["name"])
    print(f"{len(drawn) - len(survivors)} caught, {len(survivors)} survived")
    for name in survivors:
        print(f"  {name}")
    return min(len(survivors), 1)


if __name__ == "__main__":
    sys.exit(main())
