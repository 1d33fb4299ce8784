#include "kernels/strategy/book.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "kernels/format/part.h"
#include "kernels/strategy/eigen.h"
#include "kernels/strategy/float_rows.h"

namespace tessera::kernels {
namespace {

constexpr std::uint8_t kWidths[] = {2, 4, 6, 8};
constexpr std::uint64_t kErrorRows = 4096;  // rows that errors are measured on, at most

// A fixed pattern of +1 and -1: the low bits of an xorshift32 sequence.
std::vector<double> SignPattern(std::uint32_t count) {
  std::vector<double> signs(count);
  std::uint32_t state = 0x7e55e2a;
  for (double& sign : signs) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    sign = (state & 1) != 0 ? 1.0 : -1.0;
  }
  return signs;
}

// Replaces `channels` rows of a matrix by H S times themselves: S the sign pattern, H the
// orthonormal Hadamard matrix in Sylvester's order.
void Mix(double* matrix, std::uint32_t channels, std::uint32_t dim) {
  const std::vector<double> signs = SignPattern(channels);
  for (std::uint32_t d = 0; d < dim; ++d) {
    const auto at = [&](std::uint32_t c) -> double& { return matrix[std::size_t{c} * dim + d]; };
    for (std::uint32_t c = 0; c < channels; ++c) at(c) *= signs[c] / std::sqrt(channels);
    for (std::uint32_t half = 1; half < channels; half *= 2) {
      for (std::uint32_t c = 0; c < channels; ++c) {
        if ((c & half) != 0) continue;
        const double a = at(c);
        const double b = at(c + half);
        at(c) = a + b;
        at(c + half) = a - b;
      }
    }
  }
}

void StoreBf16(double value, std::byte* to) {
  const std::uint16_t bits = FloatToBf16(static_cast<float>(value));
  std::memcpy(to, &bits, sizeof(bits));
}

// Calls visit(widened rows, count) for all rows, a tile at a time.
template <class Visit>
void ForEachTile(const RowSpan& rows, const Operations& operations, Visit visit) {
  FloatRows wide;
  for (std::uint64_t first = 0; first < rows.count; first += kTileEntries) {
    const std::uint64_t count = std::min<std::uint64_t>(kTileEntries, rows.count - first);
    Widen(rows.Slice(first, count), operations, wide);
    visit(wide, static_cast<std::uint32_t>(count));
  }
}

std::vector<double> MeanOf(const RowSpan& rows, const Operations& operations) {
  std::vector<double> mean(rows.head_dim);
  ForEachTile(rows, operations, [&](const FloatRows& wide, std::uint32_t count) {
    for (std::uint32_t r = 0; r < count; ++r) {
      for (std::uint32_t d = 0; d < rows.head_dim; ++d) mean[d] += wide.row(r)[d];
    }
  });
  for (double& element : mean) element /= static_cast<double>(rows.count);
  return mean;
}

Moments CentredMoments(const RowSpan& rows, const std::vector<double>& mean,
                       const Operations& operations) {
  Moments moments(rows.head_dim);
  std::vector<float> centred(std::size_t{kTileEntries} * rows.head_dim);
  ForEachTile(rows, operations, [&](const FloatRows& wide, std::uint32_t count) {
    for (std::uint32_t r = 0; r < count; ++r) {
      for (std::uint32_t d = 0; d < rows.head_dim; ++d) {
        centred[std::size_t{r} * rows.head_dim + d] =
            static_cast<float>(double{wide.row(r)[d]} - mean[d]);
      }
    }
    moments.Add({reinterpret_cast<const std::byte*>(centred.data()), count, rows.head_dim,
                 ElementType::kFp32},
                operations);
  });
  return moments;
}

// Writes mu and R of one side.
void MakeSide(const RowSpan& rows, std::uint32_t planes, const Operations& operations,
              BookSide& side, std::byte* rotation, std::byte* mean_bytes) {
  const std::uint32_t dim = rows.head_dim;
  const std::vector<double> mean = MeanOf(rows, operations);
  Eigenbasis basis = Decompose(CentredMoments(rows, mean, operations));
  side.planes = planes;
  for (double value : basis.values) {
    side.eigenvalues.push_back(static_cast<float>(value / static_cast<double>(rows.count)));
  }
  const std::uint32_t channels = dim / planes;
  for (std::uint32_t p = 0; p < planes; ++p) {
    Mix(basis.vectors.data() + std::size_t{p} * channels * dim, channels, dim);
  }
  for (std::size_t i = 0; i < basis.vectors.size(); ++i)
    StoreBf16(basis.vectors[i], rotation + 2 * i);
  for (std::uint32_t d = 0; d < dim; ++d) StoreBf16(mean[d], mean_bytes + 2 * d);
}

PlaneWidths AllOf(std::uint8_t width, std::uint32_t planes) {
  return {.first = width, .second = planes == 2 ? width : std::uint8_t{0}};
}

// Adds the squared errors of decoded rows, by plane, in the rotated space.
void AddErrors(const FloatRows& exact, const float* decoded, std::uint32_t count, std::uint32_t dim,
               std::uint32_t planes, std::array<double, kMaxPlanes>& errors) {
  const std::uint32_t channels = dim / planes;
  for (std::uint32_t r = 0; r < count; ++r) {
    for (std::uint32_t c = 0; c < dim; ++c) {
      const double off = double{exact.row(r)[c]} - decoded[std::size_t{r} * dim + c];
      errors[c / channels] += off * off;
    }
  }
}

// z of up to 32 rows.
void RotateCentred(const RowSpan& rows, const std::byte* rotation, const std::byte* mean,
                   const Operations& operations, FloatRows& z) {
  FloatRows centred;
  Widen(rows, operations, centred);
  const std::byte* pointers[kTileEntries];
  for (std::uint32_t r = 0; r < rows.count; ++r) {
    float* row = centred.elements + std::size_t{r} * centred.stride;
    for (std::uint32_t d = 0; d < rows.head_dim; ++d) {
      std::uint16_t bits;
      std::memcpy(&bits, mean + 2 * d, sizeof(bits));
      row[d] -= Bf16ToFloat(bits);
    }
    pointers[r] = reinterpret_cast<const std::byte*>(row);
  }
  z.stride = rows.head_dim;
  operations.rotate({.rotation = rotation,
                     .rotation_type = ElementType::kBf16,
                     .channels = rows.head_dim,
                     .head_dim = rows.head_dim,
                     .rows = pointers,
                     .row_type = ElementType::kFp32,
                     .row_count = static_cast<std::uint32_t>(rows.count),
                     .output = z.elements,
                     .padded_channels = rows.head_dim});
}

// Squared errors by plane.
struct PlaneErrors {
  std::array<double, kMaxPlanes> key = {};
  std::array<double, kMaxPlanes> value = {};
};

// Adds those of the rows stored in a tile.
void AddErrorsOfTile(const LaneRows& rows, const TileShape& shape, const RotationView& book,
                     const std::byte* tile, const Operations& operations, PlaneErrors& errors) {
  const std::uint32_t dim = shape.head_dim;
  const auto count = static_cast<std::uint32_t>(rows.keys.count);
  AlignedBytes decoded(2 * std::size_t{kTileEntries} * dim * sizeof(float));
  auto* const keys = reinterpret_cast<float*>(decoded.data());
  float* const values = keys + std::size_t{kTileEntries} * dim;
  operations.decode({.tile = tile,
                     .shape = shape,
                     .layout = LayoutOf(shape),
                     .rows = count,
                     .padded_channels = dim,
                     .keys = keys,
                     .values = values});
  FloatRows z;
  RotateCentred(rows.keys, book.key, book.key_mean, operations, z);
  AddErrors(z, keys, count, dim, shape.key_planes.planes(), errors.key);
  RotateCentred(rows.values, book.value, book.value_mean, operations, z);
  AddErrors(z, values, count, dim, shape.value_planes.planes(), errors.value);
}

// Measures the errors of all planes at one width.
void MeasureWidth(const LaneRows& rows, std::size_t width, const Operations& operations,
                  Book& book) {
  const std::uint32_t dim = book.head_dim;
  const TileShape shape = PlanesShape(dim, AllOf(kWidths[width], book.key.planes),
                                      AllOf(kWidths[width], book.value.planes));
  const TileLayout layout = LayoutOf(shape);
  const RotationView view = book.view();
  AlignedBytes prepared(operations.prepared_bytes(shape, rows.keys.type));
  operations.prepare_encode(shape, rows.keys.type, view, prepared.data());
  AlignedBytes tile(layout.bytes);
  PlaneErrors errors;
  const std::uint64_t measured = std::min(rows.keys.count, kErrorRows);
  for (std::uint64_t first = 0; first < measured; first += kTileEntries) {
    const auto count =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(kTileEntries, measured - first));
    operations.encode({.key = rows.keys.row(first),
                       .value = rows.values.row(first),
                       .stride = rows.keys.row_bytes(),
                       .type = rows.keys.type,
                       .rows = count,
                       .weights = nullptr,
                       .positions = nullptr,
                       .shape = shape,
                       .layout = layout,
                       .prepared = prepared.data(),
                       .tile = tile.data(),
                       .summaries = nullptr});
    AddErrorsOfTile({rows.keys.Slice(first, count), rows.values.Slice(first, count)}, shape, view,
                    tile.data(), operations, errors);
  }
  for (std::uint32_t p = 0; p < kMaxPlanes; ++p) {
    const auto of = static_cast<double>(measured);
    book.key.errors[p][width] = static_cast<float>(errors.key[p] / of);
    book.value.errors[p][width] = static_cast<float>(errors.value[p] / of);
  }
}

