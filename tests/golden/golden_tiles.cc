#include "tests/golden/golden_tiles.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <system_error>

#include "kernels/reference/attend_part.h"

namespace tessera::kernels {
namespace {

constexpr char kMagic[8] = {'T', 'E', 'S', 'S', 'T', 'I', 'L', 'E'};

// Numbers that are equal on every machine: multiples of 2^-7 in [-4, 4), never -0.
class Numbers {
 public:
  float Next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(static_cast<int>(state_ >> 54) - 512) * 0x1p-7f;
  }

 private:
  std::uint64_t state_ = 2024;
};

std::vector<std::byte> Rows(const GoldenTile& golden, Numbers& numbers) {
  const std::size_t count = std::size_t{golden.rows} * golden.shape.head_dim;
  std::vector<std::byte> bytes(count * ElementBytes(golden.type));
  for (std::size_t i = 0; i < count; ++i) {
    const float value = numbers.Next();
    const std::uint16_t half =
        golden.type == ElementType::kFp16 ? FloatToFp16(value) : FloatToBf16(value);
    if (golden.type == ElementType::kFp32) {
      std::memcpy(&bytes[i * 4], &value, 4);
    } else {
      std::memcpy(&bytes[i * 2], &half, 2);
    }
  }
  return bytes;
}

GoldenTile FromShape(const TileShape& shape, ElementType type, std::uint32_t rows) {
  GoldenTile golden = {.shape = shape, .type = type, .rows = rows};
  Numbers numbers;
  golden.keys = Rows(golden, numbers);
  golden.values = Rows(golden, numbers);
  for (std::uint32_t r = 0; r < rows; ++r) {
    if (shape.weights) golden.weights.push_back(static_cast<float>(r * r + 1));
    if (shape.positions) golden.positions.push_back(3 * r + r / 4);
  }
  EncodeGolden(ReferenceOperations(), golden);
  DecodeGolden(ReferenceOperations(), golden);
  return golden;
}

// Writer appends values, Reader removes them, in the order of the file.
struct Writer {
  std::vector<std::byte> bytes;

  template <class T>
  void Value(const T& value) {
    const auto* begin = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), begin, begin + sizeof(T));
  }
  template <class T>
  void Array(const std::vector<T>& values) {
    const auto* begin = reinterpret_cast<const std::byte*>(values.data());
    bytes.insert(bytes.end(), begin, begin + values.size() * sizeof(T));
  }
};

struct Reader {
  const std::vector<std::byte>& bytes;
  std::size_t at = 0;
  bool good = true;

  template <class T>
  T Value() {
    std::vector<T> one;
    Array(one, 1);
    return good ? one[0] : T{};
  }
  template <class T>
  void Array(std::vector<T>& values, std::size_t count) {
    good = good && count * sizeof(T) <= bytes.size() - at;
    if (!good || count == 0) return;
    values.resize(count);
    std::memcpy(values.data(), bytes.data() + at, count * sizeof(T));
    at += count * sizeof(T);
  }
};

}  // namespace

std::vector<NamedGoldenTile> MakeGoldenTiles() {
  const auto packed = [](ValueType type, std::uint16_t channels, std::uint16_t kept,
                         std::uint8_t group) {
    return TileShape{.format = PackedFormat(type),
                     .head_dim = 64,
                     .key = {channels, kept},
                     .value = {channels, kept},
                     .group = group};
  };
  TileShape weighted = packed(ValueType::kInt8, 64, 16, 1);
  weighted.summary = Summary::kMean;
  weighted.block = 8;
  weighted.weights = weighted.positions = true;
  TileShape min_max = DenseShape(64, ElementType::kBf16);
  min_max.summary = Summary::kMinMax;
  min_max.block = 4;
  TileShape keys_cut = packed(ValueType::kBf16, 64, 64, 1);
  keys_cut.key = {39, 39};
  TileShape sides = packed(ValueType::kInt8, 48, 12, 4);
  sides.value = {64, 64};
  sides.summary = Summary::kMean;
  sides.block = 4;
  const auto make = [](const char* name, const TileShape& shape, ElementType type,
                       std::uint32_t rows) {
    return NamedGoldenTile{name, FromShape(shape, type, rows)};
  };
  return {make("bf16", packed(ValueType::kBf16, 64, 16, 1), ElementType::kFp32, 5),
          make("fp16", packed(ValueType::kFp16, 64, 16, 2), ElementType::kFp32, 5),
          make("int8", packed(ValueType::kInt8, 64, 24, 4), ElementType::kFp16, 6),
          make("fp8", packed(ValueType::kFp8, 64, 32, 2), ElementType::kBf16, 6),
          make("truncated", packed(ValueType::kBf16, 44, 12, 2), ElementType::kBf16, 6),
          make("whole", packed(ValueType::kFp8, 64, 64, 1), ElementType::kBf16, 5),
          make("keys_cut", keys_cut, ElementType::kBf16, 6),
          make("sides", sides, ElementType::kFp32, 7),
          make("weighted_mean", weighted, ElementType::kBf16, 13),
          make("min_max_dense", min_max, ElementType::kBf16, 6)};
}

