"""What a cache holds and what it took."""

from __future__ import annotations

from dataclasses import dataclass

from ..model import Model
from .. import _arrays


@dataclass(frozen=True)
class RowReport:
    """One row of the batch. Bytes are the daemon's."""

    tokens: int
    state: str
    tile_bytes: int
    shared_bytes: int  # of these: shared with forks and prefixes
    dense_bytes: int  # what the tokens take uncompressed
    tokens_kept: float


@dataclass(frozen=True)
class Report:
    """What `TesseraCache.report` answers. Times are in seconds, of attention alone."""

    policy: str
    rows: tuple[RowReport, ...]
    prompt_seconds: float
    decode_seconds: float
    forwards: int
    repeated: int  # forwards that the daemon aborted

    def __str__(self) -> str:
        lines = [f"policy {self.policy or 'dense'}: {self.forwards} forwards, "
                 f"{self.repeated} repeated; attention took {self.prompt_seconds:.2f} s in prompts,"
                 f" {self.decode_seconds:.2f} s in steps",
                 "row   tokens   kept       bytes      shared  of dense"]
        for number, row in enumerate(self.rows):
            share = row.tile_bytes / row.dense_bytes if row.dense_bytes else 0.0
            lines.append(f"{number:>3} {row.tokens:>8} {row.tokens_kept:>6.0%} "
                         f"{row.tile_bytes:>11} {row.shared_bytes:>11} {share:>9.0%}")
        return "\n".join(lines)


def dense_bytes(model: Model, tokens: int) -> int:
    """What the keys and values of so many tokens take."""
    item = _arrays.ITEM_BYTES[model.type]
    return sum(2 * layer.kv_heads * layer.head_dim * item for layer in model.layers) * tokens
