// Measures dense attention against the memory it reads: bytes per second as a share of a streaming
// read of the same mapping by the same number of threads. Both are measured alternately in one run,
// so that noise affects both; `share` is the median of the pairwise ratios.
//
//   attend_bench --benchmark_filter='avx512/D:128/G:4'
#include <benchmark/benchmark.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/dispatch/attend.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::kernels {
namespace {

constexpr std::uint32_t kLaneEntries = 2048;
constexpr std::uint32_t kKvHeads = 8;

// CPU time of the whole process, which excludes time taken by other processes. All threads of a
// measurement are busy from start to end, so this is `threads` times the elapsed time on an idle
// machine.
double CpuSeconds() {
  timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// A shared mapping like a pool's: a filled memfd with small or large pages.
class Mapping {
 public:
  Mapping(std::size_t bytes, bool large_pages) : bytes_(bytes) {
    const int fd = memfd_create("attend_bench", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) std::abort();
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (base == MAP_FAILED) std::abort();
    if (large_pages) madvise(base, bytes, MADV_HUGEPAGE);
    base_ = static_cast<std::byte*>(base);
    Fill();
  }
  ~Mapping() { munmap(base_, bytes_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }

 private:
  // bf16 or fp16 numbers near +-1; pairs of them are sane fp32 numbers, so that any type can read
  // the mapping.
  void Fill() {
    std::uint64_t state = 0x9e3779b97f4a7c15u;
    auto* words = reinterpret_cast<std::uint16_t*>(base_);
    for (std::size_t i = 0; i < bytes_ / 2; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      words[i] = static_cast<std::uint16_t>(0x3c00u | (state >> 48 & 0x83ffu));
    }
  }

  std::byte* base_;
  std::size_t bytes_;
};

class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_(threads) {}

  void ParallelFor(std::uint32_t tasks, Task task, void* context) override {
    std::atomic<std::uint32_t> next{0};
    const auto work = [&] {
      for (std::uint32_t i = next++; i < tasks; i = next++) task(context, i);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads_; ++t) others.emplace_back(work);
    work();
    for (std::thread& thread : others) thread.join();
  }

 private:
  int threads_;
};

[[gnu::target("avx512f")]] std::uint64_t SumAvx512(const std::byte* from, std::size_t bytes) {
  typedef long long Vector __attribute__((vector_size(64)));
  Vector sums[8] = {};
  for (std::size_t offset = 0; offset < bytes; offset += sizeof(sums)) {
    for (int i = 0; i < 8; ++i) {
      sums[i] += *reinterpret_cast<const Vector*>(from + offset + i * sizeof(Vector));
    }
  }
  std::uint64_t total = 0;
  for (const Vector& sum : sums) {
    for (int lane = 0; lane < 8; ++lane) total += static_cast<std::uint64_t>(sum[lane]);
  }
  return total;
}

std::uint64_t SumPlain(const std::byte* from, std::size_t bytes) {
  std::uint64_t sums[8] = {};
  for (std::size_t offset = 0; offset < bytes; offset += sizeof(sums)) {
    for (int i = 0; i < 8; ++i) {
      sums[i] += *reinterpret_cast<const std::uint64_t*>(from + offset + i * 8);
    }
  }
  std::uint64_t total = 0;
  for (std::uint64_t sum : sums) total += sum;
  return total;
}

double StreamSeconds(const Mapping& mapping, Executor& executor) {
  struct Read {
    const Mapping* mapping;
    std::size_t chunk;
  } read = {&mapping, std::size_t{1} << 20};
  const double start = CpuSeconds();
  executor.ParallelFor(
      static_cast<std::uint32_t>(mapping.bytes() / read.chunk),
      [](void* context, std::uint32_t index) {
        const Read& r = *static_cast<Read*>(context);
        const std::byte* from = r.mapping->base() + index * r.chunk;
        benchmark::DoNotOptimize(__builtin_cpu_supports("avx512f") ? SumAvx512(from, r.chunk)
                                                                   : SumPlain(from, r.chunk));
      },
      &read);
  return CpuSeconds() - start;
}

struct Shape {
  std::uint32_t head_dim;
  std::uint32_t group;
  ElementType type;
  std::size_t bytes;
  bool large_pages;
  bool shuffled;
};

// Lanes of kLaneEntries entries that fill a mapping, with their tiles in order or shuffled.
class Workload {
 public:
  explicit Workload(const Shape& shape) : mapping_(shape.bytes, shape.large_pages) {
    const DenseTile tile{shape.head_dim, shape.type};
    const std::size_t tiles_per_lane = kLaneEntries / kTileEntries;
    const std::size_t lanes = shape.bytes / (tile.bytes() * tiles_per_lane);
    for (std::size_t t = 0; t < lanes * tiles_per_lane; ++t) offsets_.push_back(t * tile.bytes());
    if (shape.shuffled) std::shuffle(offsets_.begin(), offsets_.end(), std::mt19937_64(1));

    const std::uint32_t query_heads = kKvHeads * shape.group;
    query_.resize(query_heads * shape.head_dim * ElementBytes(shape.type));
    std::memcpy(query_.data(), mapping_.base(), query_.size());
    output_.resize((lanes + kKvHeads - 1) / kKvHeads * query_heads * shape.head_dim);
    segments_.resize(lanes);
    views_.resize(lanes);
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      segments_[lane] = {.arena = mapping_.base(),
                         .arena_bytes = mapping_.bytes(),
                         .tile_offsets = offsets_.data() + lane * tiles_per_lane,
                         .entries = kLaneEntries,
                         .shape = DenseShape(shape.head_dim, shape.type)};
      views_[lane] = {.segments = &segments_[lane], .segment_count = 1};
      items_.push_back({.lane = &views_[lane],
                        .kv_head = static_cast<std::uint32_t>(lane % kKvHeads),
                        .first_query_position = kLaneEntries,
                        .query = query_.data(),
                        .output = output_.data() + lane / kKvHeads * query_heads * shape.head_dim});
    }
    batch_.geometry = {.query_heads = query_heads,
                       .kv_heads = kKvHeads,
                       .head_dim = shape.head_dim,
                       .type = shape.type,
                       .scale = 0.088f};
    batch_.items = items_;
    workspace_.resize(AttendWorkspaceBytes(batch_) + 64);
  }

  const Mapping& mapping() const { return mapping_; }
  double entries() const { return static_cast<double>(items_.size()) * kLaneEntries; }

  double AttendSeconds(const Implementation& implementation, Executor& executor) {
    std::byte* base = workspace_.data();
    base += (64 - reinterpret_cast<std::uintptr_t>(base) % 64) % 64;
    const double start = CpuSeconds();
    const AttendResult result =
        Attend(implementation, batch_, {base, workspace_.size() - 64}, executor);
    const double seconds = CpuSeconds() - start;
    if (result.status != AttendStatus::kOk) std::abort();
    return seconds;
  }

 private:
  Mapping mapping_;
  std::vector<std::uint64_t> offsets_;
  std::vector<std::byte> query_;
  std::vector<float> output_;
  std::vector<SegmentView> segments_;
  std::vector<LaneView> views_;
  std::vector<AttendItem> items_;
  AttendBatch batch_;
  std::vector<std::byte> workspace_;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void DenseAttention(benchmark::State& state, const Implementation* implementation,
                    ElementType type) {
  const Shape shape = {.head_dim = static_cast<std::uint32_t>(state.range(0)),
                       .group = static_cast<std::uint32_t>(state.range(1)),
                       .type = type,
                       .bytes = static_cast<std::size_t>(state.range(3)) << 20,
                       .large_pages = state.range(4) != 0,
                       .shuffled = state.range(5) != 0};
  Workload workload(shape);
  ThreadExecutor executor(static_cast<int>(state.range(2)));
  std::vector<double> stream;
  std::vector<double> attend;
  std::vector<double> share;
  const auto bytes = static_cast<double>(shape.bytes);
  const auto threads = static_cast<double>(state.range(2));
  for (auto _ : state) {
    stream.push_back(bytes * threads / StreamSeconds(workload.mapping(), executor) * 1e-9);
    const double seconds = workload.AttendSeconds(*implementation, executor) / threads;
    attend.push_back(bytes / seconds * 1e-9);
    share.push_back(attend.back() / stream.back());
    state.SetIterationTime(seconds);
  }
  state.counters["stream_GBps"] = Median(stream);
  state.counters["attend_GBps"] = Median(attend);
  state.counters["share"] = Median(share);
  state.counters["ns_per_entry"] = bytes / Median(attend) / workload.entries();
}

void RegisterAll() {
  for (const Implementation* implementation : Implementations()) {
    if (!ImplementationSupported(*implementation)) continue;
    if (ImplementationName(*implementation) == "reference") continue;
    for (ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
      const std::string name =
          std::string(ImplementationName(*implementation)) + "/" + ElementName(type);
      benchmark::RegisterBenchmark(
          name.c_str(), [=](benchmark::State& s) { DenseAttention(s, implementation, type); })
          ->ArgNames({"D", "G", "threads", "MiB", "huge", "shuffled"})
          ->ArgsProduct({{128}, {1, 4, 8}, {1, 2}, {1, 1536}, {0, 1}, {0, 1}})
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels

int main(int argc, char** argv) {
  tessera::kernels::RegisterAll();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
