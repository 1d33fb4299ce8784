#include "client/mapped/extents.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera::client {

using shm::DescriptorKind;

namespace {

absl::Status Differs(std::string_view what, std::uint64_t mapped, std::uint64_t expected) {
  return absl::FailedPreconditionError(
      Concat("the mapped directory has ", what, " ", mapped, "; this session expects ", expected));
}

absl::Status CheckHeader(const shm::DirectoryHeader& header, const Extents::Expected& expected) {
  if (header.magic != shm::kDirectoryMagic) {
    return Differs("magic", header.magic, shm::kDirectoryMagic);
  }
  if (header.protocol_version != shm::kProtocolVersion) {
    return Differs("protocol version", header.protocol_version, shm::kProtocolVersion);
  }
  if (header.layout_fingerprint != shm::kLayoutFingerprint) {
    return Differs("layout fingerprint", header.layout_fingerprint, shm::kLayoutFingerprint);
  }
  if (header.instance != expected.instance) {
    return Differs("instance", header.instance, expected.instance);
  }
  if (header.directory_extent_bytes != expected.directory_extent_bytes) {
    return Differs("extent size", header.directory_extent_bytes, expected.directory_extent_bytes);
  }
  if (header.pool_extent_bytes != expected.pool_extent_bytes) {
    return Differs("pool extent size", header.pool_extent_bytes, expected.pool_extent_bytes);
  }
  return absl::OkStatus();
}

absl::Status CheckLimit(std::string_view what, std::uint64_t limit, std::uint64_t extent,
                        std::uint64_t most) {
  if (extent == 0 || extent % PageBytes() != 0 || limit == 0 || limit % extent != 0 ||
      limit / extent > most) {
    return absl::FailedPreconditionError(
        Concat("the ", what, " has a limit of ", limit, " bytes in extents of ", extent,
               "; it must consist of 1 to ", most, " whole extents of whole pages"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Extents>> Extents::Open(DescriptorSource& source,
                                                       const Expected& expected, Gpu* gpu) {
  std::unique_ptr<Extents> extents(new Extents(source, gpu));
  if (absl::Status status = extents->MapHeader(expected); !status.ok()) return status;
  return extents;
}

absl::Status Extents::MapHeader(const Expected& expected) {
  absl::StatusOr<Descriptor> first = source_.Fetch(DescriptorKind::kDirectory, 0);
  if (!first.ok()) return first.status();
  if (first->bytes < sizeof(shm::DirectoryHeader) ||
      first->bytes != expected.directory_extent_bytes) {
    return Differs("a first extent of size", first->bytes, expected.directory_extent_bytes);
  }
  absl::StatusOr<AddressRange> look =
      AddressRange::Map(first->fd.get(), first->bytes, Access::kReadOnly);
  if (!look.ok()) return look.status();
  const auto& header = *reinterpret_cast<const shm::DirectoryHeader*>(look->data());
  absl::Status status = CheckHeader(header, expected);
  if (status.ok()) {
    status = CheckLimit("directory", header.directory_limit_bytes, header.directory_extent_bytes,
                        shm::kMaxDirectoryExtents);
  }
  if (status.ok()) {
    status =
        CheckLimit("pool", header.pool_limit_bytes, header.pool_extent_bytes, shm::kMaxPoolExtents);
  }
  if (!status.ok()) return status;

  absl::StatusOr<AddressRange> directory = AddressRange::Reserve(header.directory_limit_bytes);
  if (!directory.ok()) return directory.status();
  absl::StatusOr<std::unique_ptr<PoolMapping>> pool =
      PoolMapping::Reserve(header.pool_limit_bytes, header.pool_extent_bytes, gpu_);
  if (!pool.ok()) return pool.status();
  status = directory->MapAt(0, first->fd.get(), first->bytes, Access::kReadOnly);
  if (!status.ok()) return status;
  directory_ = *std::move(directory);
  pool_ = *std::move(pool);
  header_ = reinterpret_cast<const shm::DirectoryHeader*>(directory_.data());
  directory_extent_bytes_ = header_->directory_extent_bytes;
  pool_extent_bytes_ = header_->pool_extent_bytes;
  pool_limit_bytes_ = header_->pool_limit_bytes;
  MutexLock lock(mutex_);
  pool_generations_.assign(pool_limit_bytes_ / pool_extent_bytes_, 0);
  return absl::OkStatus();
}

absl::Status Extents::Refresh() {
  MutexLock lock(mutex_);
  for (;;) {
    // Read the version first: a later change causes another round.
    const std::uint64_t version = header_->mapping_version.load();
    if (version == mapped_version_.load(std::memory_order_relaxed)) return absl::OkStatus();
    if (absl::Status status = MapDirectory(); !status.ok()) return status;
    if (absl::Status status = MapPool(); !status.ok()) return status;
    mapped_version_.store(version, std::memory_order_release);
  }
}

absl::Status Extents::MapDirectory() {
  const std::uint64_t most = directory_.bytes() / directory_extent_bytes_;
  const std::uint64_t wanted = std::min<std::uint64_t>(header_->directory_extents.load(), most);
  for (; directory_extents_ < wanted; ++directory_extents_) {
    absl::StatusOr<Descriptor> extent =
        source_.Fetch(DescriptorKind::kDirectory, directory_extents_);
    if (!extent.ok()) return extent.status();
    if (extent->bytes != directory_extent_bytes_) {
      return Differs("an extent of size", extent->bytes, directory_extent_bytes_);
    }
    absl::Status mapped =
        directory_.MapAt(std::uint64_t{directory_extents_} * directory_extent_bytes_,
                         extent->fd.get(), extent->bytes, Access::kReadOnly);
    if (!mapped.ok()) return mapped;
  }
  return absl::OkStatus();
}

absl::Status Extents::MapPool() {
  for (std::uint32_t i = 0; i < pool_generations_.size(); ++i) {
    const std::uint32_t wanted = header_->pool_extent_generation[i].load();
    if (wanted == pool_generations_[i]) continue;
    if (absl::Status status = DropPoolExtent(i); !status.ok()) return status;
    if (wanted == 0) continue;
    absl::StatusOr<Descriptor> extent = source_.Fetch(DescriptorKind::kPool, i);
    // Removed in the meantime: the version has changed, so the caller checks again.
    if (absl::IsNotFound(extent.status())) continue;
    if (!extent.ok()) return extent.status();
    if (extent->bytes != pool_extent_bytes_) {
      return Differs("a pool extent of size", extent->bytes, pool_extent_bytes_);
    }
    if (absl::Status mapped = pool_->Map(i, *extent); !mapped.ok()) return mapped;
    pool_generations_[i] = extent->generation;
  }
  return absl::OkStatus();
}

absl::Status Extents::DropPoolExtent(std::uint32_t index) {
  if (pool_generations_[index] == 0) return absl::OkStatus();
  pool_generations_[index] = 0;
  return pool_->Drop(index);
}

void Extents::UnmapRemoved() {
  MutexLock lock(mutex_);
  for (std::uint32_t i = 0; i < pool_generations_.size(); ++i) {
    const std::uint32_t now = header_->pool_extent_generation[i].load();
    // If unmapping fails, the extent stays mapped and the next Refresh returns the error.
    if (now != pool_generations_[i]) (void)DropPoolExtent(i);
  }
}

void Extents::ListPoolExtents(std::vector<std::uint64_t>& addresses) const {
  MutexLock lock(mutex_);
  pool_->ListExtents(addresses);
}

std::uint32_t Extents::pool_extents_mapped() const {
  MutexLock lock(mutex_);
  return static_cast<std::uint32_t>(
      std::count_if(pool_generations_.begin(), pool_generations_.end(),
                    [](std::uint32_t generation) { return generation != 0; }));
}

void Extents::Unmap() {
  MutexLock lock(mutex_);
  header_ = nullptr;
  directory_ = AddressRange();
  pool_ = nullptr;
  pool_generations_.clear();
}

}  // namespace tessera::client
