"""What the worker process has: its attachment, and a sequence for each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import Aborted, Error, FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from ..sequence import Sequence
from ..worker import Match, attach
from .forward import Forward, Row
from .geometry import Geometry
from .plan import Part, Plan, run_of
from .settings import Settings

_log = logging.getLogger("vllm.tessera")  # vLLM prints what is below "vllm"
_ATTEMPTS = 8  # of a forward whose step the daemon aborts


@dataclass
class _Request:
    sequence: Sequence | None = None
    ids: list[int] = field(default_factory=list)  # of all tokens so far


class State:
    """Shared by vLLM's attention layers and the connector of one worker process.

    `run` is called once per forward, by one thread.
    """

    def __init__(self, settings: Settings, geometry: Geometry) -> None:
        self.settings = settings
        self.geometry = geometry
        self.worker = attach(
            settings.address, name=settings.name, tenant_token=settings.tenant_token,
            threads=settings.threads or torch.get_num_threads())
        self.model = geometry.register(self.worker)
        self.plan = Plan()
        self._requests: dict[str, _Request] = {}
        self._forward: Forward | None = None
        self._lost: set[int] = set()  # first blocks of requests whose sequence is gone

    def pool_tokens(self) -> int:
        """Tokens that the tenant's share of the daemon's pool holds uncompressed."""
        stats = self.worker.stats()
        limits = [stats["pool_limit_bytes"], *(each["hard_limit_bytes"]
                                               for each in stats["tenants"])]
        return int(min(limits)) // self.geometry.token_bytes

    # ---- one forward

    def begin(self, plan: Plan) -> None:
        """Takes over what the scheduler has decided. Frees what has ended."""
        self.plan = plan
        for name in plan.ended:
            self._close(self._requests.pop(name, None))
        for name in plan.preempted:
            request = self._requests.get(name)
            if request is not None and request.sequence is not None:
                try:
                    request.sequence.park()
                except Error as error:
                    _log.warning("Tessera: %s is not kept: %s", name, error)
                    self._close(request)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Calls the model. Repeats it if the daemon aborts its step or was restarted."""
        attempt = 0
        while True:
            self._lost.clear()
            try:
                output = forward()
                if self._forward is not None:
                    self._finish(self._forward)
                return output
            except Aborted as error:
                attempt += 1
                if attempt == _ATTEMPTS:
                    raise
                time.sleep(min(max(0.001 * 2**attempt, error.retry_after), 1.0))
            except Unavailable as error:
                attempt += 1
                if attempt == _ATTEMPTS:
                    raise
                self._reattach(error)
            finally:
                running, self._forward = self._forward, None
                if running is not None:
                    running.abandon()

    def attend(self, layer: int, rows: list[tuple[int, int, int, int]], query: Any, key: Any,
               value: Any, output: Any) -> None:
        """A layer's attention. `rows`: block, begin, end, and tokens with the new ones."""
        if layer == 0:
            self._forward = self._begin(rows)
        running = self._forward
        if running is None or running.next_layer != layer:
            raise FailedPrecondition(f"attention of layer {layer} was called out of order")
        running.attend(layer, query, key, value, output)

    def take_lost(self) -> set[int]:
        """First blocks of requests that vLLM must compute again."""
        lost, self._lost = self._lost, set()
        return lost

    def _begin(self, rows: list[tuple[int, int, int, int]]) -> Forward:
        parts = {part.block: part for part in self.plan.parts}
        found, lost = [], []
        for block, begin, end, tokens in rows:
            row = self._row(parts[block], begin, end, tokens)
            if row is None:
                lost.append(slice(begin, end))
                self._lost.add(block)
            else:
                found.append(row)
        return Forward(self.worker, self.model, found, lost, self.settings.wait)

    def _row(self, part: Part, begin: int, end: int, tokens: int) -> Row | None:
        """A request's row, None if its sequence is gone."""
        request = self._requests.setdefault(part.request, _Request())
        held = tokens - (end - begin)
        request.ids[held:] = part.ids
        sequence = self._sequence(request, part, held)
        if sequence is None:
            self._close(request)
            return None
        return Row(sequence, begin, end, held, part.ids, is_prompt=held < part.prompt,
                   ends_prompt=held < part.prompt <= tokens)

    def _sequence(self, request: _Request, part: Part, held: int) -> Sequence | None:
        """The request's sequence with `held` tokens."""
        sequence = request.sequence
        if held == 0 and sequence is not None and sequence.tokens:
            self._close(request)
            sequence = None
        if sequence is None and held == 0:
            sequence = self.worker.sequence(self.model, policy=self.settings.policy)
        elif sequence is None and part.prefix and part.daemon == run_of(self.worker):
            try:
                sequence = self.worker.fork(
                    Match(self.worker, self.model, part.prefix, held, 0, 0), tokens=held)
            except NotFound as error:
                _log.info("Tessera: a shared prompt is gone, %s computes it: %s", part.request,
                          error)
        request.sequence = sequence
        if sequence is None or sequence.tokens < held:
            return None
        if sequence.tokens > held:
            sequence.truncate(held)
        return sequence

    def _finish(self, running: Forward) -> None:
        if running.next_layer != len(self.geometry.layers):
            raise FailedPrecondition(
                f"the forward ended after layer {running.next_layer - 1}; the model has "
                f"{len(self.geometry.layers)} layers")
        ended = {id(row.sequence) for row in running.finish()}
        for part in self.plan.parts:
            request = self._requests[part.request]
            if request.sequence is not None and id(request.sequence) in ended:
                self._end_prompt(part, request)

    def _end_prompt(self, part: Part, request: _Request) -> None:
        sequence = request.sequence
        assert sequence is not None
        try:
            if not part.publish:
                if sequence.policy:
                    sequence.end_prompt()
                return
            if sequence.policy:
                sequence.compress()  # what is shared is compressed
            sequence.publish(request.ids[:sequence.tokens], ttl=self.settings.ttl)
        except (Aborted, Unavailable):
            raise
        except ResourceExhausted as error:
            _log.warning("Tessera: the prompt of %s is not shared: %s", part.request, error)

    # ---- life

    def _close(self, request: _Request | None) -> None:
        if request is None or request.sequence is None:
            return
        sequence, request.sequence = request.sequence, None
        try:
            sequence.close()
        except Error as error:  # its memory went with the daemon or the lease
            _log.debug("Tessera: closing a sequence: %s", error)

    def _reattach(self, reason: Unavailable) -> None:
        """Waits for the daemon. Requests whose sequences are gone are computed again."""
        _log.warning("Tessera: %s; attaching again", reason)
        deadline = time.monotonic() + self.settings.reattach
        while True:
            try:
                gone = self.worker.reattach()
                break
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        if gone:
            for request in self._requests.values():
                self._close(request)
        _log.warning("Tessera: attached again; %d sequences are gone", gone)

    def close(self) -> None:
        """Detaches: the daemon frees every sequence."""
        self.worker.close()


def attention_layers(config: Any) -> Iterator[Any]:
    """vLLM's attention layers that Tessera computes, in the model's order."""
    from .attention import TesseraImpl

    for layer in config.compilation_config.static_forward_context.values():
        if isinstance(getattr(layer, "impl", None), TesseraImpl):
            yield layer.impl
