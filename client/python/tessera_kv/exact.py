"""Attention within one piece of text, by torch: what is not in the cache yet."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from .model import Layer

_BLOCK = 256  # queries whose logits exist at a time


def causal(layer: Layer, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Causal attention of [batch, heads, tokens, dim], with the layer's window and soft cap but
    without its sinks. Returns [batch, heads, tokens, dim] and log-sum-exps [batch, heads, tokens].
    """
    tokens = query.shape[2]
    if not layer.logit_softcap and not 0 < layer.sliding_window < tokens:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, True, attn_mask=None, scale=layer.scale
        )
        return output, lse
    outputs, sums = [], []
    for begin in range(0, tokens, _BLOCK):
        end = min(begin + _BLOCK, tokens)
        first = max(0, begin - layer.sliding_window + 1) if layer.sliding_window else 0
        output, lse = _block(layer, query[:, :, begin:end], key[:, :, first:end],
                             value[:, :, first:end], begin - first)
        outputs.append(output)
        sums.append(lse)
    return torch.cat(outputs, 2).to(query.dtype), torch.cat(sums, 2)


def _block(layer: Layer, query: Any, key: Any, value: Any, before: int) -> tuple[Any, Any]:
    """Query i is at key `before` + i. Computed in float32."""
    batch, heads, queries, dim = query.shape
    keys = key.shape[2]
    grouped = query.float().reshape(batch, key.shape[1], -1, queries, dim)
    logits = grouped @ key.float()[:, :, None].transpose(-1, -2) * layer.scale
    if layer.logit_softcap:
        logits = torch.tanh(logits / layer.logit_softcap) * layer.logit_softcap
    distance = torch.arange(before, before + queries)[:, None] - torch.arange(keys)
    hidden = distance < 0
    if layer.sliding_window:
        hidden |= distance >= layer.sliding_window
    logits.masked_fill_(hidden, float("-inf"))
    lse = torch.logsumexp(logits, -1)
    output = torch.exp(logits - lse[..., None]) @ value.float()[:, :, None]
    return output.reshape(batch, heads, queries, dim), lse.reshape(batch, heads, queries)


def plain(layer: Layer, query: Any, key: Any, value: Any) -> Any:
    """As `causal`, with the layer's sinks. Returns [batch, tokens, heads, dim]."""
    tokens = query.shape[2]
    if not layer.logit_softcap and not layer.sinks and not 0 < layer.sliding_window < tokens:
        output = scaled_dot_product_attention(
            query, key, value, is_causal=tokens > 1, scale=layer.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2)
    output, lse = causal(layer, query, key, value)
    return with_sinks(layer, output.transpose(1, 2), lse.transpose(1, 2))


def with_sinks(layer: Layer, output: Any, lse: Any) -> Any:
    """Lets a logit per head, without a value, take its share. [..., tokens, heads, dim]."""
    if not layer.sinks:
        return output
    share = torch.sigmoid(lse - torch.tensor(layer.sinks))
    return (output.float() * share[..., None]).to(output.dtype)


def merge(output: Any, lse: Any, other: Any, other_lse: Any) -> Any:
    """Attention over two sets of keys from attention over each, [..., heads, dim]."""
    most = torch.maximum(lse, other_lse)
    weight, other_weight = torch.exp(lse - most), torch.exp(other_lse - most)
    total = weight + other_weight
    merged = (
        output.float() * (weight / total)[..., None]
        + other.float() * (other_weight / total)[..., None]
    )
    return merged.to(other.dtype)
