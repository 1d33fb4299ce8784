// The book files of an evaluation: a text that a book was made from proves nothing about it.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/eval/plan.h"
#include "client/eval/text/texts.h"
#include "kernels/strategy/files/book_file.h"

namespace tessera::cli {

// INVALID_ARGUMENT names the file and what is wrong with it.
absl::StatusOr<std::vector<kernels::BookFile>> ReadBooks(const std::vector<std::string>& paths);

// INVALID_ARGUMENT names a text that is also one of a book's, or a policy whose book is not among
// these, so that nobody knows its texts.
absl::Status CheckBooks(const std::vector<kernels::BookFile>& books,
                        const std::vector<eval::EvaluationText>& texts,
                        const std::vector<eval::PolicyAt>& policies);

}  // namespace tessera::cli
