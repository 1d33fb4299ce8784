// What a worker has shown of a sequence for its token policy, until it is compressed: queries and
// sums of attention. Host memory with a budget; freed by Compress. Of token ids a byte each is kept
// for as long as the sequence: where text is cut is asked again when more of it has come.
//
// Everything here came from a worker: Take checks it against the policy's needs and copies it. A
// fork has the same memory until one of the two changes.
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

// One layer, in the worker's words. Rows are of the model's type.
struct ShownLayer {
  std::uint32_t layer = 0;
  std::uint64_t tokens = 0;  // that the sequence has, by the daemon's own count
  // [count][query_heads][head_dim]: of the tokens from first_position on.
  struct {
    std::uint64_t first_position = 0;
    std::uint64_t count = 0;
    const std::byte* rows = nullptr;
  } last;
  // [query_heads][count][head_dim], and the positions of each, ascending.
  struct {
    std::uint64_t count = 0;
    std::span<const std::uint64_t> positions;  // [query_heads][count]
    const std::byte* rows = nullptr;
    // They are the strongest of the tokens [first_token, end).
    std::uint64_t first_token = 0;
    std::uint64_t end = ~std::uint64_t{0};  // at most those that there are
    bool none = false;                      // of these it is not known which are
    bool all = false;                       // of all of these: none that was seen is left out
  } norm;
  // [kv_heads][count]: what is paid to the tokens from first_position on.
  struct {
    std::uint64_t first_position = 0;
    std::uint64_t count = 0;
    const float* values = nullptr;
  } sums;
};

// Of queries and sums.
std::uint64_t BytesOf(const ShownLayer& shown, const kernels::LayerGeometry& geometry);

// Of one layer. Used by one thread at a time; a copy by another.
class Observation {
 public:
  // INVALID_ARGUMENT names what the policy does not ask for, or what cannot be; RESOURCE_EXHAUSTED
  // where the budget is spent. An error changes nothing. Queries at positions that were shown
  // before are taken again.
  absl::Status Take(const ShownLayer& shown, const policies::Needs& needs,
                    const cache::Model& model, const kernels::Operations& operations,
                    pool::Account& budget);
  // What was decided about: queries of tokens before this one, and all sums. What a fork shares is
  // copied for the rest of it, and forgotten where the budget has no room for that.
  void ForgetBefore(std::uint64_t position);
  // Of each head the newest queries, so many. What a fork shares is kept.
  void KeepNewest(std::uint64_t count);
  // All rows and sums; that somebody has shown some stays known.
  void ForgetRows();
  // The sequence was cut: queries from there on, and sums that they paid to. Likewise.
  void ForgetFrom(std::uint64_t position);

  std::uint64_t bytes() const;
  // By query head; valid while this does not change. Empty: none were shown.
  std::vector<policies::HeadQueries> queries() const;
  // The first of the tokens [begin, end) of which nobody has shown which queries are the strongest,
  // or that they are not known; `end`: there is none.
  std::uint64_t FirstWithoutNorms(std::uint64_t begin, std::uint64_t end) const;
  // Of the tokens [begin, end) so many queries of each head, the strongest by norm, are among them,
  // as far as anybody has shown any. All: the largest number.
  std::uint64_t NormsKnown(std::uint64_t begin, std::uint64_t end) const;
  // For the first of the entries at these positions of a kv head, as many as were shown.
  std::vector<float> SumsAt(std::uint32_t kv_head, std::span<const std::uint64_t> positions) const;

 private:
  struct HeadRows {
    std::vector<std::uint64_t> positions;
    std::vector<std::byte> rows;
    std::vector<std::uint64_t> strongest;  // those of `positions` that are the last showings'
  };
  // Somebody has shown the strongest queries of the tokens [begin, end), so many of each head.
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
    // The same rows and sums, on no account as yet.
    std::shared_ptr<Shown> Copy() const;
    std::uint64_t SumsEnd() const { return sums.empty() ? 0 : sums_first + sums.front().size(); }
  };
  // What is known of those of its tokens that are in [begin, end), while these rows are there.
  Showing Part(const Showing& showing, std::uint64_t begin, std::uint64_t end) const;
  void KeepShowings(std::uint64_t begin, std::uint64_t end);
  static void Merge(HeadRows added, std::uint64_t row_bytes, HeadRows& rows);
  // Of each head the queries at positions [begin, end).
  void KeepOnly(std::uint64_t begin, std::uint64_t end, bool keeps_sums);

  std::uint64_t BytesMore(const ShownLayer& shown, const kernels::LayerGeometry& geometry) const;
  bool Alone() const;

  std::shared_ptr<Shown> shown_;  // null: nothing; never changes while somebody else has it, too
  // Of different tokens each, in their order. They outlive rows that there was no room for.
  std::vector<Showing> showings_;
};

// `text` is by token; `ids` are of those from `first_token` on.
void TakeTokenIds(std::uint64_t first_token, std::span<const std::uint32_t> ids,
                  const cache::Model& model, std::vector<policies::TextMark>& text);

}  // namespace tessera::compaction
