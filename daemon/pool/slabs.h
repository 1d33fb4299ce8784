// `Slabs` allocates objects by size class in an arena's extents, with O(1) allocate and free.
//
// An extent is divided into slabs of one size. A slab serves objects of one size class at a time.
// When its last object is freed, the slab returns to its extent, and an extent without slabs in use
// may be returned to the node. All bookkeeping is in the daemon's private memory: nothing that a
// worker can reach decides where an object is placed.
//
// Invariants:
//   a slab is free (no class), partial (in its class's list) or full (in no list)
//   live bit set == object allocated;  slab.live == popcount(live bits)
//   used_bytes() == sum over slabs of live * object_bytes
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

namespace tessera::pool {

// How sizes are rounded. Tiles are exact (to 64 bytes), because there are millions of them in few
// sizes. Other objects are rounded up to a quarter of a power of two, which keeps size classes few.
enum class Fit : std::uint8_t { kExact, kRounded };

// Not thread-safe: the owning Pool locks.
class Slabs {
 public:
  Slabs(std::uint64_t extent_bytes, std::uint64_t slab_bytes);

  // The bytes that an object of this size occupies. `bytes` must be at most half of 2^64.
  static std::uint64_t RoundUp(std::uint64_t bytes, Fit fit);
  std::uint64_t slab_bytes() const { return slab_bytes_; }

  // Called when the arena adds or removes the extent at `index`. Only an extent without objects may
  // be removed.
  void AddExtent(std::uint32_t index);
  void RemoveExtent(std::uint32_t index);
  // Excludes the first slab of an extent from allocation (the directory's header).
  void ReserveFirstSlab(std::uint32_t index);

  // `object_bytes` must be a result of RoundUp and at most slab_bytes. nullopt: every extent is
  // full.
  std::optional<std::uint64_t> Allocate(std::uint64_t object_bytes);
  void Free(std::uint64_t offset, std::uint64_t object_bytes);

  // The highest extent without objects, provided it is not the only extent. O(1), because the pool
  // calls it for every freed object.
  std::optional<std::uint32_t> IdleExtent() const;

  std::uint64_t used_bytes() const { return used_bytes_; }
  std::uint64_t objects() const { return objects_; }
  // Checks every invariant above; aborts with the one that is violated.
  void Validate() const;

 private:
  static constexpr std::uint32_t kNone = 0xffffffff;

  struct Slab {
    std::uint64_t object_bytes = 0;  // 0: free
    std::uint32_t capacity = 0;
    std::uint32_t live = 0;
    std::uint32_t touched = 0;       // objects at and beyond this index were never allocated
    std::uint32_t previous = kNone;  // links in the class's list of partial slabs
    std::uint32_t next = kNone;
    bool reserved = false;
    bool listed = false;
    std::vector<std::uint16_t> freed;  // free indices below `touched`
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
  // Record in the slab's extent that the slab is in use or free.
  void TakeSlab(std::uint32_t slab);
  void GiveSlabBack(std::uint32_t slab);

  const std::uint64_t slab_bytes_;
  const std::uint32_t slabs_per_extent_;
  std::vector<Slab> slabs_;
  std::vector<ExtentState> extents_;
  std::uint32_t present_ = 0;              // number of extents present
  std::set<std::uint32_t> idle_;           // extents present that have no slab in use
  std::vector<std::uint32_t> free_slabs_;  // used as a stack
  std::unordered_map<std::uint64_t, std::uint32_t> partial_;  // object_bytes -> first partial slab
  std::uint64_t used_bytes_ = 0;
  std::uint64_t objects_ = 0;
};

}  // namespace tessera::pool
