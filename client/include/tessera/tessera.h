/* The C interface of the Tessera client library. deploy/docs/api.md is the guide.
 *
 * Every call that can fail returns a tessera_code, TESSERA_OK on success, and fills `error` if it
 * is not NULL. Handles are opaque; a failed call does not change its output handle. Strings are
 * UTF-8 and NUL-terminated. NULL for an optional pointer means none. NULL for any other pointer
 * answers TESSERA_INVALID_ARGUMENT; calls without a tessera_code return 0 or "".
 *
 * Structs start with their own size, so programs built against an older header of the same ABI
 * version keep working. Initialize them with the *_INIT macros, then set the fields that differ.
 */
#ifndef TESSERA_CLIENT_TESSERA_H_
#define TESSERA_CLIENT_TESSERA_H_
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TESSERA_API __attribute__((visibility("default")))
#else
#define TESSERA_API
#endif

/* Changes only when programs built against an older header would break. */
#define TESSERA_ABI_VERSION 2
TESSERA_API uint32_t tessera_abi_version(void);
/* The release, "0.1.0". */
TESSERA_API const char* tessera_version(void);

/* The numbers are those of gRPC. */
typedef enum tessera_code {
  TESSERA_OK = 0,
  TESSERA_CANCELLED = 1,
  TESSERA_UNKNOWN = 2,
  TESSERA_INVALID_ARGUMENT = 3,
  TESSERA_DEADLINE_EXCEEDED = 4,
  TESSERA_NOT_FOUND = 5,
  TESSERA_ALREADY_EXISTS = 6,
  TESSERA_PERMISSION_DENIED = 7,
  TESSERA_RESOURCE_EXHAUSTED = 8,
  TESSERA_FAILED_PRECONDITION = 9,
  TESSERA_ABORTED = 10, /* a step: nothing was committed, repeat it */
  TESSERA_OUT_OF_RANGE = 11,
  TESSERA_UNIMPLEMENTED = 12,
  TESSERA_INTERNAL = 13,
  TESSERA_UNAVAILABLE = 14, /* the lease is lost: reattach */
  TESSERA_DATA_LOSS = 15,
  TESSERA_UNAUTHENTICATED = 16
} tessera_code;

/* Why a call failed. Never reuse a number. */
typedef enum tessera_cause {
  TESSERA_CAUSE_UNSPECIFIED = 0,
  TESSERA_CAUSE_POOL_FULL = 1,       /* the node's pool has no room */
  TESSERA_CAUSE_QUOTA = 2,           /* a limit of bytes, sessions, sequences, ... is reached */
  TESSERA_CAUSE_TAIL_RING_FULL = 3,  /* the daemon has not absorbed enough committed tokens */
  TESSERA_CAUSE_READER_SLOTS = 4,    /* too many steps of this session are in flight */
  TESSERA_CAUSE_HOST_MEMORY = 5,     /* the daemon's host memory has no room */
  TESSERA_CAUSE_SEQUENCE_FAILED = 6, /* the daemon has marked the sequence FAILED */
  TESSERA_CAUSE_SEQUENCE_BUSY = 7,   /* another call or step uses the sequence */
  TESSERA_CAUSE_LEASE_LOST = 8,      /* the session has ended: reattach */
  TESSERA_CAUSE_DRAINING = 9,        /* the daemon is shutting down */
  TESSERA_CAUSE_PIN_REVOKED = 10,    /* the step was aborted: begin it again */
  TESSERA_CAUSE_POLICY = 11,         /* the policy is wrong or does not fit the model */
  TESSERA_CAUSE_ARGUMENT = 12,       /* an argument is wrong */
  TESSERA_CAUSE_OVERLOADED = 13      /* the daemon runs too many calls */
} tessera_cause;

/* The error of one call, in the caller's memory. Longer messages are truncated; they always end
 * with NUL. The size of the struct never changes. */
typedef struct tessera_error {
  tessera_code code;
  char message[1012];
  uint32_t cause;          /* a tessera_cause */
  uint32_t retry_after_ms; /* 0: unknown, or a retry will not help */
} tessera_error;

typedef enum tessera_type { TESSERA_BF16 = 1, TESSERA_FP16 = 2, TESSERA_FP32 = 3 } tessera_type;

typedef struct tessera_worker tessera_worker;
typedef struct tessera_model tessera_model;
typedef struct tessera_sequence tessera_sequence;
typedef struct tessera_step tessera_step;
typedef struct tessera_read tessera_read;
typedef struct tessera_executor tessera_executor;

