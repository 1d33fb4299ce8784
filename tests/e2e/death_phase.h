// Publishes the phase a worker is in through a mapped file, which outlives the worker.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace tessera {

enum class Phase : std::uint32_t {
  kBetween,
  kAttach,
  kAppend,
  kStep,
  kFork,
  kCompress,
  kCompute,
  kOffload,
  kPhases
};
inline constexpr const char* kPhaseNames[] = {"between", "attach",   "append",  "step",
                                              "fork",    "compress", "compute", "offload"};

class PhaseWord {
 public:
  explicit PhaseWord(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (::ftruncate(fd, 4096) == 0) {
      word_ = static_cast<std::atomic<std::uint32_t>*>(
          ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    }
    ::close(fd);
  }
  ~PhaseWord() { ::munmap(word_, 4096); }
  PhaseWord(const PhaseWord&) = delete;
  PhaseWord& operator=(const PhaseWord&) = delete;

  void Set(Phase phase) { word_->store(static_cast<std::uint32_t>(phase)); }
  Phase Get() const { return static_cast<Phase>(word_->load()); }

 private:
  std::atomic<std::uint32_t>* word_ = nullptr;
};

// Sets the phase for its lifetime.
class InPhase {
 public:
  InPhase(PhaseWord& word, Phase phase) : word_(word) { word_.Set(phase); }
  ~InPhase() { word_.Set(Phase::kBetween); }

 private:
  PhaseWord& word_;
};

}  // namespace tessera
