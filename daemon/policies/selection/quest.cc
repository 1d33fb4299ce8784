// Quest: rows stay, every page of 16 tokens is summed up by the least and greatest of each key
// channel, and attention reads the pages whose bound on the logit is greatest. Beside mosaickv the
// pages are of packed rows.
#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/cache/model/model.h"
#include "daemon/policies/registry_rows.h"

namespace tessera::policies {
namespace {

// Quest's evaluation reads never fewer.
constexpr std::uint64_t kLeastPages = 3;

constexpr double kPages[] = {4, 8, 16};

constexpr Option kOptions[] = {
    {.name = "page",
     .type = OptionType::kCount,
     .standard = "16",
     .possible = kPages,
     .unit = "entries",
     .help = "A page: the block that is summed up and read as one"},
    {.name = "tokens",
     .type = OptionType::kCount,
     .standard = "1024",
     .least = 1,
     .most = kMostEntries,
     .unit = "tokens",
     .help = "The budget, rounded down to whole pages and at least 3 of them; the newest page, and "
             "what "
             "waits in the tail, are among them"},
    {.name = "heads",
     .type = OptionType::kWord,
     .standard = "group",
     .words = kHeadsWords,
     .help = "The query heads of a kv head share one choice, or each has its own"},
    {.name = "dense_layers",
     .type = OptionType::kCount,
     .standard = "2",
     .most = cache::kMaxLayers,
     .unit = "layers",
     .help = "The first layers, which read everything"},
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
  // The greatest bound over the query heads that choose together decides, as it is. Pages are of
  // all that a lane holds: what waits to be summed up, the tail, and the newest one where there is
  // neither, are among them.
  policy.selection = {.rule = {.entries = pages * page,
                               .judge = kernels::SelectionRule::Judge::kLogit,
                               .first_block = false,
                               .counts_tail = true,
                               .each_head = ChooseEach(values.Word("heads"))},
                      .dense_layers = values.Count32("dense_layers")};
}

std::optional<Values> Read(const Policy& policy) {
  if (!IsQuest(policy)) return std::nullopt;
  TESSERA_CHECK(policy.selection.has_value(), "min/max summaries without a selection");
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
        "Pages are summed up by their least and greatest keys, and attention reads those whose "
        "bound on the logit is greatest",
    .sets = "block summaries (min/max), selection",
    .paper = "Quest (arXiv 2406.10774)",
    .decides = Decides::kSelection,
    .own_summaries = true,
    .options = kOptions,
    .apply = Apply,
    .read = Read,
};

}  // namespace tessera::policies
