// Quest: summarizes each page of entries by the minimum and maximum of every key channel. Attention
// reads the pages with the largest upper bound on the logit. Combined with mosaickv, pages consist
// of packed rows.
#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/cache/model/model.h"
#include "daemon/policies/registry_rows.h"

namespace tessera::policies {
namespace {

// The paper's evaluation never reads fewer pages.
constexpr std::uint64_t kLeastPages = 3;

constexpr double kPages[] = {4, 8, 16};

constexpr Option kOptions[] = {
    {.name = "page",
     .type = OptionType::kCount,
     .standard = "16",
     .possible = kPages,
     .unit = "entries",
     .help = "Number of entries per page, the block that is summarized and read as a whole"},
    {.name = "tokens",
     .type = OptionType::kCount,
     .standard = "1024",
     .least = 1,
     .most = kMostEntries,
     .unit = "tokens",
     .help = "Number of tokens that attention reads, including the newest page and the tail; "
             "rounded down to whole pages, at least 3"},
    {.name = "heads",
     .type = OptionType::kWord,
     .standard = "group",
     .words = kHeadsWords,
     .help = "Whether the query heads of a kv head share one selection, or each has its own"},
    {.name = "dense_layers",
     .type = OptionType::kCount,
     .standard = "2",
     .most = cache::kMaxLayers,
     .unit = "layers",
     .help = "Number of first layers in which attention reads everything"},
};

void Apply(const Values& values, Policy& policy) {
  const std::uint32_t page = values.Count32("page");
  const std::uint64_t pages = std::max(values.Count("tokens") / page, kLeastPages);
  if (policy.mosaic.has_value()) {
    policy.mosaic->strategy.summary = kernels::Summary::kMinMax;
    policy.mosaic->strategy.blocks = {page};
  } else {
    policy.summaries = {.summary = kernels::Summary::kMinMax, .block = page};
  }
  // A page's score is its largest bound over the query heads that share a selection. The budget
  // counts everything that a lane holds: rows without a summary, the tail, and otherwise the newest
  // page are always read.
  policy.selection = {.rule = {.entries = pages * page,
                               .judge = kernels::SelectionRule::Judge::kLogit,
                               .first_block = false,
                               .counts_tail = true,
                               .each_head = ChooseEach(values.Word("heads"))},
                      .dense_layers = values.Count32("dense_layers")};
}

std::optional<Values> Read(const Policy& policy) {
  if (!IsQuest(policy)) return std::nullopt;
  TESSERA_CHECK(policy.selection.has_value(), "min/max summaries need a selection");
  Values values(kOptions);
  values.Give("page", policy.summaries.has_value() ? policy.summaries->block
                                                   : policy.mosaic->strategy.blocks.front());
  values.Give("tokens", static_cast<double>(policy.selection->rule.entries));
  values.Give("heads", HeadsWord(policy.selection->rule.each_head));
  values.Give("dense_layers", policy.selection->dense_layers);
  return values;
}

}  // namespace

bool IsQuest(const Policy& policy) {
  return policy.summaries.has_value() ||
         (policy.mosaic.has_value() &&
          policy.mosaic->strategy.summary == kernels::Summary::kMinMax);
}

constexpr TermKind kQuest = {
    .name = "quest",
    .is =
        "Summarizes pages by the minimum and maximum of each key channel; attention reads the "
        "pages with the largest upper bound on the logit",
    .sets = "block summaries (min/max), selection",
    .paper = "Quest (arXiv 2406.10774)",
    .decides = Decides::kSelection,
    .own_summaries = true,
    .options = kOptions,
    .apply = Apply,
    .read = Read,
};

}  // namespace tessera::policies
