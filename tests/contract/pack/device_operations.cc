#include "tests/contract/pack/device_operations.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/host/tile_ops.h"
#include "tests/fakes/gpu/emulated_runtime.h"

namespace tessera::kernels {
namespace {

using cuda::DeviceStrategy;

// Alignment and stride unit of rows on a device.
constexpr std::uint64_t kRowAlignment = 16;

TileDevice WithQueue(TileDevice device) {
  if (device.runtime == nullptr) return device;
  const cuda::Error error = device.runtime->NewQueue(&device.queue);
  if (error.ok()) return device;
  return {.runtime = nullptr, .queue = nullptr, .reason = error.text()};
}

// Guard bytes after each output, which no kernel may change.
constexpr std::uint64_t kGuardBytes = 64;
constexpr std::byte kAnything{0xa5};

// Device memory of one call. Input arrays are allocated exactly, so that the device can detect
// overruns. Output arrays are followed by a guard.
class DeviceMemory {
 public:
  explicit DeviceMemory(const TileDevice& device) : device_(device) {}
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    for (void* address : addresses_) device_.runtime->Free(address);
  }

  std::uint64_t Put(const void* data, std::uint64_t bytes) {
    if (data == nullptr || bytes == 0) return 0;
    void* address = nullptr;
    Expect(device_.runtime->Allocate(bytes, &address));
    addresses_.push_back(address);
    Expect(device_.queue->Copy(address, data, bytes));
    return reinterpret_cast<std::uint64_t>(address);
  }
  // `data` null: the array starts with arbitrary content.
  std::uint64_t PutGuarded(const void* data, std::uint64_t bytes) {
    if (bytes == 0) return 0;
    std::vector<std::byte> image(bytes + kGuardBytes, kAnything);
    if (data != nullptr) std::memcpy(image.data(), data, bytes);
    return Put(image.data(), image.size());
  }
  std::uint64_t Room(std::uint64_t bytes) { return PutGuarded(nullptr, bytes); }
  // Rows at arbitrary host addresses, copied to where the device expects them.
  struct Rows {
    std::uint64_t at = 0;
    std::uint64_t stride = 0;
  };
  Rows PutRows(const std::byte* rows, std::uint64_t stride, std::uint64_t count,
               std::uint64_t row_bytes) {
    if (count == 0) return {.at = 0, .stride = kRowAlignment};
    const std::uint64_t spaced =
        stride % kRowAlignment == 0 ? stride : (row_bytes / kRowAlignment + 1) * kRowAlignment;
    std::vector<std::byte> image((count - 1) * spaced + row_bytes, std::byte{0xff});
    for (std::uint64_t r = 0; r < count; ++r) {
      std::memcpy(image.data() + r * spaced, rows + r * stride, row_bytes);
    }
    return {.at = Put(image.data(), image.size()), .stride = spaced};
  }
  // Copies back from a guarded array.
  void Get(void* to, std::uint64_t from, std::uint64_t bytes) {
    if (bytes == 0) return;
    std::vector<std::byte> image(bytes + kGuardBytes);
    Expect(device_.queue->Copy(image.data(), reinterpret_cast<const void*>(from), image.size()));
    Expect(device_.queue->Wait());
    std::memcpy(to, image.data(), bytes);
    for (std::uint64_t i = bytes; i < image.size(); ++i) {
      ASSERT_EQ(image[i], kAnything) << "byte " << i << " is written, behind " << bytes;
    }
  }
  static void Expect(const cuda::Error& error) { EXPECT_TRUE(error.ok()) << error.text(); }

 private:
  const TileDevice& device_;
  std::vector<void*> addresses_;
};

// Data passed from prepare_encode to encode: the place of the rotations.
struct Prepared {
  RotationView rotation;
};

// `Device` is a type that opens the device.
template <class Device>
class Table {
 public:
  static const Operations& Get() { return kTable; }

 private:
  static std::size_t PreparedBytes(const TileShape&, ElementType) { return sizeof(Prepared); }
  static void PrepareEncode(const TileShape&, ElementType, const RotationView& rotation,
                            std::byte* prepared) {
    const Prepared where = {rotation};
    std::memcpy(prepared, &where, sizeof(where));
  }

