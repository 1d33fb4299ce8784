// MosaicKV: rotates rows segment by segment and keeps each row's strongest channels, summarizes
// blocks by their mean key, and lets attention read the best blocks.
#include <array>
#include <string>

#include "daemon/base/strings.h"
#include "daemon/policies/registry_rows.h"

namespace tessera::policies {
namespace {

constexpr double kLargestHeadDim = 256;
constexpr double kTile = kernels::kTileEntries;

constexpr double kGroups[] = {1, 2, 4};
constexpr double kBlocks[] = {4, 8, 16};
constexpr std::string_view kRotationWords[] = {"bf16", "fp32"};

// The option tables list exactly what the tile format supports.
constexpr bool Names(std::span<const double> named, bool (*is_possible)(std::uint32_t)) {
  std::size_t possible = 0;
  for (std::uint32_t i = 0; i < 256; ++i) possible += is_possible(i);
  for (const double number : named) {
    if (!is_possible(static_cast<std::uint32_t>(number))) return false;
  }
  return possible == named.size();
}
static_assert(Names(kGroups, kernels::IsGroup));
static_assert(Names(kBlocks, kernels::IsBlock));
static_assert(kernels::IsHeadDim(256) && !kernels::IsHeadDim(512));

constexpr Option kOptions[] = {
    {.name = "keep",
     .type = OptionType::kNumber,
     .list = true,
     .standard = "0.125|0.25|0.375",
     .least = 1 / kLargestHeadDim,
     .unit = "share",
     .help = "Candidates for the share of a row's channels to keep, in whole groups"},
    {.name = "group",
     .type = OptionType::kCount,
     .list = true,
     .standard = "1|2|4",
     .possible = kGroups,
     .unit = "channels",
     .help = "Candidates for the number of adjacent channels that are kept or dropped together"},
    {.name = "loss_k",
     .type = OptionType::kNumber,
     .standard = "0.1",
     .unit = "share",
     .help = "Largest mean loss of keys that a candidate may have, as a share of their squared "
             "length"},
    {.name = "loss_v",
     .type = OptionType::kNumber,
     .standard = "0.15",
     .unit = "share",
     .help = "The same for values"},
    {.name = "truncate",
     .type = OptionType::kNumber,
     .standard = "0",
     .most = 1 - 4 / kLargestHeadDim,  // a group of any size is left
     .unit = "share",
     .help =
         "Share of the rotated channels to cut off, the weakest, before rows choose theirs; 0.25 "
         "in the paper"},
    {.name = "reorder",
     .type = OptionType::kSwitch,
     .standard = "1",
     .help = "Whether channels that rows often keep together are made adjacent"},
    {.name = "block",
     .type = OptionType::kCount,
     .list = true,
     .standard = "8",
     .possible = kBlocks,
     .unit = "entries",
     .help = "Candidates for the number of entries per block, which is summarized and read as a "
             "whole; 4|8|16 in the paper"},
    {.name = "block_variance",
     .type = OptionType::kNumber,
     .standard = "0.5",
     .unit = "share",
     .help =
         "Largest deviation of a block's keys from their mean, as a share of their squared length; "
         "the largest candidate block within it is chosen"},
    {.name = "segment",
     .type = OptionType::kCount,
     .standard = "64K",
     .least = kTile,
     .most = shm::kMaxSegmentEntries,
     .multiple_of = kernels::kTileEntries,
     .unit = "tokens",
     .help =
         "Largest number of tokens in a segment, which has one strategy; below about 1.5 head_dim "
         "tokens its rotations take more memory than packing saves"},
    {.name = "min_segment",
     .type = OptionType::kCount,
     .standard = "4096",
     .least = kTile,
     .most = shm::kMaxSegmentEntries,
     .multiple_of = kernels::kTileEntries,
     .unit = "tokens",
     .help = "Smallest number of tokens in a segment that is cut while decoding"},
    {.name = "sinks",
     .type = OptionType::kCount,
     .standard = "4",
     .most = shm::kMaxSegmentEntries,
     .unit = "tokens",
     .help =
         "Number of first tokens of a sequence that stay dense and are always read, rounded up to "
         "whole tiles of 32; no effect on tokens that another term keeps; 0 in the paper"},
    {.name = "recent",
     .type = OptionType::kCount,
     .standard = "128",
     .most = shm::kMaxSegmentEntries,
     .unit = "tokens",
     .help =
         "Number of newest tokens that stay dense, and up to a tile more; no effect on tokens that "
         "another term keeps; 0 in the paper"},
    {.name = "margin_k",
     .type = OptionType::kNumber,
     .standard = "0.05",
     .unit = "share",
     .help = "While decoding, a segment is cut when the loss of new keys exceeds loss_k by more "
             "than this"},
    {.name = "margin_v",
     .type = OptionType::kNumber,
     .standard = "0.05",
     .unit = "share",
     .help = "The same for values and loss_v"},
    {.name = "window",
     .type = OptionType::kCount,
     .standard = "512",
     .least = 1,
     .most = shm::kMaxSegmentEntries,
     .unit = "tokens",
     .help = "Number of newest tokens whose mean loss is compared with that limit"},
    {.name = "select",
     .type = OptionType::kNumber,
     .standard = "0.1",
     .unit = "share",
     .help =
         "Share of the visible packed entries that attention reads; 0: all of them, without block "
         "summaries"},
    {.name = "floor",
     .type = OptionType::kCount,
     .standard = kStandardFloor,
     .most = kMostEntries,
     .unit = "entries",
     .help = "Least number of packed entries that attention reads, or all if there are fewer; 0 in "
             "the paper"},
    {.name = "judge",
     .type = OptionType::kWord,
     .standard = "share",
     .words = kJudgeWords,
     .help = "Whether query heads compare blocks by their share of attention, or by logit"},
    {.name = "first_block",
     .type = OptionType::kSwitch,
     .standard = "1",
     .help = "Whether attention always reads the lane's first block"},
    {.name = "rotation",
     .type = OptionType::kWord,
     .standard = "bf16",
     .words = kRotationWords,
     .help = "Type in which rotations are stored"},
    {.name = "sample",
     .type = OptionType::kCount,
     .standard = "4096",
     .least = kTile,
     .most = shm::kMaxSegmentEntries,
     .unit = "tokens",
     .help = "Number of tokens, spread over a segment, on which the losses of candidates are "
             "measured"},
    {.name = "trial",
     .type = OptionType::kCount,
     .standard = "8192",
     .least = kTile,
     .most = shm::kMaxSegmentEntries,
     .unit = "tokens",
     .help = "Number of other tokens from which the rotation for that measurement is computed"},
    {.name = "reorder_sample",
     .type = OptionType::kCount,
     .standard = "1024",
     .least = kTile,
     .most = shm::kMaxSegmentEntries,
     .unit = "tokens",
     .help = "Number of tokens from which reorder learns which channels rows keep together"},
    {.name = "pressed",
     .type = OptionType::kNumber,
     .standard = "0",
     .unit = "share",
     .help =
         "Share of the channels to which sealed segments may be reduced when memory is short; 0: "
         "never"},
};

constexpr std::array<std::string_view, 4> kOfSelection = {"select", "floor", "judge",
                                                          "first_block"};
constexpr std::array<std::string_view, 2> kOfBlocks = {"block", "block_variance"};

// The first of these options that is given; empty: none.
std::string_view Given(const Values& values, std::span<const std::string_view> names) {
  for (const std::string_view name : names) {
    if (values.given(name)) return name;
  }
  return {};
}

// Refuses options that have no effect together with the other values.
std::string Idle(const Values& values) {
  if (values.given("reorder_sample") && !values.Switch("reorder")) {
    return "reorder_sample is given, but with reorder=0 no channels are reordered";
  }
  if (values.given("block_variance") && values.Counts("block").size() == 1) {
    return Concat("block_variance is given, but block=", values.Counts("block").front(),
                  " leaves nothing to choose; name candidates, as in block=4|8|16");
  }
  return "";
}

std::string Check(const Term& term, std::span<const Term> all) {
  const Values& values = term.values;
  if (std::string idle = Idle(values); !idle.empty()) return idle;
  for (const Term& other : all) {
    if (other.kind->decides != Decides::kSelection) continue;
    if (const auto name = Given(values, kOfSelection); !name.empty()) {
      return Concat(name, " is given, but the term ", other.kind->name,
                    " decides what attention reads");
    }
    if (const auto name = Given(values, kOfBlocks); other.kind->own_summaries && !name.empty()) {
      return Concat(name, " is given, but the term ", other.kind->name,
                    " decides how blocks are summarized");
    }
  }
  if (values.Number("select") != 0) return "";
  std::string_view idle = Given(values, std::span(kOfSelection).subspan(1));
  if (idle.empty()) idle = Given(values, kOfBlocks);
  if (idle.empty()) return "";
  return Concat(idle,
                " is given, but with select=0 attention reads everything, without block summaries");
}

void Apply(const Values& values, Policy& policy) {
  MosaicPolicy mosaic;
  kernels::StrategyOptions& strategy = mosaic.strategy;
  strategy.kept = values.value("keep").numbers;
  strategy.groups = values.Counts("group");
  strategy.threshold = {.key = values.Number("loss_k"), .value = values.Number("loss_v")};
  strategy.truncated = values.Number("truncate");
  strategy.reorder = values.Switch("reorder");
  strategy.block_variance = values.Number("block_variance");
  strategy.rotation_type = values.Word("rotation") == kRotationWords[1]
                               ? kernels::ElementType::kFp32
                               : kernels::ElementType::kBf16;
  strategy.sampled_rows = values.Count("sample");
  strategy.trial_rows = values.Count("trial");
  strategy.reorder_rows = values.Count("reorder_sample");
  mosaic.segments = {
      .tokens = values.Count("segment"),
      .min_tokens = values.Count("min_segment"),
      .sinks = values.Count("sinks"),
      .recent = values.Count("recent"),
      .loss_window = values.Count("window"),
      .margin = {.key = values.Number("margin_k"), .value = values.Number("margin_v")}};
  if (const double rate = values.Number("select"); rate == 0) {
    strategy.summary = kernels::Summary::kNone;
    strategy.blocks.clear();
  } else {
    strategy.summary = kernels::Summary::kMean;
    strategy.blocks = values.Counts("block");
    policy.selection = {.rule = {.rate = rate,
                                 .floor = values.Count("floor"),
                                 .judge = JudgeOf(values.Word("judge")),
                                 .first_block = values.Switch("first_block")}};
  }
  mosaic.pressed = values.Number("pressed");
  policy.mosaic = std::move(mosaic);
}

void ReadSelection(const Policy& policy, Values& values) {
  const kernels::StrategyOptions& strategy = policy.mosaic->strategy;
  if (strategy.summary == kernels::Summary::kNone) values.Give("select", 0);
  if (strategy.summary != kernels::Summary::kMean) return;
  values.Give("block", Value{{strategy.blocks.begin(), strategy.blocks.end()}, {}});
  values.Give("block_variance", strategy.block_variance);
  if (FindTermKind("select")->read(policy).has_value()) return;
  const kernels::SelectionRule& rule = policy.selection->rule;
  values.Give("select", rule.rate);
  values.Give("floor", static_cast<double>(rule.floor));
  values.Give("judge", JudgeWord(rule.judge));
  values.Give("first_block", rule.first_block);
}

std::optional<Values> Read(const Policy& policy) {
  if (!policy.mosaic.has_value()) return std::nullopt;
  const kernels::StrategyOptions& strategy = policy.mosaic->strategy;
  const SegmentOptions& segments = policy.mosaic->segments;
  Values values(kOptions);
  values.Give("keep", Value{strategy.kept, {}});
  values.Give("group", Value{{strategy.groups.begin(), strategy.groups.end()}, {}});
  values.Give("loss_k", strategy.threshold.key);
  values.Give("loss_v", strategy.threshold.value);
  values.Give("truncate", strategy.truncated);
  values.Give("reorder", strategy.reorder);
  values.Give("segment", static_cast<double>(segments.tokens));
  values.Give("min_segment", static_cast<double>(segments.min_tokens));
  values.Give("sinks", static_cast<double>(segments.sinks));
  values.Give("recent", static_cast<double>(segments.recent));
  values.Give("margin_k", segments.margin.key);
  values.Give("margin_v", segments.margin.value);
  values.Give("window", static_cast<double>(segments.loss_window));
  values.Give("rotation",
              kRotationWords[strategy.rotation_type == kernels::ElementType::kFp32 ? 1 : 0]);
  values.Give("sample", static_cast<double>(strategy.sampled_rows));
  values.Give("trial", static_cast<double>(strategy.trial_rows));
  values.Give("reorder_sample", static_cast<double>(strategy.reorder_rows));
  values.Give("pressed", policy.mosaic->pressed);
  ReadSelection(policy, values);
  return values;
}

}  // namespace

constexpr TermKind kMosaicKv = {
    .name = "mosaickv",
    .is = "Rotates and packs rows segment by segment; attention reads the best blocks",
    .sets = "packing, segments, block summaries (mean key), selection",
    .paper = "MosaicKV (Sheng et al., Dynamic Two-D KV Cache Compression)",
    .decides = Decides::kPacking,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
};

}  // namespace tessera::policies
