// The session's tail memory, and the owner of each commit slot.
//
// A tail's extent stays mapped while a sequence holds it, even after the daemon has dropped it: a
// step whose pin was revoked may still be writing there and must not fault.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/gpu.h"
#include "client/mapped/descriptors.h"
#include "client/mapped/mapping.h"
#include "daemon/base/mutex.h"
#include "proto/shm/layout.h"
#include "tessera/ids.h"

namespace tessera::client {

struct TailExtent {
  Mapping mapping;
};

// The open tail of one sequence.
struct Tail {
  std::uint64_t session = 0;  // serial of its session; 0: no tail
  std::uint32_t generation = 0;
  std::uint32_t commit_slot = 0;
  std::uint64_t first_token = 0;  // tokens held when it was opened
  std::byte* region = nullptr;    // ring of lane 0, on the device
  std::shared_ptr<TailExtent> extent;
};

class Tails {
 public:
  // All must outlive the object. `gpu` is null if rings are host memory.
  Tails(DescriptorSource& source, shm::ControlPage& control, Gpu* gpu)
      : source_(source), control_(control), gpu_(gpu), owners_(shm::kCommitSlots) {}

  struct Place {
    SequenceId sequence;
    std::uint32_t extent;
    std::uint64_t extent_bytes;
    std::uint64_t offset;
    std::uint64_t region_bytes;  // size of all rings of the sequence
    std::uint32_t commit_slot;
    std::uint32_t generation;
    std::uint64_t tokens;
  };
  // Maps the extent if necessary and gives the commit slot to the sequence. Inside the gate.
  absl::StatusOr<Tail> Open(const Place& place, std::uint64_t session);

  struct Commit {
    SequenceId sequence;
    const Tail* tail;
    std::uint64_t tokens;
  };
  // Tells the daemon that a step uses these sequences, which hold `tokens`, or no longer does. The
  // daemon does not move their memory while a step uses them. Inside the gate.
  void Mark(std::span<const Commit> commits, bool in_step);
  // Stores all commit words. Stores none and returns false if a slot has been given to another
  // sequence. Inside the gate.
  bool Store(std::span<const Commit> commits);

  // The daemon has dropped the extent.
  void Release(std::uint32_t extent);
  // Outside the gate, after it has closed.
  void Unmap();

  std::uint32_t extents() const;

 private:
  struct Owner {
    SequenceId sequence;
    std::uint32_t generation = 0;
    friend bool operator==(const Owner&, const Owner&) = default;
  };
  absl::StatusOr<std::shared_ptr<TailExtent>> Extent(const Place& place) TESSERA_REQUIRES(mutex_);

  DescriptorSource& source_;
  shm::ControlPage& control_;
  Gpu* const gpu_;

  mutable Mutex mutex_;
  std::unordered_map<std::uint32_t, std::shared_ptr<TailExtent>> extents_
      TESSERA_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<TailExtent>> released_ TESSERA_GUARDED_BY(mutex_);

  Mutex commit_mutex_;
  std::vector<Owner> owners_ TESSERA_GUARDED_BY(commit_mutex_);
};

}  // namespace tessera::client
