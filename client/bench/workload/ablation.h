// What each part of packing is worth: forms of storage against each other on generated rows, judged
// by the attention that they give.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/measure/attention_judge.h"
#include "client/bench/workload/generated_kv.h"
#include "client/bench/workload/kept_rows.h"

namespace tessera::cli::bench {

// Means over heads and queries.
struct Score {
  Fidelity fidelity;
  double bytes = 0;            // per token and kv head, rotations included
  std::vector<double> errors;  // of each query, in the order of heads
};
// How much larger errors of `a` are than those of `b`, query by query.
struct Difference {
  double mean = 0;
  double standard_error = 0;
};
Difference ErrorsBeyond(const Score& a, const Score& b);

// Queries at the end of generated rows, and their true attention. The rows outlive it.
class Examination {
 public:
  // Tokens with a query in every head of the group.
  struct Queries {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
  };
  // Segments are what a rotation is made for.
  Examination(const GeneratedKv& kv, std::uint32_t segment_tokens, const Queries& queries);

  struct Segment {
    std::uint32_t kv_head = 0;
    std::uint32_t index = 0;  // within the head
    kernels::LaneRows rows;
  };
  // One head's segments after another's.
  const std::vector<Segment>& segments() const { return segments_; }

  using Keep = std::function<absl::StatusOr<KeptRows>(const Segment& segment)>;
  absl::StatusOr<Score> Examine(const Keep& keep) const;

  struct Question {
    GeneratedQuery query;
    Attention truth;
  };
  // [queries][group] of a head.
  const std::vector<Question>& questions(std::uint32_t kv_head) const {
    return questions_[kv_head];
  }
  const FloatLane& lane(std::uint32_t kv_head) const { return lanes_[kv_head]; }
  const GeneratedKv& kv() const { return kv_; }

 private:
  const GeneratedKv& kv_;
  std::vector<Segment> segments_;
  std::vector<FloatLane> lanes_;
  std::vector<std::vector<Question>> questions_;
};

// One share of the channels in all forms: what the product packs, and what it might do instead.
struct FormScores {
  Score raw_mask;      // the same raw channels in all rows, in at most the bytes of `rotated[0]`
  Score svd_mask;      // rotated ones
  Score raw;           // each row its own raw channels; as many channels as `rotated`
  Score rotated[3];    // each row its own rotated ones, in groups of 1, 2, 4
  Score unordered[2];  // groups of 2, 4 without reordering
};
absl::StatusOr<FormScores> MeasureForms(const Examination& examination, double share);

// One rotation for all of a head's segments against one for each, at a quarter of the channels.
// Both are made from every other tile; losses are of the others, fidelity is of all rows.
struct RotationScores {
  kernels::Loss global_loss;
  kernels::Loss own_loss;
  Score global;
  Score own;
};
absl::StatusOr<RotationScores> MeasureRotations(const Examination& examination);

// Every segment a quarter of the channels, against each what thresholds say. Of the thresholds at
// which all together take no more bytes, and lose about as little as can be, they are those under
// which other queries, those of `calibration`, err least. And against both, at no more bytes, one
// strategy from the beginning to the end: the first segment's.
struct ChoiceScores {
  Score first;
  Score fixed;
  Score dynamic;
  kernels::Loss threshold;
  // What the segment that loses most loses, of keys and of values.
  kernels::Loss fixed_worst;
  kernels::Loss dynamic_worst;
};
absl::StatusOr<ChoiceScores> MeasureChoice(const Examination& examination,
                                           const Examination& calibration);

}  // namespace tessera::cli::bench
