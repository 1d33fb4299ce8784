"""Tessera's cache for Hugging Face transformers.

    import tessera_kv.hf as thf

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tessera")
    with thf.cache(model, "unix:/run/tessera/tesserad.sock", policy="planes") as cache:
        output = thf.generate(model, cache, **tokens, max_new_tokens=64)
        print(cache.report())

Importing it registers the attention implementation "tessera".
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..worker import Worker, attach
from . import attention as _attention
from . import versions
from .cache import TesseraCache, TesseraLayer
from .geometry import NAME, Geometry, geometry
from .passes import Setting
from .report import Report, RowReport

__all__ = ["Geometry", "Report", "RowReport", "TesseraCache", "TesseraLayer", "cache", "generate",
           "geometry", "prefill"]

versions.check()
AttentionInterface.register(NAME, _attention.attention)
AttentionMaskInterface.register(NAME, _attention.mask)


def cache(
    model: Any,
    address: str = "",
    *,
    policy: str = "",
    worker: Worker | None = None,
    threads: int | None = None,
    timeout: float = 10.0,
    background: bool = False,
    delimiters: Iterable[int] = (),
) -> TesseraCache:
    """A cache for one batch of this model. Unsupported names what the daemon cannot serve.

    `address` of the daemon, or a `worker` that is attached already. `policy`: of every row.
    `threads` compute attention, by default as many as torch has. `timeout`: seconds to wait for
    room in the tail rings. `background`: do not wait until a prompt is compressed. `delimiters`:
    ids of tokens that end a chunk of text, for policies that need them.
    """
    found = geometry(model)
    own = worker is None
    if worker is None:
        worker = attach(address, name="transformers",
                        threads=torch.get_num_threads() if threads is None else threads)
    try:
        registered = worker.model(
            found.name, layers=found.layers, dtype=found.dtype, rope_theta=found.rope_theta,
            rope_frequencies=found.rope_frequencies, delimiters=delimiters,
        )
        made = TesseraCache(Setting(worker, registered, timeout, background), found, policy,
                            worker.close if own else lambda: None)
    except BaseException:
        if own:
            worker.close()
        raise
    _repeat_aborted(model)
    return made


def generate(model: Any, cache: TesseraCache, *arguments: Any, **options: Any) -> Any:
    """`model.generate` with this cache. `input_ids` is all of the text, also in a later turn:
    transformers skips what the cache holds."""
    options[versions.cache_name(model)] = cache
    return model.generate(*arguments, **options)


def prefill(model: Any, cache: TesseraCache, input_ids: Any, **options: Any) -> Any:
    """Computes what the cache does not hold of `input_ids`, for instance to publish it.

    Returns the model's output, with the logits of the last column.
    """
    options[versions.cache_name(model)] = cache
    with torch.no_grad():
        return model(input_ids[:, cache.columns:], use_cache=True, logits_to_keep=1, **options)


def _repeat_aborted(model: Any) -> None:
    """Has the model's forward repeated where the daemon aborts a step of a `TesseraCache`."""
    forward = model.forward
    if getattr(forward, "_repeats_for_tessera", False):
        return

    @functools.wraps(forward)
    def repeating(*arguments: Any, **options: Any) -> Any:
        for given in (*arguments, options.get("past_key_values"), options.get("cache")):
            if isinstance(given, TesseraCache):
                return given.run(forward, arguments, options)
        return forward(*arguments, **options)

    repeating._repeats_for_tessera = True  # type: ignore[attr-defined]
    model.forward = repeating