bool EncodeGolden(const Operations& operations, GoldenTile& golden) {
  const TileShape& shape = golden.shape;
  // All rows of the identity; a side with fewer channels uses the first ones.
  std::vector<std::uint16_t> identity(std::size_t{shape.head_dim} * shape.head_dim + 32);
  void* place = identity.data();
  std::size_t space = identity.size() * 2;
  std::align(64, space - 64, place, space);
  auto* matrix = static_cast<std::uint16_t*>(place);
  for (std::size_t c = 0; c < shape.head_dim; ++c) matrix[c * shape.head_dim + c] = FloatToBf16(1);
  const auto rows_of = [&](const RowShape& side) {
    return side.channels == shape.head_dim ? nullptr : reinterpret_cast<const std::byte*>(matrix);
  };
  const RotationView rotation = {
      .key = rows_of(shape.key), .value = rows_of(shape.value), .type = ElementType::kBf16};
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> prepared;
  if (shape.packed()) {
    prepared.resize(operations.prepared_bytes(shape, golden.type) / sizeof(Line) + 1);
    operations.prepare_encode(shape, golden.type, rotation, prepared[0].bytes);
  }
  const TileLayout layout = LayoutOf(shape);
  std::vector<Line> tile(TileAndSummaryBytes(layout) / sizeof(Line) + 1);
  if (!operations.encode({.key = golden.keys.data(),
                          .value = golden.values.data(),
                          .stride = shape.head_dim * ElementBytes(golden.type),
                          .type = golden.type,
                          .rows = golden.rows,
                          .weights = golden.weights.empty() ? nullptr : golden.weights.data(),
                          .positions = golden.positions.empty() ? nullptr : golden.positions.data(),
                          .shape = shape,
                          .layout = layout,
                          .prepared = prepared.empty() ? nullptr : prepared[0].bytes,
                          .tile = tile[0].bytes,
                          .summaries = tile[0].bytes + layout.bytes})) {
    return false;
  }
  golden.tile.assign(tile[0].bytes, tile[0].bytes + TileAndSummaryBytes(layout));
  return true;
}

void DecodeGolden(const Operations& operations, GoldenTile& golden) {
  struct alignas(64) Line {
    float floats[16];
  };
  const std::uint32_t padded = PaddedChannels(golden.shape);
  std::vector<Line> keys(std::size_t{golden.rows} * padded / 16);
  std::vector<Line> values(keys.size());
  operations.decode({.tile = golden.tile.data(),
                     .shape = golden.shape,
                     .layout = LayoutOf(golden.shape),
                     .rows = golden.rows,
                     .padded_channels = padded,
                     .keys = keys[0].floats,
                     .values = values[0].floats});
  golden.decoded_keys.clear();
  golden.decoded_values.clear();
  for (std::uint32_t i = 0; i < golden.rows * padded; ++i) {
    const std::uint32_t channel = i % padded;
    if (channel < golden.shape.key.channels) {
      golden.decoded_keys.push_back(keys[i / 16].floats[i % 16]);
    }
    if (channel < golden.shape.value.channels) {
      golden.decoded_values.push_back(values[i / 16].floats[i % 16]);
    }
  }
}

