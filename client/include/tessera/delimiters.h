// Finds the tokens of a vocabulary that end a chunk of text.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace tessera::client {

// Whether a token's text consists only of `.` `,` `?` `!` `;` `:`, blanks, tabs and line ends:
// ".\n" does, ", and" does not. The empty text does not.
bool IsDelimiter(std::string_view text);

// Returns ModelGeometry::delimiter_token_ids, ascending. `texts[i]` is the text of token i as a
// tokenizer decodes it alone.
std::vector<std::uint32_t> DelimiterTokens(std::span<const std::string_view> texts);

}  // namespace tessera::client
