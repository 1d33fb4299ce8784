#include "client/eval/text/texts.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

namespace fs = std::filesystem;

// Prose, reference documentation and licences, each 24 KB or longer. From perl-modules, git, dpkg
// and base-files, which a build machine has. "*" stands for a version.
constexpr const char* kTexts[] = {
    "/usr/share/perl/*/pod/perldiag.pod",     "/usr/share/doc/git/RelNotes/2.19.0.txt",
    "/usr/share/doc/dpkg/spec/triggers.txt",  "/usr/share/common-licenses/LGPL-2.1",
    "/usr/share/perl/*/HTTP/Tiny.pm",         "/usr/share/common-licenses/MPL-1.1",
    "/usr/share/doc/git/RelNotes/2.10.0.txt", "/usr/share/perl/*/Archive/Tar.pm",
};

// Existing files of a path with at most one "*", which stands for a folder's name.
std::vector<std::string> Matching(const std::string& path) {
  const std::size_t star = path.find('*');
  std::error_code error;  // ignored: what cannot be looked at is left out
  if (star == std::string::npos) {
    return fs::is_regular_file(path, error) ? std::vector{path} : std::vector<std::string>();
  }
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(path.substr(0, star), error)) {
    const std::string candidate = entry.path().string() + path.substr(star + 1);
    // A version and a link to it are the same file.
    if (!entry.is_symlink(error) && fs::is_regular_file(candidate, error)) {
      found.push_back(candidate);
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

absl::StatusOr<std::vector<EvaluationText>> ReadTexts(const std::vector<std::string>& paths) {
  std::vector<std::string> chosen = paths;
  if (paths.empty()) {
    for (const char* const path : kTexts) {
      for (std::string& found : Matching(path)) chosen.push_back(std::move(found));
    }
  }
  std::vector<EvaluationText> texts;
  for (const std::string& path : chosen) {
    std::ifstream file(path, std::ios::binary);
    if (!file) return absl::NotFoundError(Concat("--texts: cannot open ", Quoted(path)));
    texts.push_back(
        {path, {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()}});
  }
  if (texts.empty()) {
    return absl::NotFoundError(
        "none of the texts is installed; name files with --texts=FILE,FILE...");
  }
  return texts;
}

}  // namespace tessera::cli::eval
