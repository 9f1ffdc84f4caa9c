"""Checks random graphs: ``python -m random_graphs --count 1000 --seed 7``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from random_graphs.running import Run, default_processes

# Beside the other results of builds, wherever the command is called from.
FOLDER = Path(__file__).resolve().parents[2] / "build" / "random-graphs"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m random_graphs", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="how many graphs (300)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first one; the others follow (0)")
    parser.add_argument("--processes", type=int, default=default_processes(), help="how many at a time")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a graph (60)")
    parser.add_argument("--shrink", type=float, default=60, help="seconds for shrinking a failure, 0 for none (60)")
    parser.add_argument("--each", type=int, default=1, help="how many failures of a kind are shrunk (1)")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where failures are written")
    parser.add_argument("--brief", action="store_true", help="the nodes of a small graph in a line, not its text")
    arguments = parser.parse_args()
    start = time.monotonic()
    run = Run(
        arguments.processes,
        arguments.timeout,
        arguments.shrink,
        arguments.folder,
        arguments.each,
        verbose=not arguments.brief,
    )
    failures = run.over(
        range(arguments.seed, arguments.seed + arguments.count), say=lambda line: print(line, flush=True)
    )
    seconds = time.monotonic() - start
    print(f"seed {arguments.seed}: {run.checked} graphs in {seconds:.0f} s, {len(failures)} failed")
    print(run.summary())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
