#include "daemon/device/host_memory.h"

#include "daemon/base/check.h"

namespace tessera::device {

namespace {

absl::StatusOr<Export> ShareMemfd(const Memfd& memory) {
  Export share = {.kind = shm::MemoryKind::kHost, .bytes = memory.bytes()};
  if (absl::Status status = DuplicateFd(memory.fd(), &share.fd); !status.ok()) return status;
  return share;
}

class Piece final : public Memory {
 public:
  Piece(AddressRange& range, std::uint64_t offset, Memfd memory)
      : range_(range), offset_(offset), memory_(std::move(memory)) {}
  ~Piece() override {
    TESSERA_CHECK(range_.Reset(offset_, memory_.bytes()).ok(),
                  "resetting mapped addresses must not fail");
  }
  absl::Status Seal() { return memory_.Seal(SealFor::kDaemonWrites); }
  std::byte* data() const override { return range_.data() + offset_; }
  std::uint64_t bytes() const override { return memory_.bytes(); }
  absl::StatusOr<Export> Share() const override { return ShareMemfd(memory_); }

 private:
  AddressRange& range_;
  const std::uint64_t offset_;
  Memfd memory_;
};

class HostSpace final : public Space {
 public:
  HostSpace(std::string name, AddressRange range)
      : name_(std::move(name)), range_(std::move(range)) {}

  absl::StatusOr<std::unique_ptr<Memory>> Create(std::uint64_t offset,
                                                 std::uint64_t bytes) override {
    absl::StatusOr<Memfd> memory = Memfd::Create(name_, bytes);
    if (!memory.ok()) return memory.status();
    if (absl::Status status = memory->Prefault(); !status.ok()) return status;
    // Map before sealing: F_SEAL_FUTURE_WRITE leaves this mapping writable.
    absl::Status status = range_.MapAt(offset, memory->fd(), bytes, Access::kReadWrite);
    if (!status.ok()) return status;
    auto piece = std::make_unique<Piece>(range_, offset, *std::move(memory));
    status = piece->Seal();
    if (!status.ok()) return status;
    return std::unique_ptr<Memory>(std::move(piece));
  }
  std::byte* base() const override { return range_.data(); }

 private:
  const std::string name_;
  AddressRange range_;
};

class WorkerPiece final : public Memory {
 public:
  WorkerPiece(Memfd memory, AddressRange mapping)
      : memory_(std::move(memory)), mapping_(std::move(mapping)) {}
  std::byte* data() const override { return mapping_.data(); }
  std::uint64_t bytes() const override { return memory_.bytes(); }
  absl::StatusOr<Export> Share() const override { return ShareMemfd(memory_); }

 private:
  const Memfd memory_;
  const AddressRange mapping_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Space>> HostMemorySource::Reserve(std::uint64_t bytes) {
  absl::StatusOr<AddressRange> range = AddressRange::Reserve(bytes);
  if (!range.ok()) return range.status();
  return std::make_unique<HostSpace>(name_, *std::move(range));
}

absl::StatusOr<std::unique_ptr<Memory>> CreateHostWorkerMemory(std::string_view name,
                                                               std::uint64_t bytes) {
  absl::StatusOr<Memfd> memory = Memfd::Create(name, bytes);
  if (!memory.ok()) return memory.status();
  if (absl::Status status = memory->Prefault(); !status.ok()) return status;
  if (absl::Status status = memory->Seal(SealFor::kWorkerWrites); !status.ok()) return status;
  absl::StatusOr<AddressRange> mapping = AddressRange::Map(memory->fd(), bytes, Access::kReadOnly);
  if (!mapping.ok()) return mapping.status();
  return std::make_unique<WorkerPiece>(*std::move(memory), *std::move(mapping));
}

}  // namespace tessera::device
