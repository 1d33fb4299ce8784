"""One forward of the model over a batch: some rows decode, others compute a part of their prompt.

Nothing is committed before `finish`, and what `finish` commits a repeated forward takes back first.
So a forward can be repeated at any point.
"""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import exact
from ..model import Model
from ..read import Read
from ..sequence import Sequence
from ..step import Step
from ..worker import Worker

# So many new tokens behind others are a step; more are attended in bulk. A step may have more, but
# its tail rings must have room for them.
STEP_TOKENS = 32


@dataclass
class Row:
    """One request's tokens in the batch."""

    sequence: Sequence
    begin: int  # its tokens among those of the batch
    end: int
    held: int  # tokens that the sequence has before
    ids: list[int]
    is_prompt: bool  # some of the new tokens belong to the prompt
    ends_prompt: bool

    @property
    def new(self) -> int:
        return self.end - self.begin

    @property
    def is_step(self) -> bool:
        """Whether a step serves it: not if the policy must observe its queries first."""
        observed = self.is_prompt and self.sequence.policy != ""
        return 0 < self.held and self.new <= STEP_TOKENS and not observed


class _Rows:
    """Rows that one call of the library serves, sequence after sequence."""

    def __init__(self, rows: AnySequence[Row]) -> None:
        self.rows = list(rows)
        self.sequences = [row.sequence for row in rows]
        self.counts = [row.new for row in rows]
        follow = all(a.end == b.begin for a, b in zip(rows, rows[1:]))
        self.span = slice(rows[0].begin, rows[-1].end) if rows and follow else None

    def take(self, tensor: Any) -> Any:
        """Their tokens of a tensor of the batch: a view if they follow each other."""
        if self.span is not None:
            return tensor[self.span]
        return torch.cat([tensor[row.begin:row.end] for row in self.rows])

    def put(self, found: Any, output: Any) -> None:
        """The reverse."""
        begin = 0
        for row in self.rows:
            output[row.begin:row.end] = found[begin:begin + row.new]
            begin += row.new


class _Kept:
    """The new keys, values and queries of a row in every layer, until `finish` appends them."""

    def __init__(self, model: Model, row: Row) -> None:
        self.row = row
        self.key: Any = None
        self.value: Any = None
        self.queries: list[Any] = []
        self.layers = len(model.layers)

    def keep(self, layer: int, query: Any, key: Any, value: Any) -> None:
        rows = slice(self.row.begin, self.row.end)
        if self.key is None:
            shape = (self.layers, self.row.new, *key.shape[1:])
            self.key, self.value = key.new_empty(shape), value.new_empty(shape)
        self.key[layer] = key[rows]
        self.value[layer] = value[rows]
        if self.row.sequence.needs.queries:
            self.queries.append(query[rows])

    def append(self) -> None:
        """Stores them in the daemon."""
        sequence = self.row.sequence
        for layer, query in enumerate(self.queries):
            sequence.observe(layer, query, self.key[layer], first_token=self.row.held)
        sequence.append(self.key, self.value)


class Forward:
    """Attention of a batch, layer after layer; then `finish` or `abandon`."""

    def __init__(self, worker: Worker, model: Model, rows: AnySequence[Row],
                 lost: AnySequence[slice], wait: float) -> None:
        """`lost`: tokens of rows whose sequence is gone. Their output is zero."""
        self.model = model
        self.lost = list(lost)
        self.next_layer = 0
        self.steps = _Rows([row for row in rows if row.is_step])
        self.bulk = [_Kept(model, row) for row in rows if not row.is_step]
        self.readers = _Rows([kept.row for kept in self.bulk if kept.row.held])
        self.step: Step | None = None
        self.read: Read | None = None
        try:
            if self.readers.rows:
                self.read = worker.read(self.readers.sequences, timeout=wait)
            if self.steps.rows:
                counts = self.steps.counts
                self.step = worker.step(
                    self.steps.sequences, timeout=wait,
                    new_tokens=counts[0] if len(set(counts)) == 1 else counts)
        except BaseException:
            self.abandon()
            raise

    def attend(self, layer: int, query: Any, key: Any, value: Any, output: Any) -> None:
        """[tokens of the batch, heads, head_dim]. Writes `output`."""
        for lost in self.lost:
            output[lost] = 0
        if self.step is not None:
            given = [self.steps.take(tensor) for tensor in (query, key, value)]
            if self.steps.span is not None:
                self.step.attend(layer, *given, out=output[self.steps.span])
            else:
                self.steps.put(self.step.attend(layer, *given, out=torch.empty_like(given[0])),
                               output)
        if self.bulk:
            self._attend_bulk(layer, query, key, value, output)
        self.next_layer = layer + 1

    def _attend_bulk(self, layer: int, query: Any, key: Any, value: Any, output: Any) -> None:
        shape = self.model.layer(layer)
        before = before_lse = None
        if self.read is not None:
            queries = self.readers.take(query)
            before = torch.empty(queries.shape, dtype=torch.float32)
            before_lse = torch.empty(queries.shape[:2], dtype=torch.float32)
            self.read.attend(
                layer, queries, out=before, lse=before_lse, causal=False,
                queries=self.readers.counts,
                first_query_position=[row.held for row in self.readers.rows])
        begin = 0
        for kept in self.bulk:
            row = kept.row
            kept.keep(layer, query, key, value)
            own, lse = exact.causal(shape, *(
                tensor[row.begin:row.end].transpose(0, 1)[None] for tensor in (query, key, value)))
            own, lse = own[0].transpose(0, 1), lse[0].transpose(0, 1)
            if row.held:
                assert before is not None and before_lse is not None
                end = begin + row.new
                own = exact.merge(before[begin:end], before_lse[begin:end], own, lse)
                begin = end
            output[row.begin:row.end] = own

    def finish(self) -> list[Row]:
        """Commits the new tokens. Returns the rows whose prompt has ended."""
        if self.read is not None:
            self.read.end()
            self.read = None
        if self.step is not None:
            self.step.end()
            self.step = None
        for kept in self.bulk:
            kept.append()
        rows = [kept.row for kept in self.bulk] + self.steps.rows
        for row in rows:
            if row.sequence.needs.token_ids:
                row.sequence.observe_tokens(row.ids, first_token=row.held)
        return [row for row in rows if row.ends_prompt]

    def abandon(self) -> None:
        """Commits nothing."""
        for running in (self.read, self.step):
            if running is not None:
                running.abandon()
        self.read = self.step = None
