#include "daemon/platform/lock_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "absl/strings/ascii.h"
#include "daemon/base/strings.h"

namespace tessera {

absl::StatusOr<LockFile> LockFile::Acquire(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return ErrnoStatus(Concat("opening the lock file ", path));
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoStatus(Concat("locking ", path));
    char text[32] = {};
    const ssize_t n = ::pread(fd.get(), text, sizeof text - 1, 0);
    const std::string pid(absl::StripAsciiWhitespace(std::string(text, n > 0 ? n : 0)));
    return absl::AlreadyExistsError(Concat("the lock file ", path, " is held by a live process",
                                           pid.empty() ? "" : Concat(" (pid ", pid, ")")));
  }
  const std::string pid = Concat(::getpid(), "\n");
  if (::ftruncate(fd.get(), 0) != 0 ||
      ::pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return ErrnoStatus(Concat("writing the lock file ", path));
  }
  return LockFile(std::move(fd));
}

}  // namespace tessera
