"""The process of one replay: a question on standard input, its answer on standard output, limits from the system."""

import os
import resource
import sys

from pydantic import TypeAdapter

from agent.protocol.errors import FieldProblem
from service.what_if.rules import CannotReplay, Question, answer_of

MEMORY_MAX = 1024 * 1024 * 1024
REFUSED, OUT_OF_MEMORY = 3, 4
NICER = 5
"""Agents are served first."""
_REPLAY: TypeAdapter[Question] = TypeAdapter(Question)
_PROBLEM: TypeAdapter[FieldProblem] = TypeAdapter(FieldProblem)


def written(asked: Question) -> bytes:
    """What the process reads."""
    return _REPLAY.dump_json(asked)


def problem_of(answer: bytes) -> FieldProblem:
    """What it writes where it ends with REFUSED."""
    return _PROBLEM.validate_json(answer)


def main(seconds: int) -> int:
    """Returns the process's status."""
    os.nice(NICER)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = sys.stdout.buffer
    try:
        out.write(answer_of(_REPLAY.validate_json(sys.stdin.buffer.read())).model_dump_json().encode())
    except CannotReplay as error:
        out.write(_PROBLEM.dump_json(error.problem))
        return REFUSED
    except MemoryError:
        return OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
