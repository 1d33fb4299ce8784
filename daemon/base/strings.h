// Builds text for messages.
//
// Why not absl::StrCat: Debian builds Abseil with its own string_view, to which std::string_view
// does not convert. These functions accept both.
#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>

namespace tessera {

// Anything with the bytes of a string: std::string, std::string_view, absl::string_view, literals.
template <typename T>
concept StringLike = std::convertible_to<const T&, std::string_view> || requires(const T& text) {
  { text.data() } -> std::convertible_to<const char*>;
  { text.size() } -> std::convertible_to<std::size_t>;
};

template <StringLike T>
std::string_view AsStringView(const T& text) {
  if constexpr (std::convertible_to<const T&, std::string_view>) {
    return text;
  } else {
    return std::string_view(text.data(), text.size());
  }
}

// Numbers are written exactly; doubles in the shortest form that parses to the same value.
template <typename T>
requires StringLike<T> || std::same_as<T, char> ||
    (std::is_arithmetic_v<T> && !std::same_as<T, bool>)void AppendPart(std::string& out,
                                                                       const T& part) {
  if constexpr (StringLike<T>) {
    out += AsStringView(part);
  } else if constexpr (std::same_as<T, char>) {
    out += part;
  } else {
    char digits[32];
    const auto result = std::to_chars(digits, digits + sizeof(digits), part);
    out.append(digits, result.ptr);
  }
}

template <typename... Parts>
void Append(std::string& out, const Parts&... parts) {
  (AppendPart(out, parts), ...);
}

template <typename... Parts>
std::string Concat(const Parts&... parts) {
  std::string out;
  Append(out, parts...);
  return out;
}

// Quotes a peer's text for a message. Long text is cut, so that a peer cannot make the daemon send
// megabytes back. Control characters are escaped (\x1b), so that it cannot control a terminal.
std::string Quoted(std::string_view text);

// `text` without the ASCII white space at its ends.
constexpr std::string_view Trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\v\f";
  const std::size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

}  // namespace tessera
