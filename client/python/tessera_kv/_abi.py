"""The C interface for ctypes. tools/make_abi.py writes it; do not edit."""

from ctypes import (
    Structure,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

ABI_VERSION = 2

# tessera_code
TESSERA_OK = 0
TESSERA_CANCELLED = 1
TESSERA_UNKNOWN = 2
TESSERA_INVALID_ARGUMENT = 3
TESSERA_DEADLINE_EXCEEDED = 4
TESSERA_NOT_FOUND = 5
TESSERA_ALREADY_EXISTS = 6
TESSERA_PERMISSION_DENIED = 7
TESSERA_RESOURCE_EXHAUSTED = 8
TESSERA_FAILED_PRECONDITION = 9
TESSERA_ABORTED = 10
TESSERA_OUT_OF_RANGE = 11
TESSERA_UNIMPLEMENTED = 12
TESSERA_INTERNAL = 13
TESSERA_UNAVAILABLE = 14
TESSERA_DATA_LOSS = 15
TESSERA_UNAUTHENTICATED = 16

# tessera_cause
TESSERA_CAUSE_UNSPECIFIED = 0
TESSERA_CAUSE_POOL_FULL = 1
TESSERA_CAUSE_QUOTA = 2
TESSERA_CAUSE_TAIL_RING_FULL = 3
TESSERA_CAUSE_READER_SLOTS = 4
TESSERA_CAUSE_HOST_MEMORY = 5
TESSERA_CAUSE_SEQUENCE_FAILED = 6
TESSERA_CAUSE_SEQUENCE_BUSY = 7
TESSERA_CAUSE_LEASE_LOST = 8
TESSERA_CAUSE_DRAINING = 9
TESSERA_CAUSE_PIN_REVOKED = 10
TESSERA_CAUSE_POLICY = 11
TESSERA_CAUSE_ARGUMENT = 12
TESSERA_CAUSE_OVERLOADED = 13

# tessera_type
TESSERA_BF16 = 1
TESSERA_FP16 = 2
TESSERA_FP32 = 3

# tessera_event_kind
TESSERA_EVENT_NONE = 0
TESSERA_EVENT_DRAINING = 1
TESSERA_EVENT_LEASE_LOST = 2
TESSERA_EVENT_REATTACHED = 3
TESSERA_EVENT_GONE = 4
TESSERA_EVENT_OVERFLOW = 5

# tessera_detail
TESSERA_DETAIL_SEQUENCE = 0
TESSERA_DETAIL_LANES = 1
TESSERA_DETAIL_ENTRIES = 2


class tessera_error(Structure):
    _fields_ = [
        ("code", c_int),
        ("message", c_char * 1012),
        ("cause", c_uint32),
        ("retry_after_ms", c_uint32),
    ]


class tessera_strides(Structure):
    _fields_ = [
        ("layer", c_int64),
        ("token", c_int64),
        ("head", c_int64),
    ]


class tessera_attach_options(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("address", c_char_p),
        ("tenant_token", c_char_p),
        ("worker_name", c_char_p),
        ("group", c_char_p),
        ("rank", c_uint32),
        ("group_size", c_uint32),
        ("map_memory", c_int32),
        ("reattach_automatic", c_int32),
        ("attach_timeout_ms", c_uint64),
        ("rpc_timeout_ms", c_uint64),
        ("reattach_timeout_ms", c_uint64),
        ("tls", c_int32),
        ("tls_ca_file", c_char_p),
        ("tls_certificate_file", c_char_p),
        ("tls_key_file", c_char_p),
        ("tls_server_name", c_char_p),
        ("on_warning", c_void_p),
        ("warning_context", c_void_p),
        ("device", c_char_p),
        ("implementation", c_char_p),
        ("prefix_hash", c_char_p),
        ("cache_salt", c_void_p),
        ("cache_salt_bytes", c_size_t),
        ("pin_limit_ms", c_uint32),
    ]


class tessera_event(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_uint32),
        ("same_daemon", c_int32),
        ("limit_ms", c_uint64),
        ("sequence_id", c_uint64),
        ("text", c_char * 488),
    ]


class tessera_layer(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("query_heads", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("scale", c_float),
        ("sliding_window", c_uint32),
        ("logit_softcap", c_float),
        ("sinks", c_void_p),
        ("has_rope", c_int32),
        ("rope_interleaved", c_int32),
        ("rope_theta", c_double),
        ("rope_frequencies", c_void_p),
        ("rope_frequency_count", c_size_t),
    ]


class tessera_model_options(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char_p),
        ("type", c_int),
        ("layers", c_void_p),
        ("layer_count", c_size_t),
        ("rope_theta", c_double),
        ("rope_interleaved", c_int32),
        ("rope_frequencies", c_void_p),
        ("rope_frequency_count", c_size_t),
        ("delimiter_token_ids", c_void_p),
        ("delimiter_count", c_size_t),
        ("weights_id", c_void_p),
        ("weights_id_bytes", c_size_t),
        ("adapter_id", c_void_p),
        ("adapter_id_bytes", c_size_t),
    ]


