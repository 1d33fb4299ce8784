"""The scheduler's side: which tokens a request begins with, and the plan of each forward."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from ..errors import Error
from ..model import Model
from ..worker import Match, Worker, attach
from .geometry import Geometry
from .plan import Part, Plan, run_of
from .settings import Settings

_log = logging.getLogger("vllm.tessera")
SHARED_TOKENS = 32  # prefixes are matched in whole tiles of so many


@dataclass
class _Request:
    request: Any  # vLLM's
    match: Match | None = None
    daemon: int = 0  # the run of the daemon that has found it
    shared: bool = False  # it may be published, and begin with published tokens
    block: int = -1  # its first one
    held: int = 0  # tokens that the worker has computed of it, preempted or not
    kept: bool = False  # it was preempted, and its sequence is parked
    ids: list[int] = field(default_factory=list)  # of the prompt, while it is being computed


class Scheduling:
    """One per engine, in the scheduler's process. Its own attachment finds published prompts."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._worker: Worker | None = None
        self._model: Model | None = None
        self._requests: dict[str, _Request] = {}
        self._preempted: list[str] = []
        self._ended: list[str] = []

    def open(self, geometry: Geometry) -> None:
        """Attaches, once the worker process has loaded the model."""
        if self.settings.share:
            self._worker = attach(
                self.settings.address, name=f"{self.settings.name}-scheduler", reattach=True,
                tenant_token=self.settings.tenant_token, map_memory=False)
            self._model = geometry.register(self._worker)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # ---- requests

    def held(self, request: Any) -> int | None:
        """Tokens that a waiting request need not compute. None: ask again, they are coming."""
        known = self._requests.get(request.request_id)
        if known is not None and known.kept:
            return min(known.held, int(request.num_tokens) - 1)
        if known is None:
            known = self._requests[request.request_id] = _Request(request)
            known.shared = self.settings.share and _may_share(request)
        if not known.shared:
            return 0
        ids = list(request.prompt_token_ids)
        if self._is_coming(request.request_id, ids):
            return None
        known.match, known.daemon = self._match(ids)
        return known.match.tokens if known.match else 0

    def _match(self, ids: list[int]) -> tuple[Match | None, int]:
        """The published tokens, but never all of the prompt: its last token must be computed. With
        the run of the daemon that has them."""
        worker, model = self._worker, self._model
        usable = (len(ids) - 1) // SHARED_TOKENS * SHARED_TOKENS
        if worker is None or model is None or not usable:
            return None, 0
        try:
            daemon = run_of(worker)
            match = worker.match(model, ids[:usable], policy=self.settings.policy)
            if match and run_of(worker) == daemon:  # else it is not known which run has answered
                return match, daemon
        except Error as error:
            _log.warning("Tessera: shared prompts cannot be looked up: %s", error)
        return None, 0

    def _is_coming(self, name: str, ids: list[int]) -> bool:
        """Whether another request of this engine computes a head of these tokens just now."""
        head = ids[:SHARED_TOKENS]
        return len(ids) > SHARED_TOKENS and any(
            other != name and each.ids[:SHARED_TOKENS] == head
            for other, each in self._requests.items() if each.ids)

    def admit(self, request: Any, tokens: int) -> None:
        """vLLM has blocks for a request, which begins with `tokens` tokens."""
        known = self._requests[request.request_id]
        if known.kept:
            known.kept, known.match = False, None
        if not tokens:
            known.match = None
        known.held = tokens
        if known.shared and tokens < request.num_prompt_tokens:
            known.ids = list(request.prompt_token_ids)

    def end(self, name: str) -> None:
        """A request has ended, or was aborted."""
        if self._requests.pop(name, None) is not None:
            self._ended.append(name)

    # ---- forwards

    def plan(self, output: Any) -> Plan:
        """What the worker must know of a forward that vLLM has scheduled."""
        plan = Plan(ended=self._ended)
        self._ended = []
        for name in output.preempted_req_ids or ():
            known = self._requests.get(name)
            if known is not None:
                known.kept = known.held > 0
                known.ids = []
                plan.preempted.append(name)
        for new in output.scheduled_new_reqs:
            self._requests[new.req_id].block = new.block_ids[0][0]
            self._add(plan, output, new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids,
                                          cached.num_computed_tokens):
            if name in cached.resumed_req_ids:
                self._requests[name].block = blocks[0][0]
            self._add(plan, output, name, computed)
        return plan

    def _add(self, plan: Plan, output: Any, name: str, computed: int) -> None:
        known = self._requests[name]
        request = known.request
        tokens = computed + output.num_scheduled_tokens[name]
        prompt = request.num_prompt_tokens
        begins = known.match is not None and computed == known.match.tokens
        plan.parts.append(Part(
            name, known.block, list(request.all_token_ids[computed:tokens]), prompt,
            prefix=known.match.prefix if known.match and begins else 0, daemon=known.daemon,
            publish=known.shared and computed < prompt <= tokens))
        known.held = tokens
        if tokens >= prompt:
            known.ids = []  # published after this forward


def _may_share(request: Any) -> bool:
    """Whether the ids of its tokens say what its keys and values are."""
    return (request.prompt_token_ids is not None and request.prompt_embeds is None
            and not request.mm_features and request.lora_request is None
            and request.cache_salt is None)
