#include "client/model/checkpoint/mapped_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <utility>

#include "absl/status/status.h"
#include "daemon/base/strings.h"
#include "daemon/platform/fd.h"

namespace tessera::llm {

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path, std::uint64_t min_bytes) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(Concat("open \"", path, "\""));
  struct stat about = {};
  if (::fstat(fd.get(), &about) != 0) return ErrnoStatus(Concat("stat \"", path, "\""));
  const std::uint64_t size = static_cast<std::uint64_t>(about.st_size);
  if (!S_ISREG(about.st_mode) || size < min_bytes) {
    return absl::InvalidArgumentError(Concat("\"", path, "\": not a model file: ", size, " bytes"));
  }
  absl::StatusOr<AddressRange> range = AddressRange::Map(fd.get(), size, Access::kReadOnly);
  if (!range.ok()) return range.status();
  MappedFile file;
  file.range_ = *std::move(range);
  file.size_ = size;
  return file;
}

}  // namespace tessera::llm
