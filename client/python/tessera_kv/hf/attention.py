"""What transformers calls: the attention function and its mask."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidArgument, Unsupported
from ..model import Layer
from .cache import take_update
from .passes import attend_alone
from .places import Places


@torch.compiler.disable
def attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any,
              dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
              softcap: float | None = None, s_aux: Any = None, **options: Any) -> tuple[Any, None]:
    """Attention of a layer over a `TesseraCache`, or within the input where there is no cache."""
    del options
    number = module.layer_idx
    updated = take_update(key, value)
    if dropout:
        raise Unsupported(f"layer {number} was called with dropout {dropout}; call model.eval()")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise Unsupported(
            f"layer {number} was called with an attention_mask of {attention_mask.ndim} "
            "dimensions; served are masks of padding, [batch, columns]"
        )
    shape = Layer(
        query.shape[1], key.shape[1], query.shape[3],
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window or 0, logit_softcap=softcap or 0.0,
        sinks=_sinks(module, s_aux),
    )
    if updated is not None:
        cache, layer = updated
        return cache.attend(layer, shape, query, key, value, attention_mask), None
    if key.shape[2] != query.shape[2]:
        raise InvalidArgument(
            f"layer {number} has another cache than a TesseraCache: pass tessera_kv.hf.cache(...), "
            "or use tessera_kv.hf.generate", "argument"
        )
    places = Places(query.shape[0], query.shape[2], attention_mask)
    return attend_alone(shape, places, query, key, value), None


def _sinks(module: Any, given: Any) -> tuple[float, ...]:
    """As numbers. They are read once: transformers passes the same parameter in every call."""
    if given is None:
        return ()
    known = getattr(module, "_tessera_sinks", None)
    if known is None or known[0] is not given or known[1] != given._version:
        known = module._tessera_sinks = (
            given, given._version, tuple(given.detach().float().tolist()))
    values: tuple[float, ...] = known[2]
    return values


def mask(*arguments: Any, **options: Any) -> Any:
    """The mask of padding, [batch, columns], or None without padding.

    The attention function knows causality and windows. Masks of other patterns raise Unsupported.
    """
    given = options.get("attention_mask")
    columns = options["kv_length"]
    _check_pattern(options)
    if given is None:
        return None
    given = given[:, -columns:].bool()
    return None if bool(given.all()) and given.shape[1] == columns else given


def _check_pattern(options: dict[str, Any]) -> None:
    """Looks at three rows of the pattern: text that is packed, or seen in both directions."""
    function = options.get("mask_function")
    positions = options.get("cache_position")  # before 5.x
    if positions is not None:
        first, count = int(positions[0]), len(positions)
    else:
        first, count = int(options.get("q_offset", 0)), int(options["q_length"])
    if function is None or count < 2:
        return
    zero = torch.zeros((), dtype=torch.long)
    keys = torch.arange(options["kv_length"])
    for query in sorted({0, count // 2, count - 1}):
        seen = function(zero, zero, torch.tensor(first + query), keys)
        if bool(seen[first + query + 1:].any()) or not bool(seen[first + query]):
            raise Unsupported(f"the mask lets token {first + query} see later ones")
        hidden = first + query + 1 - int(seen[: first + query + 1].sum())
        if bool(seen[:hidden].any()):
            raise Unsupported("the mask has gaps: sequences that are packed are not served")
        window = options.get("local_size") or getattr(options.get("config"), "sliding_window", None)
        if hidden and first + query + 1 - hidden != window:
            raise Unsupported(
                f"the mask hides the first {hidden} tokens from token {first + query}: sequences "
                "that are packed are not served"
            )
