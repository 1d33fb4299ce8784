/* The C interface, continued: decode steps, and attention over committed tokens. Include
 * tessera/tessera.h.
 */
#ifndef TESSERA_CLIENT_TESSERA_DECODE_H_
#define TESSERA_CLIENT_TESSERA_DECODE_H_
#pragma once

#include "tessera/tessera.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- decode ------------------------------------------------------------------------------- */

/* Calls task(task_context, i) for every i below `tasks`, on any threads, and returns when all are
 * done. */
typedef void (*tessera_parallel_for)(void* context, uint32_t tasks,
                                     void (*task)(void* task_context, uint32_t index),
                                     void* task_context);

/* Threads for attention, for tessera_step_options.parallel_for and parallel_context. The thread of
 * a step is one of them. Steps on several threads may share it: while it serves one, the others
 * compute alone. `threads`: at least 1. */
TESSERA_API tessera_code tessera_executor_create(uint32_t threads, tessera_executor** executor,
                                                 tessera_error* error);
/* No step may use it any more. */
TESSERA_API void tessera_executor_destroy(tessera_executor* executor);
/* A tessera_parallel_for. `context`: the executor; NULL: the calling thread alone. */
TESSERA_API void tessera_executor_run(void* context, uint32_t tasks,
                                      void (*task)(void* task_context, uint32_t index),
                                      void* task_context);

/* What attention reads of segments with block summaries: the best blocks, until they hold a budget
 * of entries. */
typedef struct tessera_selection {
  size_t struct_size;
  double rate;         /* of the entries that the queries may see; 1: all */
  uint64_t entries;    /* if not 0: the budget itself, instead of `rate` */
  uint64_t floor;      /* least budget by `rate` */
  int32_t by_logit;    /* 0: a query scores a block by its share of the query's attention */
  int32_t first_block; /* 1: always read the first block */
  int32_t counts_tail; /* 1: the newest rows, in no block yet, count against the budget */
  int32_t each_head;   /* 1: a choice per query head, instead of one per kv head */
} tessera_selection;
#define TESSERA_SELECTION_INIT \
  { sizeof(tessera_selection), 1, 0, 0, 0, 0, 0, 0 }

typedef struct tessera_step_options {
  size_t struct_size;
  uint32_t new_tokens;               /* of each sequence */
  const uint32_t* new_tokens_each;   /* or one count per sequence */
  uint64_t timeout_ms;               /* how long to wait for space in the tail rings */
  tessera_parallel_for parallel_for; /* NULL: the calling thread alone */
  void* parallel_context;
  /* A cudaStream_t, if the session maps a GPU's memory; NULL: the step's own stream. */
  void* cuda_stream;
} tessera_step_options;
#define TESSERA_STEP_OPTIONS_INIT \
  { sizeof(tessera_step_options), 1, NULL, 1000, NULL, NULL, NULL }

/* Rows, token after token, sequence after sequence: [batch][new tokens][heads][head_dim].
 * If the session maps a GPU's memory: device memory, at multiples of 16 bytes, or host memory,
 * which is copied. Results are complete once tessera_step_end has returned. */
