// Which tokens of a vocabulary end a chunk of text, where nobody has listed them.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace tessera::client {

// Whether a token's text is nothing but `.` `,` `?` `!` `;` `:`, blanks, tabs and line ends: ".\n"
// is, " and" and ", and" are not. The empty text, of tokens that stand for no text, is none.
bool IsDelimiter(std::string_view text);

// Of `texts[i]`, the text of token i as a tokenizer decodes it alone: ModelGeometry's
// delimiter_token_ids, ascending.
std::vector<std::uint32_t> DelimiterTokens(std::span<const std::string_view> texts);

}  // namespace tessera::client
