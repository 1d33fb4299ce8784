#include "kernels/strategy/moments.h"

#include <algorithm>
#include <functional>

namespace tessera::kernels {

void Moments::Add(const RowSpan& rows, const Operations& operations) {
  // A job counts rows in 32 bits. Splitting at whole tiles leaves the sums unchanged.
  constexpr std::uint64_t kRowsPerJob = std::uint64_t{1} << 20;
  for (std::uint64_t done = 0; done < rows.count; done += kRowsPerJob) {
    operations.moments(
        {.rows = rows.row(done),
         .stride = rows.row_bytes(),
         .type = rows.type,
         .row_count = static_cast<std::uint32_t>(std::min(kRowsPerJob, rows.count - done)),
         .head_dim = head_dim_,
         .sums = sums_.data()});
  }
  rows_ += rows.count;
}

void Moments::Add(const Moments& other) {
  std::transform(sums_.begin(), sums_.end(), other.sums_.begin(), sums_.begin(), std::plus<>());
  rows_ += other.rows_;
}

}  // namespace tessera::kernels
