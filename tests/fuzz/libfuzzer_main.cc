// Linked in addition to libFuzzer's main: `--write-seeds=FOLDER` writes the target's seeds and
// exits.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>

#include "tests/fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  constexpr std::string_view kFlag = "--write-seeds=";
  for (int i = 1; i < *argc; ++i) {
    const std::string_view argument = (*argv)[i];
    if (!argument.starts_with(kFlag)) continue;
    const std::filesystem::path folder = argument.substr(kFlag.size());
    std::filesystem::create_directories(folder);
    for (const tessera::fuzz::Seed& seed : tessera::fuzz::Seeds()) {
      std::ofstream file(folder / seed.name, std::ios::binary);
      file << seed.bytes;
      file.close();
      if (file.fail()) {
        std::fprintf(stderr, "cannot write \"%s\"\n", (folder / seed.name).c_str());
        std::_Exit(1);
      }
    }
    std::_Exit(0);
  }
  return 0;
}
