// What the worker has observed of a layer for its token policy: queries and sums of attention.
// They are kept in budgeted host memory until Compress decides by them.
//
// The input is untrusted: Take checks it against the policy's needs, then copies it. A fork shares
// the memory until either side changes (copy-on-write).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "daemon/cache/model/model.h"
#include "daemon/policies/token_policy.h"
#include "daemon/pool/account.h"

namespace tessera::compaction {

// The observation of one layer as the worker sent it. Rows have the model's element type.
struct ObservedLayer {
  std::uint32_t layer = 0;
  std::uint64_t tokens = 0;  // tokens of the sequence, counted by the daemon
  // Queries of `count` consecutive tokens: [count][query_heads][head_dim].
  struct {
    std::uint64_t first_position = 0;
    std::uint64_t count = 0;
    const std::byte* rows = nullptr;
  } last;
  // Each head's queries of largest norm among the tokens [first_token, end):
  // [query_heads][count][head_dim].
  struct {
    std::uint64_t count = 0;
    std::span<const std::uint64_t> positions;  // [query_heads][count], ascending for each head
    const std::byte* rows = nullptr;
    std::uint64_t first_token = 0;
    std::uint64_t end = ~std::uint64_t{0};  // clamped to `tokens`
    bool none = false;  // the worker does not know which queries of these tokens are strongest
    bool all = false;   // every query that the worker observed of these tokens is included
  } norm;
  // Attention that `count` consecutive tokens have received: [kv_heads][count].
  struct {
    std::uint64_t first_position = 0;
    std::uint64_t count = 0;
    const float* values = nullptr;
  } sums;
};

// Bytes of the queries and sums.
std::uint64_t BytesOf(const ObservedLayer& shown, const kernels::LayerGeometry& geometry);

// The observation of one layer. Not thread-safe; copies may be used by different threads.
class Observation {
 public:
  // Adds what the worker sent. A query at a known position replaces the old one; sums replace all
  // earlier sums. INVALID_ARGUMENT names data that the policy does not ask for, or that is not
  // valid. RESOURCE_EXHAUSTED: the budget is spent. An error changes nothing.
  absl::Status Take(const ObservedLayer& shown, const policies::Needs& needs,
                    const cache::Model& model, const kernels::Operations& operations,
                    pool::Account& budget);
  // Drops the queries of tokens before `position`, which were decided about, and all sums. The rest
  // is copied if a fork shares it; if the budget has no room for the copy, it is dropped too.
  void ForgetBefore(std::uint64_t position);
  // Keeps the newest `count` queries of each head. Does nothing while a fork shares them.
  void KeepNewest(std::uint64_t count);
  // Drops all rows and sums, but remembers for which tokens the worker reported norms.
  void ForgetRows();
  // After a cut: drops queries from `position` on, and the sums if they reach beyond it. Copies
  // like ForgetBefore.
  void ForgetFrom(std::uint64_t position);

  std::uint64_t bytes() const;
  // By query head; valid until the next change. Empty: no queries were observed.
  std::vector<policies::HeadQueries> queries() const;
  // The first token of [begin, end) for which no worker reported norms; `end` if all are covered.
  std::uint64_t FirstTokenWithoutNorms(std::uint64_t begin, std::uint64_t end) const;
  // How many of each head's strongest queries of the tokens [begin, end) are certainly held. The
  // largest number: all that were observed.
  std::uint64_t KnownNormQueries(std::uint64_t begin, std::uint64_t end) const;
  // Sums for the entries at these positions of a kv head: for the first of them, up to the end of
  // what was observed.
  std::vector<float> SumsAt(std::uint32_t kv_head, std::span<const std::uint64_t> positions) const;

 private:
  struct HeadRows {
    std::vector<std::uint64_t> positions;
    std::vector<std::byte> rows;
    std::vector<std::uint64_t> strongest;  // those of `positions` that were reported by norm
  };
  // A worker reported the `known` strongest queries of each head among the tokens [begin, end).
  struct Showing {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t known = 0;
  };
  struct Shown {
    std::vector<HeadRows> heads;
    std::uint64_t sums_first = 0;
    std::vector<std::vector<float>> sums;  // by kv head
    pool::Account* budget = nullptr;
    pool::Charge charge;

    std::uint64_t bytes() const;
    // The same rows and sums, not charged to an account yet.
    std::shared_ptr<Shown> Copy() const;
    std::uint64_t SumsEnd() const { return sums.empty() ? 0 : sums_first + sums.front().size(); }
  };
  // The part of a report that covers tokens in [begin, end).
  Showing Part(const Showing& showing, std::uint64_t begin, std::uint64_t end) const;
  void TrimNormReports(std::uint64_t begin, std::uint64_t end);
  static void Merge(HeadRows added, std::uint64_t row_bytes, HeadRows& rows);
  // Drops the queries outside of positions [begin, end).
  void KeepOnly(std::uint64_t begin, std::uint64_t end, bool keeps_sums);

  std::uint64_t AddedBytes(const ObservedLayer& shown,
                           const kernels::LayerGeometry& geometry) const;
  bool Alone() const;

  std::shared_ptr<Shown> shown_;  // null: empty; immutable while a fork shares it
  // Disjoint, ascending. They are kept when the budget has no room for their rows.
  std::vector<Showing> norm_reports_;
};

// Marks which tokens from `first_token` on are delimiters. `text` has one mark per token.
void TakeTokenIds(std::uint64_t first_token, std::span<const std::uint32_t> ids,
                  const cache::Model& model, std::vector<policies::TextMark>& text);

}  // namespace tessera::compaction
