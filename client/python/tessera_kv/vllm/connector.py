"""What vLLM calls for requests: the scheduler's side decides, the worker's side obeys."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from ..errors import Unsupported
from . import versions
from .plan import Plan
from .scheduling import Scheduling
from .settings import settings_of
from .state import State, attention_layers

versions.check()


class TesseraConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps a sequence in the daemon for each request, and shares prompts."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = settings_of(vllm_config)
        self._scheduling: Scheduling | None = None
        self._state: State | None = None
        if role == KVConnectorRole.SCHEDULER:
            if len(kv_cache_config.kv_cache_groups) != 1:
                raise Unsupported(
                    f"vLLM has {len(kv_cache_config.kv_cache_groups)} groups of layers; served are "
                    "models whose layers are alike")
            # A sequence that is gone is computed again, for which vLLM must not fail the request.
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
            self._scheduling = Scheduling(settings)
        else:
            self._state = next(attention_layers(vllm_config)).state

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ---- the worker's side

    @property
    def _worker(self) -> State:
        assert self._state is not None
        return self._state

    def get_handshake_metadata(self) -> Any:
        return self._worker.geometry

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Plan)
        self._worker.begin(connector_metadata)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_lost()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: rows fork what they begin with."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any,
                      **kwargs: Any) -> None:
        """Does nothing: attention has stored the rows."""

    def wait_for_save(self) -> None:
        """Does nothing: the forward has committed them."""

    def shutdown(self) -> None:
        if self._state is not None:
            self._state.close()
        if self._scheduling is not None:
            self._scheduling.close()

    # ---- the scheduler's side

    @property
    def _scheduler(self) -> Scheduling:
        assert self._scheduling is not None
        return self._scheduling

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        (geometry,) = metadata.values()
        self._scheduler.open(geometry)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[
            int | None, bool]:
        assert num_computed_tokens == 0  # vLLM shares nothing of its own
        return self._scheduler.held(request), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.admit(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        return self._scheduler.plan(scheduler_output)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[
            bool, dict[str, Any] | None]:
        self._scheduler.end(request.request_id)
        return False, None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[
            bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))
