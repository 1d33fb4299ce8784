#include "client/gpu/wanted_device.h"

#include <charconv>
#include <memory>
#include <string_view>
#include <utility>

#include "absl/strings/ascii.h"
#include "daemon/base/strings.h"
#include "daemon/platform/cuda_calls.h"
#include "daemon/platform/device_uuid.h"

namespace tessera::client {

namespace {

constexpr std::string_view kCuda = "cuda:";

absl::StatusOr<int> ParseOrdinal(const std::string& device) {
  int ordinal = -1;
  const char* const end = device.data() + device.size();
  const auto parsed = std::from_chars(device.data() + kCuda.size(), end, ordinal);
  if (parsed.ec == std::errc() && parsed.ptr == end && ordinal >= 0) return ordinal;
  return absl::InvalidArgumentError(
      Concat("device \"", device, "\" is not cuda:N with the number N of a device"));
}

absl::StatusOr<WantedDevice> OfText(const std::string& device) {
  // The prefix keeps its case; nvidia-smi prints the digits in lower case.
  std::string uuid = device.substr(0, 4) + absl::AsciiStrToLower(device.substr(4));
  if (uuid.size() > kDeviceUuidLength ||
      uuid.find_first_not_of("0123456789abcdef-", 4) != std::string::npos) {
    return ParseDeviceUuid(device).status();
  }
  return WantedDevice{
      .uuid = std::move(uuid), .source = "the option \"device\"", .is_explicit = true};
}

WantedDevice Unknown(std::string_view why) { return {.uuid = "", .source = std::string(why)}; }

// `ordinal` < 0: the current device.
absl::StatusOr<WantedDevice> OfCuda(const GpuPlatform& platform, int ordinal) {
  const bool is_explicit = ordinal >= 0;
  // A process without GPU may well want a daemon that keeps KV in host memory.
  const auto missing = [&](std::string_view why) -> absl::StatusOr<WantedDevice> {
    if (!is_explicit) return Unknown(why);
    return absl::FailedPreconditionError(Concat("device \"cuda:", ordinal, "\": ", why));
  };
  const absl::StatusOr<std::unique_ptr<CudaCalls>> calls = platform.load_cuda();
  if (!calls.ok()) return missing(AsStringView(calls.status().message()));
  int count = 0;
  CudaResult result = (*calls)->DeviceCount(&count);
  if (result.ok() && ordinal >= count) {
    return missing(Concat("this process sees ", count, " CUDA devices"));
  }
  if (result.ok() && count == 0) return missing("this process sees no CUDA device");
  if (result.ok() && !is_explicit) result = (*calls)->CurrentDevice(&ordinal);
  CudaDeviceInfo info;
  if (result.ok()) result = (*calls)->DescribeDevice(ordinal, &info);
  if (!result.ok()) return missing(result.name);
  return WantedDevice{
      .uuid = info.uuid.ToString(),
      .source =
          Concat(is_explicit ? "" : "the current device of the calling thread, ", kCuda, ordinal),
      .is_explicit = is_explicit};
}

}  // namespace

absl::StatusOr<WantedDevice> FindWantedDevice(const GpuPlatform& platform,
                                              const std::string& device) {
  if (device.empty()) return OfCuda(platform, -1);
  if (HasDeviceUuidPrefix(device)) return OfText(device);
  if (device.starts_with(kCuda)) {
    const absl::StatusOr<int> ordinal = ParseOrdinal(device);
    if (!ordinal.ok()) return ordinal.status();
    return OfCuda(platform, *ordinal);
  }
  return absl::InvalidArgumentError(
      Concat("device \"", device, "\" is neither cuda:N nor a device UUID (GPU-..., MIG-... or ",
             "CPU-...) nor the beginning of one"));
}

}  // namespace tessera::client
