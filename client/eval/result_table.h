// The figures of an evaluation as text, for terminals and pages alike.
#pragma once

#include <string>
#include <vector>

#include "client/eval/tally.h"

namespace tessera::cli::eval {

// The figures of one kind of question as cells of text: titles, then a row for each policy.
struct ResultTable {
  std::vector<std::string> titles;
  std::vector<std::vector<std::string>> rows;
};
ResultTable TableOf(const Results& results, Question question, double dense_bytes_per_token);

}  // namespace tessera::cli::eval