/* Where rows lie: bytes from one layer, token or head to the next. The elements of a row follow
 * each other. 0: dense. Sizes in bytes always count the rows themselves, without gaps. Rows with
 * strides are copied together in host memory; device memory with strides answers UNIMPLEMENTED.
 * The size of the struct never changes. */
typedef struct tessera_strides {
  int64_t layer; /* tessera_append alone */
  int64_t token;
  int64_t head;
} tessera_strides;

/* Answers of the daemon as JSON, in the shapes of `tessera --json`. Free it with
 * tessera_free_text. */
typedef char* tessera_text;
TESSERA_API void tessera_free_text(tessera_text text);

/* ---- worker ------------------------------------------------------------------------------- */

typedef struct tessera_attach_options {
  size_t struct_size;
  const char* address;      /* "unix:PATH", "unix:DIRECTORY/", "HOST:PORT"; NULL: the default */
  const char* tenant_token; /* NULL: the tenant configured without one */
  const char* worker_name;  /* for people */
  const char* group;        /* tensor-parallel group */
  uint32_t rank;
  uint32_t group_size;
  int32_t map_memory;         /* 0: use RPC for everything */
  int32_t reattach_automatic; /* 1: reattach automatically when the lease is lost */
  uint64_t attach_timeout_ms;
  uint64_t rpc_timeout_ms;
  uint64_t reattach_timeout_ms;
  /* TLS over TCP: 1 enables it, and so does any of the following. PEM files. */
  int32_t tls;
  const char* tls_ca_file;          /* issuer of the daemon's certificate; NULL: the system's */
  const char* tls_certificate_file; /* this worker's, if the daemon requires one */
  const char* tls_key_file;         /* the private key of that certificate */
  const char* tls_server_name;      /* in the daemon's certificate; NULL: the address's host */
  /* Called with a warning about a call that succeeded but probably did not do what was meant, once
   * per sequence, on the thread of that call: make no call of the sequence. NULL: one line to
   * stderr, at most one a minute. */
  void (*on_warning)(const char* warning, void* context);
  void* warning_context;
  /* The device whose daemon to use: a UUID ("GPU-...", "MIG-...", "CPU-...") or its beginning, or
   * "cuda:N" as this process numbers devices. NULL: in a directory, the current CUDA device of the
   * calling thread; without a GPU, the only daemon. */
  const char* device;
  const char* implementation; /* of the attention kernels: "avx2", ...; NULL: the fastest here */
  const char* prefix_hash;    /* which the daemon must use, "xxh3-128/32"; NULL: any */
  /* Sets this worker's prefixes apart from those of workers with another salt; at most 64 bytes. */
  const void* cache_salt;
  size_t cache_salt_bytes;
  /* How long a step may take while memory of the tenant waits to be freed, 10 to 600000; a longer
   * one may answer TESSERA_ABORTED. 0: the daemon's choice; see tessera_welcome_json. */
  uint32_t pin_limit_ms;
} tessera_attach_options;
#define TESSERA_ATTACH_OPTIONS_INIT                                                             \
  {                                                                                             \
    sizeof(tessera_attach_options), NULL, NULL, NULL, NULL, 0, 0, 1, 0, 10000, 60000, 60000, 0, \
        NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, 0                        \
  }

TESSERA_API tessera_code tessera_attach(const tessera_attach_options* options,
                                        tessera_worker** worker, tessera_error* error);
/* Frees the worker's sequences in the daemon. Remaining handles answer UNAVAILABLE and must still
 * be destroyed. NULL is allowed, as in every *_destroy. */
TESSERA_API void tessera_detach(tessera_worker* worker);
/* TESSERA_OK while attached; else TESSERA_UNAVAILABLE with the reason. */
TESSERA_API tessera_code tessera_status(const tessera_worker* worker, tessera_error* error);
/* Attaches again after the lease was lost. `gone` (optional) receives the number of lost sequences,
 * whose handles answer TESSERA_NOT_FOUND. */
TESSERA_API tessera_code tessera_reattach(tessera_worker* worker, size_t* gone,
                                          tessera_error* error);
TESSERA_API int tessera_is_mapped(const tessera_worker* worker);
TESSERA_API int tessera_is_draining(const tessera_worker* worker);
TESSERA_API uint64_t tessera_session_id(const tessera_worker* worker);
/* The daemon, its pool and the worker's tenant; and how the daemon introduced itself. */
TESSERA_API tessera_code tessera_stats_json(tessera_worker* worker, tessera_text* json,
                                            tessera_error* error);
TESSERA_API tessera_code tessera_welcome_json(const tessera_worker* worker, tessera_text* json,
                                              tessera_error* error);

