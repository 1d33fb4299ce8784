#include "client/tools/output.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "daemon/base/strings.h"

namespace tessera::cli {

absl::Status Print(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno == EPIPE) {
      return absl::CancelledError("the reader of the output has left");
    } else if (errno != EINTR) {
      return absl::DataLossError(Concat("cannot write the output: ", std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

void GuardStandardFiles() {
  ::signal(SIGPIPE, SIG_IGN);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // The lowest free number is this one. Writes to it fail with EBADF, as if it were closed.
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

}  // namespace tessera::cli
