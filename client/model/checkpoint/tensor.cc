#include "client/model/checkpoint/tensor.h"

#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "daemon/base/strings.h"
#include "kernels/format/element.h"

namespace tessera::llm {

namespace {

static_assert(std::endian::native == std::endian::little, "model files are little-endian");

struct TypeFacts {
  std::string_view name;
  std::uint32_t gguf;           // number in GGUF files
  std::size_t elements, bytes;  // of a block
};
constexpr TypeFacts kTypes[] = {
    {"F32", 0, 1, 4},       {"F16", 1, 1, 2},       {"BF16", 30, 1, 2},     {"Q4_0", 2, 32, 18},
    {"Q4_1", 3, 32, 20},    {"Q5_0", 6, 32, 22},    {"Q5_1", 7, 32, 24},    {"Q8_0", 8, 32, 34},
    {"Q4_K", 12, 256, 144}, {"Q5_K", 13, 256, 176}, {"Q6_K", 14, 256, 210},
};
const TypeFacts& FactsOf(TensorType type) { return kTypes[static_cast<std::size_t>(type)]; }

float HalfAt(const std::uint8_t* bytes) {
  std::uint16_t bits;
  std::memcpy(&bits, bytes, sizeof bits);
  return kernels::Fp16ToFloat(bits);
}

// 16 bytes hold 32 codes: the low nibbles, then the high ones.
void UnpackNibbles(const std::uint8_t* bytes, std::uint8_t* codes) {
  for (std::size_t i = 0; i < 16; ++i) {
    codes[i] = bytes[i] & 15;
    codes[i + 16] = bytes[i] >> 4;
  }
}

// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: half scale, half offset (_1), fifth bits (Q5), codes.
void Unpack32(TensorType type, const std::uint8_t* bytes, QuantisedBlock& block) {
  block.scales[0] = HalfAt(bytes);
  bytes += 2;
  if (type == TensorType::kQ8_0) {
    block.offsets[0] = -128 * block.scales[0];
    for (std::size_t i = 0; i < 32; ++i) block.codes[i] = bytes[i] ^ 128;  // signed to unsigned
    return;
  }
  const bool has_fifth = type == TensorType::kQ5_0 || type == TensorType::kQ5_1;
  if (type == TensorType::kQ4_1 || type == TensorType::kQ5_1) {
    block.offsets[0] = HalfAt(bytes);
    bytes += 2;
  } else {
    block.offsets[0] = (has_fifth ? -16 : -8) * block.scales[0];
  }
  std::uint32_t fifth = 0;
  if (has_fifth) {
    std::memcpy(&fifth, bytes, sizeof fifth);
    bytes += sizeof fifth;
  }
  UnpackNibbles(bytes, block.codes);
  for (std::size_t i = 0; has_fifth && i < 32; ++i) block.codes[i] |= (fifth >> i & 1) << 4;
}

// Q4_K, Q5_K: half scale, half offset, 12 bytes with eight 6-bit scales and offsets, fifth bits
// (Q5), nibbles. Group g has bit g of the fifth bits, and the nibbles of 32 bytes: low ones if g is
// even.
void Unpack4K(bool has_fifth, const std::uint8_t* bytes, QuantisedBlock& block) {
  const float scale = HalfAt(bytes), offset = HalfAt(bytes + 2);
  const std::uint8_t* const packed = bytes + 4;
  const std::uint8_t* const fifth = bytes + 16;
  const std::uint8_t* const nibbles = fifth + (has_fifth ? 32 : 0);
  for (std::size_t g = 0; g < 8; ++g) {
    std::uint8_t six_scale, six_offset;
    if (g < 4) {
      six_scale = packed[g] & 63;
      six_offset = packed[g + 4] & 63;
    } else {
      six_scale = (packed[g + 4] & 15) | (packed[g - 4] >> 6 << 4);
      six_offset = (packed[g + 4] >> 4) | (packed[g] >> 6 << 4);
    }
    block.scales[g] = scale * six_scale;
    block.offsets[g] = -offset * six_offset;
    for (std::size_t i = 0; i < 32; ++i) {
      const std::uint8_t both = nibbles[g / 2 * 32 + i];
      std::uint8_t code = g % 2 == 0 ? both & 15 : both >> 4;
      if (has_fifth) code |= (fifth[i] >> g & 1) << 4;
      block.codes[g * 32 + i] = code;
    }
  }
}

// Q6_K: 128 bytes of nibbles, 64 of pairs of bits, 16 signed scales, half scale. Each half of the
// block has four quarters of 32 codes, which share bytes.
void Unpack6K(const std::uint8_t* bytes, QuantisedBlock& block) {
  const std::uint8_t* const scales = bytes + 192;
  const float scale = HalfAt(bytes + 208);
  for (std::size_t g = 0; g < 16; ++g) {
    block.scales[g] = scale * static_cast<std::int8_t>(scales[g]);
    block.offsets[g] = -32 * block.scales[g];
  }
  for (std::size_t at = 0; at < 256; ++at) {
    const std::size_t half = at / 128, quarter = at % 128 / 32, i = at % 32;
    const std::uint8_t both = bytes[half * 64 + quarter % 2 * 32 + i];
    const std::uint8_t low = quarter < 2 ? both & 15 : both >> 4;
    const std::uint8_t high = bytes[128 + half * 32 + i] >> (2 * quarter) & 3;
    block.codes[at] = low | high << 4;
  }
}

}  // namespace

std::string_view NameOf(TensorType type) { return FactsOf(type).name; }

std::optional<TensorType> TypeOfGguf(std::uint32_t number) {
  for (std::size_t i = 0; i < std::size(kTypes); ++i) {
    if (kTypes[i].gguf == number) return static_cast<TensorType>(i);
  }
  return std::nullopt;
}

std::optional<TensorType> TypeOfSafetensors(std::string_view name) {
  for (const TensorType type : {TensorType::kF32, TensorType::kF16, TensorType::kBf16}) {
    if (NameOf(type) == name) return type;
  }
  return std::nullopt;
}

bool IsQuantised(TensorType type) { return BlockElements(type) > 1; }
std::size_t BlockElements(TensorType type) { return FactsOf(type).elements; }
std::size_t GroupElements(TensorType type) { return type == TensorType::kQ6K ? 16 : 32; }
std::size_t BlockBytes(TensorType type) { return FactsOf(type).bytes; }

void Unpack(TensorType type, std::span<const std::byte> bytes, QuantisedBlock& block) {
  const auto* const at = reinterpret_cast<const std::uint8_t*>(bytes.data());
  switch (type) {
    case TensorType::kQ4K:
    case TensorType::kQ5K:
      return Unpack4K(type == TensorType::kQ5K, at, block);
    case TensorType::kQ6K:
      return Unpack6K(at, block);
    default:
      return Unpack32(type, at, block);
  }
}

std::size_t Tensor::row_bytes() const {
  return row_elements() / BlockElements(type) * BlockBytes(type);
}

void Tensor::ReadRow(std::uint64_t row, std::span<float> values) const {
  const std::span<const std::byte> data = Row(row);
  if (!IsQuantised(type)) {
    if (type == TensorType::kF32) {
      std::memcpy(values.data(), data.data(), data.size());
      return;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint16_t bits;
      std::memcpy(&bits, &data[2 * i], sizeof bits);
      values[i] =
          type == TensorType::kF16 ? kernels::Fp16ToFloat(bits) : kernels::Bf16ToFloat(bits);
    }
    return;
  }
  const std::size_t elements = BlockElements(type), bytes = BlockBytes(type);
  QuantisedBlock block;
  for (std::size_t first = 0; first < values.size(); first += elements) {
    Unpack(type, data.subspan(first / elements * bytes, bytes), block);
    for (std::size_t i = 0; i < elements; ++i) {
      const std::size_t group = i / GroupElements(type);
      values[first + i] = block.codes[i] * block.scales[group] + block.offsets[group];
    }
  }
}

absl::Status CheckTensor(const Tensor& tensor) {
  const auto refused = [&](const auto&... why) {
    return absl::InvalidArgumentError(
        Concat(NameOf(tensor.type), " of ", ShapeText(tensor.shape), ": ", why...));
  };
  const std::size_t elements = BlockElements(tensor.type);
  if (tensor.row_elements() % elements != 0) {
    return refused("a row must consist of whole blocks of ", elements);
  }
  // No product above the number of bytes is computed, so nothing overflows.
  const std::uint64_t blocks = tensor.bytes.size() / BlockBytes(tensor.type);
  std::uint64_t product = 1;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    const std::uint64_t extent =
        i + 1 == tensor.shape.size() ? tensor.shape[i] / elements : tensor.shape[i];
    if (extent != 0 && product > blocks / extent) {
      return refused("the file has only ", tensor.bytes.size(), " bytes for it");
    }
    product *= extent;
  }
  if (product != blocks || tensor.bytes.size() % BlockBytes(tensor.type) != 0) {
    return refused("it takes ", tensor.bytes.size(), " bytes in the file");
  }
  return absl::OkStatus();
}

std::string ShapeText(std::span<const std::uint64_t> shape) {
  std::string text;
  for (const std::uint64_t extent : shape) Append(text, text.empty() ? "" : " x ", extent);
  return text;
}

}  // namespace tessera::llm
