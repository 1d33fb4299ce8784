// The interface of a fuzz target, for libFuzzer and replay_main.cc alike.
//
// A target is one file in targets/. It runs one input and aborts (TESSERA_CHECK) on any error.
// Seeds are inputs that reach code which random bytes would not. Code generates them, so that they
// can be regenerated after a format change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

extern "C" {
int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
// Changes `data` in place, to at most `max_size` bytes, and returns the new size. Targets may
// define their own mutator; the default is LLVMFuzzerMutate.
__attribute__((weak)) std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                                          std::size_t max_size, unsigned seed);
// Provided by libFuzzer or by replay_main.cc.
std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);
}

namespace tessera::fuzz {

struct Seed {
  std::string name;  // of its corpus file
  std::string bytes;
};

std::vector<Seed> Seeds();

}  // namespace tessera::fuzz
