// rotate and unrotate; and that an implementation provides every operation.
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "tests/contract/attend/attend_batch.h"
#include "tests/contract/pack/pack_conformance.h"

namespace tessera::kernels {
namespace {

constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

double Length(const std::vector<double>& row) {
  return std::sqrt(std::inner_product(row.begin(), row.end(), row.begin(), 0.0));
}

// Rows in separate memory, each followed by unreadable memory.
struct ScatteredRows {
  ScatteredRows(const TileShape& shape, ElementType type, std::uint32_t count, TestRandom& random) {
    for (std::uint32_t r = 0; r < count; ++r) {
      inputs.emplace_back(shape, type, 1, Content::kNormal, random);
      pointers.push_back(inputs.back().Job(shape).key);
    }
  }
  std::vector<TileInput> inputs;
  std::vector<const std::byte*> pointers;
};

std::vector<float> Rotate(const Operations& operations, const TileShape& shape,
                          const std::byte* rotation, ElementType rotation_type,
                          const ScatteredRows& rows, ElementType row_type, const char** ran) {
  const auto count = static_cast<std::uint32_t>(rows.pointers.size());
  const std::uint32_t padded = PaddedChannels(shape);
  const Buffer output(std::size_t{count} * padded * sizeof(float));
  auto* floats = reinterpret_cast<float*>(output.data());
  *ran = operations.rotate({.rotation = rotation,
                            .rotation_type = rotation_type,
                            .channels = shape.key.channels,
                            .head_dim = shape.head_dim,
                            .rows = rows.pointers.data(),
                            .row_type = row_type,
                            .row_count = count,
                            .output = floats,
                            .padded_channels = padded});
  return {floats, floats + std::size_t{count} * padded};
}

// An implementation must provide all operations of the table.
TEST_P(PartConformance, EveryOperationIsThere) {
  TESSERA_NEEDS(attend_part);
  TESSERA_NEEDS(rotate);
  TESSERA_NEEDS(unrotate);
  TESSERA_NEEDS(score_part);
  TESSERA_NEEDS(select);
  TESSERA_NEEDS(prepared_bytes);
  TESSERA_NEEDS(prepare_encode);
  TESSERA_NEEDS(encode);
  TESSERA_NEEDS(decode);
  TESSERA_NEEDS(gather);
  TESSERA_NEEDS(moments);
  TESSERA_NEEDS(observe);
  TESSERA_NEEDS(first_unusable);
}

TEST_P(PartConformance, RotateIsTheProduct) {
  TESSERA_NEEDS(rotate);
  for (int round = 0; round < 80; ++round) {
    const TileShape shape = RandomShape(random_, {.cut = true});
    const ElementType matrix_type = random_.OneIn(2) ? ElementType::kBf16 : ElementType::kFp32;
    const ElementType type = kTypes[random_.Below(3)];
    const Rotations rotations(shape, matrix_type, random_);
    const ScatteredRows rows(shape, type, static_cast<std::uint32_t>(random_.Between(1, 32)),
                             random_);
    const char* ran = nullptr;
    const std::vector<float> rotated =
        Rotate(ops(), shape, rotations.view().key, matrix_type, rows, type, &ran);
    ExpectRan(ran);
    const std::uint32_t padded = PaddedChannels(shape);
    for (std::size_t r = 0; r < rows.inputs.size(); ++r) {
      const std::vector<double> x = rows.inputs[r].Row(false, 0);
      const std::vector<double> exact =
          RotateExactly(rotations.view().key, matrix_type, shape.key.channels, x);
      for (std::uint32_t c = 0; c < padded; ++c) {
        const float got = rotated[r * padded + c];
        if (c >= shape.key.channels) {
          ASSERT_EQ(got, 0.0f) << "padding";
        } else {
          ASSERT_NEAR(got, exact[c], Length(x) * 0x1p-20) << Describe(shape) << " channel " << c;
        }
      }
    }
  }
}

TEST_P(PartConformance, RotateWithoutMatrixCopies) {
  TESSERA_NEEDS(rotate);
  for (std::uint32_t head_dim : kHeadDims) {
    for (ElementType type : kTypes) {
      const TileShape shape = DenseShape(head_dim, type);
      const ScatteredRows rows(shape, type, 7, random_);
      const char* ran = nullptr;
      const std::vector<float> copied =
          Rotate(ops(), shape, nullptr, ElementType::kBf16, rows, type, &ran);
      ExpectRan(ran);
      for (std::size_t r = 0; r < 7; ++r) {
        const std::vector<double> x = rows.inputs[r].Row(false, 0);
        for (std::uint32_t c = 0; c < head_dim; ++c) ASSERT_EQ(copied[r * head_dim + c], x[c]);
      }
    }
  }
}

std::vector<float> Unrotate(const Operations& operations, const TileShape& shape,
                            const std::byte* rotation, ElementType type,
                            const std::vector<float>& rows, std::uint32_t count, const char** ran) {
  const Buffer input(rows.size() * sizeof(float));
  std::memcpy(input.data(), rows.data(), input.size());
  const Buffer output(std::size_t{count} * shape.head_dim * sizeof(float));
  auto* floats = reinterpret_cast<float*>(output.data());
  *ran = operations.unrotate({.rotation = rotation,
                              .rotation_type = type,
                              .channels = shape.value.channels,
                              .head_dim = shape.head_dim,
                              .rows = reinterpret_cast<const float*>(input.data()),
                              .padded_channels = PaddedChannels(shape),
                              .row_count = count,
                              .output = floats});
  return {floats, floats + std::size_t{count} * shape.head_dim};
}

TEST_P(PartConformance, UnrotateIsTheTransposedProduct) {
  TESSERA_NEEDS(unrotate);
  for (int round = 0; round < 80; ++round) {
    const TileShape shape = RandomShape(random_, {.cut = true});
    const ElementType type = random_.OneIn(2) ? ElementType::kBf16 : ElementType::kFp32;
    const Rotations rotations(shape, type, random_);
    const auto count = static_cast<std::uint32_t>(random_.Between(1, 32));
    const std::uint32_t padded = PaddedChannels(shape);
    // Data after the last channel does not belong to the row.
    std::vector<float> rows(std::size_t{count} * padded, 0.0f);
    for (std::uint32_t i = 0; i < count * padded; ++i) {
      if (i % padded < shape.value.channels) rows[i] = NormalNumber(random_);
    }
    const char* ran = nullptr;
    const std::vector<float> x =
        Unrotate(ops(), shape, rotations.view().value, type, rows, count, &ran);
    ExpectRan(ran);
    for (std::uint32_t r = 0; r < count; ++r) {
      std::vector<double> exact(shape.head_dim, 0.0);
      double squares = 0;
      for (std::uint32_t c = 0; c < shape.value.channels; ++c) {
        const double y = rows[r * padded + c];
        squares += y * y;
        const std::byte* row =
            rotations.view().value + std::size_t{c} * shape.head_dim * ElementBytes(type);
        for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
          exact[d] += y * OutputElement(type, row, d);
        }
      }
      for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
        ASSERT_NEAR(x[r * shape.head_dim + d], exact[d], std::sqrt(squares) * 0x1p-20)
            << Describe(shape) << " channel " << d;
      }
    }
  }
}

