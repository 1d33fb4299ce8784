"""A cache for transformers whose keys and values are in Tessera's daemon."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import Aborted, FailedPrecondition, InvalidArgument, Unsupported
from ..model import Layer
from ..sequence import Sequence
from .geometry import Geometry
from .passes import STEP_TOKENS, Chunk, Pass, Prompt, Setting, Step
from .places import Places
from .report import Report, RowReport, dense_bytes

_ATTEMPTS = 8  # of a forward whose step the daemon aborts

# What `update` was given last in this thread: the attention function takes it up.
_updated = threading.local()


def take_update(key: Any, value: Any) -> tuple[TesseraCache, int] | None:
    """The cache and layer whose `update` returned these very tensors, if one did."""
    found = getattr(_updated, "last", None)
    _updated.last = None
    if found is None or found[2] is not key or found[3] is not value:
        return None
    return found[0], found[1]


class TesseraLayer(CacheLayerMixin):
    """One layer of a `TesseraCache`. It holds nothing."""

    is_compileable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: TesseraCache, number: int) -> None:
        super().__init__()
        self.cache = cache
        self.number = number
        self.is_initialized = True

    def lazy_initialization(self, *tensors: Any) -> None:
        """Does nothing: the daemon needs no room in advance."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **options: Any) -> tuple[
            Any, Any]:
        """Returns the tensors as they are. The attention function stores them."""
        _updated.last = (self.cache, self.number, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, queries: Any) -> tuple[int, int]:
        """Columns that a mask must have, and the first one. `queries`: a number, or positions."""
        new = queries if isinstance(queries, int) else queries.shape[0]
        return self.cache.columns + new, 0

    def get_seq_length(self, *_: Any) -> int:
        """Columns of the batch: padding and dropped tokens count."""
        return self.cache.columns

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can be taken back."""
        return self.cache.is_croppable

    @property
    def batch_size(self) -> int:
        """Rows of the batch, -1 before the first forward."""
        return len(self.cache.rows) or -1


class TesseraCache(Cache):
    """Keys and values of a batch. Made by `cache`; a context or `close` frees them.

    Each row of the batch is a sequence of the daemon (`rows`). Used by one thread at a time.
    """

    def __init__(self, setting: Setting, geometry: Geometry, policy: str,
                 on_close: Callable[[], None]) -> None:
        super().__init__(
            layers=[TesseraLayer(self, number) for number in range(len(setting.model.layers))]
        )
        self.setting = setting
        self.worker = setting.worker
        self.model = setting.model
        self.geometry = geometry
        self.policy = policy
        self.rows: list[Sequence] = []
        self.columns = 0
        self.ids: list[list[int] | None] = []  # of each row's tokens, None: not known
        self._on_close = on_close
        self._pass: Pass | None = None
        self._new_ids: list[list[int]] | None = None
        self._seconds = {True: 0.0, False: 0.0}  # in prompts, in steps
        self.forwards = self.repeated = 0  # forwards that ended; that the daemon aborted
        self._check_policy()

    def _check_policy(self) -> None:
        if re.search(r"\bpos=slot\b", self.policy):
            raise Unsupported(
                f'policy "{self.policy}" moves positions (pos=slot): transformers rotates queries '
                "by the number of tokens"
            )
        if "key_space=pre" in self.policy and not self.geometry.rope_frequencies:
            raise Unsupported(
                f'policy "{self.policy}" compares keys before RoPE; {self.geometry.rope_missing}'
            )

    # ---- one forward

    def run(self, forward: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
            ) -> Any:
        """Calls the model's forward. Repeats it if the daemon aborts the step."""
        ids: Any = options.get("input_ids", arguments[0] if arguments else None)
        has_ids = torch.is_tensor(ids) and ids.ndim == 2
        for attempt in range(_ATTEMPTS):
            self._new_ids = ids.tolist() if has_ids else None
            try:
                output = forward(*arguments, **options)
                if self._pass is not None:
                    raise FailedPrecondition(
                        f"the forward ended after layer {self._pass.next_layer - 1}; the model "
                        f"has {len(self.layers)} layers"
                    )
                return output
            except Aborted as error:
                self.abandon()
                if attempt == _ATTEMPTS - 1:
                    raise
                self.repeated += 1
                time.sleep(min(max(0.001 * 2**attempt, error.retry_after), 1.0))
            except BaseException:
                self.abandon()
                raise
            finally:
                self._new_ids = None
        raise AssertionError("unreachable")

    def attend(self, number: int, shape: Layer, query: Any, key: Any, value: Any, mask: Any) -> Any:
        """A layer's attention. [batch, heads, columns, dim] in, [batch, columns, heads, dim] out.

        `shape`: what the caller wants to compute, which must be what the daemon knows.
        """
        self._check_call(number, shape)
        start = time.perf_counter()
        if number == 0:
            self.abandon()
            self._pass = self._begin(query.shape[0], query.shape[2], mask)
        running = self._pass
        if running is None or running.next_layer != number:
            raise FailedPrecondition(f"attention of layer {number} was called out of order")
        output = running.attend(number, query, key, value)
        running.next_layer += 1
        if running.next_layer == len(self.layers):
            self._finish(running)
        self._seconds[not isinstance(running, Step)] += time.perf_counter() - start
        return output

    def _check_call(self, number: int, shape: Layer) -> None:
        known = self.model.layer(number)
        if shape != known:
            different = [
                f"{name} {getattr(shape, name)} (registered: {getattr(known, name)})"
                for name in Layer.__dataclass_fields__
                if getattr(shape, name) != getattr(known, name)
            ]
            raise Unsupported(f"layer {number} was called with {', '.join(different)}")

    def _begin(self, batch: int, columns: int, mask: Any) -> Pass:
        if not self.rows:
            for _ in range(batch):
                self.rows.append(self.worker.sequence(self.model, policy=self.policy))
            self.ids = [[] for _ in range(batch)]
        if len(self.rows) != batch:
            raise InvalidArgument(
                f"the batch has {batch} rows; the cache holds {len(self.rows)}", "argument"
            )
        places = self._places(columns, mask)
        if self.columns == 0:
            return Prompt(self.setting, self.rows, places, self._leaders(places))
        for row in self.rows:
            if row.next_position != row.tokens:
                raise Unsupported(f'policy "{self.policy}" moves positions')
        if columns <= STEP_TOKENS and places.active:
            return Step(self.setting, self.rows, places)
        return Chunk(self.setting, self.rows, places)

    def _places(self, columns: int, mask: Any) -> Places:
        """Where the tokens of each row are among the new columns."""
        held = [row.tokens for row in self.rows]
        if mask is None:
            for number, tokens in enumerate(held):
                if tokens != self.columns:
                    raise InvalidArgument(
                        f"row {number} has {self.columns - tokens} columns of padding; "
                        "attention_mask must say so in every forward", "argument"
                    )
            return Places(len(held), columns)
        if mask.shape[1] != self.columns + columns:
            raise InvalidArgument(
                f"attention_mask has {mask.shape[1]} columns; the cache has {self.columns}, the "
                f"forward {columns}", "argument"
            )
        for number, (tokens, old) in enumerate(zip(held, mask[:, : self.columns].sum(1).tolist())):
            if old != tokens:
                raise Unsupported(
                    f"attention_mask of row {number} has {old} tokens of the cache's {tokens}: "
                    "tokens cannot be hidden later"
                )
        return Places(len(held), columns, mask[:, self.columns:])

    def _leaders(self, places: Places) -> list[int]:
        """For each row of a prompt, the first one with the same tokens."""
        first: dict[tuple[int, ...], int] = {}
        leaders = []
        for row in range(len(self.rows)):
            ids = self._added_ids(row, places)
            leaders.append(first.setdefault(tuple(ids), row) if ids else row)
        return leaders

    def _added_ids(self, row: int, places: Places) -> list[int] | None:
        return None if self._new_ids is None else places.ids(self._new_ids[row], row)

    def _finish(self, running: Pass) -> None:
        places = running.places
        added = [self._added_ids(row, places) for row in range(len(self.rows))]
        for number in places.active:
            row, ids = self.rows[number], added[number]
            if row.needs.token_ids and ids is None:
                raise Unsupported(
                    f'policy "{self.policy}" needs token ids: pass input_ids to the model that '
                    "cache() was given"
                )
        running.finish(added)
        self.rows = running.rows
        for number, ids in enumerate(added):
            known = self.ids[number]
            self.ids[number] = None if known is None or ids is None else known + ids
        self.columns += places.columns
        self.forwards += 1
        self._pass = None

    def abandon(self) -> None:
        """Takes back what an unfinished forward has done."""
        running, self._pass = self._pass, None
        if running is not None:
            running.abandon()

    # ---- what transformers asks of a cache

    @property
    def is_croppable(self) -> bool:
        """Whether the newest tokens can be taken back: not if the policy drops while decoding."""
        return not any(row.needs.while_decoding for row in self.rows)

    def reset(self) -> None:
        """Frees every row."""
        self.abandon()
        for row in self.rows:
            row.close()
        self.rows, self.ids, self.columns = [], [], 0

    def _select(self, indices: list[int]) -> None:
        """Row i becomes what row indices[i] was. The first use of a row moves it, others fork."""
        self.abandon()
        old, ids = self.rows, self.ids
        moved: set[int] = set()
        rows = []
        for index in indices:
            rows.append(old[index].fork() if index in moved else old[index])
            moved.add(index)
        for index, row in enumerate(old):
            if index not in moved:
                row.close()
        self.rows = rows
        self.ids = [None if ids[index] is None else list(ids[index] or ()) for index in indices]

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i becomes row beam_idx[i], by forks."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Any) -> None:
        """Keeps these rows."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, by forks."""
        self._select([row for row in range(len(self.rows)) for _ in range(repeats)])

    def crop(self, tokens: int) -> None:
        """Takes tokens back. Negative: so many; positive: as many as the cache has beyond them."""
        removed = min(self.columns, -tokens if tokens <= 0 else max(0, self.columns - tokens))
        if removed == 0:
            return
        self.abandon()
        for number, row in enumerate(self.rows):
            kept = max(0, row.tokens - removed)
            row.truncate(kept)
            known = self.ids[number]
            self.ids[number] = None if known is None else known[:kept]
        self.columns -= removed

    # ---- what Tessera adds

    def fork(self, count: int = 1) -> TesseraCache:
        """A cache with every row `count` times. It copies nothing, and this one remains.

        Close it before this one.
        """
        self.abandon()
        made = TesseraCache(self.setting, self.geometry, self.policy, lambda: None)
        for row, ids in zip(self.rows, self.ids):
            for _ in range(count):
                made.rows.append(row.fork())
                made.ids.append(None if ids is None else list(ids))
        made.columns = self.columns
        return made

    def match(self, input_ids: Any, attention_mask: Any = None, *, wait: float = 0.0) -> int:
        """Begins an empty cache with what other workers have published of these prompts.

        Returns how many columns need not be computed; `generate` skips them. `wait`: seconds to
        wait for a prefix that another worker is computing.
        """
        if self.rows:
            raise FailedPrecondition("the cache is not empty")
        columns = input_ids.shape[1]
        pads = [0] * len(input_ids) if attention_mask is None else [
            columns - int(row.sum()) for row in attention_mask
        ]
        ids = [row[pad:] for row, pad in zip(input_ids.tolist(), pads)]
        # The last token is computed in any case: its logits are needed.
        matches = [
            self.worker.match(self.model, row[:-1], policy=self.policy, wait=wait) for row in ids
        ]
        covered = min(pad + (match.tokens if match else 0) for pad, match in zip(pads, matches))
        wanted = [max(0, covered - pad) for pad in pads]
        if not any(wanted):
            return 0
        for row, match, tokens in zip(ids, matches, wanted):
            if tokens == 0:
                self.rows.append(self.worker.sequence(self.model, policy=self.policy))
            elif tokens == match.tokens:
                self.rows.append(self.worker.fork(match))
            else:
                whole = min(match.tokens, -(-tokens // 32) * 32)  # forks are of whole tiles
                self.rows.append(self.worker.fork(match, tokens=whole))
                self.rows[-1].truncate(tokens)
            self.ids.append(row[:tokens])
        self.columns = covered
        return covered

    def publish(self, *, ttl: float = 0.0, pinned: bool = False) -> list[int]:
        """Publishes the tokens of each row for every worker of the tenant. Returns prefix ids.

        `ttl`: seconds that a prefix may be unused, 0 for no limit.
        """
        made = []
        for number, (row, ids) in enumerate(zip(self.rows, self.ids)):
            if ids is None:
                raise Unsupported(f"the ids of row {number} are not known: it had inputs_embeds")
            made.append(row.publish(ids, ttl=ttl, pinned=pinned).prefix)
        return made

    def report(self) -> Report:
        """Bytes and tokens of every row, and what attention took."""
        rows = []
        for row in self.rows:
            found = row.describe()
            rows.append(RowReport(found.tokens, found.state, found.tile_bytes,
                                  found.shared_tile_bytes, dense_bytes(self.model, found.tokens),
                                  found.tokens_kept))
        return Report(self.policy, tuple(rows), self._seconds[True], self._seconds[False],
                      self.forwards, self.repeated)

    def close(self) -> None:
        """Frees the rows in the daemon."""
        self.reset()
        closing, self._on_close = self._on_close, lambda: None
        closing()

    def __enter__(self) -> TesseraCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        self.close()
        return False

    def __repr__(self) -> str:
        return f"<TesseraCache of {len(self.rows)} rows, {self.columns} columns>"
