// The figures of a text evaluation: for the terminal, as an HTML page, as CSV and as JSON.
#pragma once

#include <string>
#include <vector>

#include "client/eval/text/text_results.h"

namespace tessera::cli::eval {

struct TextFacts {
  std::string machine;
  double dense_bytes_per_token = 0;
  std::string version, date;
  std::string model;    // path and size
  std::string command;  // quoted for a shell
  std::vector<std::string> texts;
};

std::string TextSummary(const TextResults& results, const TextFacts& facts);
// Self-contained: no scripts, no links.
std::string TextPage(const TextResults& results, const TextFacts& facts);
// A title line, and one row per length and policy. A cell without a value is empty.
std::string TextCsv(const TextResults& results, const TextFacts& facts);
std::string TextJson(const TextResults& results);

}  // namespace tessera::cli::eval
