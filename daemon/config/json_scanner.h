// JsonScanner cuts JSON with comments into tokens that know their places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tessera::config {

// A place in a text, for people: both count from 1, and columns count characters.
struct Position {
  std::size_t line = 1;
  std::size_t column = 1;

  std::string ToString() const;  // "3:17"
};
Position PositionAt(std::string_view text, std::size_t offset);

struct JsonToken {
  enum class Kind : std::uint8_t {
    kMark,    // one of { } [ ] : ,
    kString,  // without quotes, escapes resolved
    kNumber,  // as written
    kTrue,
    kFalse,
    kNull,
    kEnd,
  };
  Kind kind = Kind::kEnd;
  std::size_t offset = 0;  // of the first byte
  std::string text;

  bool IsMark(char mark) const { return kind == Kind::kMark && text[0] == mark; }
  // "text", "the number 7" or "{": for messages. Never the content of a string, which may be a
  // secret.
  std::string ToString() const;
};

// JSON as in RFC 8259, and comments where white space is allowed: // and # up to the end of the
// line, /* */ around several. Strings must be UTF-8 without zero characters.
class JsonScanner {
 public:
  // `text` must outlive the scanner. A byte-order mark at its start is skipped.
  explicit JsonScanner(std::string_view text);

  // INVALID_ARGUMENT starts with the place, as "3:17: ", and quotes nothing of the text.
  absl::StatusOr<JsonToken> Next();
  absl::Status ErrorAt(std::size_t offset, std::string_view what) const;

 private:
  absl::Status SkipSpaceAndComments();
  absl::StatusOr<JsonToken> ScanString();
  absl::Status ScanEscape(std::string& out);
  absl::StatusOr<std::uint32_t> ScanHex();
  absl::StatusOr<JsonToken> ScanWord();

  const std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace tessera::config