std::vector<std::byte> SerialiseGolden(const GoldenTile& golden) {
  const TileShape& shape = golden.shape;
  Writer writer;
  writer.Value(kMagic);
  writer.Value(kTileFormatVersion);
  for (std::uint8_t byte : {static_cast<std::uint8_t>(shape.format), shape.group,
                            static_cast<std::uint8_t>(shape.summary), shape.block}) {
    writer.Value(byte);
  }
  for (std::uint16_t word : {shape.head_dim, shape.key.channels, shape.key.kept,
                             shape.value.channels, shape.value.kept}) {
    writer.Value(word);
  }
  for (int byte :
       {shape.weights ? 1 : 0, shape.positions ? 1 : 0, static_cast<int>(golden.type), 0}) {
    writer.Value(static_cast<std::uint8_t>(byte));
  }
  writer.Value(golden.rows);
  writer.Array(golden.keys);
  writer.Array(golden.values);
  writer.Array(golden.weights);
  writer.Array(golden.positions);
  writer.Array(golden.tile);
  writer.Array(golden.decoded_keys);
  writer.Array(golden.decoded_values);
  return writer.bytes;
}

std::optional<GoldenTile> ParseGolden(const std::vector<std::byte>& bytes) {
  Reader reader{bytes};
  std::vector<char> magic;
  reader.Array(magic, sizeof(kMagic));
  if (!reader.good || !std::equal(magic.begin(), magic.end(), kMagic)) return std::nullopt;
  if (reader.Value<std::uint32_t>() != kTileFormatVersion) return std::nullopt;
  GoldenTile golden;
  TileShape& shape = golden.shape;
  shape.format = static_cast<TileFormat>(reader.Value<std::uint8_t>());
  shape.group = reader.Value<std::uint8_t>();
  shape.summary = static_cast<Summary>(reader.Value<std::uint8_t>());
  shape.block = reader.Value<std::uint8_t>();
  shape.head_dim = reader.Value<std::uint16_t>();
  for (RowShape* side : {&shape.key, &shape.value}) {
    side->channels = reader.Value<std::uint16_t>();
    side->kept = reader.Value<std::uint16_t>();
  }
  shape.weights = reader.Value<std::uint8_t>() != 0;
  shape.positions = reader.Value<std::uint8_t>() != 0;
  golden.type = static_cast<ElementType>(reader.Value<std::uint8_t>());
  reader.Value<std::uint8_t>();
  golden.rows = reader.Value<std::uint32_t>();
  if (!reader.good || UnsupportedReason(shape) != nullptr || golden.rows == 0 ||
      golden.rows > kTileEntries || !IsElementType(static_cast<std::uint8_t>(golden.type))) {
    return std::nullopt;
  }
  const std::size_t elements = std::size_t{golden.rows} * shape.head_dim;
  reader.Array(golden.keys, elements * ElementBytes(golden.type));
  reader.Array(golden.values, elements * ElementBytes(golden.type));
  reader.Array(golden.weights, shape.weights ? golden.rows : 0);
  reader.Array(golden.positions, shape.positions ? golden.rows : 0);
  reader.Array(golden.tile, TileAndSummaryBytes(LayoutOf(shape)));
  reader.Array(golden.decoded_keys, std::size_t{golden.rows} * shape.key.channels);
  reader.Array(golden.decoded_values, std::size_t{golden.rows} * shape.value.channels);
  if (!reader.good || reader.at != bytes.size()) return std::nullopt;
  return golden;
}

std::optional<GoldenTile> ReadGolden(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  const std::vector<char> chars{std::istreambuf_iterator<char>(stream), {}};
  std::vector<std::byte> bytes(chars.size());
  std::memcpy(bytes.data(), chars.data(), chars.size());
  return ParseGolden(bytes);
}

std::string WriteGoldenTiles(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::create_directory(folder, error)) {
    return folder.string() + (error ? ": " + error.message() : " is there already");
  }
  for (const NamedGoldenTile& named : MakeGoldenTiles()) {
    const std::vector<std::byte> bytes = SerialiseGolden(named.golden);
    std::ofstream stream(folder / (named.name + ".bin"), std::ios::binary);
    stream.write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
    if (!stream.flush()) return "could not write " + named.name;
  }
  return "";
}

}  // namespace tessera::kernels
