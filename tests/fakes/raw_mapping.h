// A decoding sequence as a worker without the client library sees it: its control page and tail
// rings, mapped directly.
#pragma once

#include <memory>

#include "daemon/platform/event_loop.h"
#include "daemon/platform/memfd.h"
#include "proto/shm/lane_layout.h"
#include "proto/shm/layout.h"
#include "tests/fakes/raw_worker.h"

namespace tessera::fakes {

class RawMapping {
 public:
  // The worker must have opened its descriptors. Returns null if a mapping fails.
  static std::unique_ptr<RawMapping> Map(RawWorker& worker) {
    std::unique_ptr<RawMapping> mapping(new RawMapping(worker));
    absl::StatusOr<RawWorker::Descriptor> control = worker.Fetch(shm::DescriptorKind::kControl, 0);
    if (!control.ok() || !control->fd.valid()) return nullptr;
    absl::StatusOr<AddressRange> range =
        AddressRange::Map(control->fd.get(), control->answer.bytes, Access::kReadWrite);
    if (!range.ok()) return nullptr;
    mapping->control_ = *std::move(range);
    return mapping;
  }

  shm::ControlPage& control() { return *reinterpret_cast<shm::ControlPage*>(control_.data()); }

  // Opens a tail for the sequence and maps it.
  bool OpenTail(std::uint64_t sequence) {
    const v1::TailsOpened opened = worker_.OpenTails({sequence});
    if (opened.code() != 0 || opened.tails_size() != 1) return false;
    place_ = opened.tails(0);
    absl::StatusOr<RawWorker::Descriptor> tail =
        worker_.Fetch(shm::DescriptorKind::kTail, place_.extent());
    if (!tail.ok() || !tail->fd.valid()) return false;
    absl::StatusOr<AddressRange> range =
        AddressRange::Map(tail->fd.get(), tail->answer.bytes, Access::kReadWrite);
    if (!range.ok()) return false;
    tail_ = *std::move(range);
    return true;
  }
  const v1::TailPlace& place() const { return place_; }
  std::byte* tail_region() { return tail_.data() + place_.offset(); }

  void Commit(std::uint64_t tokens) {
    control().commits[place_.commit_slot()].store(
        shm::CommitWord::Pack(place_.generation(), tokens));
  }

 private:
  explicit RawMapping(RawWorker& worker) : worker_(worker) {}
  RawWorker& worker_;
  AddressRange control_;
  AddressRange tail_;
  v1::TailPlace place_;
};

}  // namespace tessera::fakes
