"""What the scheduler's process tells the worker's before each forward."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..worker import Worker


def run_of(worker: Worker) -> int:
    """Which run of the daemon a worker is attached to. Unavailable while it is attached to none."""
    return int(worker.welcome()["instance"])


@dataclass
class Part:
    """A request's share of one forward."""

    request: str
    block: int  # the first of its blocks: what a row of the batch is known by
    ids: list[int]  # of the new tokens
    prompt: int  # tokens that its prompt has
    prefix: int = 0  # id of the published prompt that it begins with,
    daemon: int = 0  # in this run of the daemon: the next one gives the id to another prompt
    publish: bool = False  # the prompt, once it is there


@dataclass
class Plan:
    """One forward."""

    parts: list[Part] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
