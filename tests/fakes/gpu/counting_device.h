// Wraps a device: counts the bytes read back to the host, and limits the number of lanes whose keys
// fit at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "daemon/device/device.h"

namespace tessera::tests {

class CountingDevice final : public device::Device {
 public:
  explicit CountingDevice(device::Device& device) : device_(device) {}

  std::uint64_t reads() const { return reads_; }
  std::uint64_t loads() const { return loads_; }
  std::uint64_t looks() const { return looks_; }
  void set_most_lanes(int lanes) { most_lanes_ = lanes; }
  // All later observations return this status.
  void FailObservations(absl::Status status) { look_status_ = std::move(status); }

  const Description& description() const override { return device_.description(); }
  absl::Status health() const override { return device_.health(); }
  device::MemorySource& pool_memory() override { return device_.pool_memory(); }
  absl::StatusOr<std::unique_ptr<device::Memory>> CreateWorkerMemory(std::string_view name,
                                                                     std::uint64_t bytes) override {
    return device_.CreateWorkerMemory(name, bytes);
  }
  absl::StatusOr<std::optional<device::UnusableRow>> StoreRows(
      device::Place source, kernels::ElementType type,
      std::span<const device::RowRun> runs) override {
    return device_.StoreRows(source, type, runs);
  }
  absl::StatusOr<std::optional<std::size_t>> Encode(
      std::span<const device::TileStrategy> strategies, kernels::ElementType type,
      std::span<const device::TileEncode> tiles) override {
    return device_.Encode(strategies, type, tiles);
  }
  absl::Status Gather(const kernels::TileShape& from, const kernels::TileShape& to,
                      std::span<const device::TileGather> tiles) override {
    return device_.Gather(from, to, tiles);
  }
  absl::Status StoreWords(std::span<const device::WordStore> stores) override {
    return device_.StoreWords(stores);
  }
  absl::Status Read(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    ++reads_;
    return device_.Read(to, from, bytes);
  }
  absl::Status Write(std::byte* to, const std::byte* from, std::uint64_t bytes) override {
    return device_.Write(to, from, bytes);
  }
  absl::StatusOr<std::unique_ptr<device::LaneKeys>> LoadKeys(
      const kernels::LayerGeometry& geometry, std::span<const device::KeyRun> runs) override {
    if (lanes_ >= most_lanes_) return absl::ResourceExhaustedError("no room for one more lane");
    absl::StatusOr<std::unique_ptr<device::LaneKeys>> keys = device_.LoadKeys(geometry, runs);
    if (!keys.ok()) return keys;
    ++loads_;
    return std::make_unique<Keys>(*this, *std::move(keys));
  }
  absl::StatusOr<std::string_view> Attend(const kernels::AttendBatch& batch,
                                          const device::PoolView& pool) override {
    return device_.Attend(batch, pool);
  }
  absl::StatusOr<std::string_view> Select(const kernels::AttendBatch& batch,
                                          const device::PoolView& pool,
                                          kernels::SelectionSink& sink) override {
    return device_.Select(batch, pool, sink);
  }

 private:
  class Keys final : public device::LaneKeys {
   public:
    Keys(CountingDevice& device, std::unique_ptr<device::LaneKeys> keys)
        : device_(device), keys_(std::move(keys)) {
      ++device_.lanes_;
    }
    ~Keys() override { --device_.lanes_; }
    absl::Status Look(std::span<const kernels::KeyObservation> looks) override {
      ++device_.looks_;
      return device_.look_status_.ok() ? keys_->Look(looks) : device_.look_status_;
    }
    absl::Status AddSquaredLengths(std::span<double> sums) override {
      return device_.look_status_.ok() ? keys_->AddSquaredLengths(sums) : device_.look_status_;
    }
    absl::Status AddChannelSquares(std::uint64_t count, std::span<double> sums) override {
      return device_.look_status_.ok() ? keys_->AddChannelSquares(count, sums)
                                       : device_.look_status_;
    }
    absl::Status Read(std::byte* to) override { return keys_->Read(to); }

   private:
    CountingDevice& device_;
    const std::unique_ptr<device::LaneKeys> keys_;
  };

  device::Device& device_;
  std::atomic<std::uint64_t> reads_{0};
  std::atomic<std::uint64_t> loads_{0};
  std::atomic<std::uint64_t> looks_{0};
  std::atomic<int> lanes_{0};
  int most_lanes_ = std::numeric_limits<int>::max();
  absl::Status look_status_;
};

}  // namespace tessera::tests
