#include "client/api/c_rows.h"

#include <cstring>

#include "client/gpu/gpu.h"
#include "client/mapped/mapped_memory.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

// The strides with the dense ones in place of zeros.
tessera_strides Resolved(const RowShape& shape, tessera_strides strides) {
  if (strides.head == 0) strides.head = static_cast<std::int64_t>(shape.row_bytes);
  if (strides.token == 0) {
    strides.token = static_cast<std::int64_t>(shape.heads * shape.row_bytes);
  }
  if (strides.layer == 0) {
    strides.layer = static_cast<std::int64_t>(shape.tokens * shape.heads * shape.row_bytes);
  }
  return strides;
}

// Calls copy(offset among dense rows, offset among strided ones, bytes) for every run of bytes that
// follow each other in both.
void ForEachRun(const RowShape& shape, const tessera_strides& given, auto copy) {
  const tessera_strides strides = Resolved(shape, given);
  const bool whole_tokens = strides.head == static_cast<std::int64_t>(shape.row_bytes);
  const std::uint64_t runs = whole_tokens ? 1 : shape.heads;
  const std::uint64_t bytes = whole_tokens ? shape.heads * shape.row_bytes : shape.row_bytes;
  std::size_t dense = 0;
  for (std::uint64_t layer = 0; layer < shape.layers; ++layer) {
    for (std::uint64_t token = 0; token < shape.tokens; ++token) {
      std::int64_t at = static_cast<std::int64_t>(layer) * strides.layer +
                        static_cast<std::int64_t>(token) * strides.token;
      for (std::uint64_t run = 0; run < runs; ++run, at += strides.head, dense += bytes) {
        copy(dense, at, bytes);
      }
    }
  }
}

bool IsOnGpu(Session* session) {
  MappedMemory* const mapped = session == nullptr ? nullptr : session->mapped_memory();
  return mapped != nullptr && mapped->gpu() != nullptr;
}

absl::Status CheckHostMemory(const char* name, Session* session, const void* rows) {
  if (!IsOnGpu(session) || !session->mapped_memory()->gpu()->runtime().IsDeviceMemory(rows)) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      Concat(name, " is device memory with strides; pass dense rows, or host memory"));
}

}  // namespace

bool IsDense(const RowShape& shape, const tessera_strides& given) {
  const tessera_strides strides = Resolved(shape, given);
  const tessera_strides dense = Resolved(shape, {});
  return (shape.heads <= 1 || strides.head == dense.head) &&
         (shape.tokens <= 1 || strides.token == dense.token) &&
         (shape.layers <= 1 || strides.layer == dense.layer);
}

std::span<std::byte> RowCopies::Take(std::size_t bytes) {
  if (used_ == buffers_.size()) buffers_.emplace_back();
  std::vector<std::byte>& buffer = buffers_[used_++];
  if (buffer.size() < bytes) buffer.resize(bytes);
  return {buffer.data(), bytes};
}

absl::StatusOr<std::span<const std::byte>> RowCopies::Gather(const char* name, Session* session,
                                                             std::span<const std::byte> rows,
                                                             const RowShape& shape,
                                                             const tessera_strides& strides) {
  // A wrong size is refused by the call itself, which names the right one.
  if (rows.size() != shape.bytes() || IsDense(shape, strides)) return rows;
  if (absl::Status status = CheckHostMemory(name, session, rows.data()); !status.ok()) {
    return status;
  }
  const std::span<std::byte> copy = Take(rows.size());
  ForEachRun(shape, strides, [&](std::size_t dense, std::int64_t at, std::size_t bytes) {
    std::memcpy(copy.data() + dense, rows.data() + at, bytes);
  });
  return copy;
}

absl::StatusOr<std::span<std::byte>> RowCopies::Reserve(const char* name, Session* session,
                                                        std::span<std::byte> rows,
                                                        const RowShape& shape,
                                                        const tessera_strides& strides) {
  if (rows.size() != shape.bytes() || IsDense(shape, strides)) return rows;
  // Scatter runs when a call returns, but a GPU may write its outputs until the step ends.
  if (IsOnGpu(session)) {
    return absl::UnimplementedError(Concat(name, " has strides; on a GPU, pass dense outputs"));
  }
  return Take(rows.size());
}

void RowCopies::Scatter(std::span<const std::byte> from, std::span<std::byte> to,
                        const RowShape& shape, const tessera_strides& strides) {
  if (from.data() == to.data()) return;
  ForEachRun(shape, strides, [&](std::size_t dense, std::int64_t at, std::size_t bytes) {
    std::memcpy(to.data() + at, from.data() + dense, bytes);
  });
}

}  // namespace tessera::client
