// What the kernels are launched with: plain structs, passed by value and kept by a captured graph.
// Everything that changes from step to step is in the step image instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kernels/cuda/common/step_limits.h"
#include "kernels/cuda/common/step_view.h"
#include "kernels/cuda/common/target.h"
#include "kernels/format/element.h"
#include "kernels/format/layer_geometry.h"

namespace tessera::kernels::cuda {

// ---- Attention ---------------------------------------------------------------------------------

struct AttendCall {
  LayerGeometry geometry;  // `sinks` is a device address
  bool causal = true;
  bool appended = true;  // false: the layer's new tokens are not in the rings yet
  ElementType output_type = ElementType::kFp32;
  std::uint32_t layer = 0;
  StepLimits limits;
  // Device addresses, 16-byte aligned. Rows are those that StepSequence::first_query_row counts.
  const std::byte* step = nullptr;
  const void* query = nullptr;     // [row][query_heads][head_dim], geometry.type
  std::uint64_t query_stride = 0;  // elements between rows; 0: query_heads * head_dim
  void* output = nullptr;          // likewise, output_type
  std::uint64_t output_stride = 0;
  float* lse = nullptr;  // [row][query_heads]; may be null
  void* scratch = nullptr;
  std::uint64_t scratch_bytes = 0;
  std::uint64_t* fault = nullptr;  // kNoFault, or the lowest FaultWord since it was reset
};

// Bytes of `scratch`: the partial results of every work item of a layer, the query rows as each
// packed segment wants them, and what selecting takes.
std::uint64_t AttendScratchBytes(const LayerGeometry& geometry, const StepLimits& limits);

// Empty, or why the call cannot be launched.
std::string_view AttendCallProblem(const AttendCall& call);
// The same for choosing alone, which has no output.
std::string_view SelectCallProblem(const AttendCall& call);

struct AttendParams {
  const std::byte* step;
  const std::byte* query;
  std::byte* output;
  float* lse;
  const float* sinks;
  float* states;   // [work][max_columns][2]: maximum in log2 units, sum
  float* outputs;  // [work][max_columns][head_dim], unnormalised; of packed parts in V's space
  float* rotated_scales;   // [strategy][max_columns]: what the rotated rows were divided by
  std::uint16_t* rotated;  // [strategy][max_columns][head_dim], R_k q; zeros from `channels` on
  // Selection, of the layer's blocks and their lanes. Logarithms are in base 2.
  float* scores;          // [max_columns][max_blocks]
  float* score_sums;      // [piece][max_columns][2]: the candidates' maximum, sum of 2^(s - max)
  float* row_sums;        // [selection][max_columns]: log-sum-exp over all candidates
  std::uint32_t* values;  // [max_blocks], as OrderedKey
  std::uint32_t* taken;   // [max_blocks]: a lane's list begins at its first block
  TakenRange* ranges;     // [choice + selection]: FirstRangeOf
  std::uint8_t* visible;  // [max_blocks]: entries that some query of the item sees
  std::uint64_t* fault;
  std::uint64_t query_stride;
  std::uint64_t output_stride;
  std::uint32_t layer;
  std::uint32_t query_heads;
  std::uint32_t group;
  std::uint32_t head_dim;
  std::uint32_t max_batch;
  std::uint32_t max_columns;
  std::uint32_t max_works;
  std::uint32_t max_strategies;
  std::uint32_t max_selections;
  std::uint32_t max_choices;
  std::uint32_t max_blocks;
  std::uint32_t max_pieces;
  std::uint32_t max_slots;
  std::uint32_t kinds;
  std::uint32_t selected_kinds;
  std::uint32_t window;
  std::uint32_t causal;
  std::uint32_t appended;
  float logit_scale;  // log2 units; under a soft-cap: scale / softcap
  float logit_cap;    // softcap in log2 units; 0: none
  float score_scale;  // log2 units; a soft-cap says nothing of blocks
  ElementType query_type;
  ElementType output_type;
};

AttendParams MakeAttendParams(const AttendCall& call);

// ---- New rows ----------------------------------------------------------------------------------

// Writes the step's new K and V rows of a layer into the tail rings.
struct AppendParams {
  const std::byte* step;
  const std::byte* key;    // [row][kv_heads][head_dim]
  const std::byte* value;  // likewise
  std::uint64_t* fault;
  std::uint64_t row_stride;  // bytes between rows
  std::uint32_t layer;
  std::uint32_t row_bytes;  // of one head
  std::uint32_t kv_heads;
  std::uint32_t max_batch;
  std::uint32_t max_appended;
};

// K and V rows of one lane on their way into one place. Device addresses, multiples of 16.
struct RowRun {
  std::uint64_t key;           // of the first source row
  std::uint64_t value;         // 0: there are K rows alone
  std::uint64_t stride;        // bytes between source rows
  std::uint64_t key_target;    // target rows lie one after another
  std::uint64_t value_target;  // likewise
  std::uint32_t rows;
  std::uint32_t row_bytes;
};
static_assert(sizeof(RowRun) == 48);

// Copies runs of rows, and looks for NaN, infinity and magnitudes of at least 2^63 in what it
// copies. The source may be changing: every element is read once, and what was read is both judged
// and stored. Rows are stored whatever they hold; `found` tells.
struct StoreRowsParams {
  const RowRun* runs;
  std::uint64_t* found;  // kNoneUnusable, or the lowest UnusableWord
  std::uint32_t count;
  ElementType type;
};

struct WordStore {
  std::uint64_t address;
  std::uint64_t word;
};
static_assert(sizeof(WordStore) == 16);

struct StoreWordsParams {
  const WordStore* stores;
  std::uint32_t count;
};

// What AppendParams asks of its rows, and whoever writes a RowRun should: 16-byte alignment of
// addresses and strides, rows of whole 16-byte chunks. Empty, or the problem.
std::string_view RowsProblem(const void* key, const void* value, std::uint64_t row_stride,
                             std::uint32_t row_bytes);

}  // namespace tessera::kernels::cuda
