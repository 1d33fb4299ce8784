// Keys, queries and the attention that the queries pay to the keys, defined as in
// kernels/format/part.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/format/error_bound.h"
#include "kernels/format/operations.h"
#include "tests/contract/attend/attend_lanes.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {

struct ObserveWish {
  std::uint64_t max_keys = 300;
  std::uint32_t max_queries = 40;
  std::uint32_t stride_unit = 1;  // strides are a multiple of so many elements, apart from the row
  bool all_visible = false;
};

// Expected sums per key, and what their error bound depends on.
struct ObserveExpected {
  std::vector<double> sums;
  // Per key, over all rows that see it, with M the row's largest logit mass (see error_bound.h):
  // the sum of the shares, the sum of share times M, and the mass of the product.
  std::vector<double> shares;
  std::vector<double> weighted_shares;
  std::vector<double> mass;

  double Tolerance(const ErrorBound& bound, std::uint64_t key) const;
};

// A random problem. Invisible keys and the bytes between rows are NaN.
class ObserveCase {
 public:
  ObserveCase(const ObserveWish& wish, TestRandom& random);

  // A job with all queries, without scratch and sums.
  ObserveJob Job() const;
  // Adds queries [first, first + count) to the sums in `before` and returns the result.
  std::vector<double> Observe(const Operations& operations, std::vector<double> before,
                              std::uint32_t first, std::uint32_t count, const char** ran) const;
  std::vector<double> Observe(const Operations& operations, const char** ran) const {
    return Observe(operations, std::vector<double>(key_count), 0, query_count, ran);
  }
  ObserveExpected Expected() const;
  std::uint32_t SeeingRows() const;
  // Reorders the keys: old key order[t] becomes key t.
  void Permute(const std::vector<std::uint64_t>& order);
  void SetQuery(std::uint32_t row, std::uint32_t channel, float value);

  std::uint32_t head_dim;
  ElementType type;
  std::uint64_t key_count;
  std::uint32_t query_count;
  std::uint64_t key_stride;
  std::uint64_t query_stride;
  float scale;
  float logit_softcap;
  bool logits;
  bool no_begins;  // passes null as visible_begin
  std::vector<std::uint64_t> visible_begin;
  std::vector<std::uint64_t> visible_end;
  std::unique_ptr<Buffer> keys;
  std::unique_ptr<Buffer> queries;
  std::vector<float> log2_weights;  // empty: every key has weight 1

 private:
  void DrawVisibility(bool all, TestRandom& random);
  void LeaveSomeOut(TestRandom& random);
  bool Seen(std::uint64_t key) const;
};

}  // namespace tessera::kernels
