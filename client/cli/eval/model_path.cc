#include "client/cli/eval/model_path.h"

#include <filesystem>

#include "absl/status/status.h"
#include "client/tools/environment.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

namespace fs = std::filesystem;

fs::path CacheFolder() {
  const std::string cache = ReadEnvironment("XDG_CACHE_HOME");
  const fs::path base =
      cache.empty() ? fs::path(ReadEnvironment("HOME")) / ".cache" : fs::path(cache);
  return base / "tessera" / "models";
}

}  // namespace

absl::StatusOr<std::string> FindModel(const std::string& path_or_name) {
  std::error_code error;  // ignored: what cannot be looked at is not there
  if (fs::exists(path_or_name, error)) return path_or_name;
  const bool is_name = path_or_name.find('/') == std::string::npos;
  const fs::path cached = CacheFolder() / path_or_name / "model.gguf";
  if (is_name && fs::exists(cached, error)) return cached.string();
  std::string why = "it is no file or folder";
  if (is_name) {
    Append(why, ", and ", CacheFolder().string(),
           " has no model of this name; deploy/models/fetch --list lists those it can fetch");
  }
  return absl::InvalidArgumentError(
      Concat("cannot open ", Quoted(path_or_name), " (--model): ", why));
}

bool IsLanguageModel(const std::string& path) {
  std::error_code error;
  return !fs::is_directory(path, error) || fs::exists(fs::path(path) / "tokenizer.json", error);
}

}  // namespace tessera::cli
