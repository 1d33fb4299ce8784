#include "daemon/config/json_scanner.h"

#include <algorithm>

#include "absl/status/status.h"
#include "daemon/base/strings.h"
#include "daemon/base/utf8.h"

namespace tessera::config {

namespace {

using Kind = JsonToken::Kind;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// The characters of numbers and of true, false and null.
bool IsWordCharacter(char c) {
  return IsDigit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '+' || c == '-' ||
         c == '.' || c == '_';
}

// Takes at least one digit off `text`.
bool TakeDigits(std::string_view& text) {
  const std::size_t count = std::min(text.find_first_not_of("0123456789"), text.size());
  text.remove_prefix(count);
  return count > 0;
}

bool IsNumber(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  if (text.size() > 1 && text[0] == '0' && IsDigit(text[1])) return false;
  if (!TakeDigits(text)) return false;
  if (text.starts_with('.')) {
    text.remove_prefix(1);
    if (!TakeDigits(text)) return false;
  }
  if (text.starts_with('e') || text.starts_with('E')) {
    text.remove_prefix(1);
    if (text.starts_with('+') || text.starts_with('-')) text.remove_prefix(1);
    if (!TakeDigits(text)) return false;
  }
  return text.empty();
}

void AppendUtf8(std::uint32_t code, std::string& out) {
  const auto byte = [&out](std::uint32_t value) { out += static_cast<char>(value); };
  const auto tail = [&](int shift) { byte(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xc0 | code >> 6);
    tail(0);
  } else if (code < 0x10000) {
    byte(0xe0 | code >> 12);
    tail(6);
    tail(0);
  } else {
    byte(0xf0 | code >> 18);
    tail(12);
    tail(6);
    tail(0);
  }
}

}  // namespace

std::string Position::ToString() const { return Concat(line, ":", column); }

Position PositionAt(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, offset);
  const std::size_t newline = before.rfind('\n');
  const std::string_view line = before.substr(newline == std::string_view::npos ? 0 : newline + 1);
  const auto begins_character = [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  };
  return {.line = 1 + static_cast<std::size_t>(std::ranges::count(before, '\n')),
          .column = 1 + static_cast<std::size_t>(std::ranges::count_if(line, begins_character))};
}

std::string JsonToken::ToString() const {
  switch (kind) {
    case Kind::kMark:
      return Concat("'", text, "'");
    case Kind::kString:
      return "text in quotes";
    case Kind::kNumber:
      return "a number";
    case Kind::kTrue:
    case Kind::kFalse:
    case Kind::kNull:
      return text;
    case Kind::kEnd:
      return "the end of the file";
  }
  return "";
}

JsonScanner::JsonScanner(std::string_view text) : text_(text) {
  if (text_.starts_with("\xef\xbb\xbf")) at_ = 3;
}

absl::Status JsonScanner::ErrorAt(std::size_t offset, std::string_view what) const {
  return absl::InvalidArgumentError(Concat(PositionAt(text_, offset).ToString(), ": ", what));
}

absl::Status JsonScanner::SkipSpaceAndComments() {
  for (;;) {
    at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size());
    const std::string_view rest = text_.substr(at_);
    if (rest.starts_with('#') || rest.starts_with("//")) {
      at_ = std::min(text_.find('\n', at_), text_.size());
    } else if (rest.starts_with("/*")) {
      const std::size_t end = text_.find("*/", at_ + 2);
      if (end == std::string_view::npos) return ErrorAt(at_, "this comment has no end");
      at_ = end + 2;
    } else {
      return absl::OkStatus();
    }
  }
}

absl::StatusOr<JsonToken> JsonScanner::Next() {
  if (absl::Status status = SkipSpaceAndComments(); !status.ok()) return status;
  if (at_ == text_.size()) return JsonToken{.kind = Kind::kEnd, .offset = at_, .text = ""};
  const char c = text_[at_];
  if (c == '"') return ScanString();
  if (std::string_view("{}[]:,").find(c) != std::string_view::npos) {
    return JsonToken{.kind = Kind::kMark, .offset = at_++, .text = std::string(1, c)};
  }
  if (IsWordCharacter(c)) return ScanWord();
  if (c == '\'') return ErrorAt(at_, "text needs double quotes");
  return ErrorAt(at_, "this character has no meaning in JSON");
}

