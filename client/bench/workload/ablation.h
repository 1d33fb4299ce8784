// Ablation of the packed format: compares storage formats on generated rows by the error of their
// attention.
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
  std::vector<double> errors;  // per query, in the order of heads
};
// Errors of `a` minus errors of `b`, query by query.
struct Difference {
  double mean = 0;
  double standard_error = 0;
};
Difference ErrorDifference(const Score& a, const Score& b);

// Queries at the end of generated rows, and their exact attention. The rows must outlive it.
class Examination {
 public:
  // A range of query indices; each has one query per head of the group.
  struct Queries {
    std::uint32_t first = 0;
    std::uint32_t count = 0;
  };
  // `segment_tokens`: the length of the segments that strategies are computed for.
  Examination(const GeneratedKv& kv, std::uint32_t segment_tokens, const Queries& queries);

  struct Segment {
    std::uint32_t kv_head = 0;
    std::uint32_t index = 0;  // within the head
    kernels::LaneRows rows;
  };
  // Ordered by head, then by position.
  const std::vector<Segment>& segments() const { return segments_; }

  using Keep = std::function<absl::StatusOr<KeptRows>(const Segment& segment)>;
  absl::StatusOr<Score> Examine(const Keep& keep) const;

  struct Question {
    GeneratedQuery query;
    Attention truth;
  };
  // [queries][group] of a kv head.
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

// The same share of channels in the packed format and its alternatives.
struct FormScores {
  Score raw_mask;      // the same raw channels in all rows, at most the bytes of `rotated[0]`
  Score svd_mask;      // the same rotated channels in all rows, likewise
  Score raw;           // raw channels chosen per row, as many as in `rotated`
  Score rotated[3];    // rotated channels chosen per row, in groups of 1, 2, 4: the packed format
  Score unordered[2];  // groups of 2, 4 without reordering
};
absl::StatusOr<FormScores> MeasureForms(const Examination& examination, double share);

// One rotation for all segments of a head compared with one per segment, at 25 % of the channels.
// Both are computed from the even tiles. Losses are measured on the odd tiles, fidelity on all.
struct RotationScores {
  kernels::Loss global_loss;
  kernels::Loss own_loss;
  Score global;
  Score own;
};
absl::StatusOr<RotationScores> MeasureRotations(const Examination& examination);

// Compares three choices of strategy: a fixed 25 % of the channels per segment, thresholds per
// segment (dynamic), and the first segment's strategy for all. Dynamic and first take no more bytes
// than fixed and dynamic, respectively. Of the thresholds within that limit, those with the
// smallest losses are tried on the queries of `calibration`, and the one with the smallest error is
// used.
struct ChoiceScores {
  Score first;
  Score fixed;
  Score dynamic;
  kernels::Loss threshold;
  // Largest loss of any segment, keys and values separately.
  kernels::Loss fixed_worst;
  kernels::Loss dynamic_worst;
};
absl::StatusOr<ChoiceScores> MeasureChoice(const Examination& examination,
                                           const Examination& calibration);

}  // namespace tessera::cli::bench
