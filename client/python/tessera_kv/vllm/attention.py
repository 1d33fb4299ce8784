"""What vLLM calls for attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

from ..errors import Unsupported
from ..model import Layer
from . import versions
from .state import State

versions.check()


class TesseraBackend(AttentionBackend):
    """Attention whose keys and values are in Tessera's daemon."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"  # the member of vLLM's list that the plug-in replaces

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return TesseraImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return TesseraBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A block holds one element a token: vLLM's scheduler counts blocks, nobody fills them."""
        return replace(spec, num_head_slots=1, state_content_bytes=spec.dtype.itemsize)


@dataclass
class TesseraMetadata:
    """The rows of a batch: first block, first token, end, and tokens with the new ones."""

    rows: list[tuple[int, int, int, int]]


class TesseraBuilder(AttentionMetadataBuilder[TesseraMetadata]):
    """Makes the metadata of each forward."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any,
                 device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)  # rows that decode come first: a view serves them

    def build(self, common_prefix_len: int, common_attn_metadata: Any,
              fast_build: bool = False) -> TesseraMetadata:
        common = common_attn_metadata
        if common.causal is not True:
            raise Unsupported("attention in both directions is not served")
        count = common.num_reqs
        starts = common.query_start_loc_cpu[:count + 1].tolist()
        tokens = common.seq_lens[:count].tolist()
        blocks = common.block_table_tensor[:count, 0].tolist()
        return TesseraMetadata([
            row for row in zip(blocks, starts, starts[1:], tokens) if row[1] < row[2]])


class TesseraImpl(AttentionImpl):
    """Attention of one layer."""

    state: State  # both are set when the model is loaded
    number: int

    def __init__(self, num_heads: int, head_size: int, scale: float,
                 num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
                 sliding_window: int | None = None,
                 kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
                 attn_type: str = AttentionType.DECODER,
                 kv_sharing_target_layer_name: str | None = None, **others: Any) -> None:
        refused = {
            "attention of kind": None if attn_type == AttentionType.DECODER else attn_type,
            "ALiBi with slopes": alibi_slopes, "a sliding window of": sliding_window,
            "keys shared with layer": kv_sharing_target_layer_name,
            **{name: value for name, value in others.items() if value is not None},
        }
        for name, value in refused.items():
            if value is not None:
                raise Unsupported(f"the model has {name} {value}, which is not served yet")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window = None
        self.shape = Layer(num_heads, self.num_kv_heads, head_size, scale=self.scale,
                           logit_softcap=logits_soft_cap or 0.0)

    def forward(self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any,
                attn_metadata: TesseraMetadata | None, output: Any, output_scale: Any = None,
                output_block_scale: Any = None) -> Any:
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("quantized attention output is not served")
        if attn_metadata is None:  # vLLM tries the model's memory
            return output.zero_()
        self.state.attend(self.number, attn_metadata.rows, query, key, value, output)
        return output