  static bool Encode(const EncodeJob& job) {
    DeviceMemory memory(Device::Get());
    Prepared prepared = {};
    if (job.prepared != nullptr) std::memcpy(&prepared, job.prepared, sizeof(prepared));
    const RotationView& rotation = prepared.rotation;
    const DeviceStrategy strategy = {
        .shape = job.shape,
        .layout = job.layout,
        .rotation_type = rotation.type,
        .key_rotation =
            memory.Put(rotation.key, RotationBytes(job.shape, job.shape.key, rotation.type)),
        .value_rotation =
            memory.Put(rotation.value, RotationBytes(job.shape, job.shape.value, rotation.type)),
        .key_mean = memory.Put(rotation.key_mean, job.shape.head_dim * sizeof(std::uint16_t)),
        .value_mean = memory.Put(rotation.value_mean, job.shape.head_dim * sizeof(std::uint16_t)),
        .key_error_limit = job.key_error_limit,
        .value_error_limit = job.value_error_limit};
    const std::uint64_t row_bytes = job.shape.head_dim * ElementBytes(job.type);
    const auto key = memory.PutRows(job.key, job.stride, job.rows, row_bytes);
    const auto value = memory.PutRows(job.value, job.stride, job.rows, row_bytes);
    const cuda::EncodeTileJob of_device = {
        .key = key.at,
        .value = value.at,
        .stride = key.stride,
        .weights = memory.Put(job.weights, job.rows * sizeof(float)),
        .positions = memory.Put(job.positions, job.rows * sizeof(std::uint32_t)),
        .tile = memory.Room(job.layout.bytes),
        .summaries = memory.Room(job.layout.summary_bytes),
        .rows = job.rows,
        .strategy = 0};
    std::optional<std::uint32_t> unusable;
    memory.Expect(
        Calls().Encode(std::span(&strategy, 1), job.type, std::span(&of_device, 1), &unusable));
    memory.Get(job.tile, of_device.tile, job.layout.bytes);
    memory.Get(job.summaries, of_device.summaries, job.layout.summary_bytes);
    return !unusable.has_value();
  }

  static const char* Decode(const DecodeJob& job) {
    DeviceMemory memory(Device::Get());
    const DeviceStrategy strategy = {.shape = job.shape, .layout = job.layout};
    const std::uint64_t bytes = std::uint64_t{job.rows} * job.padded_channels * sizeof(float);
    const cuda::DecodeTileJob of_device = {.tile = memory.Put(job.tile, job.layout.bytes),
                                           .keys = memory.Room(bytes),
                                           .values = memory.Room(bytes),
                                           .rows = job.rows,
                                           .strategy = 0};
    memory.Expect(Calls().Decode(std::span(&strategy, 1), std::span(&of_device, 1)));
    memory.Get(job.keys, of_device.keys, bytes);
    memory.Get(job.values, of_device.values, bytes);
    return Device::Get().runtime->implementation();
  }

  static const char* Gather(const GatherJob& job) {
    DeviceMemory memory(Device::Get());
    const DeviceStrategy strategies[] = {{.shape = job.from, .layout = job.from_layout},
                                         {.shape = job.to, .layout = job.to_layout}};
    std::map<const std::byte*, std::uint64_t> places;
    const auto place = [&](const std::byte*& host, std::uint64_t bytes) {
      if (host == nullptr) return;
      auto [at, is_new] = places.try_emplace(host);
      if (is_new) at->second = memory.Put(host, bytes);
      host = reinterpret_cast<const std::byte*>(at->second);
    };
    std::vector<GatherRow> rows(job.rows, job.rows + job.row_count);
    for (GatherRow& row : rows) {
      place(row.tile, job.from_layout.bytes);
      place(row.summaries, job.from_layout.summary_bytes);
    }
    const cuda::GatherTile of_device = {.tile = memory.Room(job.to_layout.bytes),
                                        .summaries = memory.Room(job.to_layout.summary_bytes),
                                        .rows = rows,
                                        .from = 0,
                                        .to = 1};
    memory.Expect(Calls().Gather(strategies, std::span(&of_device, 1)));
    memory.Get(job.tile, of_device.tile, job.to_layout.bytes);
    memory.Get(job.summaries, of_device.summaries, job.to_layout.summary_bytes);
    return Device::Get().runtime->implementation();
  }

