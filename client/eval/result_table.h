// The figures of an evaluation as text cells, for the terminal and the HTML page.
#pragma once

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

}  // namespace tessera::cli::eval
