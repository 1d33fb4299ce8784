// Prints deploy/docs/metrics.md:  build/tests/metric_reference deploy > deploy/docs/metrics.md
#include <cstdio>

#include "tests/unit/metrics/metric_reference.h"

int main(int argc, char** argv) {
  if (argc != 2) return std::fputs("usage: metric_reference DEPLOY_FOLDER\n", stderr), 2;
  return std::fputs(tessera::metrics::MetricReference(argv[1]).c_str(), stdout) < 0;
}
