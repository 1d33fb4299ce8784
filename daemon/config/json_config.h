// Reads the configuration file: JSON with comments, sizes and times, into a DaemonConfig.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/config/json_scanner.h"
#include "tessera/v1/config.pb.h"

namespace tessera::config {

// The places of a file's fields, by path: "pool_bytes", "tenants[1].name".
class FieldPlaces {
 public:
  FieldPlaces() = default;
  explicit FieldPlaces(std::string_view text) : text_(text) {}

  // Stores the place; returns the place stored before, if any.
  const std::size_t* Add(const std::string& path, std::size_t offset);
  // Forgets a field whose value comes from elsewhere.
  void Remove(const std::string& path) { offsets_.erase(path); }
  // Prefixes the message with the place of the field that it starts with ("pool_bytes: ..."), as
  // "3:17: ". Other messages remain as they are.
  absl::Status Locate(const absl::Status& status) const;

 private:
  std::string text_;
  std::map<std::string, std::size_t, std::less<>> offsets_;
};

// Strict: a field that does not exist or is given twice, a value of the wrong type, or a comma too
// many is INVALID_ARGUMENT, and so is whatever JsonScanner refuses. Messages read "LINE:COLUMN:
// FIELD: REASON" and never contain a token. `null` leaves a field out. Names may be written as
// pool_bytes or poolBytes.
absl::Status FromJson(std::string_view json, tessera::v1::DaemonConfig* message,
                      FieldPlaces* places = nullptr);

}  // namespace tessera::config
