// The sequences of one step, and the argument checks that both transports share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/sequence/sequence_state.h"
#include "client/step/attend_rpc.h"
#include "tessera/read.h"
#include "tessera/sequence.h"
#include "tessera/step.h"

namespace tessera::client {

struct StepItem {
  SequenceUse sequence;
  std::uint64_t base;  // tokens committed when the step began
  std::uint32_t new_tokens;
  std::uint64_t first_row;                    // of its tokens, in the step's tensors
  std::uint64_t first_query_position;         // `base`, except in a read
  bool wants_tail = true;                     // false: a read of a sequence without tail rings
  const shm::SequenceBlock* block = nullptr;  // only if memory is mapped
};

// Reused from step to step, so that a step with a known batch allocates nothing.
class StepBatch {
 public:
  // Takes exclusive use of every sequence. Errors leave the batch empty.
  absl::Status Take(std::span<Sequence* const> sequences, const StepOptions& options);
  // For a read: without new tokens, and no policy observes its queries. FAILED_PRECONDITION if the
  // layers of a sequence hold different numbers of tokens.
  absl::Status TakeForReading(std::span<Sequence* const> sequences);
  // Sets the queries of a read's next call. Returns whether they differ from those of the previous
  // one. Errors change nothing.
  absl::StatusOr<bool> SetQueries(const ReadTensors& tensors);
  void Release();

  std::vector<StepItem>& items() { return items_; }
  const std::vector<StepItem>& items() const { return items_; }
  const BoundModel& model() const { return *model_; }
  std::uint64_t rows() const { return rows_; }
  bool empty() const { return items_.empty(); }
  bool is_reading() const { return is_reading_; }

  bool appended(std::uint32_t layer) const { return appended_[layer]; }
  void MarkAppended(std::uint32_t layer) { appended_[layer] = true; }
  bool AppendedAny() const;

  absl::Status CheckAppend(std::uint32_t layer, std::span<const std::byte> key,
                           std::span<const std::byte> value) const;
  absl::Status CheckAttend(std::uint32_t layer, const StepTensors& tensors) const;
  // The parts of the tensors that belong to each sequence, for AttendByRpc. Call CheckAttend first.
  std::vector<AttendRow> Rows(std::uint32_t layer, const StepTensors& tensors) const;
  // Which rows a call of Observe passes: all rows of the step, or only those of sequences whose
  // policies observe them, one after another.
  enum class QueryRows : std::uint8_t { kAll, kObserved };
  // Lets the sequences' policies observe decoded queries, which are in host memory.
  // INVALID_ARGUMENT if a policy that learns from every query cannot use one of them; then no query
  // has been observed.
  absl::Status Observe(std::uint32_t layer, std::span<const std::byte> query, QueryRows rows);
  // Lists the observed rows, as ranges of rows of the step's tensors.
  struct RowRun {
    std::uint64_t first;
    std::uint64_t count;
  };
  void ListObserved(std::vector<RowRun>& runs) const;
  // Checks that every layer was appended and that `accepted` fits.
  absl::Status CheckEnd(std::span<const std::uint32_t> accepted) const;

  // Discards the observations of the step.
  void ForgetRows() {
    for (const StepItem& item : items_) {
      if (item.sequence->observer != nullptr) item.sequence->observer->TruncateRows(item.base);
    }
  }

 private:
  bool Observes(const StepItem& item) const;
  absl::Status CheckLayer(std::uint32_t layer) const;
  std::string MissingLayers() const;

  std::vector<StepItem> items_;
  const BoundModel* model_ = nullptr;
  std::uint64_t rows_ = 0;
  bool is_reading_ = false;
  std::vector<bool> appended_;  // per layer
  std::vector<bool> refused_;   // per layer: Observe refused its queries
};

// What a read shares with a step.
StepTensors AsStepTensors(const ReadTensors& tensors);

// The rule that a call sets for all items.
std::optional<kernels::SelectionRule> RuleOf(const StepTensors& tensors);
// The rule of an item: `named` by the call, else that of its policy.
const kernels::SelectionRule* RuleOf(const StepItem& item, std::uint32_t layer,
                                     const std::optional<kernels::SelectionRule>& named);

// INVALID_ARGUMENT if the output type is neither fp32 nor the model's.
absl::Status CheckOutputType(ElementType type, const BoundModel& model);

}  // namespace tessera::client
