// Rows of the C interface that have strides: copied together for calls that take dense rows, and
// apart again for outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/session/session.h"
#include "tessera/tessera.h"

namespace tessera::client {

class MappedMemory;

// The shape of a tensor in rows.
struct RowShape {
  std::uint64_t layers = 1;
  std::uint64_t tokens = 0;
  std::uint64_t heads = 0;
  std::uint64_t row_bytes = 0;

  std::uint64_t bytes() const { return layers * tokens * heads * row_bytes; }
};

// Whether rows of this shape lie as if they had no strides.
bool IsDense(const RowShape& shape, const tessera_strides& strides);

// Memory for dense copies, reused from call to call.
class RowCopies {
 public:
  // `rows` itself if it is dense, else a dense copy. UNIMPLEMENTED if a copy is needed and the rows
  // are device memory of `session`.
  absl::StatusOr<std::span<const std::byte>> Gather(const char* name, Session* session,
                                                    std::span<const std::byte> rows,
                                                    const RowShape& shape,
                                                    const tessera_strides& strides);
  // Memory for outputs: `rows` itself if it is dense. After the call, Scatter copies it to its
  // place.
  absl::StatusOr<std::span<std::byte>> Reserve(const char* name, Session* session,
                                               std::span<std::byte> rows, const RowShape& shape,
                                               const tessera_strides& strides);
  static void Scatter(std::span<const std::byte> from, std::span<std::byte> to,
                      const RowShape& shape, const tessera_strides& strides);
  // Forgets the copies of the previous call.
  void Clear() { used_ = 0; }

 private:
  std::span<std::byte> Take(std::size_t bytes);

  // One buffer per tensor of a call, so that none moves while another is in use.
  std::vector<std::vector<std::byte>> buffers_;
  std::size_t used_ = 0;
};

}  // namespace tessera::client
