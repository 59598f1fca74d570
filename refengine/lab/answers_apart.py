"""Somebody's answers checked in a process of their own, each test in a limited time: a loop that never ends, or an answer that
ends Python, is the outcome of one test, and the others are still run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from refengine.errors import UserError
from refengine.lab.exercises import WRONG, Outcome, checks_of, load, named, outcome

LIMIT = 60.0
"""Seconds that a test may take, and the import of the answers; tests need a few at most."""


class NoAnswer(Exception):
    """The process does not answer: why, in words."""


def check_apart(answers: Path, tests: Path, limit: float = LIMIT) -> Iterator[Outcome]:
    """As check_answers, each outcome as it comes. limit: seconds for each test; the process of one that has not answered by then
    is ended, and another goes on with the next.

    Raises UserError where a file cannot be imported, or not in that time.
    """
    done, names = 0, [("", "")]
    while done < len(names):
        with Worker(answers, tests, done) as worker:
            names = worker.receive(None)
            try:
                worker.receive(limit)
            except NoAnswer as why:
                raise UserError(f"{answers}: its import {why}") from None
            for name, title in names[done:]:
                done += 1
                try:
                    yield worker.receive(limit)
                except NoAnswer as why:
                    yield Outcome(name, title, WRONG, str(why))
                    break


class Worker:
    """A process that checks answers from a test on, and is gone when the block is left."""

    def __init__(self, answers: Path, tests: Path, first: int):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=work, args=(theirs, answers, tests, first))
        self.process.start()
        theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *problem: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def receive(self, limit: float | None) -> Any:
        """What it sends next. limit: seconds to wait. Raises the UserError that it sends, and NoAnswer where nothing comes."""
        if not self.pipe.poll(limit):
            raise NoAnswer(f"took longer than {limit:g} s: does a loop end?")
        try:
            sent = self.pipe.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode or 0
            raise NoAnswer(f"ended Python, with {'signal' if code < 0 else 'exit status'} {abs(code)}") from None
        if isinstance(sent, UserError):
            raise sent
        return sent


def work(pipe: Connection, answers: Path, tests: Path, first: int) -> None:
    """In the process: send the tests' names, None once the answers are imported, then an outcome for each test from ``first``
    on; or a UserError."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        checks = checks_of(tests)
        pipe.send([named(check) for check in checks])
        module = load(answers)
        pipe.send(None)
        for check in checks[first:]:
            found = outcome(check, module, answers)
            sys.stdout.flush()
            pipe.send(found)
    except UserError as problem:
        pipe.send(problem)
