// Renders an evaluation as one self-contained HTML page: no scripts, no links.
#pragma once

#include <string>

#include "client/eval/tally.h"

namespace tessera::cli::eval {

struct PageFacts {
  std::string machine;
  double dense_bytes_per_token = 0;
  // How to repeat the run. Empty: not on the page.
  std::string version = {};
  std::string date = {};
  std::string model = {};    // path and size of the weights
  std::string command = {};  // quoted for a shell
};
std::string ReportPage(const Results& results, const PageFacts& facts);

}  // namespace tessera::cli::eval
