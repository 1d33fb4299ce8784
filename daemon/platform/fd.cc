#include "daemon/platform/fd.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "daemon/base/strings.h"

namespace tessera {

void Fd::Close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

absl::Status ErrnoStatus(std::string_view what) {
  const int error = errno;
  return absl::ErrnoToStatus(error, absl::string_view(what.data(), what.size()));
}

bool IsShortage(int error) {
  return error == EMFILE || error == ENFILE || error == ETOOMANYREFS || error == ENOBUFS ||
         error == ENOMEM;
}

absl::Status DuplicateFd(int fd, Fd* duplicate) {
  *duplicate = Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  return duplicate->valid() ? absl::OkStatus() : ErrnoStatus(Concat("duplicate of fd ", fd));
}

int CountOpenFds() {
  DIR* dir = ::opendir("/proc/self/fd");
  if (dir == nullptr) return -1;
  int count = 0;
  while (const dirent* entry = ::readdir(dir)) {
    if (entry->d_name[0] != '.') ++count;
  }
  ::closedir(dir);
  return count - 1;  // without the one opened by opendir
}

std::uint64_t RaiseFdLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  const rlimit raised = {.rlim_cur = limit.rlim_max, .rlim_max = limit.rlim_max};
  return ::setrlimit(RLIMIT_NOFILE, &raised) == 0 ? raised.rlim_cur : limit.rlim_cur;
}

}  // namespace tessera
