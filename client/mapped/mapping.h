// Maps descriptors into this process, as host memory or as memory of a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/gpu.h"
#include "client/mapped/descriptors.h"
#include "daemon/platform/cuda_memory.h"
#include "daemon/platform/memfd.h"

namespace tessera::client {

// Memory that the worker writes: an extent of tail rings, or the staging arena. On a GPU addresses
// are device addresses.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { *this = std::move(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    device_ = std::move(other.device_);  // first: it is mapped into the range
    range_ = std::move(other.range_);
    host_ = std::move(other.host_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }
  // `gpu` is null if the session uses host memory.
  static absl::StatusOr<Mapping> Map(const Descriptor& descriptor, Gpu* gpu);

  bool valid() const { return bytes_ != 0; }
  std::byte* data() const { return data_; }
  std::uint64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  AddressRange host_;
  std::unique_ptr<CudaRange> range_;  // outlives the mappings in it
  CudaMemory device_;
};

// The pool's extents, which this process only reads.
class PoolMapping {
 public:
  virtual ~PoolMapping() = default;
  static absl::StatusOr<std::unique_ptr<PoolMapping>> Reserve(std::uint64_t bytes,
                                                              std::uint64_t extent_bytes, Gpu* gpu);

  virtual absl::Status Map(std::uint32_t index, const Descriptor& extent) = 0;
  // No effect on a GPU: running kernels may still read the extent, and the daemon does not reuse it
  // before the session ends.
  virtual absl::Status Drop(std::uint32_t index) = 0;
  // The address at offset 0. Host code may dereference it only in host memory; on a GPU it serves
  // for arithmetic.
  virtual std::byte* base() const = 0;
  // The device addresses of the extents up to the last one mapped; 0 for extents not mapped.
  virtual void ListExtents(std::vector<std::uint64_t>& addresses) const = 0;
};

}  // namespace tessera::client
