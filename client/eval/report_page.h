// Renders an evaluation as one self-contained HTML page: no scripts, no links.
#pragma once

#include <string>

#include "client/eval/tally.h"

namespace tessera::cli::eval {

struct PageFacts {
  std::string machine;
  double dense_bytes_per_token = 0;
};
std::string ReportPage(const Results& results, const PageFacts& facts);

}  // namespace tessera::cli::eval
