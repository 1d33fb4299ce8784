// Makes a book file (kernels/strategy/files/book_file.h) from what a model computes for texts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/eval/text/texts.h"
#include "client/model/checkpoint/tokenizer.h"
#include "client/model/model.h"
#include "kernels/strategy/files/book_file.h"

namespace tessera::cli::eval {

struct CalibrationOptions {
  std::string name;           // of the book
  std::uint32_t rows = 4096;  // of each lane, in equal parts from all texts
};

// Computes the first tokens of each text and makes the books of all lanes from their rows, without
// the first ones, which are unlike all others. INVALID_ARGUMENT if the texts give fewer than 256
// rows, or the model's rows have a length that planes do not support.
absl::StatusOr<kernels::BookFile> Calibrate(const llm::Model& model,
                                            const llm::Tokenizer& tokenizer,
                                            const std::vector<EvaluationText>& texts,
                                            const CalibrationOptions& options);

}  // namespace tessera::cli::eval
