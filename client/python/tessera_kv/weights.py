"""Which weights a torch model has."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def fingerprint(model: Any) -> str:
    """A hash of the weights. Workers share prefixes by it, so it must differ for models that
    compute different keys: it covers a sum over all bits of each weight, and a sample of them."""
    state = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size())
        total = flat.view(integers).sum(dtype=torch.int64).item() if integers else flat.sum().item()
        sample = flat[:: max(1, flat.numel() // 64)].contiguous()
        state.update(f"{name} {tuple(weight.shape)} {weight.dtype} {total} ".encode())
        state.update(sample.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]
