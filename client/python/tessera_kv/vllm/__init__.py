"""Tessera as vLLM's attention on the CPU.

    os.environ["TESSERA_VLLM_CPU"] = "1"
    engine = vllm.LLM(..., enable_prefix_caching=False, kv_transfer_config={
        "kv_connector": "TesseraConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "tessera_kv.vllm.connector",
        "kv_connector_extra_config": {"address": "unix:...", "policy": "planes"}})

vLLM calls `register` in every process, by the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

import os

from .versions import check

# The plug-in changes nothing where this is not set: the package may be installed for other uses.
SWITCH = "TESSERA_VLLM_CPU"
BACKEND = "tessera_kv.vllm.attention.TesseraBackend"


def is_on() -> bool:
    """Whether this process shall use Tessera."""
    return os.environ.get(SWITCH, "") not in ("", "0")


def register() -> None:
    """Replaces vLLM's CPU attention. Unsupported for a vLLM outside of the tested range."""
    if not is_on():
        return
    check()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from .runner import wrap

    # Without a number vLLM insists on most of the machine's memory before it loads the model.
    # `runner` replaces it then.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # Where Triton works, vLLM would take its second runner, which has other methods.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    wrap(CPUModelRunner)
