#include "client/eval/tasks/recall_document.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace tessera::cli::eval {

namespace {

Tokens Joined(std::initializer_list<Tokens> parts) {
  Tokens all;
  for (const Tokens& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

TokenId Pop(Tokens& tokens) {
  const TokenId last = tokens.back();
  tokens.pop_back();
  return last;
}

// Index of the item nearest to `wanted`; of two equally near, the upper one.
std::size_t Nearest(const std::vector<std::int64_t>& ascending, double wanted) {
  std::size_t low = 0, high = ascending.size() - 1;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (static_cast<double>(ascending[middle]) < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0) return low;
  const double below = wanted - static_cast<double>(ascending[low - 1]);
  const double above = static_cast<double>(ascending[low]) - wanted;
  return below < above ? low - 1 : low;
}

}  // namespace

RecallDocument::RecallDocument(const RecallWords& words, std::uint64_t seed)
    : words_(words), random_(seed) {
  keys_ = Shuffled(words.keys, words.keys.size());
  variables_ = Shuffled(words.variables, words.variables.size());
}

Tokens RecallDocument::Shuffled(Tokens pool, std::size_t count) {
  Tokens picked;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = random_.Below(pool.size());
    picked.push_back(pool[at]);
    pool[at] = pool.back();
    pool.pop_back();
  }
  return picked;
}

void RecallDocument::AddNeedle(Tokens tokens, std::optional<double> depth) {
  const double at = depth.has_value() ? *depth : random_.Next();
  needles_.push_back({at, std::move(tokens)});
}

Tokens RecallDocument::AddFact(TokenId key, std::optional<double> depth) {
  Tokens value;
  for (int i = 0; i < 4; ++i) value.push_back(Any(words_.digits));
  AddNeedle(Joined({words_.fact, {key}, words_.is, value, {words_.dot}}), depth);
  return value;
}

void RecallDocument::AddOtherFacts(std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) AddFact(Pop(keys_), std::nullopt);
}

void RecallDocument::Ask(const Tokens& begin, const Tokens& middle) {
  question_ = Joined({begin, middle, words_.ask_end});
  answer_.push_back(words_.dot);
}

void RecallDocument::AskFact(std::size_t others, double depth) {
  const TokenId key = Pop(keys_);
  answer_ = AddFact(key, depth);
  AddOtherFacts(others);
  Ask(words_.ask_one, {key});
}

void RecallDocument::AskFacts(std::size_t keys, std::size_t others, double depth) {
  Tokens asked, listed;
  for (std::size_t i = 0; i < keys; ++i) asked.push_back(Pop(keys_));
  for (std::size_t i = 0; i < keys; ++i) {
    const Tokens separator = i == 0 ? Tokens() : Tokens{words_.comma};
    const Tokens value = AddFact(asked[i], i == 0 ? std::optional(depth) : std::nullopt);
    listed = Joined({listed, separator, {asked[i]}});
    answer_ = Joined({answer_, separator, {asked[i]}, value});
  }
  AddOtherFacts(others);
  Ask(words_.ask_several, listed);
}

void RecallDocument::AskAllValues(std::size_t values, std::size_t others, double depth) {
  const TokenId key = Pop(keys_);
  std::vector<double> depths = {depth};
  while (depths.size() < values) depths.push_back(random_.Next());
  std::sort(depths.begin(), depths.end());
  for (const double at : depths) {
    const Tokens separator = answer_.empty() ? Tokens() : Tokens{words_.comma};
    answer_ = Joined({answer_, separator, AddFact(key, at)});
  }
  AddOtherFacts(others);
  Ask(words_.ask_all, {key});
}

