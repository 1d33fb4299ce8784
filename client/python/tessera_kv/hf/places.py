"""Which of a forward's new columns hold tokens, row by row; the others are padding."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from typing import Any

import torch

from ..errors import Unsupported


class Places:
    """Of each row: where its tokens are among `columns` columns, and how many (`counts`)."""

    def __init__(self, batch: int, columns: int, mask: Any = None) -> None:
        """`mask`: [batch, columns], true for tokens; None: all of them."""
        self.columns = columns
        self.where: list[Any] = [slice(0, columns)] * batch  # or positions, where there are gaps
        self.counts = [columns] * batch
        if mask is None:
            return
        self.counts = mask.sum(1).tolist()
        for row, count in enumerate(self.counts):
            if count and not bool(mask[row, -1]):
                raise Unsupported(
                    f"attention_mask of row {row} has padding behind tokens; pad on the left"
                )
            if bool(mask[row, columns - count:].all()):
                self.where[row] = slice(columns - count, columns)
            else:
                self.where[row] = mask[row].nonzero().flatten()

    @property
    def active(self) -> list[int]:
        """Rows with tokens."""
        return [row for row, count in enumerate(self.counts) if count]

    @property
    def is_full(self) -> bool:
        """Whether no column is padding."""
        return all(count == self.columns for count in self.counts)

    def take(self, tensor: Any, row: int) -> Any:
        """A row's tokens of [batch, heads, columns, dim], as [tokens, heads, dim]. A view, unless
        there are gaps."""
        return tensor[row, :, self.where[row]].transpose(0, 1)

    def together(self, tensor: Any, rows: AnySequence[int]) -> Any:
        """Tokens of these rows, row after row."""
        return torch.cat([self.take(tensor, row) for row in rows])

    def put(self, found: Any, rows: AnySequence[int], query: Any) -> Any:
        """The reverse: [batch, columns, heads, dim], with zeros for padding."""
        output = torch.zeros_like(query.transpose(1, 2))
        begin = 0
        for row in rows:
            end = begin + self.counts[row]
            output[row, self.where[row]] = found[begin:end].to(output.dtype)
            begin = end
        return output

    def ids(self, ids: AnySequence[int], row: int) -> list[int]:
        """A row's tokens of the ids of all columns."""
        where = self.where[row]
        return list(ids[where]) if isinstance(where, slice) else [ids[at] for at in where.tolist()]
