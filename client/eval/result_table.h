// The figures of an evaluation as text cells, for the terminal and the HTML page, and as CSV.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "client/eval/tally.h"

namespace tessera::cli::eval {

// The figures for one kind of question: titles, and one row per policy.
struct ResultTable {
  std::vector<std::string> titles;
  std::vector<std::vector<std::string>> rows;
};
ResultTable TableOf(const Results& results, Question question, double dense_bytes_per_token);

// CSV with a title line and one row per question, policy and task. A cell without a value is empty.
std::string CsvOf(const Results& results, double dense_bytes_per_token);

// The two functions below ignore policies that were refused for some samples: their shares are of
// other samples.

// The Pareto front by bytes kept, ascending: policies that no other policy beats in bytes or right
// answers without being worse in the other.
std::vector<std::size_t> ParetoFront(const Results& results, Question question);
// The policy with the most right answers at `share` of the bytes or less. Fewer bytes break a tie.
// nullopt: no policy keeps so few.
std::optional<std::size_t> BestWithin(const Results& results, Question question, double share);

}  // namespace tessera::cli::eval
