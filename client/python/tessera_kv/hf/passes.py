"""One forward of the model: what happens to a batch's rows from its first to its last layer.

A row is one sequence of the batch. `counts` says how many of its columns in this forward hold
tokens: the last ones, since padding is on the left. A pass changes no row before `finish`, or takes
the change back in `abandon`, so that a forward can be repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as AnySequence
from typing import Any

import torch

from ..model import Layer, Model
from ..read import Read
from ..sequence import Sequence
from ..worker import Worker
from . import exact

# A forward of so many tokens behind others is a step; more are attended in bulk. A step may have
# more, but its tail ring must have room for them.
STEP_TOKENS = 32


class Pass(ABC):
    """One forward. `attend` is called once per layer, in order; then `finish` or `abandon`."""

    def __init__(self, worker: Worker, model: Model, rows: AnySequence[Sequence],
                 counts: AnySequence[int]) -> None:
        self.worker = worker
        self.model = model
        self.rows = list(rows)
        self.counts = list(counts)
        self.next_layer = 0

    def part(self, tensor: Any, row: int) -> Any:
        """A row's new tokens of [batch, heads, columns, dim], as [tokens, heads, dim]."""
        columns = tensor.shape[2]
        return tensor[row, :, columns - self.counts[row]:].transpose(0, 1)

    @abstractmethod
    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        """[batch, heads, columns, dim] in, [batch, columns, heads, dim] out."""

    @abstractmethod
    def finish(self) -> None:
        """Commits the new tokens of every row."""

    @abstractmethod
    def abandon(self) -> None:
        """Leaves the rows as they were before."""

    def observe(self, layer: int, row: int, query: Any, key: Any, first_token: int) -> None:
        """Lets the policy see a prompt."""
        if self.rows[row].needs.queries:
            self.rows[row].observe(layer, self.part(query, row), self.part(key, row),
                                   first_token=first_token, prompt_tokens=self.counts[row])


def attend_alone(shape: Layer, counts: AnySequence[int], query: Any, key: Any, value: Any) -> Any:
    """Causal attention within the new columns, row by row where there is padding."""
    columns = query.shape[2]
    if all(count == columns for count in counts):
        return exact.plain(shape, query, key, value)
    output = torch.zeros_like(query.transpose(1, 2))
    for row, count in enumerate(counts):
        if count:
            where = slice(row, row + 1), slice(None), slice(columns - count, None)
            output[row, columns - count:] = exact.plain(shape, query[where], key[where],
                                                        value[where])[0]
    return output


class Prompt(Pass):
    """The first tokens of every row. They go to the daemon layer by layer.

    `leaders[r]` is the first row with the same tokens: only leaders are stored, and `finish` forks
    them. `abandon` removes what layers have appended.
    """

    def __init__(self, worker: Worker, model: Model, rows: AnySequence[Sequence],
                 counts: AnySequence[int], leaders: AnySequence[int]) -> None:
        super().__init__(worker, model, rows, counts)
        self.leaders = list(leaders)

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        for row, leader in enumerate(self.leaders):
            if row == leader and self.counts[row]:
                self.observe(layer, row, query, key, 0)
                self.rows[row].append(self.part(key, row), self.part(value, row), layer=layer)
        return attend_alone(self.model.layers[layer], self.counts, query, key, value)

    def finish(self) -> None:
        followed = {leader for row, leader in enumerate(self.leaders) if row != leader}
        for row in sorted(set(self.leaders)):
            if not self.rows[row].policy or not self.counts[row]:
                continue
            if row in followed:
                self.rows[row].compress()  # forks then share what it leaves
            else:
                self.rows[row].end_prompt()
        for row, leader in enumerate(self.leaders):
            if row != leader:
                empty, self.rows[row] = self.rows[row], self.rows[leader].fork()
                empty.close()

    def abandon(self) -> None:
        for row in self.rows:
            row.truncate(0)