void RecallDocument::AskVariables(std::size_t hops, std::size_t chains, double depth) {
  const Tokens values = Shuffled(words_.numbers, chains);
  for (std::size_t chain = 0; chain < chains; ++chain) {
    Tokens names;
    for (std::size_t i = 0; i <= hops; ++i) names.push_back(Pop(variables_));
    // The question is about the first chain. Its later assignments follow the first one.
    std::vector<double> depths;
    if (chain == 0) depths.push_back(depth);
    while (depths.size() <= hops) {
      const double drawn = random_.Next();
      depths.push_back(chain == 0 ? depth + (1 - depth) * drawn : drawn);
    }
    std::sort(depths.begin() + (chain == 0 ? 1 : 0), depths.end());
    AddNeedle({words_.var, names[0], words_.equals, values[chain], words_.dot}, depths[0]);
    for (std::size_t i = 1; i <= hops; ++i) {
      AddNeedle({words_.var, names[i], words_.equals, words_.var, names[i - 1], words_.dot},
                depths[i]);
    }
    if (chain != 0) continue;
    answer_ = {names[0]};
    for (std::size_t i = 1; i <= hops; ++i) answer_ = Joined({answer_, {words_.comma, names[i]}});
  }
  Ask(words_.ask_variables, {values[0]});
}

void RecallDocument::AskSignal(std::size_t most, std::size_t others, std::size_t kinds) {
  Tokens keys;
  for (std::size_t i = 0; i <= kinds; ++i) keys.push_back(Pop(keys_));
  const auto signal = [&](TokenId key) {
    AddNeedle(Joined({words_.signal, {key, words_.dot}}), std::nullopt);
  };
  for (std::size_t i = 0; i < most; ++i) signal(keys[0]);
  std::vector<std::size_t> counts(kinds);
  for (std::size_t i = 0; i < others; ++i) {
    const std::size_t kind = random_.Below(kinds);
    if (counts[kind] + 2 >= most) continue;  // the winner leads by at least two
    ++counts[kind];
    signal(keys[1 + kind]);
  }
  answer_ = {keys[0]};
  Ask(words_.ask_signal, {});
}

void RecallDocument::AskPlace(double depth) {
  const TokenId name = Any(words_.names);
  const TokenId object = Any(words_.objects);
  const TokenId verb = Any(words_.verbs);
  const TokenId place = Any(words_.places);
  asked_ = {name, object};
  const Tokens event = {name, verb, words_.the, object};
  AddNeedle(Joined({event, words_.in_the, {place, words_.dot}}), depth);
  answer_ = {place};
  Ask(words_.ask_place, event);
}

Tokens RecallDocument::FillerSentence() {
  Tokens sentence;
  for (const RecallWords::Slot& slot : words_.templates[random_.Below(words_.templates.size())]) {
    const TokenId* const word = std::get_if<TokenId>(&slot);
    sentence.push_back(word != nullptr ? *word : Any(words_.*std::get<1>(slot)));
  }
  if (random_.Next() < 0.15) sentence.push_back(words_.newline);
  return sentence;
}

// Filler with the requested name and object could contradict the needle.
bool RecallDocument::ContradictsAnswer(const Tokens& sentence) const {
  return asked_.has_value() && sentence.size() > 3 && sentence[0] == asked_->first &&
         std::find(sentence.begin(), sentence.end(), asked_->second) != sentence.end();
}

Tokens RecallDocument::Context(std::int64_t budget) {
  for (const Needle& needle : needles_) budget -= static_cast<std::int64_t>(needle.tokens.size());
  std::vector<Tokens> sentences;
  std::vector<std::int64_t> ends = {0};
  while (true) {
    Tokens sentence = FillerSentence();
    const std::int64_t end = ends.back() + static_cast<std::int64_t>(sentence.size());
    if (end > budget) break;
    if (ContradictsAnswer(sentence)) continue;
    sentences.push_back(std::move(sentence));
    ends.push_back(end);
  }
  // Each needle is inserted at the sentence boundary nearest to its depth, in order of depth.
  std::stable_sort(needles_.begin(), needles_.end(),
                   [](const Needle& a, const Needle& b) { return a.depth < b.depth; });
  std::vector<Tokens> before(ends.size());
  for (const Needle& needle : needles_) {
    const double wanted = needle.depth * static_cast<double>(ends.back());
    Tokens& place = before[Nearest(ends, wanted)];
    place.insert(place.end(), needle.tokens.begin(), needle.tokens.end());
  }
  Tokens context = {words_.begin};
  for (std::size_t i = 0; i < ends.size(); ++i) {
    context.insert(context.end(), before[i].begin(), before[i].end());
    if (i == sentences.size()) break;
    context.insert(context.end(), sentences[i].begin(), sentences[i].end());
  }
  return context;
}

}  // namespace tessera::cli::eval