typedef enum tessera_event_kind {
  TESSERA_EVENT_NONE = 0,       /* no event waits */
  TESSERA_EVENT_DRAINING = 1,   /* the daemon will exit within limit_ms */
  TESSERA_EVENT_LEASE_LOST = 2, /* text: why */
  TESSERA_EVENT_REATTACHED = 3, /* same_daemon */
  TESSERA_EVENT_GONE = 4,       /* sequence_id did not survive; follows REATTACHED */
  TESSERA_EVENT_OVERFLOW = 5    /* more than 1024 waited: older ones were discarded */
} tessera_event_kind;

typedef struct tessera_event {
  size_t struct_size; /* set by the caller */
  uint32_t kind;      /* a tessera_event_kind */
  int32_t same_daemon;
  uint64_t limit_ms;
  uint64_t sequence_id;
  char text[488];
} tessera_event;
#define TESSERA_EVENT_INIT \
  { sizeof(tessera_event), 0, 0, 0, 0, "" }

/* A descriptor that is readable while events wait. It belongs to the worker: poll it, but neither
 * read nor close it. -1 for NULL. */
TESSERA_API int tessera_events_fd(const tessera_worker* worker);
/* Takes the oldest event; TESSERA_EVENT_NONE if none waits. Never blocks. */
TESSERA_API tessera_code tessera_next_event(tessera_worker* worker, tessera_event* event,
                                            tessera_error* error);

/* ---- models ------------------------------------------------------------------------------- */

/* All layers of an array have the same struct_size. */
typedef struct tessera_layer {
  size_t struct_size;
  uint32_t query_heads; /* a multiple of kv_heads */
  uint32_t kv_heads;
  uint32_t head_dim;       /* 64, 128 or 256 */
  float scale;             /* 0: 1 / sqrt(head_dim) */
  uint32_t sliding_window; /* 0: none */
  float logit_softcap;     /* 0: none */
  const float* sinks;      /* one per query head, or NULL */
  int32_t has_rope;        /* 1: the following fields describe this layer; 0: it has the model's */
  int32_t rope_interleaved;
  double rope_theta;
  const double* rope_frequencies;
  size_t rope_frequency_count;
} tessera_layer;
#define TESSERA_LAYER_INIT \
  { sizeof(tessera_layer), 0, 0, 0, 0, 0, 0, NULL, 0, 0, 0, NULL, 0 }

typedef struct tessera_model_options {
  size_t struct_size;
  const char* name;
  tessera_type type; /* of K, V and Q */
  const tessera_layer* layers;
  size_t layer_count;
  double rope_theta; /* 0: no rotary positions */
  int32_t rope_interleaved;
  /* The model's inverse frequencies, at most head_dim / 2; NULL: computed from rope_theta. */
  const double* rope_frequencies;
  size_t rope_frequency_count;
  /* The tokens that end a chunk of text, for policies that split text into chunks; or NULL. */
  const uint32_t* delimiter_token_ids;
  size_t delimiter_count;
  /* A hash or a revision of the weights, and of an adapter (LoRA) on them; at most 64 bytes each.
   * Prefixes of other weights are never found, even under the same name. NULL: unknown. */
  const void* weights_id;
  size_t weights_id_bytes;
  const void* adapter_id;
  size_t adapter_id_bytes;
} tessera_model_options;
#define TESSERA_MODEL_OPTIONS_INIT                                                               \
  {                                                                                              \
    sizeof(tessera_model_options), NULL, TESSERA_BF16, NULL, 0, 0, 0, NULL, 0, NULL, 0, NULL, 0, \
        NULL, 0                                                                                  \
  }

/* Counts the tokens whose texts consist only of . , ? ! ; : and white space. texts[i] is the text
 * of token i. Their ids are written to `ids`, ascending, unless it is NULL. */
TESSERA_API size_t tessera_delimiters(const char* const* texts, size_t count, uint32_t* ids);

TESSERA_API tessera_code tessera_register_model(tessera_worker* worker,
                                                const tessera_model_options* options,
                                                tessera_model** model, tessera_error* error);
TESSERA_API void tessera_model_destroy(tessera_model* model);

/* ---- sequences ---------------------------------------------------------------------------- */

/* `policy`: NULL (dense) or the text of a policy. */
TESSERA_API tessera_code tessera_sequence_create(tessera_worker* worker, const tessera_model* model,
                                                 const char* policy, tessera_sequence** sequence,
                                                 tessera_error* error);
/* The handle of a sequence that another session has handed over to this one. */
TESSERA_API tessera_code tessera_sequence_adopt(tessera_worker* worker, const tessera_model* model,
                                                uint64_t sequence_id, tessera_sequence** sequence,
                                                tessera_error* error);