  static const char* Moments(const MomentsJob& job) {
    DeviceMemory memory(Device::Get());
    const auto rows =
        memory.PutRows(job.rows, job.stride, job.row_count, job.head_dim * ElementBytes(job.type));
    const std::uint64_t bytes = std::uint64_t{job.head_dim} * job.head_dim * sizeof(double);
    const cuda::MomentsTileJob of_device = {.rows = rows.at,
                                            .stride = rows.stride,
                                            .sums = memory.PutGuarded(job.sums, bytes),
                                            .row_count = job.row_count};
    memory.Expect(Calls().Moments(job.head_dim, job.type, std::span(&of_device, 1)));
    memory.Get(job.sums, of_device.sums, bytes);
    return Device::Get().runtime->implementation();
  }

  static const char* Observe(const ObserveJob& job) {
    DeviceMemory memory(Device::Get());
    const std::uint64_t row_bytes = job.head_dim * ElementBytes(job.type);
    const auto keys = memory.PutRows(job.keys, job.key_stride, job.key_count, row_bytes);
    const auto queries = memory.PutRows(job.queries, job.query_stride, job.query_count, row_bytes);
    const std::uint64_t row_words = job.query_count * sizeof(std::uint64_t);
    const std::uint64_t sum_bytes = job.key_count * sizeof(double);
    const cuda::ObserveTileJob of_device = {
        .keys = keys.at,
        .key_stride = keys.stride,
        .key_count = job.key_count,
        .queries = queries.at,
        .query_stride = queries.stride,
        .visible_begin = memory.Put(job.visible_begin, row_words),
        .visible_end = memory.Put(job.visible_end, row_words),
        .log2_weights = memory.Put(job.log2_weights, job.key_count * sizeof(float)),
        .sums = memory.PutGuarded(job.sums, sum_bytes),
        .query_count = job.query_count};
    memory.Expect(Calls().Observe({.head_dim = job.head_dim,
                                   .type = job.type,
                                   .scale = job.scale,
                                   .logit_softcap = job.logit_softcap,
                                   .logits = job.logits},
                                  std::span(&of_device, 1)));
    memory.Get(job.sums, of_device.sums, sum_bytes);
    return Device::Get().runtime->implementation();
  }

  static cuda::TileCalls& Calls() {
    static cuda::TileCalls calls(*Device::Get().runtime, *Device::Get().queue);
    return calls;
  }

  static constexpr Operations kTable = {.attend_part = nullptr,
                                        .rotate = nullptr,
                                        .unrotate = nullptr,
                                        .score_part = nullptr,
                                        .select = nullptr,
                                        .prepared_bytes = &PreparedBytes,
                                        .prepare_encode = &PrepareEncode,
                                        .encode = &Encode,
                                        .decode = &Decode,
                                        .gather = &Gather,
                                        .moments = &Moments,
                                        .observe = &Observe,
                                        .first_unusable = nullptr};
};

struct Real {
  static const TileDevice& Get() { return RealTileDevice(); }
};
struct Emulated {
  static const TileDevice& Get() { return EmulatedTileDevice(); }
};

}  // namespace

const TileDevice& RealTileDevice() {
  static const TileDevice device = [] {
    TileDevice gpu;
    gpu.runtime = cuda::SystemGpus().Open(0, &gpu.reason);
    return WithQueue(std::move(gpu));
  }();
  return device;
}

const TileDevice& EmulatedTileDevice() {
  static const TileDevice device =
      WithQueue({.runtime = tests::NewEmulatedRuntime({}), .queue = nullptr, .reason = ""});
  return device;
}

const Operations& RealTileOperations() { return Table<Real>::Get(); }
const Operations& EmulatedTileOperations() { return Table<Emulated>::Get(); }

}  // namespace tessera::kernels
