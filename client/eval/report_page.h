// An evaluation as one HTML page that needs nothing beside it.
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
