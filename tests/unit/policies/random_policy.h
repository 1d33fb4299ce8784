// Random policy texts from the registry's tables, and random spellings of the same policy.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/policies/registry.h"
#include "tests/fakes/seed.h"

namespace tessera::policies {

struct GivenOption {
  const Option* option;
  Value value;
};
struct GivenTerm {
  const TermKind* kind;
  std::vector<GivenOption> options;
};

class PolicyWords {
 public:
  // `few`: uses only the limits and a few numbers in between, so that two policies are often equal.
  PolicyWords(TestRandom& random, bool few) : random_(random), few_(few) {}

  // Each term follows its table; the combination may be refused.
  std::vector<GivenTerm> Next() {
    std::vector<GivenTerm> terms;
    for (const TermKind* kind : TermKinds()) {
      // There are many token policies, and only one may be used.
      if (!random_.OneIn(kind->decides == Decides::kPacking ? 2
                         : kind->tokens != nullptr          ? 16
                                                            : 4)) {
        continue;
      }
      GivenTerm term = {kind, {}};
      for (const Option& option : kind->options) {
        if (random_.OneIn(few_ ? 8 : 5)) term.options.push_back({&option, NextValue(option)});
      }
      terms.push_back(std::move(term));
    }
    return terms;
  }

  // In any order, with blanks anywhere and numbers in any notation.
  std::string Spell(std::vector<GivenTerm> terms) {
    Shuffle(terms);
    std::string text = Blanks();
    for (GivenTerm& term : terms) {
      Append(text, &term == terms.data() ? "" : "+", Blanks(), term.kind->name, Blanks());
      Shuffle(term.options);
      char separator = ':';
      for (const GivenOption& given : term.options) {
        Append(text, separator, Blanks(), given.option->name, Blanks(), "=", Blanks(),
               Spell(*given.option, given.value), Blanks());
        separator = ',';
      }
    }
    return text;
  }

 private:
  Value NextValue(const Option& option) {
    if (option.type == OptionType::kWord) return {{}, random_.Pick(option.words)};
    if (option.type == OptionType::kName) {
      constexpr std::string_view kOther[] = {"papers", "Qwen2.5_v1-a", "0", "."};
      const bool word = random_.OneIn(2);
      return {{}, {}, std::string(random_.Pick(word ? option.words : std::span(kOther)))};
    }
    Value value;
    const std::uint64_t most = option.list ? random_.Between(1, 4) : 1;
    for (std::uint64_t i = 0; i < most; ++i) {
      const double number = NextNumber(option);
      if (std::ranges::count(value.numbers, number) == 0) value.numbers.push_back(number);
    }
    return value;
  }

  double NextNumber(const Option& option) {
    if (option.type == OptionType::kSwitch) return static_cast<double>(random_.Below(2));
    if (!option.possible.empty()) return random_.Pick(option.possible);
    if (random_.OneIn(few_ ? 3 : 8)) return option.most;
    if (option.type == OptionType::kCount) {
      const auto steps =
          static_cast<std::uint64_t>((option.most - option.least) / option.multiple_of);
      const std::uint64_t step = few_ ? random_.Below(3) : random_.Below(steps + 1);
      return option.least + static_cast<double>(step * option.multiple_of);
    }
    if (random_.OneIn(8) && !option.above_least) return option.least;
    // Doubles of every kind: short, long and tiny ones.
    double share = few_ ? 0.25 * static_cast<double>(random_.Between(1, 3))
                        : static_cast<double>(random_.Between(1, 1000)) / 1000;
    if (!few_ && random_.OneIn(3)) share = std::ldexp(static_cast<double>(random_.Bits() | 1), -64);
    if (!few_ && random_.OneIn(6)) share *= std::ldexp(1.0, -static_cast<int>(random_.Below(900)));
    return std::clamp(share, option.least, option.most);
  }

  std::string Spell(const Option& option, Value value) {
    if (option.type == OptionType::kWord) return std::string(value.word);
    if (option.type == OptionType::kName) return value.name;
    Shuffle(value.numbers);
    std::string text;
    for (const double number : value.numbers) {
      Append(text, text.empty() ? "" : "|", Blanks(),
             option.type == OptionType::kNumber ? SpellNumber(number) : SpellCount(number),
             Blanks());
    }
    return text;
  }

  std::string SpellNumber(double number) {
    const std::string plain = Concat(number);
    if (plain.find('e') != std::string::npos) return plain;
    if (plain.starts_with("0.") && random_.OneIn(3)) return plain.substr(1);
    // Percent: moves the decimal point by two places in the text.
    if (!plain.starts_with("0.") || random_.OneIn(2)) return plain;
    std::string digits = plain.substr(2);
    digits.append(digits.size() < 2 ? 2 - digits.size() : 0, '0');
    return Concat(digits.substr(0, 2), ".", digits.substr(2), "0", Blanks(), "%");
  }

  std::string SpellCount(double number) {
    const auto count = static_cast<std::uint64_t>(number);
    const std::string zeros(random_.Below(3), '0');
    if (count % (1 << 20) == 0 && random_.OneIn(2)) return Concat(zeros, count >> 20, "M");
    if (count % 1024 == 0 && random_.OneIn(2)) return Concat(zeros, count >> 10, "K");
    return Concat(zeros, count);
  }

  std::string Blanks() { return random_.OneIn(10) ? std::string(random_.Between(1, 2), ' ') : ""; }

  template <typename T>
  void Shuffle(std::vector<T>& items) {
    for (std::size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random_.Below(i)]);
  }

  TestRandom& random_;
  bool few_;
};

}  // namespace tessera::policies
