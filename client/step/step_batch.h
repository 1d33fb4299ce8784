// The sequences of one step, and the checks that both doors make.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/sequence/sequence_state.h"
#include "tessera/sequence.h"
#include "tessera/step.h"

namespace tessera::client {

struct StepItem {
  SequenceUse sequence;
  std::uint64_t base;  // tokens committed when the step began
  std::uint32_t new_tokens;
  std::uint64_t first_row;                    // of its tokens in the step's tensors
  const shm::SequenceBlock* block = nullptr;  // where memory is mapped
};

// Kept and used again, so that a step allocates nothing once its batch has been seen.
class StepBatch {
 public:
  // Takes the use of every sequence. Errors leave the batch empty.
  absl::Status Take(std::span<Sequence* const> sequences, const StepOptions& options);
  void Release();

  std::vector<StepItem>& items() { return items_; }
  const std::vector<StepItem>& items() const { return items_; }
  const BoundModel& model() const { return *model_; }
  std::uint64_t rows() const { return rows_; }
  bool empty() const { return items_.empty(); }

  bool appended(std::uint32_t layer) const { return appended_[layer]; }
  void MarkAppended(std::uint32_t layer) { appended_[layer] = true; }
  bool AppendedAny() const;

  absl::Status CheckAppend(std::uint32_t layer, std::span<const std::byte> key,
                           std::span<const std::byte> value) const;
  absl::Status CheckAttend(std::uint32_t layer, const StepTensors& tensors) const;
  // Takes what the policies of the sequences ask for of queries that are decoded. Host memory: all
  // rows of the step, or those that are observed alone, one after another.
  enum class QueryRows : std::uint8_t { kAll, kObserved };
  // INVALID_ARGUMENT where a policy that learns from every query would never be rid of one; then
  // nobody has seen any.
  absl::Status Observe(std::uint32_t layer, std::span<const std::byte> query, QueryRows rows);
  // Which those are, in runs of the step's tensors.
  struct RowRun {
    std::uint64_t first;
    std::uint64_t count;
  };
  void ListObserved(std::vector<RowRun>& runs) const;
  // That every layer was appended and that `accepted` fits.
  absl::Status CheckEnd(std::span<const std::uint32_t> accepted) const;

  // Nothing counts of what the step has shown.
  void ForgetRows() {
    for (const StepItem& item : items_) {
      if (item.sequence->observer != nullptr) item.sequence->observer->CutRowsTo(item.base);
    }
  }

 private:
  static bool Observes(const StepItem& item);
  absl::Status CheckLayer(std::uint32_t layer) const;
  std::string MissingLayers() const;

  std::vector<StepItem> items_;
  const BoundModel* model_ = nullptr;
  std::uint64_t rows_ = 0;
  std::vector<bool> appended_;  // per layer
  std::vector<bool> refused_;   // likewise: its queries, by Observe
};

// The rule that a call names for all items.
std::optional<kernels::SelectionRule> RuleOf(const StepTensors& tensors);
// The rule of an item: `named` by the call, or else that of its policy.
const kernels::SelectionRule* RuleOf(const StepItem& item, std::uint32_t layer,
                                     const std::optional<kernels::SelectionRule>& named);

// INVALID_ARGUMENT if the output type is neither fp32 nor the model's.
absl::Status CheckOutputType(ElementType type, const BoundModel& model);

}  // namespace tessera::client
