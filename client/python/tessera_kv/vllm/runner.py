"""vLLM's model runner, wrapped: a forward can be repeated, and the model is read once loaded."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import Unsupported
from .geometry import geometry_of
from .settings import settings_of
from .state import State, attention_layers


def wrap(runner: Any) -> None:
    """Wraps two methods of a runner's class. Does nothing if they are wrapped already."""
    load, forward = runner.load_model, runner._model_forward
    if getattr(forward, "_repeats_for_tessera", False):
        return

    @functools.wraps(load)
    def load_model(self: Any, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        self.tessera = _open(self.vllm_config, self.model)

    @functools.wraps(forward)
    def model_forward(self: Any, *arguments: Any, **options: Any) -> Any:
        return self.tessera.run(lambda: forward(self, *arguments, **options))

    model_forward._repeats_for_tessera = True  # type: ignore[attr-defined]
    runner.load_model, runner._model_forward = load_model, model_forward


def _open(config: Any, model: Any) -> State:
    settings = settings_of(config)
    layers = list(attention_layers(config))
    attention = [layer for layer in config.compilation_config.static_forward_context.values()
                 if hasattr(layer, "impl")]
    if not layers or len(layers) != len(attention):
        raise Unsupported(
            f"{len(attention) - len(layers)} of {len(attention)} attention layers of "
            f"{config.model_config.model} are of a kind that is not served")
    state = State(settings, geometry_of(config, model, tuple(each.shape for each in layers)))
    for number, layer in enumerate(layers):
        layer.state, layer.number = state, number
    # vLLM's pool only counts: it gets as many blocks as the daemon's pool holds tokens.
    cache = config.cache_config
    if cache.num_gpu_blocks_override is None:
        tokens = max(settings.capacity or state.pool_tokens(), config.model_config.max_model_len)
        blocks = -(-tokens // cache.block_size) + 1  # vLLM keeps one for itself
        item = config.model_config.dtype.itemsize
        cache.kv_cache_memory_bytes = blocks * cache.block_size * item * len(layers)
    return state
