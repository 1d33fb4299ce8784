#include "daemon/platform/read_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "daemon/base/strings.h"
#include "daemon/platform/fd.h"

namespace tessera {

absl::StatusOr<std::string> ReadFile(const std::string& path, std::size_t limit) {
  // A pipe without a writer would block the open, so it must not wait either.
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file.valid()) return absl::ErrnoToStatus(errno, Concat("cannot open \"", path, "\""));
  struct stat facts = {};
  if (::fstat(file.get(), &facts) != 0) {
    return absl::ErrnoToStatus(errno, Concat("cannot read \"", path, "\""));
  }
  if (!S_ISREG(facts.st_mode)) {
    return absl::InvalidArgumentError(Concat("\"", path, "\" is not a regular file"));
  }
  std::string text(limit + 1, '\0');
  std::size_t size = 0;
  while (size < text.size()) {
    const ssize_t n = ::read(file.get(), text.data() + size, text.size() - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return absl::ErrnoToStatus(errno, Concat("cannot read \"", path, "\""));
    if (n == 0) break;
    size += static_cast<std::size_t>(n);
  }
  if (size > limit) {
    return absl::InvalidArgumentError(
        Concat("\"", path, "\" has more than ", limit, " bytes, the limit"));
  }
  text.resize(size);
  return text;
}

}  // namespace tessera
