#include "daemon/pool/slabs.h"

#include <algorithm>
#include <bit>

#include "daemon/base/check.h"

namespace tessera::pool {

namespace {
constexpr std::uint64_t kAlignment = 64;
constexpr std::uint32_t kMaxObjectsPerSlab = 65536;
}  // namespace

Slabs::Slabs(std::uint64_t extent_bytes, std::uint64_t slab_bytes)
    : slab_bytes_(slab_bytes),
      slabs_per_extent_(static_cast<std::uint32_t>(extent_bytes / slab_bytes)) {
  TESSERA_CHECK(slab_bytes % kAlignment == 0 && extent_bytes % slab_bytes == 0,
                "an extent consists of whole slabs");
  TESSERA_CHECK(slab_bytes / kAlignment <= kMaxObjectsPerSlab, "object indices fit in 16 bits");
}

std::uint64_t Slabs::RoundUp(std::uint64_t bytes, Fit fit) {
  const std::uint64_t aligned = std::max(kAlignment, (bytes + kAlignment - 1) & ~(kAlignment - 1));
  if (fit == Fit::kExact || aligned <= 4 * kAlignment) return aligned;
  const std::uint64_t step = std::bit_floor(aligned - 1) / 4;
  return (aligned + step - 1) / step * step;
}

void Slabs::AddExtent(std::uint32_t index) {
  if (index >= extents_.size()) {
    extents_.resize(index + 1);
    slabs_.resize(std::size_t{index + 1} * slabs_per_extent_);
  }
  TESSERA_CHECK(!extents_[index].present, "an extent can be added only once");
  extents_[index] = {.present = true};
  ++present_;
  idle_.insert(index);
  // Pushed in reverse, so that the lowest slab is used first.
  for (std::uint32_t i = slabs_per_extent_; i-- > 0;) {
    free_slabs_.push_back(index * slabs_per_extent_ + i);
  }
}

void Slabs::RemoveExtent(std::uint32_t index) {
  TESSERA_CHECK(index < extents_.size() && extents_[index].present, "no such extent");
  TESSERA_CHECK(extents_[index].slabs_in_use == 0, "objects live in the extent");
  extents_[index].present = false;
  --present_;
  idle_.erase(index);
  std::erase_if(free_slabs_, [&](std::uint32_t slab) { return slab / slabs_per_extent_ == index; });
}

void Slabs::ReserveFirstSlab(std::uint32_t index) {
  const std::uint32_t slab = index * slabs_per_extent_;
  TESSERA_CHECK(slabs_[slab].object_bytes == 0, "the slab is in use");
  slabs_[slab].reserved = true;
  TakeSlab(slab);
  std::erase(free_slabs_, slab);
}

std::uint32_t Slabs::OpenSlab(std::uint64_t object_bytes) {
  if (free_slabs_.empty()) return kNone;
  const std::uint32_t index = free_slabs_.back();
  free_slabs_.pop_back();
  Slab& slab = slabs_[index];
  slab.object_bytes = object_bytes;
  slab.capacity = static_cast<std::uint32_t>(slab_bytes_ / object_bytes);
  slab.live = 0;
  slab.touched = 0;
  slab.freed.clear();
  slab.live_bits.assign((slab.capacity + 63) / 64, 0);
  TakeSlab(index);
  List(index);
  return index;
}

void Slabs::List(std::uint32_t index) {
  Slab& slab = slabs_[index];
  const auto [it, inserted] = partial_.try_emplace(slab.object_bytes, index);
  slab.previous = kNone;
  slab.next = inserted ? kNone : it->second;
  if (!inserted) {
    slabs_[it->second].previous = index;
    it->second = index;
  }
  slab.listed = true;
}

void Slabs::Unlist(std::uint32_t index) {
  Slab& slab = slabs_[index];
  if (slab.next != kNone) slabs_[slab.next].previous = slab.previous;
  if (slab.previous != kNone) {
    slabs_[slab.previous].next = slab.next;
  } else if (slab.next != kNone) {
    partial_[slab.object_bytes] = slab.next;
  } else {
    partial_.erase(slab.object_bytes);
  }
  slab.listed = false;
}

std::optional<std::uint64_t> Slabs::Allocate(std::uint64_t object_bytes) {
  TESSERA_CHECK(object_bytes % kAlignment == 0 && object_bytes > 0 && object_bytes <= slab_bytes_,
                "the object size is rounded and fits a slab");
  const auto it = partial_.find(object_bytes);
  const std::uint32_t index = it != partial_.end() ? it->second : OpenSlab(object_bytes);
  if (index == kNone) return std::nullopt;
  Slab& slab = slabs_[index];
  std::uint32_t object;
  if (!slab.freed.empty()) {
    object = slab.freed.back();
    slab.freed.pop_back();
  } else {
    object = slab.touched++;
  }
  slab.live_bits[object / 64] |= std::uint64_t{1} << (object % 64);
  if (++slab.live == slab.capacity) Unlist(index);
  used_bytes_ += object_bytes;
  ++objects_;
  return index * slab_bytes_ + object * object_bytes;
}

void Slabs::Free(std::uint64_t offset, std::uint64_t object_bytes) {
  const std::uint32_t index = static_cast<std::uint32_t>(offset / slab_bytes_);
  TESSERA_CHECK(index < slabs_.size() && slabs_[index].object_bytes == object_bytes,
                "no object of this size lives at the freed offset");
  Slab& slab = slabs_[index];
  const std::uint64_t within = offset % slab_bytes_;
  const std::uint32_t object = static_cast<std::uint32_t>(within / object_bytes);
  const std::uint64_t bit = std::uint64_t{1} << (object % 64);
  TESSERA_CHECK(within % object_bytes == 0 && object < slab.touched &&
                    (slab.live_bits[object / 64] & bit) != 0,
                "an object was freed twice, or not at its start");
  slab.live_bits[object / 64] &= ~bit;
  slab.freed.push_back(static_cast<std::uint16_t>(object));
  used_bytes_ -= object_bytes;
  --objects_;
  if (--slab.live == 0) {
    Retire(index);
  } else if (!slab.listed) {
    List(index);
  }
}

void Slabs::Retire(std::uint32_t index) {
  Slab& slab = slabs_[index];
  if (slab.listed) Unlist(index);
  slab.object_bytes = 0;
  slab.freed = {};
  slab.live_bits = {};
  GiveSlabBack(index);
  free_slabs_.push_back(index);
}

void Slabs::TakeSlab(std::uint32_t slab) {
  const std::uint32_t index = slab / slabs_per_extent_;
  if (extents_[index].slabs_in_use++ == 0) idle_.erase(index);
}

void Slabs::GiveSlabBack(std::uint32_t slab) {
  const std::uint32_t index = slab / slabs_per_extent_;
  if (--extents_[index].slabs_in_use == 0) idle_.insert(index);
}

std::optional<std::uint32_t> Slabs::IdleExtent() const {
  if (present_ < 2 || idle_.empty()) return std::nullopt;
  return *idle_.rbegin();
}

void Slabs::Validate() const {
  std::uint64_t used = 0;
  std::uint64_t objects = 0;
  std::vector<std::uint32_t> in_use(extents_.size(), 0);
  std::uint32_t present = 0;
  for (std::uint32_t i = 0; i < slabs_.size(); ++i) {
    const Slab& slab = slabs_[i];
    if (slab.reserved) ++in_use[i / slabs_per_extent_];
    if (slab.object_bytes == 0) continue;
    ++in_use[i / slabs_per_extent_];
    std::uint32_t live = 0;
    for (std::uint64_t bits : slab.live_bits) live += std::popcount(bits);
    TESSERA_CHECK(live == slab.live, "live bits and live count agree");
    TESSERA_CHECK(slab.freed.size() + slab.live == slab.touched,
                  "touched objects are live or free");
    TESSERA_CHECK(slab.listed == (slab.live < slab.capacity), "exactly partial slabs are listed");
    used += slab.live * slab.object_bytes;
    objects += slab.live;
  }
  TESSERA_CHECK(used == used_bytes_ && objects == objects_, "used bytes are those of live objects");
  for (std::uint32_t i = 0; i < extents_.size(); ++i) {
    TESSERA_CHECK(in_use[i] == extents_[i].slabs_in_use, "slabs in use per extent");
    present += extents_[i].present;
    TESSERA_CHECK(idle_.contains(i) == (extents_[i].present && in_use[i] == 0),
                  "exactly the extents without slabs in use are idle");
  }
  TESSERA_CHECK(present == present_, "extents are counted");
}

}  // namespace tessera::pool
