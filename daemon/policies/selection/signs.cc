// signs: indexes each key by the signs of half of its rotated channels and a norm, 9 bytes a token
// at head_dim 128. Attention reads the quads of four tokens that score best by them, and whatever
// has no index: sinks, the newest tokens, the tail.
#include <string>

#include "daemon/base/strings.h"
#include "daemon/policies/registry_rows.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kChoiceWords[] = {"row", "call"};

constexpr Option kOptions[] = {
    {.name = "rate",
     .type = OptionType::kNumber,
     .standard = "0.2",
     .above_least = true,
     .unit = "share",
     .help = "Share of the indexed entries that attention reads, in quads of four"},
    {.name = "floor",
     .type = OptionType::kCount,
     .standard = "2048",
     .most = kMostEntries,
     .unit = "entries",
     .help = "Least number of indexed entries that attention reads, or all if there are fewer"},
    {.name = "choice",
     .type = OptionType::kWord,
     .standard = "row",
     .words = kChoiceWords,
     .help = "Whether each query of a call chooses for itself, or all of its queries share one "
             "choice"},
};

std::string Check(const Term&, std::span<const Term> all) {
  for (const Term& other : all) {
    if (other.kind == &kMosaicKv) {
      return "rows that mosaickv packs drop channels, and have no index of signs; use "
             "planes+signs, or mosaickv's own select";
    }
    if (other.kind == &kThink) {
      return "rows with dropped key channels have no index of signs; use planes+signs";
    }
  }
  return "";
}

void Apply(const Values& values, Policy& policy) {
  policy.signs = true;
  // Scores are divided by the query's length, so that heads compare by logit.
  policy.selection = {.rule = {.rate = values.Number("rate"),
                               .floor = values.Count("floor"),
                               .judge = kernels::SelectionRule::Judge::kLogit,
                               .each_query = values.Word("choice") == kChoiceWords[0]}};
}

std::optional<Values> Read(const Policy& policy) {
  if (!policy.signs) return std::nullopt;
  Values values(kOptions);
  values.Give("rate", policy.selection->rule.rate);
  values.Give("floor", static_cast<double>(policy.selection->rule.floor));
  values.Give("choice", kChoiceWords[policy.selection->rule.each_query ? 0 : 1]);
  return values;
}

}  // namespace

constexpr TermKind kSigns = {
    .name = "signs",
    .is =
        "Indexes keys by the signs of their rotated channels, in planes or dense; attention reads "
        "the quads of tokens that score best",
    .sets = "index of keys, selection",
    .decides = Decides::kSelection,
    .own_summaries = true,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
};

}  // namespace tessera::policies