typedef struct tessera_step_tensors {
  size_t struct_size;
  const void* key; /* kv heads, the model's type */
  const void* value;
  size_t key_bytes;  /* of key and of value, each */
  const void* query; /* query heads, the model's type */
  size_t query_bytes;
  void* output; /* query heads, output_type */
  size_t output_bytes;
  float* lse; /* [batch][new tokens][query heads], or NULL */
  size_t lse_count;
  tessera_type output_type; /* TESSERA_FP32 or the model's */
  int32_t causal;
  const tessera_selection* selection; /* NULL: each sequence's policy decides */
  tessera_strides key_strides;
  tessera_strides value_strides;
  tessera_strides query_strides;
  tessera_strides output_strides;
} tessera_step_tensors;
#define TESSERA_STEP_TENSORS_INIT                                                                  \
  {                                                                                                \
    sizeof(tessera_step_tensors), NULL, NULL, 0, NULL, 0, NULL, 0, NULL, 0, TESSERA_FP32, 1, NULL, \
        {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {                                                         \
      0, 0, 0                                                                                      \
    }                                                                                              \
  }

TESSERA_API tessera_code tessera_step_begin(tessera_worker* worker,
                                            tessera_sequence* const* sequences, size_t count,
                                            const tessera_step_options* options,
                                            tessera_step** step, tessera_error* error);
TESSERA_API tessera_code tessera_step_append(tessera_step* step, uint32_t layer,
                                             const tessera_step_tensors* tensors,
                                             tessera_error* error);
TESSERA_API tessera_code tessera_step_attend(tessera_step* step, uint32_t layer,
                                             const tessera_step_tensors* tensors,
                                             tessera_error* error);
TESSERA_API tessera_code tessera_step_append_and_attend(tessera_step* step, uint32_t layer,
                                                        const tessera_step_tensors* tensors,
                                                        tessera_error* error);
/* Commits; `accepted` is NULL (all) or one count per sequence. Destroy the step afterwards. */
TESSERA_API tessera_code tessera_step_end(tessera_step* step, const uint32_t* accepted,
                                          size_t count, tessera_error* error);
/* A step that has not ended commits nothing. */
TESSERA_API void tessera_step_destroy(tessera_step* step);

/* ---- reading ------------------------------------------------------------------------------ */

/* Attention over the tokens that are committed, with any number of queries: for a chunk of a prompt
 * whose own rows the caller attends itself, and merges by `lse`. The sequences take no other call
 * until the read has ended. TESSERA_ABORTED from any call: repeat it from tessera_read_begin. */
typedef struct tessera_read_options {
  size_t struct_size;
  uint64_t timeout_ms; /* how long to wait for memory, if a sequence must be restored */
  tessera_parallel_for parallel_for; /* as in tessera_step_options */
  void* parallel_context;
  void* cuda_stream;
} tessera_read_options;
#define TESSERA_READ_OPTIONS_INIT \
  { sizeof(tessera_read_options), 1000, NULL, NULL, NULL }

/* [queries of every sequence][query_heads][head_dim]. Memory as in tessera_step_tensors. */
typedef struct tessera_read_tensors {
  size_t struct_size;
  uint32_t queries;             /* of each sequence */
  const uint32_t* queries_each; /* or one count per sequence */
  /* One position per sequence, of its first query. NULL: the last query has the position of the
   * last token. */
  const uint64_t* first_query_positions;
  const void* query; /* the model's type */
  size_t query_bytes;
  void* output; /* output_type */
  size_t output_bytes;
  float* lse; /* [queries][query_heads], natural log; or NULL */
  size_t lse_count;
  tessera_type output_type; /* TESSERA_FP32 or the model's */
  int32_t causal;
  const tessera_selection* selection; /* as in tessera_step_tensors */
  tessera_strides query_strides;
  tessera_strides output_strides;
} tessera_read_tensors;
#define TESSERA_READ_TENSORS_INIT                                                                  \
  {                                                                                                \
    sizeof(tessera_read_tensors), 1, NULL, NULL, NULL, 0, NULL, 0, NULL, 0, TESSERA_FP32, 1, NULL, \
        {0, 0, 0}, {                                                                               \
      0, 0, 0                                                                                      \
    }                                                                                              \
  }

TESSERA_API tessera_code tessera_read_begin(tessera_worker* worker,
                                            tessera_sequence* const* sequences, size_t count,
                                            const tessera_read_options* options,
                                            tessera_read** read, tessera_error* error);
TESSERA_API tessera_code tessera_read_attend(tessera_read* read, uint32_t layer,
                                             const tessera_read_tensors* tensors,
                                             tessera_error* error);
/* Outputs are valid only if it returns TESSERA_OK. Destroy the read afterwards. */
TESSERA_API tessera_code tessera_read_end(tessera_read* read, tessera_error* error);
TESSERA_API void tessera_read_destroy(tessera_read* read);

/* The same by one RPC, computed by the daemon: also for sequences that are in no read, and for
 * workers without mapped memory. */
TESSERA_API tessera_code tessera_attend_rpc(tessera_worker* worker,
                                            tessera_sequence* const* sequences, size_t count,
                                            uint32_t layer, const tessera_read_tensors* tensors,
                                            tessera_error* error);
/* The entries of a layer that attention would read of a sequence under the rule tensors->selection:
 * positions per head. Reads the queries, their number, their position and `causal`. */
TESSERA_API tessera_code tessera_select_json(tessera_worker* worker,
                                             const tessera_sequence* sequence, uint32_t layer,
                                             const tessera_read_tensors* tensors,
                                             tessera_text* json, tessera_error* error);

/* Entries of one lane, in lane order, decoded as attention sees them. Token policies may keep
 * different entries of each kv head. Host memory. */
typedef struct tessera_lane_rows {
  size_t struct_size;
  uint32_t layer;
  uint32_t kv_head;
  uint64_t first_entry;
  uint64_t entries;   /* that the arrays have room for; the call sets it to how many it read */
  tessera_type type;  /* of key and value: TESSERA_FP32 or the model's */
  void* key;          /* [entries][head_dim]; NULL: not wanted, as for every array */
  void* value;        /* likewise */
  uint64_t* position; /* [entries]: the number of each entry's token */
  float* weight;      /* [entries]: the tokens that each entry stands for */
  /* Set by the call: the entries that the lane holds, those of the tail included, and the tokens
   * that its layer holds. A call with `entries` 0 only asks for them. */
  uint64_t lane_entries;
  uint64_t tokens;
} tessera_lane_rows;
#define TESSERA_LANE_ROWS_INIT \
  { sizeof(tessera_lane_rows), 0, 0, 0, 0, TESSERA_FP32, NULL, NULL, NULL, NULL, 0, 0 }

/* Copies rows out of the daemon, by RPC. TESSERA_ABORTED if the lane changes meanwhile, again and
 * again. */
TESSERA_API tessera_code tessera_sequence_read(tessera_sequence* sequence, tessera_lane_rows* rows,
                                               tessera_error* error);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* TESSERA_CLIENT_TESSERA_DECODE_H_ */
