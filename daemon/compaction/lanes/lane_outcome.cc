#include "daemon/compaction/lanes/lane_outcome.h"

#include <cmath>

#include "daemon/base/strings.h"

namespace tessera::compaction {

namespace {

std::string Rounded(double loss) { return Concat(std::round(loss * 1000) / 1000); }

std::string Tokens(std::uint64_t count) { return Concat(count, count == 1 ? " token" : " tokens"); }

// "; 96 more tokens are needed", or empty if unknown.
std::string MoreTokens(const DenseRows& rows) {
  const std::uint64_t more = rows.more_tokens();
  if (more == 0) return "";
  return Concat("; ", more, more == 1 ? " more token is" : " more tokens are", " needed");
}

std::string LossText(const DenseRows& rows) {
  std::string text = Concat("loss of ", rows.of_value ? "values " : "keys ", Rounded(rows.loss),
                            " is above ", rows.of_value ? "loss_v " : "loss_k ", rows.limit,
                            " (segment of ", Tokens(rows.tokens));
  if (rows.min_segment != 0) Append(text, ", shorter than min_segment ", rows.min_segment);
  return text + ")";
}

std::string OverheadText(const DenseRows& rows) {
  std::string text = Concat("a segment of ", Tokens(rows.tokens),
                            " with its rotations would be larger than dense rows");
  return text + (rows.needs == 0 ? ", at any length" : MoreTokens(rows));
}

std::string ReasonText(const DenseRows& rows) {
  switch (rows.reason) {
    case DenseReason::kNone:
      break;
    case DenseReason::kLossAboveLimit:
      return LossText(rows);
    case DenseReason::kTooShort:
      return Concat(Tokens(rows.tokens), " are too few for the policy", MoreTokens(rows));
    case DenseReason::kWaiting:
      return Concat("waiting for the end of a prompt, or for enough tokens", MoreTokens(rows));
    case DenseReason::kNotObserved:
      return rows.message.empty() ? "the worker has not sent the observations that the policy needs"
                                  : rows.message;
    case DenseReason::kNoMemory:
      return Concat("no memory to hold the new form beside the old one: ", rows.message);
    case DenseReason::kNothingNew:
      return "nothing new since the last compression";
    case DenseReason::kPolicyDense:
      return "the policy does not compress this lane";
    case DenseReason::kSegmentOverhead:
      return OverheadText(rows);
    case DenseReason::kValueOutOfRange:
      return "a value is too large for the policy's value type";
    case DenseReason::kNewest:
      return "the policy keeps the first and newest tokens dense";
    case DenseReason::kNothingToDrop:
      return "the policy found no entries to drop or merge";
    case DenseReason::kOther:
      return rows.message;
  }
  return "";
}

}  // namespace

std::string_view NameOf(DenseReason reason) {
  constexpr std::string_view kNames[kDenseReasons] = {
      "none",      "loss_above_limit", "too_short",    "waiting",          "not_observed",
      "no_memory", "nothing_new",      "policy_dense", "segment_overhead", "value_out_of_range",
      "newest",    "nothing_to_drop",  "other"};
  return kNames[static_cast<std::size_t>(reason)];
}

DenseRows DenseBecause(const absl::Status& failed) {
  DenseReason reason = DenseReason::kOther;
  if (absl::IsFailedPrecondition(failed)) reason = DenseReason::kNotObserved;
  if (absl::IsResourceExhausted(failed)) reason = DenseReason::kNoMemory;
  return {.reason = reason, .message = std::string(AsStringView(failed.message()))};
}

std::string TextOf(const LaneOutcome& outcome) {
  const DenseRows& dense = outcome.dense;
  if (dense.reason == DenseReason::kNothingNew) return ReasonText(dense);
  const std::uint64_t entries = outcome.compressed_entries + outcome.dense_entries;
  std::string text;
  if (outcome.form != LaneForm::kDense && entries < outcome.tokens) {
    text = Concat("keeps ", entries, " entries of ", Tokens(outcome.tokens));
  } else if (outcome.form == LaneForm::kCompressed) {
    text = Concat("compressed: ", Tokens(outcome.tokens));
  }
  if (dense.reason == DenseReason::kNone) return text;
  if (!text.empty()) text += "; ";
  if (outcome.form == LaneForm::kPartly && outcome.compressed_entries > 0) {
    Append(text, outcome.dense_entries, " of ", entries, " entries ");
  }
  return text + "left dense: " + ReasonText(dense);
}

}  // namespace tessera::compaction
