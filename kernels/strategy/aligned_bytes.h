// A byte vector aligned to 64 bytes, as kernels require for rotations.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace tessera::kernels {

inline constexpr std::size_t kRotationAlignment = 64;

template <typename T>
struct AlignedAllocator {
  using value_type = T;

  AlignedAllocator() = default;
  template <typename U>
  AlignedAllocator(const AlignedAllocator<U>&) {}  // NOLINT: implicit for std::allocator_traits

  T* allocate(std::size_t count) {
    return static_cast<T*>(
        ::operator new (count * sizeof(T), std::align_val_t{kRotationAlignment}));
  }
  void deallocate(T* memory, std::size_t) {
    ::operator delete (memory, std::align_val_t{kRotationAlignment});
  }
  template <typename U>
  bool operator==(const AlignedAllocator<U>&) const {
    return true;
  }
};

using AlignedBytes = std::vector<std::byte, AlignedAllocator<std::byte>>;

}  // namespace tessera::kernels
