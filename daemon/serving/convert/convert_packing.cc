// Converts packings, selections and policies. Declared in convert.h.

#include <map>
#include <string>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/plan.h"
#include "daemon/policies/token_policy.h"
#include "daemon/serving/convert/convert.h"

namespace tessera::serving {

namespace {

using kernels::TileShape;

constexpr std::uint32_t kDefaultBlock = 8;

static_assert(static_cast<int>(kernels::ValueType::kBf16) == v1::VALUE_TYPE_BF16);
static_assert(static_cast<int>(kernels::ValueType::kFp16) == v1::VALUE_TYPE_FP16);
static_assert(static_cast<int>(kernels::ValueType::kInt8) == v1::VALUE_TYPE_INT8);
static_assert(static_cast<int>(kernels::ValueType::kFp8) == v1::VALUE_TYPE_FP8);
static_assert(static_cast<int>(kernels::Summary::kMean) == v1::BLOCK_SUMMARY_MEAN);
static_assert(static_cast<int>(kernels::Summary::kMinMax) == v1::BLOCK_SUMMARY_MIN_MAX);
static_assert(static_cast<int>(kernels::Summary::kSigns) == v1::BLOCK_SUMMARY_SIGNS);

absl::Status SetSummary(const v1::Packing& packing, TileShape& shape) {
  const int summary = packing.summary();
  if (!v1::BlockSummary_IsValid(summary)) {
    return absl::InvalidArgumentError(
        Concat("packing.summary is ", summary, "; use NONE (0), MEAN (1) or MIN_MAX (2)"));
  }
  if (summary == v1::BLOCK_SUMMARY_SIGNS) {
    return absl::InvalidArgumentError(
        "packing.summary is SIGNS (3), which needs a book of the model; set a policy with signs, "
        "as in planes+signs, instead of a packing");
  }
  shape.summary = static_cast<kernels::Summary>(summary);
  if (shape.summary == kernels::Summary::kNone) {
    if (packing.block() == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        Concat("packing.block is ", packing.block(), " without a packing.summary"));
  }
  const std::uint32_t block = packing.block() == 0 ? kDefaultBlock : packing.block();
  if (!kernels::IsBlock(block)) {
    return absl::InvalidArgumentError(Concat("packing.block is ", block, "; use 4, 8 or 16"));
  }
  shape.block = static_cast<std::uint8_t>(block);
  return absl::OkStatus();
}

// Dense rows with block summaries.
absl::StatusOr<TileShape> DenseForm(const v1::Packing& packing, TileShape shape, bool rotated) {
  struct Field {
    std::string_view name;
    std::uint32_t value;
  };
  for (const Field& field :
       {Field{"kept_channels", packing.kept_channels()}, Field{"group", packing.group()},
        Field{"values", static_cast<std::uint32_t>(packing.values())},
        Field{"channels", packing.channels()}}) {
    if (field.value == 0) continue;
    return absl::InvalidArgumentError(Concat("packing.", field.name, " is ", field.value,
                                             " and packing.dense is set; dense rows are not "
                                             "packed, so it must be 0"));
  }
  if (rotated) {
    return absl::InvalidArgumentError(
        "packing.dense is set and there are rotations; dense rows cannot be rotated");
  }
  if (shape.summary == kernels::Summary::kNone) {
    return absl::InvalidArgumentError(
        "packing.dense is set without a packing.summary: nothing would change");
  }
  return shape;
}

std::string FormatName(const TileShape& shape) {
  if (!shape.packed()) {
    return Concat("dense ", kernels::ElementName(kernels::ElementsOf(shape.format)));
  }
  if (shape.planes()) {
    return Concat("planes ", policies::WidthsText(shape.key_planes), ", ",
                  policies::WidthsText(shape.value_planes));
  }
  return Concat("packed ", kernels::ValueTypeName(kernels::ValuesOf(shape.format)));
}

}  // namespace

absl::StatusOr<TileShape> ToTileShape(const v1::Packing& packing,
                                      const kernels::LayerGeometry& geometry, bool rotated) {
  TileShape shape = kernels::DenseShape(geometry.head_dim, geometry.type);
  if (absl::Status status = SetSummary(packing, shape); !status.ok()) return status;
  if (packing.dense()) return DenseForm(packing, shape, rotated);
  const int values =
      packing.values() == v1::VALUE_TYPE_UNSPECIFIED ? v1::VALUE_TYPE_BF16 : packing.values();
  if (!v1::ValueType_IsValid(values)) {
    return absl::InvalidArgumentError(Concat("packing.values is ", values,
                                             "; use BF16 (1), FP16 (2), INT8 (3) or FP8 "
                                             "(4)"));
  }
  const std::uint32_t channels = packing.channels() == 0 ? geometry.head_dim : packing.channels();
  const std::uint32_t group = packing.group() == 0 ? 1 : packing.group();
  // Checked before the conversion to 16 and 8 bits.
  if (channels > geometry.head_dim) {
    return absl::InvalidArgumentError(
        Concat("packing.channels is ", channels, "; the limit is head_dim, ", geometry.head_dim));
  }
  if (packing.kept_channels() == 0 || packing.kept_channels() > channels) {
    return absl::InvalidArgumentError(Concat("packing.kept_channels is ", packing.kept_channels(),
                                             "; use 1 to ", channels, ", the number of channels"));
  }
  if (!kernels::IsGroup(group)) {
    return absl::InvalidArgumentError(Concat("packing.group is ", group, "; use 1, 2 or 4"));
  }
  if (channels != geometry.head_dim && !rotated) {
    return absl::InvalidArgumentError(Concat("packing.channels is ", channels, " of head_dim ",
                                             geometry.head_dim,
                                             " without rotations; only rotated rows can be cut"));
  }
  shape.format = kernels::PackedFormat(static_cast<kernels::ValueType>(values));
  shape.key = {.channels = static_cast<std::uint16_t>(channels),
               .kept = static_cast<std::uint16_t>(packing.kept_channels())};
  shape.value = shape.key;
  shape.group = static_cast<std::uint8_t>(group);
  if (const char* why = kernels::UnsupportedReason(shape); why != nullptr) {
    return absl::InvalidArgumentError(Concat("packing with kept_channels ", shape.key.kept,
                                             ", channels ", channels, ", group ", group,
                                             " of head_dim ", geometry.head_dim, ": ", why));
  }
  return shape;
}

absl::StatusOr<kernels::SelectionRule> ToSelectionRule(const v1::Selection& selection) {
  const int judge = selection.judge();
  if (!v1::Selection::Judge_IsValid(judge)) {
    return absl::InvalidArgumentError(
        Concat("selection.judge is ", judge, "; use SHARE (0) or LOGIT (1)"));
  }
  if (selection.entries() != 0 && selection.rate() != 0) {
    return absl::InvalidArgumentError(Concat("selection has entries ", selection.entries(),
                                             " and rate ", selection.rate(),
                                             "; set only one of them"));
  }
  if (selection.entries() == 0 && !(selection.rate() > 0 && selection.rate() <= 1)) {
    return absl::InvalidArgumentError(
        Concat("selection.rate is ", selection.rate(),
               "; it must be above 0 and at most 1, unless entries is set"));
  }
  if (selection.entries() != 0 && selection.floor() != 0) {
    return absl::InvalidArgumentError(
        Concat("selection has entries ", selection.entries(), " and floor ", selection.floor(),
               "; floor is the least budget by rate, so it must be 0 where entries is the budget"));
  }
  using Judge = kernels::SelectionRule::Judge;
  return kernels::SelectionRule{
      .rate = selection.entries() != 0 ? 1.0 : selection.rate(),
      .entries = selection.entries(),
      .floor = selection.floor(),
      .judge = judge == v1::Selection::JUDGE_LOGIT ? Judge::kLogit : Judge::kShare,
      .first_block = selection.first_block(),
      .counts_tail = selection.counts_tail(),
      .each_head = selection.each_head(),
      .each_query = selection.each_query()};
}

void Describe(const policies::SelectionPolicy& policy, v1::PolicySelection& shown) {
  v1::Selection& selection = *shown.mutable_selection();
  if (policy.rule.entries != 0) {
    selection.set_entries(policy.rule.entries);
  } else {
    selection.set_rate(policy.rule.rate);
    selection.set_floor(policy.rule.floor);
  }
  using Judge = kernels::SelectionRule::Judge;
  selection.set_judge(policy.rule.judge == Judge::kLogit ? v1::Selection::JUDGE_LOGIT
                                                         : v1::Selection::JUDGE_SHARE);
  selection.set_first_block(policy.rule.first_block);
  selection.set_counts_tail(policy.rule.counts_tail);
  selection.set_each_head(policy.rule.each_head);
  selection.set_each_query(policy.rule.each_query);
  shown.set_dense_layers(policy.dense_layers);
}

namespace {

// Refuses the separators of the policy text inside a word of it.
absl::Status CheckPolicyWord(std::string_view what, const std::string& word) {
  const std::size_t at = word.find_first_of("+:,=");
  if (!word.empty() && at == std::string::npos) return absl::OkStatus();
  if (word.empty()) return absl::InvalidArgumentError(Concat("policy_spec: ", what, " is empty"));
  return absl::InvalidArgumentError(Concat("policy_spec: ", what, " holds ",
                                           Quoted(word.substr(at, 1)), " at character ", at + 1,
                                           "; give each term and option separately"));
}

absl::StatusOr<policies::Policy> ParseRequested(const std::string& text,
                                                const v1::PolicySpec* spec) {
  if (spec == nullptr) return policies::ParsePolicy(text);
  if (!text.empty()) {
    return absl::InvalidArgumentError(
        Concat("both policy ", Quoted(text), " and policy_spec are set; set only one of them"));
  }
  std::string words;
  for (const v1::PolicyTermSpec& term : spec->terms()) {
    absl::Status status = CheckPolicyWord("the name of a term", term.name());
    Append(words, words.empty() ? "" : "+", term.name());
    // Sorted by name, so that error messages are deterministic.
    const std::map<std::string, std::string> options(term.options().begin(), term.options().end());
    char before = ':';
    for (const auto& [key, value] : options) {
      if (status.ok()) status = CheckPolicyWord("the name of an option", key);
      if (status.ok()) status = CheckPolicyWord("the value of an option", value);
      Append(words, std::string(1, before), key, "=", value);
      before = ',';
    }
    if (!status.ok()) return status;
  }
  return policies::ParsePolicy(words);
}

}  // namespace

absl::StatusOr<policies::Policy> ToPolicy(const std::string& text, const v1::PolicySpec* spec) {
  absl::StatusOr<policies::Policy> policy = ParseRequested(text, spec);
  if (!policy.ok()) return WithCause(policy.status(), ErrorCause::kPolicy);
  return policy;
}

std::optional<v1::PolicyNeeds> ToPolicyNeeds(const policies::Policy& policy) {
  if (!policy.chooses()) return std::nullopt;
  const policies::Needs needs = policies::NeedsOf(policy);
  v1::PolicyNeeds shown;
  shown.set_last_queries(needs.last_queries);
  shown.set_last_share(needs.last_share);
  shown.set_norm_share(needs.norm_share);
  shown.set_attention_sums(needs.attention_sums);
  shown.set_token_ids(needs.token_ids);
  shown.set_decode_queries(needs.decode_queries);
  shown.set_acts_while_decoding(policies::Continues(policy));
  shown.set_layers_alike(needs.layers_alike);
  return shown;
}

void Describe(const cache::SegmentRun& run, v1::SegmentRun& shown) {
  shown.set_segments(run.segments);
  shown.set_entries(run.entries);
  shown.set_first_position(run.first_position);
  shown.set_format(FormatName(run.shape));
  if (run.shape.packed()) {
    shown.set_channels(run.shape.key.channels);
    shown.set_kept_channels(run.shape.key.kept);
    shown.set_value_channels(run.shape.value.channels);
    shown.set_value_kept_channels(run.shape.value.kept);
    shown.set_group(run.shape.group);
  }
  shown.set_summary(static_cast<v1::BlockSummary>(run.shape.summary));
  shown.set_block(run.shape.block);
  shown.set_tile_bytes(run.tile_bytes);
  shown.set_rotation_bytes(run.rotation_bytes);
  shown.set_table_bytes(run.table_bytes);
  shown.set_summary_bytes(run.summary_bytes);
  shown.set_provisional(run.provisional);
  shown.set_key_loss(run.loss.key);
  shown.set_value_loss(run.loss.value);
}

}  // namespace tessera::serving
