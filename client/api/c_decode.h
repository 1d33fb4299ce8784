// What steps and reads of the C interface share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "client/api/c_handles.h"
#include "client/api/c_rows.h"
#include "client/api/lease_core.h"
#include "client/api/worker_access.h"
#include "client/sequence/sequence_access.h"
#include "client/session/session.h"
#include "tessera/step.h"

namespace tessera::client {

// Adapts the caller's parallel_for to an Executor.
class CallbackExecutor final : public Executor {
 public:
  CallbackExecutor(tessera_parallel_for parallel_for, void* context)
      : parallel_for_(parallel_for), context_(context) {}
  void ParallelFor(std::uint32_t tasks, Task task, void* context) override {
    parallel_for_(context_, tasks, task, context);
  }

 private:
  tessera_parallel_for parallel_for_;
  void* context_;
};

// The handles' sequences; null where a handle is NULL, which BeginStep and BeginRead refuse.
inline std::vector<Sequence*> BatchOf(tessera_sequence* const* sequences, std::size_t count) {
  std::vector<Sequence*> batch;
  batch.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    batch.push_back(sequences[i] == nullptr ? nullptr : &sequences[i]->sequence);
  }
  return batch;
}

// Null while the worker is not attached.
inline std::shared_ptr<Session> SessionOf(const std::shared_ptr<Core>& core) {
  absl::StatusOr<std::shared_ptr<Session>> session = core->session();
  return session.ok() ? *std::move(session) : nullptr;
}

enum class RowKind : std::uint8_t { kKeyValue, kQuery };

// Of `tokens` rows of a layer; `element_bytes` 0: the model's type. Empty if the layer does not
// exist: the call itself refuses it.
inline RowShape ShapeOf(const BoundModel& model, std::uint32_t layer, RowKind kind,
                        std::uint64_t tokens, std::size_t element_bytes = 0) {
  if (layer >= model.layers()) return {};
  const kernels::LayerGeometry& geometry = model.geometry(layer);
  return {
      .layers = 1,
      .tokens = tokens,
      .heads = kind == RowKind::kQuery ? geometry.query_heads : geometry.kv_heads,
      .row_bytes = element_bytes == 0 ? model.row_bytes(layer) : geometry.head_dim * element_bytes};
}

inline std::optional<SelectionRule> ToSelection(const tessera_selection* selection) {
  if (selection == nullptr) return std::nullopt;
  const tessera_selection given = Adopt(selection, tessera_selection TESSERA_SELECTION_INIT);
  return SelectionRule{
      .rate = given.rate,
      .entries = given.entries,
      .floor = given.floor,
      .judge = given.by_logit != 0 ? SelectionRule::Judge::kLogit : SelectionRule::Judge::kShare,
      .first_block = given.first_block != 0,
      .counts_tail = given.counts_tail != 0,
      .each_head = given.each_head != 0};
}

inline std::size_t OutputElementBytes(tessera_type type) {
  return ElementBytes(ToElementType(type));
}

}  // namespace tessera::client
