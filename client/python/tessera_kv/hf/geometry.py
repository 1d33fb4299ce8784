"""What Tessera must know of a transformers model: layers, RoPE, and which weights it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidArgument, Unsupported
from ..model import Layer
from ..weights import fingerprint

NAME = "tessera"  # the attention implementation, as transformers knows it
HEAD_DIMS = (64, 128, 256)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LAYER_TYPES = ("full_attention", "sliding_attention")

# Rotate the two halves of a row against each other, every layer alike.
HALF_ROTATED = frozenset((
    "gemma", "gemma2", "gemma3_text", "gpt_oss", "granite", "llama", "mistral", "mixtral", "olmo2",
    "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2",
))
# Frequencies of other kinds change with the length of the text.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")

# Attributes of a configuration that change what attention computes: name, value that is served.
_REFUSED = (
    ("is_encoder_decoder", "cross attention"), ("add_cross_attention", "cross attention"),
    ("kv_lora_rank", "latent attention (MLA)"), ("alibi", "ALiBi"),
    ("num_kv_shared_layers", "layers that share keys and values"),
    ("kv_sharing_modes", "layers that share keys and values"),
    ("use_bidirectional_attention", "bidirectional attention"),
    ("attention_chunk_size", "chunked attention"),
)


@dataclass(frozen=True)
class Geometry:
    """A model as `Worker.model` takes it."""

    name: str  # of the weights: processes with the same ones share prefixes
    layers: tuple[Layer, ...]
    dtype: str
    rope_theta: float  # 0: the daemon does not know the model's positions
    rope_frequencies: tuple[float, ...]
    rope_missing: str  # why it does not


def attention_modules(model: Any) -> list[Any]:
    """The attention of each layer, by number. Unsupported if a layer has none that is known."""
    config = model.config.get_text_config(decoder=True)
    found: dict[int, Any] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "scaling") and hasattr(module, "head_dim"):
            found.setdefault(index, module)
    for layer in range(config.num_hidden_layers):
        if layer not in found:
            raise Unsupported(f"layer {layer} of {config.model_type} has no known attention")
    return [found[layer] for layer in range(config.num_hidden_layers)]


def _check(model: Any, config: Any) -> None:
    kind = config.model_type
    for name, what in _REFUSED:
        value = getattr(config, name, None)
        if value:
            raise Unsupported(f"{kind} has {name}={value}: {what} is not served")
    if getattr(config, "position_embedding_type", None) == "alibi":
        raise Unsupported(f"{kind} has position_embedding_type=alibi: ALiBi is not served")
    if config is not model.config:
        raise Unsupported(f"{model.config.model_type} has more parts than text: not served")
    for layer, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        if layer_type not in LAYER_TYPES:
            raise Unsupported(
                f"layer {layer} of {kind} is {layer_type}; served are {' and '.join(LAYER_TYPES)}"
            )
    if config._attn_implementation != NAME:
        raise InvalidArgument(
            f"the model's attn_implementation is {config._attn_implementation}: load it with "
            f'attn_implementation="{NAME}", or call model.set_attn_implementation("{NAME}")',
            "argument",
        )


def _layer(number: int, module: Any, config: Any) -> Layer:
    if module.head_dim not in HEAD_DIMS:
        raise Unsupported(
            f"layer {number} of {config.model_type} has head_dim {module.head_dim}; served are "
            f"{', '.join(map(str, HEAD_DIMS))}"
        )
    query_heads = int(getattr(module, "num_heads", 0) or config.num_attention_heads)
    groups = int(getattr(module, "num_key_value_groups", 1))
    sinks = getattr(module, "sinks", None)
    return Layer(
        query_heads, query_heads // groups, module.head_dim, scale=float(module.scaling),
        sliding_window=int(getattr(module, "sliding_window", None) or 0),
        logit_softcap=float(getattr(module, "attn_logit_softcapping", None) or 0),
        sinks=() if sinks is None else tuple(sinks.detach().float().tolist()),
    )


def _rope(model: Any, config: Any, head_dim: int) -> tuple[float, tuple[float, ...], str]:
    """Base, frequencies, and the reason if there are none."""
    if config.model_type not in HALF_ROTATED:
        return 0.0, (), f"how {config.model_type} rotates rows is not known"
    kinds: set[str] = set()
    sets: list[tuple[float, ...]] = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                kind = getattr(module, "rope_type", "default")
                kinds.update(kind.values() if isinstance(kind, dict) else [kind])
                values = tuple(buffer.double().tolist())
                if values not in sets:
                    sets.append(values)
    if not kinds <= set(STATIC_ROPE):
        return 0.0, (), f"its RoPE is of type {', '.join(sorted(kinds))}"
    if len(sets) != 1:
        return 0.0, (), f"its layers have {len(sets)} different RoPE bases"
    if len(sets[0]) != head_dim // 2:
        return 0.0, (), f"its RoPE turns {2 * len(sets[0])} of {head_dim} channels"
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 1e4
    return float(theta), sets[0], ""


def geometry(model: Any) -> Geometry:
    """Reads a model. Unsupported names the layer and the value that are not served."""
    config = model.config.get_text_config(decoder=True)
    _check(model, config)
    if model.device.type != "cpu":
        raise Unsupported(
            f"the model is on {model.device}: tessera_kv.hf serves models in host memory so far"
        )
    if model.dtype not in DTYPES:
        raise Unsupported(f"the model is {model.dtype}; served are {', '.join(DTYPES.values())}")
    layers = tuple(
        _layer(number, module, config) for number, module in enumerate(attention_modules(model))
    )
    theta, frequencies, missing = _rope(model, config, layers[0].head_dim)
    return Geometry(f"{config.model_type}-{fingerprint(model)}", layers, DTYPES[model.dtype], theta,
                    frequencies, missing)