// R^T R x = x for a square R, up to the matrix's rounding. Without a matrix both operations copy.
TEST_P(PartConformance, UnrotateUndoesRotate) {
  TESSERA_NEEDS(rotate);
  TESSERA_NEEDS(unrotate);
  for (int round = 0; round < 40; ++round) {
    const TileShape shape = RandomShape(random_, {});
    const ElementType type = random_.OneIn(2) ? ElementType::kBf16 : ElementType::kFp32;
    const bool identity = random_.OneIn(4);
    const Rotations rotations(shape, type, random_);
    const std::byte* matrix = identity ? nullptr : rotations.view().key;
    const ScatteredRows rows(shape, ElementType::kFp32, 9, random_);
    const char* ran = nullptr;
    const std::vector<float> there =
        Rotate(ops(), shape, matrix, type, rows, ElementType::kFp32, &ran);
    const std::vector<float> back = Unrotate(ops(), shape, matrix, type, there, 9, &ran);
    const double error = identity ? 0 : type == ElementType::kFp32 ? 0x1p-19 : 0x1p-6;
    for (std::size_t r = 0; r < 9; ++r) {
      const std::vector<double> x = rows.inputs[r].Row(false, 0);
      for (std::uint32_t c = 0; c < shape.head_dim; ++c) {
        ASSERT_NEAR(back[r * shape.head_dim + c], x[c], error * Length(x)) << Describe(shape);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