absl::StatusOr<JsonToken> JsonScanner::ScanWord() {
  const std::size_t begin = at_;
  while (at_ < text_.size() && IsWordCharacter(text_[at_])) ++at_;
  const std::string_view word = text_.substr(begin, at_ - begin);
  JsonToken token = {.kind = Kind::kNumber, .offset = begin, .text = std::string(word)};
  if (IsNumber(word)) return token;
  if (word == "true" || word == "false" || word == "null") {
    token.kind = word == "true" ? Kind::kTrue : word == "false" ? Kind::kFalse : Kind::kNull;
    return token;
  }
  return ErrorAt(begin, IsDigit(word[0])
                            ? "this is no number; sizes, times and file modes need quotes"
                            : "this is not true, false, null or a number; text needs quotes");
}

absl::StatusOr<JsonToken> JsonScanner::ScanString() {
  JsonToken token = {.kind = Kind::kString, .offset = at_++, .text = ""};
  while (at_ < text_.size()) {
    const char c = text_[at_];
    if (c == '"') {
      ++at_;
      return token;
    }
    if (c == '\\') {
      if (absl::Status status = ScanEscape(token.text); !status.ok()) return status;
      continue;
    }
    if (c == '\n') return ErrorAt(token.offset, "this text has no closing quote in its line");
    if (static_cast<unsigned char>(c) < ' ') {
      return ErrorAt(at_, "a control character in quotes must be written as an escape, e.g. \\t");
    }
    const std::size_t length = Utf8SequenceLength(text_.substr(at_));
    if (length == 0) return ErrorAt(at_, "this text is not UTF-8");
    token.text.append(text_, at_, length);
    at_ += length;
  }
  return ErrorAt(token.offset, "this text has no closing quote");
}

// At a backslash.
absl::Status JsonScanner::ScanEscape(std::string& out) {
  const std::size_t begin = at_;
  const char letter = at_ + 1 < text_.size() ? text_[at_ + 1] : '\0';
  at_ = std::min(at_ + 2, text_.size());
  constexpr std::string_view kLetters = "\"\\/bfnrt";
  constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  if (const std::size_t i = kLetters.find(letter); i != std::string_view::npos) {
    out += kMeanings[i];
    return absl::OkStatus();
  }
  if (letter != 'u')
    return ErrorAt(begin, "this escape is not one of \\\" \\\\ \\/ \\b \\f \\n \\r \\t \\u");
  absl::StatusOr<std::uint32_t> code = ScanHex();
  if (!code.ok()) return code.status();
  if (*code == 0) return ErrorAt(begin, "a zero character is not allowed");
  // Characters beyond 16 bits are written as two halves, the high one first.
  const bool high = *code >= 0xd800 && *code < 0xdc00;
  if (high && text_.substr(at_).starts_with("\\u")) {
    at_ += 2;
    const absl::StatusOr<std::uint32_t> low = ScanHex();
    if (!low.ok()) return low.status();
    if (*low >= 0xdc00 && *low < 0xe000) {
      AppendUtf8(0x10000 + ((*code - 0xd800) << 10) + (*low - 0xdc00), out);
      return absl::OkStatus();
    }
  }
  if (*code >= 0xd800 && *code < 0xe000) {
    return ErrorAt(begin, "this escape is half of a character");
  }
  AppendUtf8(*code, out);
  return absl::OkStatus();
}

absl::StatusOr<std::uint32_t> JsonScanner::ScanHex() {
  const std::size_t begin = at_;
  std::uint32_t code = 0;
  for (; at_ < begin + 4; ++at_) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    const char c = at_ < text_.size() ? text_[at_] : '\0';
    const std::size_t digit = kDigits.find(c >= 'A' && c <= 'F' ? static_cast<char>(c + 32) : c);
    if (digit == std::string_view::npos) return ErrorAt(begin, "\\u needs four hexadecimal digits");
    code = code * 16 + static_cast<std::uint32_t>(digit);
  }
  return code;
}

}  // namespace tessera::config
