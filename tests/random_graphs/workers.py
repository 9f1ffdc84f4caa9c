"""Processes that check graphs. A crash or a hang is a failure of one graph and does not end the run."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from queue import Queue
from typing import Any

from random_graphs.cases import Case, generate, settled
from random_graphs.checks import Report, check, signature
from random_graphs.oracle import InvalidGraphError

INVALID = "invalid"
"""Kind of report of a graph that no oracle can run."""

# Memory limit of a process, above the need of every generated graph. Some candidates during shrinking never end.
MAX_MEMORY_BYTES = 8 << 30

Task = int | bytes
Checker = Callable[[Case], Report]


def checked(task: Task, checker: Checker) -> Report:
    """Return the report of a seed or of a stored case. The outputs of a stored case are declared again."""
    settled_case = None
    try:
        if isinstance(task, int):
            report = checker(generate(task))
        else:
            case = settled(Case.restored(task))
            settled_case = case.stored()
            report = checker(case)
    except InvalidGraphError as error:
        report = Report(INVALID, str(error))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # A panic of the core is a BaseException. A panic, and an error in this tool, is a failure of the graph.
        report = Report(f"raised {type(error).__name__}: {signature(str(error))}", str(error))
    report.settled = settled_case
    return report


def _serve(connection: Connection, checker: Checker) -> None:
    # The output of a crashing process is discarded, because its exit status is reported.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(checked(task, checker))


class Worker:
    """A process that checks one graph at a time. It is restarted after a crash."""

    def __init__(self, timeout: float, checker: Checker = check) -> None:
        self.timeout, self.checker = timeout, checker
        self.process: Any = None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.checker), daemon=True)
        self.process.start()
        theirs.close()

    def check(self, task: Task) -> Report:
        """Return the report of a graph, also after a crash or a hang."""
        if self.process is None:
            self.start()
        try:
            self.connection.send(task)
            if not self.connection.poll(self.timeout):
                self.stop()
                return Report("hang", f"no result after {self.timeout:g} s")
            report = self.connection.recv()
            assert isinstance(report, Report)
            return report
        except (EOFError, OSError):
            self.process.join()
            status = self.process.exitcode
            self.stop()
            return Report("crash", f"the process ended with status {status}")

    def stop(self) -> None:
        """Kill the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


def check_all(
    tasks: Iterable[Task], count: int, timeout: float, checker: Checker = check
) -> Iterator[tuple[Task, Report]]:
    """Check all tasks in `count` processes; yields reports in order of completion."""
    waiting = iter(tasks)
    lock = threading.Lock()
    done: Queue[Any] = Queue()
    halt = threading.Event()

    def serve() -> None:
        worker = Worker(timeout, checker)
        try:
            while not halt.is_set():
                with lock:
                    task = next(waiting, None)
                if task is None:
                    break
                done.put((task, worker.check(task)))
        except BaseException as error:
            done.put(error)
        finally:
            worker.stop()
            done.put(None)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    left = count
    try:
        while left:
            found = done.get()
            if found is None:
                left -= 1
            elif isinstance(found, BaseException):
                raise found
            else:
                yield found
    finally:
        halt.set()
        for thread in threads:
            thread.join()
