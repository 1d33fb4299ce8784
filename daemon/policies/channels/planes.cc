// planes: subtracts a mean, rotates, and stores each row as integer codes of a few bits.
#include <algorithm>
#include <string>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/policies/plan.h"
#include "daemon/policies/registry_rows.h"

namespace tessera::policies {
namespace {

constexpr double kTile = kernels::kTileEntries;

// Widths in bits, of the more energetic half of the rotated channels and of the other.
constexpr std::string_view kKeyWords[] = {"8|8", "8|4", "6|4", "6|2", "4|4", "4|2"};
constexpr std::string_view kValueWords[] = {"8", "6", "4", "2", "4|4", "4|2"};

constexpr std::string_view kPressedWords[] = {"none", "4"};

constexpr std::string_view kBookWords[] = {kAutoBook, kOwnBook};

constexpr Option kOptions[] = {
    {.name = "key",
     .type = OptionType::kWord,
     .standard = "6|4",
     .words = kKeyWords,
     .unit = "bits",
     .help = "Bits per channel of a key: of the half with the most energy, and of the other half"},
    {.name = "value",
     .type = OptionType::kWord,
     .standard = "4",
     .words = kValueWords,
     .unit = "bits",
     .help = "Bits per channel of a value: of all channels, or of each half"},
    {.name = "sinks",
     .type = OptionType::kCount,
     .standard = "4",
     .most = shm::kMaxSegmentEntries,
     .unit = "tokens",
     .help = "Number of first tokens of a sequence that stay dense, rounded up to whole tiles of "
             "32"},
    {.name = "recent",
     .type = OptionType::kCount,
     .standard = "64",
     .most = shm::kMaxSegmentEntries,
     .unit = "tokens",
     .help = "Number of newest tokens that stay dense, and up to a tile more; no effect on tokens "
             "that another term keeps, or beside one that drops tokens while decoding"},
    {.name = "book_rows",
     .type = OptionType::kCount,
     .standard = "1024",
     .least = 8 * kTile,
     .most = shm::kMaxSegmentEntries,
     .multiple_of = kernels::kTileEntries,
     .unit = "tokens",
     .help = "Number of tokens from which a model's means and rotations are made, once for each "
             "tenant; rows stay dense until a sequence has so many"},
    {.name = "book",
     .type = OptionType::kName,
     .standard = kAutoBook,
     .words = kBookWords,
     .help = "Where means and rotations come from. auto: a model's first rows; own: the rows of "
             "each segment; otherwise the name of a book that the daemon has loaded (--book)"},
    {.name = "pressed",
     .type = OptionType::kWord,
     .standard = "none",
     .words = kPressedWords,
     .unit = "bits",
     .help =
         "Bits to which 6-bit codes of keys may be shortened when memory is short; none: never"},
};

constexpr Preset::Setting kSafe[] = {{"key", "8|8"}, {"value", "8"}};
constexpr Preset::Setting kNear[] = {{"key", "6|4"}, {"value", "4"}};
constexpr Preset::Setting kLean[] = {{"key", "4|4"}, {"value", "4"}};
constexpr Preset::Setting kSmall[] = {{"key", "4|2"}, {"value", "4|2"}};
constexpr Preset kPresets[] = {
    {"safe", kSafe}, {"near", kNear}, {"lean", kLean}, {"small", kSmall}};

kernels::PlaneWidths WidthsOf(std::string_view word) {
  const auto bits = [](char c) { return static_cast<std::uint8_t>(c - '0'); };
  return {bits(word.front()), word.size() == 1 ? std::uint8_t{0} : bits(word.back())};
}

std::string_view WordOf(const kernels::PlaneWidths& widths,
                        std::span<const std::string_view> words) {
  const auto word = std::ranges::find(words, WidthsText(widths));
  TESSERA_CHECK(word != words.end(), WidthsText(widths));
  return *word;
}

std::string Check(const Term& term, std::span<const Term> all) {
  const std::string& book = term.values.Name("book");
  if (term.values.given("book_rows") && book != kAutoBook && book != kOwnBook) {
    return Concat("book_rows is given, but the book ", book, " is made already; leave it out");
  }
  const kernels::PlaneWidths key = WidthsOf(term.values.Word("key"));
  if (term.values.Word("pressed") != kPressedWords[0] && kernels::WithoutCrumbs(key) == key) {
    return Concat("pressed shortens 6-bit codes of keys, but key=", WidthsText(key), " has none");
  }
  for (const Term& other : all) {
    if (other.kind == &kSigns) continue;
    if (other.kind->decides == Decides::kSelection) {
      return Concat("rows in planes have no block summaries, which ", other.kind->name,
                    " needs; their index is signs, as in planes+signs");
    }
    if (other.kind->decides == Decides::kValues) {
      return Concat("key and value state the widths of codes; leave out ", other.kind->name);
    }
  }
  return "";
}

void Apply(const Values& values, Policy& policy) {
  policy.planes = PlanesPolicy{.key = WidthsOf(values.Word("key")),
                               .value = WidthsOf(values.Word("value")),
                               .sinks = values.Count("sinks"),
                               .recent = values.Count("recent"),
                               .book_rows = values.Count("book_rows"),
                               .book = values.Name("book"),
                               .drops_crumbs = values.Word("pressed") != kPressedWords[0]};
}

std::optional<Values> Read(const Policy& policy) {
  if (!policy.planes.has_value()) return std::nullopt;
  Values values(kOptions);
  values.Give("key", WordOf(policy.planes->key, kKeyWords));
  values.Give("value", WordOf(policy.planes->value, kValueWords));
  values.Give("sinks", static_cast<double>(policy.planes->sinks));
  values.Give("recent", static_cast<double>(policy.planes->recent));
  if (!policy.planes->has_book_of_file()) {
    values.Give("book_rows", static_cast<double>(policy.planes->book_rows));
  }
  values.Give("book", Value{{}, {}, policy.planes->book});
  values.Give("pressed", kPressedWords[policy.planes->drops_crumbs ? 1 : 0]);
  return values;
}

}  // namespace

constexpr TermKind kPlanes = {
    .name = "planes",
    .is =
        "Stores rows as integer codes of 2 to 8 bits in a rotated space, on which attention "
        "computes directly; presets: safe, near (the default), lean, small",
    .sets = "packing (of keys and values)",
    .decides = Decides::kPacking,
    .options = kOptions,
    .presets = kPresets,
    .check = Check,
    .apply = Apply,
    .read = Read,
};

}  // namespace tessera::policies