std::string Text(std::uint64_t number) { return std::to_string(number); }

// The first element of a side that is not usable; empty if there is none.
std::string SideProblem(const RowSpan& side, const char* name, const Operations& operations) {
  const std::int64_t bad =
      operations.first_unusable(side.data, side.count * side.head_dim, side.type);
  if (bad < 0) return {};
  const auto at = static_cast<std::uint64_t>(bad);
  return "channel " + Text(at % side.head_dim) + " of " + name + " " + Text(at / side.head_dim) +
         " is not finite, or at least 2^63";
}

}  // namespace

std::string PlanesProblem(const TileShape& shape) {
  const char* reason = shape.planes() ? UnsupportedReason(shape) : "the format is not planes";
  if (reason == nullptr) return {};
  const auto widths = [](const PlaneWidths& side) {
    return Text(side.first) + "|" + Text(side.second);
  };
  return "planes K " + widths(shape.key_planes) + ", V " + widths(shape.value_planes) +
         " of head_dim " + Text(shape.head_dim) + ": " + reason;
}

std::string BookProblem(const LaneRows& rows, const BookPlanes& planes,
                        const Operations& operations) {
  if (!IsHeadDim(rows.keys.head_dim) || rows.values.head_dim != rows.keys.head_dim) {
    return "a book needs rows of 64, 128 or 256 channels, not " + Text(rows.keys.head_dim) +
           " and " + Text(rows.values.head_dim);
  }
  if (rows.keys.count == 0 || rows.keys.count != rows.values.count) {
    return "a book needs as many keys as values and at least one, not " + Text(rows.keys.count) +
           " and " + Text(rows.values.count);
  }
  for (std::uint32_t count : {planes.key, planes.value}) {
    if (count == 0 || count > kMaxPlanes) {
      return "a side of a book has 1 or 2 planes, not " + Text(count);
    }
  }
  std::string problem = SideProblem(rows.keys, "key", operations);
  return problem.empty() ? SideProblem(rows.values, "value", operations) : problem;
}