/* Frees the sequence in the daemon, unless it was handed over, and the handle. */
TESSERA_API void tessera_sequence_destroy(tessera_sequence* sequence);
TESSERA_API uint64_t tessera_sequence_id(const tessera_sequence* sequence);
TESSERA_API uint64_t tessera_sequence_tokens(const tessera_sequence* sequence);
/* The rotary position of the next token's query and key: its number, unless the policy moves
 * positions. Constant within a step. */
TESSERA_API uint64_t tessera_sequence_next_position(const tessera_sequence* sequence);
/* Valid as long as the handle. */
TESSERA_API const char* tessera_sequence_policy(const tessera_sequence* sequence);

typedef struct tessera_append {
  size_t struct_size;
  const void* key; /* [layers][tokens][kv_heads][head_dim], the model's type */
  const void* value;
  size_t bytes; /* of each */
  uint64_t tokens;
  uint32_t first_layer;
  uint32_t layers;       /* 0: all from first_layer on */
  int32_t end_of_prompt; /* of these layers; tessera_sequence_end_prompt: all */
  tessera_strides key_strides;
  tessera_strides value_strides;
} tessera_append;
#define TESSERA_APPEND_INIT                                                   \
  {                                                                           \
    sizeof(tessera_append), NULL, NULL, 0, 0, 0, 0, 0, {0, 0, 0}, { 0, 0, 0 } \
  }

/* Appends in bulk. `tokens` (optional) receives the tokens that every layer holds afterwards. */
TESSERA_API tessera_code tessera_sequence_append(tessera_sequence* sequence,
                                                 const tessera_append* append, uint64_t* tokens,
                                                 tessera_error* error);
TESSERA_API tessera_code tessera_sequence_fork(tessera_sequence* sequence, tessera_sequence** child,
                                               tessera_error* error);
/* With another policy; NULL: dense. */
TESSERA_API tessera_code tessera_sequence_fork_as(tessera_sequence* sequence, const char* policy,
                                                  tessera_sequence** child, tessera_error* error);
TESSERA_API tessera_code tessera_sequence_truncate(tessera_sequence* sequence, uint64_t tokens,
                                                   tessera_error* error);
TESSERA_API tessera_code tessera_sequence_park(tessera_sequence* sequence, tessera_error* error);
TESSERA_API tessera_code tessera_sequence_handover(tessera_sequence* sequence,
                                                   uint64_t to_session_id, tessera_error* error);

/* Moves the memory that only this sequence holds to the daemon's host tier; any call that needs it
 * restores it. `moved_bytes` (optional) receives the bytes of the pool that this frees. */
TESSERA_API tessera_code tessera_sequence_offload(tessera_sequence* sequence, uint64_t* moved_bytes,
                                                  tessera_error* error);
/* Restores it ahead of time. */
TESSERA_API tessera_code tessera_sequence_restore(tessera_sequence* sequence, tessera_error* error);

typedef struct tessera_sequence_info {
  size_t struct_size; /* set by the caller */
  uint64_t tokens;
  uint64_t tile_bytes;
  uint64_t shared_tile_bytes;
  int32_t decoding;
  int32_t failed;
  uint64_t rotation_bytes;
  uint64_t offloaded_bytes;
} tessera_sequence_info;
TESSERA_API tessera_code tessera_sequence_describe(const tessera_sequence* sequence,
                                                   tessera_sequence_info* info,
                                                   tessera_error* error);
typedef enum tessera_detail {
  TESSERA_DETAIL_SEQUENCE = 0,
  TESSERA_DETAIL_LANES = 1,  /* also every lane */
  TESSERA_DETAIL_ENTRIES = 2 /* also the position of every entry of every lane */
} tessera_detail;
TESSERA_API tessera_code tessera_sequence_describe_json(const tessera_sequence* sequence,
                                                        tessera_detail detail, tessera_text* json,
                                                        tessera_error* error);

/* ---- compression -------------------------------------------------------------------------- */

/* What the sequence's policy must observe of a prompt before it compresses it. */
typedef struct tessera_needs {
  size_t struct_size;     /* set by the caller */
  int32_t queries;        /* 1: the queries of its tokens: tessera_sequence_observe */
  int32_t keys;           /* 1: also their keys */
  int32_t token_ids;      /* 1: their ids: tessera_sequence_observe_tokens */
  int32_t while_decoding; /* 1: the policy also acts while decoding, in tessera_step_begin */
} tessera_needs;
TESSERA_API tessera_code tessera_sequence_needs(const tessera_sequence* sequence,
                                                tessera_needs* needs, tessera_error* error);

