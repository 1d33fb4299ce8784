// Launch parameters of the kernels: plain structs that are passed by value and kept by a captured
// graph. Everything that changes from step to step is in the step image instead.
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
  bool appended = true;  // false: the step's new tokens are not in the tail rings yet
  ElementType output_type = ElementType::kFp32;
  std::uint32_t layer = 0;
  StepLimits limits;
  // Device addresses, 16-byte aligned. StepSequence::first_query_row counts these rows.
  const std::byte* step = nullptr;
  const void* query = nullptr;     // [row][query_heads][head_dim], geometry.type
  std::uint64_t query_stride = 0;  // elements between rows; 0: query_heads * head_dim
  void* output = nullptr;          // same layout, output_type
  std::uint64_t output_stride = 0;
  float* lse = nullptr;  // [row][query_heads]; may be null
  void* scratch = nullptr;
  std::uint64_t scratch_bytes = 0;
  std::uint64_t* fault = nullptr;  // kNoFault, or the lowest FaultWord since it was reset
};

// Bytes of `scratch` that a call needs: partial results of every work item of a layer, rotated
// query rows per packed segment, and selection buffers.
std::uint64_t AttendScratchBytes(const LayerGeometry& geometry, const StepLimits& limits);

// Returns why the call cannot be launched; empty if it can.
std::string_view AttendCallProblem(const AttendCall& call);
// The same check for Select, which has no output.
std::string_view SelectCallProblem(const AttendCall& call);

struct AttendParams {
  const std::byte* step;
  const std::byte* query;
  std::byte* output;
  float* lse;
  const float* sinks;
  float* states;   // [work][max_columns][2]: maximum in log2 units, sum
  float* outputs;  // [work][max_columns][head_dim], unnormalised; packed parts in V's rotated space
  // [strategy][max_columns]: the power of two that each rotated row was divided by
  float* rotated_scales;
  // [strategy][max_columns][head_dim]: R_k q; zeros from `channels` on. Over planes a row holds
  // int8 codes and a CodedQuery instead.
  std::uint16_t* rotated;
  // Selection buffers for the layer's blocks and the lanes that own them. Logarithms are base 2.
  float* scores;          // [max_columns][max_blocks]
  float* score_sums;      // [piece][max_columns][2]: maximum of the candidates, sum of 2^(s - max)
  float* row_sums;        // [selection][max_columns]: log-sum-exp over all candidates
  std::uint32_t* values;  // [max_blocks], as OrderedKey
  // [max_blocks]: selected blocks; a lane's list begins at the index of its first block
  std::uint32_t* taken;
  SelectedRange* ranges;  // [choice + selection]; indexed by FirstRangeOf
  std::uint8_t* visible;  // [max_blocks]: number of entries that some query of the item sees
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
  std::uint32_t summaries;
  std::uint32_t window;
  std::uint32_t causal;
  std::uint32_t appended;
  float logit_scale;  // log2 units; with a soft-cap: scale / softcap
  float logit_cap;    // softcap in log2 units; 0: none
  float score_scale;  // log2 units; the soft-cap is not applied to block scores
  ElementType query_type;
  ElementType output_type;
};

AttendParams MakeAttendParams(const AttendCall& call);

// ---- New rows ----------------------------------------------------------------------------------

// Writes the step's new K and V rows of a layer into the tail rings.
struct AppendParams {
  const std::byte* step;
  const std::byte* key;    // [row][kv_heads][head_dim]
  const std::byte* value;  // same layout
  std::uint64_t* fault;
  std::uint64_t row_stride;  // bytes between rows
  std::uint32_t layer;
  std::uint32_t row_bytes;  // bytes of one head's row
  std::uint32_t kv_heads;
  std::uint32_t max_batch;
  std::uint32_t max_appended;
};

// K and V rows of one lane to be copied to one place. Device addresses are multiples of 16.
struct RowRun {
  std::uint64_t key;           // address of the first source row
  std::uint64_t value;         // 0: K rows only
  std::uint64_t stride;        // bytes between source rows
  std::uint64_t key_target;    // target rows are consecutive
  std::uint64_t value_target;  // same layout
  std::uint32_t rows;
  std::uint32_t row_bytes;
};
static_assert(sizeof(RowRun) == 48);

// Copies runs of rows and checks them for NaN, infinity and magnitudes of 2^63 or more. The source
// may change concurrently: each element is read once, and that value is both checked and stored.
// Bad rows are stored too; `found` reports them.
struct StoreRowsParams {
  const RowRun* runs;
  std::uint64_t* found;  // kNoneUnusable, or the lowest UnusableWord found
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

// Checks the rows of AppendParams, and of any RowRun: addresses and strides must be 16-byte
// aligned, and rows must be whole 16-byte chunks. Returns the problem, or an empty string.
std::string_view RowsProblem(const void* key, const void* value, std::uint64_t row_stride,
                             std::uint32_t row_bytes);

}  // namespace tessera::kernels::cuda
