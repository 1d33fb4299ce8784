#include "daemon/cache/segment/book_library.h"

#include <algorithm>
#include <filesystem>
#include <span>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/platform/read_file.h"

namespace tessera::cache {

namespace {

// A file may say one fingerprint and hold other lanes.
bool HasLanesOf(const kernels::BookFile& file, const Model& model) {
  if (file.lanes.size() != model.lanes()) return false;
  for (std::uint32_t layer = 0; layer < model.layers(); ++layer) {
    for (std::uint32_t head = 0; head < model.layout().kv_heads(layer); ++head) {
      const std::uint32_t dim = model.geometry(layer).head_dim;
      if (file.lanes[model.layout().lane(layer, head)].head_dim != dim) return false;
    }
  }
  return true;
}

}  // namespace

absl::StatusOr<BookLibrary> BookLibrary::Load(const std::vector<std::string>& paths) {
  BookLibrary library;
  for (const std::string& path : paths) {
    std::error_code error;  // ignored: reading the file fails, too
    const std::uintmax_t size = std::filesystem::file_size(path, error);
    const absl::StatusOr<std::string> bytes =
        ReadFile(path, error ? 0 : std::min<std::uintmax_t>(size, kMaxFileBytes));
    if (!bytes.ok()) {
      return absl::InvalidArgumentError(
          Concat("book ", Quoted(path), ": ", AsStringView(bytes.status().message())));
    }
    Loaded loaded = {.path = path, .file = {}};
    const std::string problem =
        kernels::ReadBookFile(std::as_bytes(std::span(*bytes)), loaded.file);
    if (!problem.empty()) {
      return absl::InvalidArgumentError(Concat("book ", Quoted(path), ": ", problem));
    }
    for (const Loaded& other : library.books_) {
      if (other.file.name != loaded.file.name ||
          other.file.fingerprint != loaded.file.fingerprint) {
        continue;
      }
      return absl::InvalidArgumentError(Concat("books ", Quoted(other.path), " and ", Quoted(path),
                                               " have the same name, ", loaded.file.name,
                                               ", and are of the same model; load one of them"));
    }
    library.books_.push_back(std::move(loaded));
  }
  return library;
}

const kernels::BookFile* BookLibrary::Find(std::string_view name, const Model& model) const {
  for (const Loaded& loaded : books_) {
    if (loaded.file.name == name && loaded.file.fingerprint == model.book_fingerprint()) {
      return HasLanesOf(loaded.file, model) ? &loaded.file : nullptr;
    }
  }
  return nullptr;
}

absl::Status BookLibrary::Check(std::string_view name, const Model& model) const {
  if (Find(name, model) != nullptr) return absl::OkStatus();
  std::string names;
  for (const Loaded& loaded : books_) {
    if (loaded.file.name == name && loaded.file.fingerprint == model.book_fingerprint()) {
      return absl::InvalidArgumentError(
          Concat("planes: the book ", name, " in ", Quoted(loaded.path), " has ",
                 loaded.file.lanes.size(), " lanes that are not those of this model, which has ",
                 model.lanes(), "; make it again with tessera calibrate"));
    }
    if (loaded.file.name == name) {
      return absl::InvalidArgumentError(
          Concat("planes: the book ", name, " is of a model with fingerprint ",
                 kernels::FingerprintText(loaded.file.fingerprint), ", but this model has ",
                 kernels::FingerprintText(model.book_fingerprint()),
                 "; make a book for it with tessera calibrate, or use book=auto"));
    }
    Append(names, names.empty() ? "" : ", ", loaded.file.name);
  }
  return absl::InvalidArgumentError(Concat("planes: this daemon has no book ", name, "; it has ",
                                           names.empty() ? "none" : names,
                                           ". Load its file with --book, or use book=auto"));
}

}  // namespace tessera::cache
