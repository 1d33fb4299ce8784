// Size-class slabs over an arena's extents: O(1) allocate and free.
//
// An extent is cut into slabs of one size. A slab serves objects of one size class at a time; when
// its last object goes it returns to its extent, and an extent without slabs in use may go back to
// the node. All bookkeeping is in the daemon's private memory: nothing a worker can see or reach
// decides where an object lies.
//
// Invariants:
//   a slab is free (no class), partial (in its class's list) or full (in no list);
//   live bit set == object handed out;  slab.live == popcount(live bits)
//   used_bytes() == sum over slabs of live * object_bytes
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

namespace tessera::pool {

// How far an object may be rounded up. Tiles are exact (to 64 bytes): there are millions of them
// and few sizes. Everything else rounds up to a quarter of a power of two, to keep classes few.
enum class Fit : std::uint8_t { kExact, kRounded };

// Not thread-safe: the Pool that owns it locks.
class Slabs {
 public:
  Slabs(std::uint64_t extent_bytes, std::uint64_t slab_bytes);

  // The bytes an object of that size really takes. `bytes` is at most half of 2^64.
  static std::uint64_t RoundUp(std::uint64_t bytes, Fit fit);
  std::uint64_t slab_bytes() const { return slab_bytes_; }

  // The arena's extent at `index` came or went. Only an extent without objects may go.
  void AddExtent(std::uint32_t index);
  void RemoveExtent(std::uint32_t index);
  // Marks the first slab of an extent as never to be handed out (the directory's header).
  void ReserveFirstSlab(std::uint32_t index);

  // `object_bytes` is a result of RoundUp, at most slab_bytes. Nothing: every extent is full.
  std::optional<std::uint64_t> Allocate(std::uint64_t object_bytes);
  void Free(std::uint64_t offset, std::uint64_t object_bytes);

  // An extent without any object, not the only one: the highest such. For shrinking. O(1): it is
  // asked with every object that goes, however many extents there are.
  std::optional<std::uint32_t> IdleExtent() const;

  std::uint64_t used_bytes() const { return used_bytes_; }
  std::uint64_t objects() const { return objects_; }
  // Checks every invariant above; aborts with what is broken.
  void Validate() const;

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;

  struct Slab {
    std::uint64_t object_bytes = 0;  // 0: free
    std::uint32_t capacity = 0;
    std::uint32_t live = 0;
    std::uint32_t touched = 0;       // objects at and beyond this index were never handed out
    std::uint32_t previous = kNone;  // in the class's list of partial slabs
    std::uint32_t next = kNone;
    bool reserved = false;
    bool listed = false;
    std::vector<std::uint16_t> freed;  // indices below `touched` that are free
    std::vector<std::uint64_t> live_bits;
  };
  struct ExtentState {
    bool present = false;
    std::uint32_t slabs_in_use = 0;
  };

  std::uint32_t OpenSlab(std::uint64_t object_bytes);
  void List(std::uint32_t slab);
  void Unlist(std::uint32_t slab);
  void Retire(std::uint32_t slab);
  // The slab comes into use in its extent, or goes out of it.
  void TakeSlab(std::uint32_t slab);
  void GiveSlabBack(std::uint32_t slab);

  const std::uint64_t slab_bytes_;
  const std::uint32_t slabs_per_extent_;
  std::vector<Slab> slabs_;
  std::vector<ExtentState> extents_;
  std::uint32_t present_ = 0;                                 // of the extents
  std::set<std::uint32_t> idle_;                              // those of them without a slab in use
  std::vector<std::uint32_t> free_slabs_;                     // a stack
  std::unordered_map<std::uint64_t, std::uint32_t> partial_;  // object_bytes -> first partial slab
  std::uint64_t used_bytes_ = 0;
  std::uint64_t objects_ = 0;
};

}  // namespace tessera::pool
