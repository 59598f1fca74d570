"""``refengine tutorial``: begin a tutorial's exercises, and check what was answered."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from refengine.commands.report import write_whole
from refengine.errors import UserError
from refengine.lab.answers_apart import LIMIT, check_apart
from refengine.lab.exercises import OK, Outcome
from refengine.lab.tutorials import Tutorial, find_tutorial

ANSWERS = Path("answers")
"""Where answers lie unless one says otherwise."""


def start(number: str, folder: Path) -> int:
    """Copy a tutorial's empty answers into a folder. Raises UserError where there are answers already."""
    tutorial = find_tutorial(number)
    path = answers_of(tutorial, folder)
    if path.exists():
        raise UserError(f"{path}: is there already; delete it to begin anew")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise UserError(f"{folder}: cannot be made: {problem.strerror}; name another folder") from problem
    place = "" if folder == ANSWERS else f" --answers {quote(str(folder))}"
    write_whole(path, tutorial.exercise("stub").read_bytes(), "FOLDER")
    print(f"{path}: fill in its functions, then run: refengine tutorial check {tutorial.number}{place}")
    return 0


def check(number: str, folder: Path, solution: bool, limit: float = LIMIT) -> int:
    """Run the exercises' tests, each for at most ``limit`` seconds, and show each; the exit status. Raises UserError where there
    is nothing to check."""
    tutorial = find_tutorial(number)
    path = tutorial.exercise("solution") if solution else answers_of(tutorial, folder)
    if not path.exists():
        place = "" if folder == ANSWERS else f" {quote(str(folder))}"
        raise UserError(
            f"{path}: not in {path.parent.absolute()}; begin with: refengine tutorial start {tutorial.number}{place}"
        )
    outcomes = []
    for outcome in check_apart(path, tutorial.tests, limit):
        print("\n".join(lines(outcome)), flush=True)
        outcomes.append(outcome)
    passed = sum(outcome.state == OK for outcome in outcomes)
    print(f"TUTORIAL {tutorial.number} {passed} of {len(outcomes)} passed")
    return 0 if passed == len(outcomes) else 1


def answers_of(tutorial: Tutorial, folder: Path) -> Path:
    return folder / f"t{tutorial.number}.py"


def lines(outcome: Outcome) -> list[str]:
    """A test's result: its title, and below it what is wrong."""
    return [f"{outcome.state:6} {outcome.title}", *([f"       {outcome.why}"] if outcome.why else [])]
