// A book file, as the daemon reads it. Any bytes must give a reason, or books that can be used:
// every lane has a book for any number of planes, and writing the file again gives the same bytes.
#include <algorithm>
#include <string>
#include <vector>

#include "daemon/base/check.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/strategy/files/book_file.h"
#include "tests/fuzz/fuzz_target.h"

namespace tessera::fuzz {

std::vector<Seed> Seeds() {
  constexpr std::uint32_t kDim = 64, kRows = 40;
  std::vector<float> rows(kRows * kDim);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i * 7919 % 101) - 50;
  const kernels::RowSpan span = {reinterpret_cast<const std::byte*>(rows.data()), kRows, kDim,
                                 kernels::ElementType::kFp32};
  const kernels::Operations& operations = kernels::OperationsOf(kernels::BestImplementation());
  const kernels::BookFile file = {.name = "seed",
                                  .fingerprint = 1,
                                  .rows = kRows,
                                  .texts = {kernels::BookTextOf("a", "b")},
                                  .lanes = {kernels::MakeFileLane({span, span}, operations)}};
  const std::vector<std::byte> bytes = kernels::BytesOf(file);
  return {{"one", {reinterpret_cast<const char*>(bytes.data()), bytes.size()}}};
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  const auto* first = reinterpret_cast<const std::byte*>(data);
  std::vector<std::byte> bytes(first, first + size);
  kernels::BookFile file;
  static_cast<void>(kernels::ReadBookFile(bytes, file));
  // Behind the checksum.
  if (bytes.size() >= 4) kernels::SealBookFile(bytes);
  if (!kernels::ReadBookFile(bytes, file).empty()) return 0;
  TESSERA_CHECK(std::ranges::equal(kernels::BytesOf(file), bytes), file.name);
  for (std::uint32_t lane = 0; lane < file.lanes.size(); ++lane) {
    for (const std::uint32_t planes : {1u, 2u}) {
      const kernels::Book book = file.BookOf(lane, {.key = planes, .value = 3 - planes});
      TESSERA_CHECK(book.bytes.size() == kernels::BookLayoutOf(book.head_dim).bytes, file.name);
    }
  }
  return 0;
}