/* Rows of consecutive tokens of one layer, in host memory, rotated as keys are stored. */
typedef struct tessera_observation {
  size_t struct_size;
  uint32_t layer;
  uint64_t first_token;
  const void* query; /* [tokens][query_heads][head_dim], the model's type */
  size_t query_bytes;
  const void* key; /* [tokens][kv_heads][head_dim]; NULL unless needs.keys */
  size_t key_bytes;
  uint64_t prompt_tokens; /* how long the prompt will be; 0: unknown */
  tessera_strides query_strides;
  tessera_strides key_strides;
} tessera_observation;
#define TESSERA_OBSERVATION_INIT                                                   \
  {                                                                                \
    sizeof(tessera_observation), 0, 0, NULL, 0, NULL, 0, 0, {0, 0, 0}, { 0, 0, 0 } \
  }

/* Keeps what the policy needs of these rows in this process until the sequence is compressed. Call
 * it before the append that ends the prompt, layer by layer, in the order of tokens. */
TESSERA_API tessera_code tessera_sequence_observe(tessera_sequence* sequence,
                                                  const tessera_observation* observation,
                                                  tessera_error* error);
TESSERA_API tessera_code tessera_sequence_observe_tokens(tessera_sequence* sequence,
                                                         uint64_t first_token, const uint32_t* ids,
                                                         size_t count, tessera_error* error);
/* Has the daemon compress the sequence as its policy says, as at the end of a prompt, and waits
 * until it has finished. */
TESSERA_API tessera_code tessera_sequence_compress(tessera_sequence* sequence,
                                                   tessera_error* error);
/* Ends the prompt in every layer: the daemon compresses it in the background. Does not wait. The
 * same as an append with end_of_prompt for all layers, without rows. */
TESSERA_API tessera_code tessera_sequence_end_prompt(tessera_sequence* sequence,
                                                     tessera_error* error);

/* ---- published prefixes ------------------------------------------------------------------- */

typedef struct tessera_publish_options {
  size_t struct_size;
  uint64_t ttl_ms; /* how long it may be unused; 0: no limit */
  int32_t pinned;  /* 1: kept until it is freed by id */
} tessera_publish_options;
#define TESSERA_PUBLISH_OPTIONS_INIT \
  { sizeof(tessera_publish_options), 0, 0 }

/* Publishes the first `count` tokens, which have these ids: all tokens, unless the policy keeps
 * every token. `prefix_id` and `deduplicated` are optional. */
TESSERA_API tessera_code tessera_sequence_publish(tessera_sequence* sequence,
                                                  const uint32_t* token_ids, size_t count,
                                                  const tessera_publish_options* options,
                                                  uint64_t* prefix_id, int* deduplicated,
                                                  tessera_error* error);

typedef struct tessera_match_options {
  size_t struct_size;
  const char* policy; /* as tessera_sequence_create takes it */
  const uint32_t* token_ids;
  size_t token_count;
  uint64_t wait_ms;     /* how long to wait for another worker's computation */
  int32_t will_compute; /* 1: this worker computes the missing tokens and publishes them */
} tessera_match_options;
#define TESSERA_MATCH_OPTIONS_INIT \
  { sizeof(tessera_match_options), NULL, NULL, 0, 0, 0 }

typedef struct tessera_prefix_match {
  size_t struct_size; /* set by the caller */
  uint64_t prefix_id; /* 0: nothing is published */
  uint64_t tokens;
  uint64_t computing_tokens;
  uint64_t computation_id; /* 0: none; see tessera_free_id */
} tessera_prefix_match;
#define TESSERA_PREFIX_MATCH_INIT \
  { sizeof(tessera_prefix_match), 0, 0, 0, 0 }

TESSERA_API tessera_code tessera_match(tessera_worker* worker, const tessera_model* model,
                                       const tessera_match_options* options,
                                       tessera_prefix_match* match, tessera_error* error);
/* Creates a sequence that begins with the first `tokens` matched tokens; 0: all of them. */
TESSERA_API tessera_code tessera_fork_prefix(tessera_worker* worker, const tessera_model* model,
                                             const tessera_prefix_match* match, uint64_t tokens,
                                             tessera_sequence** sequence, tessera_error* error);
/* Removes a prefix from the index, or withdraws an announced computation. */
TESSERA_API tessera_code tessera_free_id(tessera_worker* worker, uint64_t id, tessera_error* error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#include "tessera/tessera_decode.h"

#endif /* TESSERA_CLIENT_TESSERA_H_ */
