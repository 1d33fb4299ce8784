// Writes the golden tiles of the current tile format into a new folder.
#include <cstdio>
#include <string>

#include "tests/golden/golden_tiles.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FOLDER\n", argv[0]);
    return 2;
  }
  const std::string problem = tessera::kernels::WriteGoldenTiles(argv[1]);
  if (problem.empty()) return 0;
  std::fprintf(stderr, "nothing written: %s\n", problem.c_str());
  return 1;
}
