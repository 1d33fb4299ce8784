#include "daemon/pool/extents.h"

#include <utility>

namespace tessera::pool {

namespace {

class MemfdExtent final : public Extent {
 public:
  explicit MemfdExtent(Memfd memory) : memory_(std::move(memory)) {}
  int fd() const override { return memory_.fd(); }
  std::uint64_t bytes() const override { return memory_.bytes(); }

 private:
  Memfd memory_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Extent>> SharedMemoryExtents::Create(AddressRange& range,
                                                                    std::uint64_t offset,
                                                                    std::uint64_t bytes) {
  absl::StatusOr<Memfd> memory = Memfd::Create(name_, bytes);
  if (!memory.ok()) return memory.status();
  if (absl::Status status = memory->Prefault(); !status.ok()) return status;
  // Mapped before it is sealed: FUTURE_WRITE leaves this one mapping writable.
  if (absl::Status status = range.MapAt(offset, memory->fd(), bytes, Access::kReadWrite);
      !status.ok()) {
    return status;
  }
  if (absl::Status status = memory->Seal(SealFor::kDaemonWrites); !status.ok()) {
    (void)range.Reset(offset, bytes);
    return status;
  }
  return std::make_unique<MemfdExtent>(*std::move(memory));
}

}  // namespace tessera::pool
