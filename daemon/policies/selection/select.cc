// The term `select`: attention reads the best blocks of segments that have block summaries.
#include "daemon/cache/model/model.h"
#include "daemon/policies/registry_rows.h"

namespace tessera::policies {
namespace {

constexpr std::string_view kRate = "rate";
constexpr std::string_view kEntries = "entries";
constexpr std::string_view kFloor = "floor";

constexpr Option kOptions[] = {
    {.name = kRate,
     .type = OptionType::kNumber,
     .standard = "0.1",
     .above_least = true,
     .unit = "share",
     .help = "Share of the visible entries in blocks that attention reads; not together with "
             "entries"},
    {.name = kEntries,
     .type = OptionType::kCount,
     .least = 1,
     .most = kMostEntries,
     .unit = "entries",
     .help = "Number of entries in blocks that attention reads, whatever the length; replaces "
             "rate"},
    {.name = kFloor,
     .type = OptionType::kCount,
     .standard = kStandardFloor,
     .most = kMostEntries,
     .unit = "entries",
     .help = "Least number of entries in blocks that attention reads, or all if there are fewer; "
             "cannot be combined with entries"},
    {.name = "judge",
     .type = OptionType::kWord,
     .standard = "share",
     .words = kJudgeWords,
     .help = "Whether query heads compare blocks by their share of attention, or by logit"},
    {.name = "heads",
     .type = OptionType::kWord,
     .standard = "group",
     .words = kHeadsWords,
     .help = "Whether the query heads of a kv head share one selection, or each has its own"},
    {.name = "first_block",
     .type = OptionType::kSwitch,
     .standard = "1",
     .help = "Whether attention always reads the lane's first block"},
    {.name = "dense_layers",
     .type = OptionType::kCount,
     .standard = "0",
     .most = cache::kMaxLayers,
     .unit = "layers",
     .help = "Number of first layers in which attention reads everything"},
};

std::string Check(const Term& term, std::span<const Term>) {
  if (term.values.given(kRate) && term.values.given(kEntries)) {
    return "rate and entries are both given; give only one of them";
  }
  if (term.values.given(kFloor) && term.values.given(kEntries)) {
    return "floor and entries are both given; floor is the least budget by rate";
  }
  return "";
}

void Apply(const Values& values, Policy& policy) {
  kernels::SelectionRule rule = {.judge = JudgeOf(values.Word("judge")),
                                 .first_block = values.Switch("first_block"),
                                 .each_head = ChooseEach(values.Word("heads"))};
  if (values.given(kEntries)) {
    rule.entries = values.Count(kEntries);
  } else {
    rule.rate = values.Number(kRate);
    rule.floor = values.Count(kFloor);
  }
  policy.selection = {.rule = rule, .dense_layers = values.Count32("dense_layers")};
}

std::optional<Values> Read(const Policy& policy) {
  if (!policy.selection.has_value() || IsQuest(policy) || policy.signs) return std::nullopt;
  const kernels::SelectionRule& rule = policy.selection->rule;
  // mosaickv's own options express this selection.
  if (policy.mosaic.has_value() && rule.entries == 0 && policy.selection->dense_layers == 0 &&
      !rule.each_head) {
    return std::nullopt;
  }
  Values values(kOptions);
  if (rule.entries != 0) {
    values.Give(kEntries, static_cast<double>(rule.entries));
  } else {
    values.Give(kRate, rule.rate);
    values.Give(kFloor, static_cast<double>(rule.floor));
  }
  values.Give("judge", JudgeWord(rule.judge));
  values.Give("heads", HeadsWord(rule.each_head));
  values.Give("first_block", rule.first_block);
  values.Give("dense_layers", policy.selection->dense_layers);
  return values;
}

}  // namespace

kernels::SelectionRule::Judge JudgeOf(std::string_view word) {
  using Judge = kernels::SelectionRule::Judge;
  return word == kJudgeWords[1] ? Judge::kLogit : Judge::kShare;
}

std::string_view JudgeWord(kernels::SelectionRule::Judge judge) {
  return kJudgeWords[judge == kernels::SelectionRule::Judge::kLogit ? 1 : 0];
}

bool ChooseEach(std::string_view word) { return word == kHeadsWords[1]; }

std::string_view HeadsWord(bool each_head) { return kHeadsWords[each_head ? 1 : 0]; }

constexpr TermKind kSelect = {
    .name = "select",
    .is =
        "Lets attention read only the best blocks of segments that have block summaries, and all "
        "other segments whole",
    .sets = "selection",
    .decides = Decides::kSelection,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
};

}  // namespace tessera::policies
