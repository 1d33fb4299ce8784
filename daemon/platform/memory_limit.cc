#include "daemon/platform/memory_limit.h"

#include <malloc.h>

#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// The contents of a file of /proc or /sys; nullopt if it cannot be read.
std::optional<std::string> ReadSmallFile(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) return std::nullopt;
  return text.str();
}

// The number that `text` starts with; nullopt for "max".
std::optional<std::uint64_t> LeadingNumber(std::string_view text) {
  text = Trim(text);
  std::uint64_t value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ec != std::errc()) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> MemTotal(std::string_view meminfo) {
  constexpr std::string_view kKey = "MemTotal:";
  const std::size_t at = meminfo.find(kKey);
  if (at == std::string_view::npos) return std::nullopt;
  const std::optional<std::uint64_t> kib = LeadingNumber(meminfo.substr(at + kKey.size()));
  if (!kib.has_value() || *kib == 0) return std::nullopt;
  return *kib * kKiB;
}

struct CgroupPaths {
  std::string v2;  // "": the process is in no cgroup of that version
  std::string v1_memory;
};

// Lines of /proc/self/cgroup: "0::/path" (version 2) or "ID:controller,controller:/path" (1).
CgroupPaths ParseCgroups(const std::string& text) {
  CgroupPaths paths;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      paths.v2 = path;
    } else if (controllers.find(",memory,") != std::string::npos) {
      paths.v1_memory = path;
    }
  }
  return paths;
}

// Lowers `limit` to the value of `file` in the cgroup at `path` under `mount` and in each of its
// ancestors up to the mount. In a container, `path` may be the host's and not exist under the
// mount; the walk then still reaches the mount itself, which is the container's own cgroup.
void ApplyHierarchy(const fs::path& mount, const std::string& path, const char* file,
                    MemoryLimit& limit) {
  const fs::path relative = fs::path(path).relative_path().lexically_normal();
  // "/../.." is a cgroup outside of our namespace: only the mount itself can be read.
  const bool outside = relative.begin() != relative.end() && *relative.begin() == "..";
  fs::path at = outside ? fs::path() : relative;
  while (true) {
    const fs::path source = mount / at / file;
    const std::optional<std::string> text = ReadSmallFile(source);
    const std::optional<std::uint64_t> bytes = text ? LeadingNumber(*text) : std::nullopt;
    if (bytes.has_value() && *bytes < limit.bytes) limit = {*bytes, source.string()};
    if (at.empty()) return;
    at = at.parent_path();
  }
}

}  // namespace

absl::StatusOr<MemoryLimit> DetectMemoryLimit(const fs::path& root) {
  const fs::path meminfo_path = root / "proc/meminfo";
  const std::optional<std::string> meminfo = ReadSmallFile(meminfo_path);
  if (!meminfo.has_value()) {
    return absl::NotFoundError(Concat(meminfo_path.string(), " cannot be read"));
  }
  const std::optional<std::uint64_t> total = MemTotal(*meminfo);
  if (!total.has_value()) {
    return absl::InvalidArgumentError(Concat(meminfo_path.string(), " has no MemTotal"));
  }
  MemoryLimit limit{*total, Concat(meminfo_path.string(), " MemTotal")};

  const CgroupPaths paths = ParseCgroups(ReadSmallFile(root / "proc/self/cgroup").value_or(""));
  const fs::path mount = root / "sys/fs/cgroup";
  if (!paths.v2.empty()) {
    ApplyHierarchy(mount, paths.v2, "memory.max", limit);
    ApplyHierarchy(mount / "unified", paths.v2, "memory.max", limit);  // hybrid
  }
  if (!paths.v1_memory.empty()) {
    ApplyHierarchy(mount / "memory", paths.v1_memory, "memory.limit_in_bytes", limit);
  }
  return limit;
}

void ReturnFreedMemory() {
  // A threshold that was set does not grow with the sizes of freed blocks.
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 4 << 20);
}

}  // namespace tessera
