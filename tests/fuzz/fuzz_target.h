// What every fuzz target offers, to libFuzzer and to replay_main.cc alike.
//
// A target is one file in targets/. It runs one input; whatever is wrong aborts (TESSERA_CHECK).
// Seeds are the inputs that reach what random bytes would not, made by code, so that they can be
// made anew when a format changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

extern "C" {
int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
// Changes `data` in place, to at most `max_size` bytes, and returns its size. A target may bring
// its own; without one LLVMFuzzerMutate does it.
__attribute__((weak)) std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                                          std::size_t max_size, unsigned seed);
// Of libFuzzer, or of replay_main.cc.
std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);
}

namespace tessera::fuzz {

struct Seed {
  std::string name;  // of its file in the corpus
  std::string bytes;
};

std::vector<Seed> Seeds();

}  // namespace tessera::fuzz
