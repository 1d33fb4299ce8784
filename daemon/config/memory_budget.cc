#include "daemon/config/memory_budget.h"

#include <algorithm>

#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"
#include "daemon/config/limits.h"

namespace tessera::config {
namespace {

// Percent of the limit. The rest is for the transport, the heap, and what the kernel charges for
// page tables and sockets.
constexpr std::uint64_t kPoolShare = 50;
constexpr std::uint64_t kHostTierShare = 20;
constexpr std::uint64_t kRawCopyShare = 6;

// Several daemons, one for each GPU, share the memory of a host and see the same limit.
constexpr std::uint64_t kHostTierBesideGpu = 4 * kGiB;
constexpr std::uint64_t kRawCopiesBesideGpu = kGiB;

std::uint64_t Percent(std::uint64_t bytes, std::uint64_t share) {
  return bytes / 100 * share + bytes % 100 * share / 100;
}

std::uint64_t Minus(std::uint64_t from, std::uint64_t bytes) {
  return from > bytes ? from - bytes : 0;
}

}  // namespace

std::uint64_t MemoryBudget::sum() const {
  std::uint64_t sum = 0;
  for (const std::uint64_t part :
       {pool_bytes, host_tier_bytes, raw_copy_bytes, transport_bytes, heap_bytes}) {
    sum += std::min(part, std::numeric_limits<std::uint64_t>::max() - sum);
  }
  return sum;
}

std::string MemoryBudget::ToString() const {
  return Concat(
      pool_bytes == 0 ? std::string() : Concat("pool_bytes ", FormatBytes(pool_bytes), " + "),
      "host_tier_bytes ", FormatBytes(host_tier_bytes), " + raw_copy_bytes ",
      FormatBytes(raw_copy_bytes), " + messages ", FormatBytes(transport_bytes), " + heap ",
      FormatBytes(heap_bytes), " = ", FormatBytes(sum()), " of ", FormatBytes(limit_bytes),
      " according to ", source);
}

MemoryBudget BudgetOf(const Config& config, const DeviceMemory& memory) {
  const bool on_gpu = memory.host.has_value();
  MemoryBudget budget = {.limit_bytes = on_gpu ? memory.host->bytes : memory.bytes,
                         .source = on_gpu ? memory.host->source : memory.source,
                         .pool_bytes = on_gpu ? 0 : config.pool_bytes,
                         .host_tier_bytes = config.host_tier_bytes.value_or(0),
                         .raw_copy_bytes = config.raw_copy_bytes};
  budget.transport_bytes =
      std::min(std::clamp(budget.limit_bytes / 32, kTransportBytes.min, kTransportBytes.max),
               budget.limit_bytes / 8);
  budget.heap_bytes = std::min(kHeapBytes, budget.limit_bytes / 10);
  return budget;
}

void DeriveMemory(const DeviceMemory& memory, Config& config) {
  const bool on_gpu = memory.host.has_value();
  const std::uint64_t extent = std::max<std::uint64_t>(config.pool_extent_bytes, 1);
  if (on_gpu && config.pool_bytes == 0) {
    config.pool_bytes = Percent(memory.bytes, kPoolShare) / extent * extent;
  }
  const MemoryBudget stated = BudgetOf(config, memory);
  const bool derives_pool = !on_gpu && config.pool_bytes == 0;
  const bool derives_tier = !config.host_tier_bytes.has_value();
  const bool derives_raw = config.raw_copy_bytes == 0;
  const std::uint64_t shares = (derives_pool ? kPoolShare : 0) +
                               (derives_tier ? kHostTierShare : 0) +
                               (derives_raw ? kRawCopyShare : 0);
  if (shares == 0) return;
  // The shares are of the limit, or of less if the stated values leave less.
  const std::uint64_t left = Minus(stated.limit_bytes, stated.sum()) / shares;
  const std::uint64_t whole = left < stated.limit_bytes / 100 ? left * 100 : stated.limit_bytes;
  if (derives_pool) config.pool_bytes = Percent(whole, kPoolShare) / extent * extent;
  if (derives_tier) {
    config.host_tier_bytes =
        std::min(Percent(whole, kHostTierShare), on_gpu ? kHostTierBesideGpu : kHostTierBytes.max);
  }
  if (derives_raw) {
    config.raw_copy_bytes = std::clamp(Percent(whole, kRawCopyShare), kRawCopyBytes.min,
                                       on_gpu ? kRawCopiesBesideGpu : kRawCopyBytes.max);
  }
}

}  // namespace tessera::config
