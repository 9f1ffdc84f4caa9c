"""Processes that check graphs: a crash or a hang is a failure of one graph, not the end of the run."""

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
"""The kind of a graph that no oracle runs."""

# More than any of these graphs takes; some that are tried while shrinking never end.
MOST_BYTES = 8 << 30

Task = int | bytes
Checker = Callable[[Case], Report]


def checked(task: Task, checker: Checker) -> Report:
    """The report of a seed, or of a stored case, whose outputs are declared as they are."""
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
        # A panic of the core, which is no Exception, or an error in the tool: a failure of the graph either way.
        report = Report(f"raised {type(error).__name__}: {signature(str(error))}", str(error))
    report.settled = settled_case
    return report


def _serve(connection: Connection, checker: Checker) -> None:
    # Whatever a dying process says is not of interest: its exit status is reported.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(checked(task, checker))


class Worker:
    """A process that checks one graph after the other, started again when it dies."""

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
        """The report, whatever becomes of the process."""
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
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
            self.process = None


def check_all(
    tasks: Iterable[Task], count: int, timeout: float, checker: Checker = check
) -> Iterator[tuple[Task, Report]]:
    """The reports of all tasks as they come, by a number of processes."""
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
