#include "client/eval/text/needles.h"

#include <algorithm>
#include <random>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

constexpr std::string_view kCities[] = {
    "Lisbon", "Oslo",  "Cairo",  "Lima",   "Hanoi",  "Vienna",  "Dublin", "Quito",
    "Athens", "Sofia", "Warsaw", "Manila", "Havana", "Nairobi", "Prague", "Santiago"};

// The first place at or after `at` where a sentence has ended.
std::size_t SentenceEnd(const llm::Tokenizer& tokenizer, std::span<const llm::TokenId> text,
                        std::size_t at) {
  const std::vector<llm::TokenId>& ends = tokenizer.delimiters();
  for (std::size_t i = at; i < text.size(); ++i) {
    if (std::ranges::binary_search(ends, text[i])) return i + 1;
  }
  return at;
}

}  // namespace

absl::StatusOr<NeedleText> HideNeedles(const llm::Tokenizer& tokenizer,
                                       std::span<const llm::TokenId> text, std::uint32_t length,
                                       std::uint32_t count, std::uint32_t seed) {
  // std::mt19937's numbers are the same everywhere; distributions are not.
  std::mt19937 random(seed);
  const std::size_t first_city = random() % std::size(kCities);
  NeedleText needles;
  std::vector<std::vector<llm::TokenId>> sentences;
  std::size_t needle_tokens = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::string_view city = kCities[(first_city + i) % std::size(kCities)];
    const std::string number = Concat(1000 + random() % 9000);
    const absl::StatusOr<std::vector<llm::TokenId>> parts[] = {
        tokenizer.Encode(Concat("\nThe secret number of ", city, " is ", number, ".\n")),
        tokenizer.Encode(Concat("\n\nQuestion: What is the secret number of ", city,
                                "?\nAnswer: The secret number of ", city, " is")),
        tokenizer.Encode(Concat(" ", number))};
    for (const auto& part : parts) {
      if (!part.ok()) return part.status();
    }
    needle_tokens += parts[0]->size();
    sentences.push_back(*parts[0]);
    needles.questions.push_back({*parts[1], *parts[2]});
  }
  if (needle_tokens > length || text.size() < length - needle_tokens) {
    return absl::InvalidArgumentError(Concat("a text of ", text.size(), " tokens is too short for ",
                                             length, " tokens with ", count, " needles"));
  }
  const std::size_t rest = length - needle_tokens;
  std::size_t from = 0;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::size_t middle = rest * (2 * i + 1) / (2 * count);
    const std::size_t to = std::min(rest, SentenceEnd(tokenizer, text, std::max(from, middle)));
    needles.context.insert(needles.context.end(), text.begin() + from, text.begin() + to);
    needles.context.insert(needles.context.end(), sentences[i].begin(), sentences[i].end());
    from = to;
  }
  needles.context.insert(needles.context.end(), text.begin() + from, text.begin() + rest);
  return needles;
}

}  // namespace tessera::cli::eval