float BookSide::Error(const PlaneWidths& widths) const {
  float error = 0;
  for (std::uint32_t p = 0; p < widths.planes(); ++p) error += errors[p][widths.width(p) / 2 - 1];
  return error;
}

bool Book::Fits(const TileShape& shape) const {
  return shape.planes() && shape.head_dim == head_dim && shape.key_planes.planes() == key.planes &&
         shape.value_planes.planes() == value.planes;
}

Book MakeBook(const LaneRows& rows, const BookPlanes& planes, const Operations& operations) {
  Book book;
  book.head_dim = rows.keys.head_dim;
  const BookLayout layout = BookLayoutOf(book.head_dim);
  book.bytes.resize(layout.bytes);
  MakeSide(rows.keys, planes.key, operations, book.key, book.bytes.data() + layout.key_rotation,
           book.bytes.data() + layout.key_mean);
  MakeSide(rows.values, planes.value, operations, book.value,
           book.bytes.data() + layout.value_rotation, book.bytes.data() + layout.value_mean);
  for (std::size_t width = 0; width < std::size(kWidths); ++width) {
    MeasureWidth(rows, width, operations, book);
  }
  return book;
}

CodeErrors ErrorsOfTile(const LaneRows& rows, const TileShape& shape, const RotationView& book,
                        const std::byte* tile, const Operations& operations) {
  PlaneErrors errors;
  AddErrorsOfTile(rows, shape, book, tile, operations, errors);
  return {.key = errors.key[0] + errors.key[1], .value = errors.value[0] + errors.value[1]};
}

}  // namespace tessera::kernels
