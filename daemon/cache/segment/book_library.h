// BookLibrary: the book files that the daemon was started with. A tenant that uses one stores the
// books in its own pool, lane by lane.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/model/model.h"
#include "kernels/strategy/files/book_file.h"

namespace tessera::cache {

// Immutable after Load, which copies the files into host memory. Shared by all tenants.
class BookLibrary {
 public:
  static constexpr std::size_t kMaxFileBytes = std::size_t{1} << 30;

  // INVALID_ARGUMENT names the file and what is wrong with it, or the two files that have books of
  // one name for one model.
  static absl::StatusOr<BookLibrary> Load(const std::vector<std::string>& paths);

  // INVALID_ARGUMENT if no file has a book of this name, or none for this model: the message names
  // the books that there are, or both fingerprints.
  absl::Status Check(std::string_view name, const Model& model) const;
  // Null if Check fails.
  const kernels::BookFile* Find(std::string_view name, const Model& model) const;

 private:
  struct Loaded {
    std::string path;
    kernels::BookFile file;
  };
  std::vector<Loaded> books_;
};

}  // namespace tessera::cache
