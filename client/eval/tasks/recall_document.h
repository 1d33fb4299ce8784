// Builds one text: needles, a question about them, and filler around them. The order of random
// draws is part of the definition: changing it changes every sample.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "client/eval/tasks/python_random.h"
#include "client/eval/tasks/recall_words.h"

namespace tessera::cli::eval {

class RecallDocument {
 public:
  // `words` must outlive the document.
  RecallDocument(const RecallWords& words, std::uint64_t seed);

  // Each adds needles, places the requested one at `depth`, and sets question and answer.
  void AskFact(std::size_t others, double depth);
  void AskFacts(std::size_t keys, std::size_t others, double depth);
  void AskAllValues(std::size_t values, std::size_t others, double depth);
  void AskVariables(std::size_t hops, std::size_t chains, double depth);
  void AskSignal(std::size_t most, std::size_t others, std::size_t kinds);
  void AskPlace(double depth);

  // Needles and filler, up to `budget` tokens after the opening token.
  Tokens Context(std::int64_t budget);
  const Tokens& question() const { return question_; }
  const Tokens& answer() const { return answer_; }

 private:
  struct Needle {
    double depth;
    Tokens tokens;
  };
  Tokens Shuffled(Tokens pool, std::size_t count);
  TokenId Any(const Tokens& pool) { return pool[random_.Below(pool.size())]; }
  void AddNeedle(Tokens tokens, std::optional<double> depth);
  Tokens AddFact(TokenId key, std::optional<double> depth);
  void AddOtherFacts(std::size_t count);
  Tokens FillerSentence();
  bool ContradictsAnswer(const Tokens& sentence) const;
  void Ask(const Tokens& begin, const Tokens& middle);

  const RecallWords& words_;
  PythonRandom random_;
  std::vector<Needle> needles_;
  Tokens keys_, variables_;  // unused words, taken from the back
  Tokens question_, answer_;
  std::optional<std::pair<TokenId, TokenId>> asked_;  // name and object of AskPlace
};

}  // namespace tessera::cli::eval
