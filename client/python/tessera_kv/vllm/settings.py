"""What the user sets, and which configurations of vLLM are served."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InvalidArgument, Unsupported
from . import SWITCH, is_on

CONNECTOR = "TesseraConnector"


@dataclass(frozen=True)
class Settings:
    """`kv_connector_extra_config`. Times are in seconds."""

    address: str = ""  # of the daemon
    name: str = "vllm"  # of the engine: routers know it by this name in the daemon's KV events
    policy: str = ""  # of every sequence
    threads: int = 0  # that compute attention; 0: as many as torch has
    tenant_token: str = ""
    share: bool = True  # publish prompts, and begin with published ones
    ttl: float = 600.0  # of published prompts
    capacity: int = 0  # tokens that vLLM admits; 0: what fits the daemon's pool uncompressed
    wait: float = 10.0  # for room in the tail rings
    reattach: float = 60.0  # for the daemon to come back


def settings_of(config: Any) -> Settings:
    """Reads and checks vLLM's configuration. Unsupported names what is not served."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        raise InvalidArgument(
            f"{SWITCH} is set, and kv_transfer_config does not name {CONNECTOR}: give both, or "
            "neither", "argument")
    if not is_on():
        raise InvalidArgument(
            f"kv_transfer_config names {CONNECTOR}: set {SWITCH}=1, too, and check that the "
            "package tessera-kv is installed for this Python", "argument")
    given = dict(transfer.kv_connector_extra_config)
    known = {field.name: type(field.default) for field in fields(Settings)}
    for name, value in given.items():
        if name not in known:
            raise InvalidArgument(
                f'kv_connector_extra_config has "{name}"; known are {", ".join(known)}', "argument")
        if not isinstance(value, (int, float) if known[name] is float else known[name]):
            raise InvalidArgument(
                f'kv_connector_extra_config: "{name}" is {value!r}; expected is '
                f"{known[name].__name__}", "argument")
    found = Settings(**given)
    if re.search(r"\bpos=slot\b", found.policy):
        raise Unsupported(
            f'policy "{found.policy}" moves positions (pos=slot): vLLM rotates queries by the '
            "number of tokens")
    _check(config)
    return found


def _check(config: Any) -> None:
    parallel, cache = config.parallel_config, config.cache_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
                 "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise Unsupported(f"{name} is {getattr(parallel, name)}; served is 1")
    if cache.enable_prefix_caching:
        raise Unsupported("vLLM's own prefix caching is on: start it with "
                          "--no-enable-prefix-caching; Tessera shares prompts instead")
    if cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise Unsupported(f"kv_cache_dtype is {cache.cache_dtype}; leave it out, and choose a "
                          "policy of Tessera")
    if config.speculative_config is not None:
        raise Unsupported("speculative decoding is not served yet")
    if config.lora_config is not None:
        raise Unsupported("LoRA adapters are not served yet")
    if config.use_v2_model_runner:
        raise Unsupported("vLLM's second model runner is not served: set "
                          "VLLM_USE_V2_MODEL_RUNNER=0")
