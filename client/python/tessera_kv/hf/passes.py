"""One forward of the model: what happens to a batch's rows from its first to its last layer.

A row is one sequence of the batch. A pass changes no row before `finish`, or takes the change back
in `abandon`, so that a forward can be repeated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import exact
from ..errors import FailedPrecondition
from ..model import Layer, Model
from ..read import Read
from ..sequence import Sequence
from ..worker import Worker
from .places import Places

# A forward of so many tokens behind others is a step; more are attended in bulk. A step may have
# more, but its tail ring must have room for them.
STEP_TOKENS = 32


@dataclass(frozen=True)
class Setting:
    """What all passes of a cache share."""

    worker: Worker
    model: Model
    timeout: float  # seconds to wait for room in the tail rings
    background: bool  # prompts are compressed while the model decodes


class Pass(ABC):
    """One forward. `attend` is called once per layer, in order; then `finish` or `abandon`."""

    def __init__(self, setting: Setting, rows: AnySequence[Sequence], places: Places) -> None:
        self.setting = setting
        self.rows = list(rows)
        self.places = places
        self.next_layer = 0

    @abstractmethod
    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        """[batch, heads, columns, dim] in, [batch, columns, heads, dim] out."""

    @abstractmethod
    def finish(self, ids: AnySequence[AnySequence[int] | None]) -> None:
        """Commits the new tokens of every row, which have these ids."""

    @abstractmethod
    def abandon(self) -> None:
        """Leaves the rows as they were before."""

    def observe(self, layer: int, row: int, query: Any, key: Any, first_token: int) -> None:
        """Lets the policy see a prompt."""
        if self.rows[row].needs.queries:
            take = self.places.take
            self.rows[row].observe(layer, take(query, row), take(key, row),
                                   first_token=first_token, prompt_tokens=self.places.counts[row])

    def observe_ids(self, row: int, ids: AnySequence[int] | None, first_token: int) -> None:
        """Tells a policy that asks for them the ids of new tokens."""
        if ids is not None and self.rows[row].needs.token_ids:
            self.rows[row].observe_tokens(ids, first_token=first_token)


def attend_alone(shape: Layer, places: Places, query: Any, key: Any, value: Any) -> Any:
    """Causal attention within the new columns, row by row where there is padding."""
    if places.is_full:
        return exact.plain(shape, query, key, value)
    rows = places.active
    found = [
        exact.plain(shape, *(tensor[row:row + 1, :, places.where[row]]
                             for tensor in (query, key, value)))[0]
        for row in rows
    ]
    return places.put(torch.cat(found), rows, query) if rows else torch.zeros_like(
        query.transpose(1, 2))


class Prompt(Pass):
    """The first tokens of every row. They go to the daemon layer by layer.

    `leaders[r]` is the first row with the same tokens: only leaders are stored, and `finish` forks
    them. `abandon` removes what layers have appended.
    """

    def __init__(self, setting: Setting, rows: AnySequence[Sequence], places: Places,
                 leaders: AnySequence[int]) -> None:
        super().__init__(setting, rows, places)
        self.leaders = list(leaders)

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        take = self.places.take
        for row in self.places.active:
            if self.leaders[row] == row:
                self.observe(layer, row, query, key, 0)
                self.rows[row].append(take(key, row), take(value, row), layer=layer)
        return attend_alone(self.setting.model.layers[layer], self.places, query, key, value)

    def finish(self, ids: AnySequence[AnySequence[int] | None]) -> None:
        followed = {leader for row, leader in enumerate(self.leaders) if row != leader}
        for row in self.places.active:
            if self.leaders[row] != row or not self.rows[row].policy:
                continue
            self.observe_ids(row, ids[row], 0)
            if self.setting.background and row not in followed:
                self.rows[row].end_prompt()
            else:  # forks then share what it leaves
                self.rows[row].compress()
        for row, leader in enumerate(self.leaders):
            if row != leader:
                empty, self.rows[row] = self.rows[row], self.rows[leader].fork()
                empty.close()

    def abandon(self) -> None:
        for row in self.rows:
            row.truncate(0)


class Step(Pass):
    """A few tokens behind others: one step of the library for the whole batch."""

    def __init__(self, setting: Setting, rows: AnySequence[Sequence], places: Places) -> None:
        super().__init__(setting, rows, places)
        self.active = places.active
        counts = [places.counts[row] for row in self.active]
        self.step = setting.worker.step(
            [self.rows[row] for row in self.active],
            new_tokens=counts[0] if len(set(counts)) == 1 else counts,
            timeout=setting.timeout,
        )

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        batch, heads, columns, dim = query.shape
        if self.places.is_full:
            given = [tensor.transpose(1, 2) for tensor in (query, key, value)]
            if batch > 1 and columns > 1:  # rows do not follow each other at one distance
                given = [tensor.contiguous() for tensor in given]
            output = query.new_empty((batch, columns, heads, dim))
            return self.step.attend(layer, *given, out=output)
        parts = [self.places.together(tensor, self.active) for tensor in (query, key, value)]
        found = self.step.attend(layer, *parts, out=torch.empty_like(parts[0]))
        return self.places.put(found, self.active, query)

    def finish(self, ids: AnySequence[AnySequence[int] | None]) -> None:
        self.step.end()
        for row in self.active:
            self.observe_ids(row, ids[row], self.rows[row].tokens - self.places.counts[row])

    def abandon(self) -> None:
        self.step.abandon()


class Chunk(Pass):
    """Many tokens behind others: attention over the cache, merged with attention among themselves.

    Keys and values of all layers are kept until `finish` appends them in bulk: a read takes the
    sequences until it ends.
    """

    def __init__(self, setting: Setting, rows: AnySequence[Sequence], places: Places) -> None:
        super().__init__(setting, rows, places)
        self.before = [row.tokens for row in self.rows]
        self.held = [row for row in places.active if self.before[row]]
        self.kept: list[tuple[Any, Any, Any]] = []
        self.observes = any(row.needs.queries for row in self.rows)
        self.read: Read | None = None
        if self.held:
            self.read = setting.worker.read([self.rows[row] for row in self.held],
                                            timeout=setting.timeout)

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        self.kept.append((query if self.observes else None, key, value))
        shape, places = self.setting.model.layers[layer], self.places
        if self.read is None:
            return attend_alone(shape, places, query, key, value)
        queries = places.together(query, self.held)
        before = torch.empty(queries.shape, dtype=torch.float32)
        before_lse = torch.empty(queries.shape[:2], dtype=torch.float32)
        self.read.attend(
            layer, queries, out=before, lse=before_lse, causal=False,
            queries=[places.counts[row] for row in self.held],
            first_query_position=[self.before[row] for row in self.held],
        )
        found, begin = [], 0
        for row in places.active:
            own, lse = exact.causal(shape, *(tensor[row:row + 1, :, places.where[row]]
                                             for tensor in (query, key, value)))
            own, lse = own[0].transpose(0, 1), lse[0].transpose(0, 1)
            if row in self.held:
                end = begin + places.counts[row]
                own = exact.merge(before[begin:end], before_lse[begin:end], own, lse)
                begin = end
            else:
                own = exact.with_sinks(shape, own, lse)
            found.append(own)
        return places.put(torch.cat(found), places.active, query)

    def finish(self, ids: AnySequence[AnySequence[int] | None]) -> None:
        if self.read is not None:
            self.read.end()
            self.read = None
        take = self.places.take
        for row in self.places.active:
            sequence = self.rows[row]
            for layer, (query, key, value) in enumerate(self.kept):
                if query is not None:
                    self.observe(layer, row, query, key, self.before[row])
                sequence.append(take(key, row), take(value, row), layer=layer)
            if sequence.policy:
                self.observe_ids(row, ids[row], self.before[row])
                self.compress(sequence)

    def compress(self, sequence: Sequence) -> None:
        """Does nothing if the policy needs to have observed decoded tokens."""
        if self.setting.background:
            sequence.end_prompt()
            return
        try:
            sequence.compress()
        except FailedPrecondition:
            pass

    def abandon(self) -> None:
        if self.read is not None:
            self.read.abandon()
            return
        for row, before in zip(self.rows, self.before):
            row.truncate(before)
