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

absl::Status CheckSecret(const std::string& path) {
  struct stat facts = {};
  if (::stat(path.c_str(), &facts) != 0) return absl::OkStatus();
  const bool own = facts.st_uid == ::geteuid() && facts.st_uid != 0;
  const mode_t most = own ? 0600 : 0640;
  const mode_t mode = facts.st_mode & 07777;
  // Special bits do no harm; execution does not matter to the owner.
  if ((mode & 077 & ~most) == 0) return absl::OkStatus();
  constexpr int kOctalDigits = 4;
  std::string octal;
  for (int digit = kOctalDigits - 1; digit >= 0; --digit) {
    octal += static_cast<char>('0' + (mode >> (3 * digit) & 7));
  }
  return absl::PermissionDeniedError(Concat("\"", path, "\" has mode ", octal,
                                            ", so other users can read or change the secret; ",
                                            own ? "chmod 0600 it" : "chmod 0640 it, or less"));
}

}  // namespace tessera
