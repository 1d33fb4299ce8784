#include "daemon/platform/prepare_directory.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string_view>

#include "daemon/base/strings.h"
#include "daemon/platform/fd.h"

namespace tessera {

namespace {

// A descriptor that needs no permission on the directory itself, only on the way to it.
constexpr int kHandle = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

bool IsSymlink(int parent, const std::string& name) {
  struct stat found {};
  return ::fstatat(parent, name.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0 &&
         S_ISLNK(found.st_mode);
}

// Says why `name`, the end of `path`, could not be opened; errno is the system's reason.
absl::Status WhyNotOpened(int parent, const std::string& name, std::string_view path) {
  const int error = errno;
  const absl::Status status = ErrnoStatus(Concat("opening ", path));
  if (IsSymlink(parent, name)) {
    return absl::InvalidArgumentError(
        Concat(path, " is a symbolic link; give the path that it points to"));
  }
  if (absl::IsNotFound(status)) {
    return absl::NotFoundError(
        Concat(path, " does not exist; only the last directory of the path is made"));
  }
  return error == ENOTDIR ? absl::InvalidArgumentError(Concat(path, " is not a directory"))
                          : status;
}

struct Place {
  Fd parent;
  std::string name;  // of the directory in `parent`
};

// Opens the parent of `path`, component by component.
absl::StatusOr<Place> OpenParent(const std::string& path) {
  if (!path.starts_with('/')) {
    return absl::InvalidArgumentError(Concat(Quoted(path), " is not an absolute path"));
  }
  Place place = {Fd(::open("/", kHandle)), ""};
  if (!place.parent.valid()) return ErrnoStatus("opening /");
  std::string opened;  // up to `place.parent`
  for (std::string_view rest = path; !rest.empty();) {
    const std::size_t slash = rest.find('/');
    const std::string name(rest.substr(0, slash));
    rest.remove_prefix(slash == std::string_view::npos ? rest.size() : slash + 1);
    if (name.empty() || name == ".") continue;
    if (name == "..") {
      return absl::InvalidArgumentError(Concat(Quoted(path), " contains \"..\""));
    }
    if (!place.name.empty()) {
      Append(opened, "/", place.name);
      Fd next(::openat(place.parent.get(), place.name.c_str(), kHandle));
      if (!next.valid()) return WhyNotOpened(place.parent.get(), place.name, opened);
      place.parent = std::move(next);
    }
    place.name = name;
  }
  if (place.name.empty()) {
    return absl::InvalidArgumentError(Concat(Quoted(path), " is the root directory"));
  }
  return place;
}

absl::StatusOr<bool> IsEmpty(int directory) {
  Fd readable(::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!readable.valid()) return ErrnoStatus("reading it");
  const auto close = [](DIR* dir) { ::closedir(dir); };
  const std::unique_ptr<DIR, decltype(close)> dir(::fdopendir(readable.get()), close);
  if (dir == nullptr) return ErrnoStatus("reading it");
  readable.Release();  // closed by closedir
  while (const dirent* entry = ::readdir(dir.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") return false;
  }
  return true;
}

// Whether the owner and the mode of a directory may be changed.
absl::Status CheckOurs(int directory, const struct stat& found, const DirectoryRequest& request) {
  if (found.st_uid == request.uid) return absl::OkStatus();
  const absl::StatusOr<bool> empty = IsEmpty(directory);
  const std::string belongs = Concat(request.path, " belongs to uid ", found.st_uid);
  if (!empty.ok()) {
    return absl::FailedPreconditionError(Concat(belongs, ", and whether it is empty is not known: ",
                                                AsStringView(empty.status().message())));
  }
  if (!*empty) {
    return absl::FailedPreconditionError(
        Concat(belongs, ", not ", request.uid,
               ", and is not empty; give an empty directory, or remove what it contains"));
  }
  return absl::OkStatus();
}

// Changes what differs from the request. Returns whether anything did.
absl::StatusOr<bool> Adjust(int directory, const struct stat& found,
                            const DirectoryRequest& request) {
  bool changed = false;
  if (found.st_uid != request.uid || found.st_gid != request.gid) {
    if (::fchownat(directory, "", request.uid, request.gid, AT_EMPTY_PATH) != 0) {
      return ErrnoStatus(
          Concat("giving ", request.path, " to ", request.uid, ":", request.gid, " (CAP_CHOWN)"));
    }
    changed = true;
  }
  struct stat now {};
  if ((found.st_mode & 07777) != request.mode) {
    // A handle has no fchmod, and another way into the directory may need permissions on it.
    const std::string handle = Concat("/proc/self/fd/", directory);
    if (::chmod(handle.c_str(), request.mode) != 0) {
      return ErrnoStatus(Concat("setting the mode of ", request.path, " (CAP_FOWNER)"));
    }
    changed = true;
  }
  if (::fstat(directory, &now) != 0) return ErrnoStatus(Concat("looking at ", request.path));
  // The kernel drops the setgid bit silently if the caller is not in the group.
  if ((now.st_mode & 07777) != request.mode) {
    return absl::PermissionDeniedError(Concat("the setgid bit of ", request.path,
                                              " cannot be set without CAP_FSETID or membership in "
                                              "group ",
                                              request.gid));
  }
  return changed;
}

}  // namespace

absl::StatusOr<Prepared> PrepareDirectory(const DirectoryRequest& request) {
  absl::StatusOr<Place> place = OpenParent(request.path);
  if (!place.ok()) return place.status();
  const int parent = place->parent.get();
  const bool made = ::mkdirat(parent, place->name.c_str(), 0700) == 0;
  if (!made && errno != EEXIST) return ErrnoStatus(Concat("making ", request.path));
  const Fd directory(::openat(parent, place->name.c_str(), kHandle));
  if (!directory.valid()) return WhyNotOpened(parent, place->name, request.path);
  struct stat found {};
  if (::fstat(directory.get(), &found) != 0) {
    return ErrnoStatus(Concat("looking at ", request.path));
  }
  if (absl::Status status = CheckOurs(directory.get(), found, request); !status.ok()) return status;
  const absl::StatusOr<bool> changed = Adjust(directory.get(), found, request);
  if (!changed.ok()) {
    if (made) ::unlinkat(parent, place->name.c_str(), AT_REMOVEDIR);
    return changed.status();
  }
  return made ? Prepared::kMade : *changed ? Prepared::kAdjusted : Prepared::kUnchanged;
}

}  // namespace tessera
