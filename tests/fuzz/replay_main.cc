// The driver of a fuzz target without libFuzzer. Runs every corpus file, then a given number of
// random mutations. Everything follows from the seed, which it prints.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/check.h"
#include "tests/fakes/seed.h"
#include "tests/fuzz/fuzz_target.h"

namespace tessera::fuzz {
namespace {

TestRandom* mutations = nullptr;  // a global, because LLVMFuzzerMutate has no parameter for it

void Usage(std::FILE* to, const char* program) {
  std::fprintf(
      to,
      "Usage: %s [--mutations=N] [--max-bytes=N] [--work-file=FILE] [FILE|FOLDER...]\n"
      "       %s --write-seeds=FOLDER\n"
      "Runs the inputs, then N random mutations of them (TESSERA_TEST_SEED=random draws\n"
      "others, TESSERA_TEST_SEED=N repeats a run). FILE holds the current input; it remains\n"
      "after a crash.\n",
      program, program);
}

// A file that holds the current input, so that it survives a crash.
class WorkFile {
 public:
  explicit WorkFile(std::string path) : path_(std::move(path)) {
    if (path_.empty()) return;
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    TESSERA_CHECK(fd_ >= 0, path_);
  }
  ~WorkFile() {
    if (fd_ < 0) return;
    ::close(fd_);
    ::unlink(path_.c_str());
  }
  void Hold(const std::string& bytes) const {
    if (fd_ < 0) return;
    const bool held = ::ftruncate(fd_, 0) == 0 &&
                      ::pwrite(fd_, bytes.data(), bytes.size(), 0) == ssize_t(bytes.size());
    TESSERA_CHECK(held, path_);
  }

 private:
  const std::string path_;
  int fd_ = -1;
};

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  TESSERA_CHECK(file.is_open(), path.string());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Reads files, and the files of folders, in order of their names.
std::vector<std::string> ReadInputs(const std::vector<std::string_view>& paths) {
  std::vector<std::filesystem::path> files;
  for (const std::string_view path : paths) {
    if (!std::filesystem::is_directory(path)) {
      files.emplace_back(path);
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  std::vector<std::string> inputs;
  for (const std::filesystem::path& file : files) inputs.push_back(ReadFile(file));
  return inputs;
}

// Runs the input from a heap block of its exact size, so that a sanitizer detects overruns.
void RunOne(const std::string& bytes, const WorkFile& work) {
  work.Hold(bytes);
  const std::vector<std::uint8_t> exact(bytes.begin(), bytes.end());
  LLVMFuzzerTestOneInput(exact.data(), exact.size());
}

std::string Changed(std::string bytes, const std::vector<std::string>& inputs,
                    std::size_t max_bytes, TestRandom& random) {
  for (std::uint64_t left = random.Between(1, 4); left > 0; --left) {
    if (!inputs.empty() && random.OneIn(16)) {  // the front of one input, the end of another
      const std::string& other = inputs[random.Below(inputs.size())];
      bytes.resize(random.Below(bytes.size() + 1));
      bytes += other.substr(random.Below(other.size() + 1));
    }
    const std::size_t size = std::min(bytes.size(), max_bytes);
    bytes.resize(max_bytes);
    auto* data = reinterpret_cast<std::uint8_t*>(bytes.data());
    bytes.resize(
        LLVMFuzzerCustomMutator != nullptr
            ? LLVMFuzzerCustomMutator(data, size, max_bytes, static_cast<unsigned>(random.Bits()))
            : LLVMFuzzerMutate(data, size, max_bytes));
  }
  return bytes;
}

int WriteSeeds(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  const std::vector<Seed> seeds = Seeds();
  for (const Seed& seed : seeds) {
    std::ofstream file(folder / seed.name, std::ios::binary);
    file << seed.bytes;
    file.close();
    TESSERA_CHECK(!file.fail(), seed.name);
  }
  std::printf("%zu seeds in %s\n", seeds.size(), folder.c_str());
  return 0;
}

struct Options {
  std::uint64_t mutations = 0;
  std::size_t max_bytes = 8192;
  std::string work_file;
  std::string write_seeds;
  std::vector<std::string_view> paths;
};

bool Parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const auto value = [&](std::string_view name) -> const char* {
      return argument.starts_with(name) ? argv[i] + name.size() : nullptr;
    };
    if (const char* count = value("--mutations=")) {
      options.mutations = std::strtoull(count, nullptr, 10);
    } else if (const char* bytes = value("--max-bytes=")) {
      options.max_bytes = std::strtoull(bytes, nullptr, 10);
    } else if (const char* file = value("--work-file=")) {
      options.work_file = file;
    } else if (const char* folder = value("--write-seeds=")) {
      options.write_seeds = folder;
    } else if (argument.starts_with("-")) {
      return false;
    } else {
      options.paths.push_back(argument);
    }
  }
  return true;
}

int Main(int argc, char** argv) {
  Options options;
  if (!Parse(argc, argv, options)) {
    Usage(stderr, argv[0]);
    return 2;
  }
  if (!options.write_seeds.empty()) return WriteSeeds(options.write_seeds);

  const WorkFile work(options.work_file);
  std::vector<std::string> inputs = ReadInputs(options.paths);
  for (const std::string& input : inputs) RunOne(input, work);
  std::printf("%s: %zu inputs of the corpus\n", argv[0], inputs.size());
  if (options.mutations == 0) return inputs.empty() ? 1 : 0;
  // Includes seeds that are missing in the minimised corpus.
  for (Seed& seed : Seeds()) inputs.push_back(std::move(seed.bytes));
  TestRandom random;
  mutations = &random;
  for (std::uint64_t i = 0; i < options.mutations; ++i) {
    const std::string& input = inputs[random.Below(inputs.size())];
    RunOne(Changed(input, inputs, options.max_bytes, random), work);
  }
  std::printf("%s: %llu mutations of them\n", argv[0],
              static_cast<unsigned long long>(options.mutations));
  return 0;
}

}  // namespace
}  // namespace tessera::fuzz

// Changes a byte, a bit or a number, or inserts, removes, repeats or moves bytes.
std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size) {
  tessera::TestRandom& random = *tessera::fuzz::mutations;
  const std::size_t at = random.Below(size + 1);
  const std::size_t some = std::min<std::size_t>(random.Between(1, 16), size - at);
  switch (random.Below(size == 0 ? 1 : 6)) {
    case 0: {
      const std::size_t more = std::min<std::size_t>(random.Between(1, 8), max_size - size);
      std::copy_backward(data + at, data + size, data + size + more);
      for (std::size_t i = 0; i < more; ++i) data[at + i] = std::uint8_t(random.Bits());
      return size + more;
    }
    case 1:
      std::copy(data + at + some, data + size, data + at);
      return size - some;
    case 2:
      if (at < size) data[at] ^= std::uint8_t(1u << random.Below(8));
      return size;
    case 3:
      if (at < size) data[at] = std::uint8_t(random.Bits());
      return size;
    case 4: {
      const std::uint64_t number = random.Border();
      for (std::size_t i = 0; i < std::min<std::size_t>(some, 8); ++i) {
        data[at + i] = std::uint8_t(number >> (8 * i));
      }
      return size;
    }
    default: {
      const std::size_t from = random.Below(size - some + 1);
      std::vector<std::uint8_t> moved(data + from, data + from + some);
      std::copy(moved.begin(), moved.end(), data + at);
      return size;
    }
  }
}

int main(int argc, char** argv) { return tessera::fuzz::Main(argc, argv); }