class tessera_append(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("key", c_void_p),
        ("value", c_void_p),
        ("bytes", c_size_t),
        ("tokens", c_uint64),
        ("first_layer", c_uint32),
        ("layers", c_uint32),
        ("end_of_prompt", c_int32),
        ("key_strides", tessera_strides),
        ("value_strides", tessera_strides),
    ]


class tessera_sequence_info(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("tokens", c_uint64),
        ("tile_bytes", c_uint64),
        ("shared_tile_bytes", c_uint64),
        ("decoding", c_int32),
        ("failed", c_int32),
        ("rotation_bytes", c_uint64),
        ("offloaded_bytes", c_uint64),
    ]


class tessera_needs(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("queries", c_int32),
        ("keys", c_int32),
        ("token_ids", c_int32),
        ("while_decoding", c_int32),
    ]


class tessera_observation(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("layer", c_uint32),
        ("first_token", c_uint64),
        ("query", c_void_p),
        ("query_bytes", c_size_t),
        ("key", c_void_p),
        ("key_bytes", c_size_t),
        ("prompt_tokens", c_uint64),
        ("query_strides", tessera_strides),
        ("key_strides", tessera_strides),
    ]


class tessera_publish_options(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("ttl_ms", c_uint64),
        ("pinned", c_int32),
    ]


class tessera_match_options(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("policy", c_char_p),
        ("token_ids", c_void_p),
        ("token_count", c_size_t),
        ("wait_ms", c_uint64),
        ("will_compute", c_int32),
    ]


class tessera_prefix_match(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("prefix_id", c_uint64),
        ("tokens", c_uint64),
        ("computing_tokens", c_uint64),
        ("computation_id", c_uint64),
    ]


class tessera_selection(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("rate", c_double),
        ("entries", c_uint64),
        ("floor", c_uint64),
        ("by_logit", c_int32),
        ("first_block", c_int32),
        ("counts_tail", c_int32),
        ("each_head", c_int32),
    ]


class tessera_step_options(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("new_tokens", c_uint32),
        ("new_tokens_each", c_void_p),
        ("timeout_ms", c_uint64),
        ("parallel_for", c_void_p),
        ("parallel_context", c_void_p),
        ("cuda_stream", c_void_p),
    ]


class tessera_step_tensors(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("key", c_void_p),
        ("value", c_void_p),
        ("key_bytes", c_size_t),
        ("query", c_void_p),
        ("query_bytes", c_size_t),
        ("output", c_void_p),
        ("output_bytes", c_size_t),
        ("lse", c_void_p),
        ("lse_count", c_size_t),
        ("output_type", c_int),
        ("causal", c_int32),
        ("selection", c_void_p),
        ("key_strides", tessera_strides),
        ("value_strides", tessera_strides),
        ("query_strides", tessera_strides),
        ("output_strides", tessera_strides),
    ]


class tessera_read_options(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("timeout_ms", c_uint64),
        ("parallel_for", c_void_p),
        ("parallel_context", c_void_p),
        ("cuda_stream", c_void_p),
    ]


class tessera_read_tensors(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("queries", c_uint32),
        ("queries_each", c_void_p),
        ("first_query_positions", c_void_p),
        ("query", c_void_p),
        ("query_bytes", c_size_t),
        ("output", c_void_p),
        ("output_bytes", c_size_t),
        ("lse", c_void_p),
        ("lse_count", c_size_t),
        ("output_type", c_int),
        ("causal", c_int32),
        ("selection", c_void_p),
        ("query_strides", tessera_strides),
        ("output_strides", tessera_strides),
    ]


class tessera_lane_rows(Structure):
    """Begins with its own size; the other fields are zero."""

    _fields_ = [
        ("struct_size", c_size_t),
        ("layer", c_uint32),
        ("kv_head", c_uint32),
        ("first_entry", c_uint64),
        ("entries", c_uint64),
        ("type", c_int),
        ("key", c_void_p),
        ("value", c_void_p),
        ("position", c_void_p),
        ("weight", c_void_p),
        ("lane_entries", c_uint64),
        ("tokens", c_uint64),
    ]