class Step(Pass):
    """A few tokens behind others: one step of the library for the whole batch."""

    def __init__(self, worker: Worker, model: Model, rows: AnySequence[Sequence],
                 counts: AnySequence[int], timeout: float) -> None:
        super().__init__(worker, model, rows, counts)
        self.active = [row for row, count in enumerate(self.counts) if count]
        few = {self.counts[row] for row in self.active}
        self.is_whole = len(self.active) == len(self.rows) and len(few) == 1
        self.step = worker.step(
            [self.rows[row] for row in self.active],
            new_tokens=few.pop() if len(few) == 1 else [self.counts[row] for row in self.active],
            timeout=timeout,
        )

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        batch, heads, columns, dim = query.shape
        if self.is_whole and columns == self.counts[0]:
            given = [tensor.transpose(1, 2) for tensor in (query, key, value)]
            if batch > 1 and columns > 1:  # rows do not follow each other at one distance
                given = [tensor.contiguous() for tensor in given]
            output = query.new_empty((batch, columns, heads, dim))
            return self.step.attend(layer, *given, out=output)
        parts = [torch.cat([self.part(tensor, row) for row in self.active])
                 for tensor in (query, key, value)]
        found = self.step.attend(layer, *parts, out=torch.empty_like(parts[0]))
        return scatter(found, self.active, self.counts, query)

    def finish(self) -> None:
        self.step.end()

    def abandon(self) -> None:
        self.step.abandon()


def scatter(found: Any, active: AnySequence[int], counts: AnySequence[int], query: Any) -> Any:
    """Puts [tokens of active rows, heads, dim] where they belong in [batch, columns, heads, dim]."""
    output = torch.zeros_like(query.transpose(1, 2))
    begin = 0
    for row in active:
        output[row, query.shape[2] - counts[row]:] = found[begin:begin + counts[row]]
        begin += counts[row]
    return output


class Chunk(Pass):
    """Many tokens behind others: attention over the cache, merged with attention among themselves.

    Keys and values of all layers are kept until `finish` appends them in bulk.
    """

    def __init__(self, worker: Worker, model: Model, rows: AnySequence[Sequence],
                 counts: AnySequence[int], timeout: float) -> None:
        super().__init__(worker, model, rows, counts)
        self.before = [row.tokens for row in self.rows]
        self.held = [row for row, count in enumerate(self.counts) if count and self.before[row]]
        self.kept: list[tuple[Any, Any]] = []
        self.read: Read | None = None
        self.seen: list[tuple[Any, Any]] = []
        # The read takes the sequences, so what the policy observes waits for its end.
        self.observes = any(row.needs.queries for row in self.rows)
        if self.held:
            self.read = worker.read([self.rows[row] for row in self.held], timeout=timeout)

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        self.kept.append((key, value))
        if self.observes:
            self.seen.append((query, key))
        shape = self.model.layers[layer]
        if self.read is None:
            return attend_alone(shape, self.counts, query, key, value)
        queries = torch.cat([self.part(query, row) for row in self.held])
        lse = torch.empty(queries.shape[:2], dtype=torch.float32)
        found = self.read.attend(
            layer, queries, out=torch.empty(queries.shape, dtype=torch.float32), lse=lse,
            causal=False, queries=[self.counts[row] for row in self.held],
            first_query_position=[self.before[row] for row in self.held],
        )
        output = torch.zeros_like(query.transpose(1, 2))
        columns, begin = query.shape[2], 0
        for row, count in enumerate(self.counts):
            if not count:
                continue
            where = slice(row, row + 1), slice(None), slice(columns - count, None)
            own, own_lse = exact.causal(shape, query[where], key[where], value[where])
            own, own_lse = own[0].transpose(0, 1), own_lse[0].transpose(0, 1)
            if row in self.held:
                end = begin + count
                merged = exact.merge(found[begin:end], lse[begin:end], own, own_lse)
                begin = end
            else:
                merged = exact.with_sinks(shape, own, own_lse)
            output[row, columns - count:] = merged
        return output

    def finish(self) -> None:
        if self.read is not None:
            self.read.end()
            self.read = None
        for row, sequence in enumerate(self.rows):
            if not self.counts[row]:
                continue
            for layer, (query, key) in enumerate(self.seen):
                self.observe(layer, row, query, key, self.before[row])
            for layer, (key, value) in enumerate(self.kept):
                sequence.append(self.part(key, row), self.part(value, row), layer=layer)
            if sequence.policy:
                sequence.end_prompt()

    def abandon(self) -> None:
        if self.read is not None:
            self.read.abandon()
            return
        for row, before in zip(self.rows, self.before):
            row.truncate(before)
