#include "daemon/metrics/process.h"

#include <sys/resource.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>

#include "daemon/metrics/names.h"

namespace tessera::metrics {
namespace {

double Seconds(const timespec& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}
double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
}

// Field 22 of /proc/self/stat: clock ticks from boot to the start of the process. The name in field
// 2 may contain spaces, so fields are counted from its closing parenthesis.
std::optional<double> StartTime() {
  std::ifstream file("/proc/self/stat");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(name_end + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  double ticks = 0;
  timespec now{};
  timespec since_boot{};
  if (!(fields >> ticks) || ::clock_gettime(CLOCK_REALTIME, &now) != 0 ||
      ::clock_gettime(CLOCK_BOOTTIME, &since_boot) != 0) {
    return std::nullopt;
  }
  return Seconds(now) - Seconds(since_boot) + ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

std::optional<std::uint64_t> ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  std::uint64_t size = 0;
  std::uint64_t resident = 0;
  if (!(file >> size >> resident)) return std::nullopt;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::optional<std::uint64_t> OpenFds() {
  std::error_code error;
  std::filesystem::directory_iterator entry("/proc/self/fd", error);
  std::uint64_t count = 0;
  for (; !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) ++count;
  if (error) return std::nullopt;
  return count - 1;  // without the one that reads the folder
}

}  // namespace

ProcessMetrics::ProcessMetrics(std::uint64_t memory_limit_bytes)
    : start_time_(StartTime()), memory_limit_bytes_(memory_limit_bytes) {}

void ProcessMetrics::Collect(Visitor& visitor) const {
  if (start_time_.has_value()) visitor.Add(kProcessStartTimeSeconds, *start_time_);
  rusage usage{};
  if (::getrusage(RUSAGE_SELF, &usage) == 0) {
    visitor.Add(kProcessCpuSecondsTotal, Seconds(usage.ru_utime) + Seconds(usage.ru_stime));
  }
  if (const auto bytes = ResidentBytes()) {
    visitor.Add(kProcessResidentMemoryBytes, *bytes);
    if (memory_limit_bytes_ != 0) {
      visitor.Add(kMemoryHeadroomBytes,
                  memory_limit_bytes_ - std::min(*bytes, memory_limit_bytes_));
    }
  }
  if (const auto open = OpenFds()) visitor.Add(kProcessOpenFds, *open);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) visitor.Add(kProcessMaxFds, limit.rlim_cur);
}

}  // namespace tessera::metrics
