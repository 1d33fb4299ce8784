// Selection alone: attention reads the best blocks of what has block summaries.
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
     .help = "Of the entries that the queries may see in blocks, so many are read; not beside "
             "entries"},
    {.name = kEntries,
     .type = OptionType::kCount,
     .least = 1,
     .most = kMostEntries,
     .unit = "entries",
     .help = "So many entries of blocks are read, whatever the length; instead of rate"},
    {.name = kFloor,
     .type = OptionType::kCount,
     .standard = kStandardFloor,
     .most = kMostEntries,
     .unit = "entries",
     .help = "Attention reads at least so many entries of blocks, or all if there are fewer; not "
             "beside entries"},
    {.name = "judge",
     .type = OptionType::kWord,
     .standard = "share",
     .words = kJudgeWords,
     .help = "Query heads compare blocks by share of their own attention, or by logit"},
    {.name = "heads",
     .type = OptionType::kWord,
     .standard = "group",
     .words = kHeadsWords,
     .help = "The query heads of a kv head share one choice, or each has its own"},
    {.name = "first_block",
     .type = OptionType::kSwitch,
     .standard = "1",
     .help = "Whether the lane's first block is always read"},
    {.name = "dense_layers",
     .type = OptionType::kCount,
     .standard = "0",
     .most = cache::kMaxLayers,
     .unit = "layers",
     .help = "The first layers, which read everything"},
};

std::string Check(const Term& term, std::span<const Term>) {
  if (term.values.given(kRate) && term.values.given(kEntries)) {
    return "rate and entries are both given; each is the budget by itself";
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
  if (!policy.selection.has_value() || IsQuest(policy)) return std::nullopt;
  const kernels::SelectionRule& rule = policy.selection->rule;
  // What mosaickv says with options of its own.
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
        "Attention reads the best blocks of segments that have block summaries, and all of the "
        "others",
    .sets = "selection",
    .decides = Decides::kSelection,
    .options = kOptions,
    .check = Check,
    .apply = Apply,
    .read = Read,
};

}  // namespace tessera::policies