# Function -> (result, arguments).
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "tessera_abi_version": (c_uint32, []),
    "tessera_version": (c_char_p, []),
    "tessera_free_text": (None, [c_void_p]),
    "tessera_attach": (c_int, [c_void_p, c_void_p, c_void_p]),
    "tessera_detach": (None, [c_void_p]),
    "tessera_status": (c_int, [c_void_p, c_void_p]),
    "tessera_reattach": (c_int, [c_void_p, c_void_p, c_void_p]),
    "tessera_is_mapped": (c_int, [c_void_p]),
    "tessera_is_draining": (c_int, [c_void_p]),
    "tessera_session_id": (c_uint64, [c_void_p]),
    "tessera_stats_json": (c_int, [c_void_p, c_void_p, c_void_p]),
    "tessera_welcome_json": (c_int, [c_void_p, c_void_p, c_void_p]),
    "tessera_events_fd": (c_int, [c_void_p]),
    "tessera_next_event": (c_int, [c_void_p, c_void_p, c_void_p]),
    "tessera_delimiters": (c_size_t, [c_void_p, c_size_t, c_void_p]),
    "tessera_register_model": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "tessera_model_destroy": (None, [c_void_p]),
    "tessera_sequence_create": (c_int, [c_void_p, c_void_p, c_char_p, c_void_p, c_void_p]),
    "tessera_sequence_adopt": (c_int, [c_void_p, c_void_p, c_uint64, c_void_p, c_void_p]),
    "tessera_sequence_destroy": (None, [c_void_p]),
    "tessera_sequence_id": (c_uint64, [c_void_p]),
    "tessera_sequence_tokens": (c_uint64, [c_void_p]),
    "tessera_sequence_next_position": (c_uint64, [c_void_p]),
    "tessera_sequence_policy": (c_char_p, [c_void_p]),
    "tessera_sequence_append": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p]),
    "tessera_sequence_fork": (c_int, [c_void_p, c_void_p, c_void_p]),
    "tessera_sequence_fork_as": (c_int, [c_void_p, c_char_p, c_void_p, c_void_p]),
    "tessera_sequence_truncate": (c_int, [c_void_p, c_uint64, c_void_p]),
    "tessera_sequence_park": (c_int, [c_void_p, c_void_p]),
    "tessera_sequence_handover": (c_int, [c_void_p, c_uint64, c_void_p]),
    "tessera_sequence_offload": (c_int, [c_void_p, c_void_p, c_void_p]),
    "tessera_sequence_restore": (c_int, [c_void_p, c_void_p]),
    "tessera_sequence_describe": (c_int, [c_void_p, c_void_p, c_void_p]),
    "tessera_sequence_describe_json": (c_int, [c_void_p, c_int, c_void_p, c_void_p]),
    "tessera_sequence_needs": (c_int, [c_void_p, c_void_p, c_void_p]),
    "tessera_sequence_observe": (c_int, [c_void_p, c_void_p, c_void_p]),
    "tessera_sequence_observe_tokens": (c_int, [c_void_p, c_uint64, c_void_p, c_size_t, c_void_p]),
    "tessera_sequence_compress": (c_int, [c_void_p, c_void_p]),
    "tessera_sequence_end_prompt": (c_int, [c_void_p, c_void_p]),
    "tessera_sequence_publish": (
        c_int,
        [c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "tessera_match": (c_int, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "tessera_fork_prefix": (c_int, [c_void_p, c_void_p, c_void_p, c_uint64, c_void_p, c_void_p]),
    "tessera_free_id": (c_int, [c_void_p, c_uint64, c_void_p]),
    "tessera_executor_create": (c_int, [c_uint32, c_void_p, c_void_p]),
    "tessera_executor_destroy": (None, [c_void_p]),
    "tessera_executor_run": (None, [c_void_p, c_uint32, c_void_p, c_void_p]),
    "tessera_step_begin": (c_int, [c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p]),
    "tessera_step_append": (c_int, [c_void_p, c_uint32, c_void_p, c_void_p]),
    "tessera_step_attend": (c_int, [c_void_p, c_uint32, c_void_p, c_void_p]),
    "tessera_step_append_and_attend": (c_int, [c_void_p, c_uint32, c_void_p, c_void_p]),
    "tessera_step_end": (c_int, [c_void_p, c_void_p, c_size_t, c_void_p]),
    "tessera_step_destroy": (None, [c_void_p]),
    "tessera_read_begin": (c_int, [c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_void_p]),
    "tessera_read_attend": (c_int, [c_void_p, c_uint32, c_void_p, c_void_p]),
    "tessera_read_end": (c_int, [c_void_p, c_void_p]),
    "tessera_read_destroy": (None, [c_void_p]),
    "tessera_attend_rpc": (c_int, [c_void_p, c_void_p, c_size_t, c_uint32, c_void_p, c_void_p]),
    "tessera_select_json": (c_int, [c_void_p, c_void_p, c_uint32, c_void_p, c_void_p, c_void_p]),
    "tessera_sequence_read": (c_int, [c_void_p, c_void_p, c_void_p]),
}
