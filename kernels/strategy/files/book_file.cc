#include "kernels/strategy/files/book_file.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/format/element.h"

namespace tessera::kernels {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are copied as they are");

constexpr std::string_view kMagic = "TESSBOOK";
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kMostLanes = 1 << 16;
constexpr std::uint32_t kMostTexts = 4096;
constexpr std::uint32_t kMostTextName = 255;
// How far the length of a row of R, rounded to bf16, may be from 1.
constexpr double kOffLength = 0.02;

// CRC-32C (Castagnoli), as iSCSI and ext4 use it.
std::uint32_t Crc32C(std::span<const std::byte> bytes) {
  static const std::array<std::uint32_t, 256> table = [] {
    std::array<std::uint32_t, 256> made = {};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
      made[i] = crc;
    }
    return made;
  }();
  std::uint32_t crc = 0xffffffffu;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ table[(crc ^ static_cast<std::uint32_t>(byte)) & 0xff];
  }
  return ~crc;
}

// FNV-1a. Finds differences, not attackers.
class Hash {
 public:
  void Add(const void* data, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; ++i) {
      value_ = (value_ ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3u;
    }
  }
  template <typename Number>
  void Add(Number number) {
    static_assert(std::is_arithmetic_v<Number>);
    Add(&number, sizeof number);
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

class Writer {
 public:
  template <typename Number>
  void Add(Number number) {
    static_assert(std::is_arithmetic_v<Number>);
    Add(&number, sizeof number);
  }
  void Add(const void* data, std::size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), from, from + bytes);
  }
  void AddText(std::string_view text) {
    Add(static_cast<std::uint32_t>(text.size()));
    Add(text.data(), text.size());
  }
  template <typename Number>
  void AddAll(const std::vector<Number>& numbers) {
    Add(numbers.data(), numbers.size() * sizeof(Number));
  }
  std::vector<std::byte> Sealed() && {
    bytes_.resize(bytes_.size() + sizeof(std::uint32_t));
    SealBookFile(bytes_);
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
};

void AddSide(const BookFile::Side& side, Writer& out) {
  out.AddAll(side.mean);
  out.AddAll(side.eigenvalues);
  for (const BookFile::Side::Rotated& rotated : side.by_planes) {
    out.Add(rotated.errors.data(), sizeof rotated.errors);
    out.AddAll(rotated.rotation);
  }
}

std::string Text(std::uint64_t number) { return std::to_string(number); }

// Reads numbers and texts; after the end everything is 0, and `short_of` says so.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  template <typename Number>
  Number Next() {
    Number number = {};
    Copy(&number, sizeof number);
    return number;
  }
  std::string NextText(std::uint32_t most) {
    const auto size = Next<std::uint32_t>();
    if (size > most || size > left_.size()) {
      is_short_ = true;
      return {};
    }
    std::string text(size, '\0');
    Copy(text.data(), size);
    return text;
  }
  template <typename Number>
  void Fill(std::vector<Number>& numbers, std::size_t count) {
    if (count * sizeof(Number) > left_.size()) {
      is_short_ = true;
      return;
    }
    numbers.resize(count);
    Copy(numbers.data(), count * sizeof(Number));
  }
  void Copy(void* to, std::size_t bytes) {
    if (bytes > left_.size()) {
      is_short_ = true;
      return;
    }
    std::memcpy(to, left_.data(), bytes);
    left_ = left_.subspan(bytes);
  }
  bool is_short() const { return is_short_; }
  std::size_t left() const { return left_.size(); }

 private:
  std::span<const std::byte> left_;
  bool is_short_ = false;
};

std::string RotationProblem(const std::vector<std::uint16_t>& rotation, std::uint32_t dim) {
  for (std::uint32_t row = 0; row < dim; ++row) {
    double square = 0;
    for (std::uint32_t d = 0; d < dim; ++d) {
      const double element = Bf16ToFloat(rotation[std::size_t{row} * dim + d]);
      square += element * element;
    }
    // Written so that NaN is a problem, too.
    if (!(std::abs(square - 1) <= kOffLength)) {
      return "row " + Text(row) + " of R has a squared length of " + std::to_string(square) +
             ", not 1";
    }
  }
  return {};
}

bool IsUsable(float number) { return std::isfinite(number) && number >= 0; }

std::string ReadSide(Reader& in, std::uint32_t dim, BookFile::Side& side) {
  in.Fill(side.mean, dim);
  in.Fill(side.eigenvalues, dim);
  for (BookFile::Side::Rotated& rotated : side.by_planes) {
    in.Copy(rotated.errors.data(), sizeof rotated.errors);
    in.Fill(rotated.rotation, std::size_t{dim} * dim);
  }
  if (in.is_short()) return "the file ends in the middle";
  if (!std::ranges::all_of(side.mean, [](auto bits) { return std::isfinite(Bf16ToFloat(bits)); })) {
    return "mu is not finite";
  }
  if (!std::ranges::all_of(side.eigenvalues, IsUsable)) return "an eigenvalue is not finite";
  for (const BookFile::Side::Rotated& rotated : side.by_planes) {
    for (const auto& of_plane : rotated.errors) {
      if (!std::ranges::all_of(of_plane, IsUsable)) return "an error is not finite";
    }
    std::string problem = RotationProblem(rotated.rotation, dim);
    if (!problem.empty()) return problem;
  }
  return {};
}

std::string ReadHeader(Reader& in, std::uint32_t& lanes, BookFile& file) {
  char magic[kMagic.size()] = {};
  in.Copy(magic, sizeof magic);
  if (std::string_view(magic, sizeof magic) != kMagic) return "it is no book file";
  const auto version = in.Next<std::uint32_t>();
  if (version != kVersion) {
    return "it has version " + Text(version) + "; this program reads version " + Text(kVersion);
  }
  lanes = in.Next<std::uint32_t>();
  if (lanes == 0 || lanes > kMostLanes) {
    return "it has " + Text(lanes) + " lanes; allowed are 1 to " + Text(kMostLanes);
  }
  file.fingerprint = in.Next<std::uint64_t>();
  file.rows = in.Next<std::uint64_t>();
  const auto texts = in.Next<std::uint32_t>();
  if (texts > kMostTexts) return "it names " + Text(texts) + " texts; at most " + Text(kMostTexts);
  file.name = in.NextText(kMaxBookName);
  if (!in.is_short() && !IsBookName(file.name)) {
    return "the book's name must have 1 to 64 letters, digits, '.', '_' and '-'";
  }
  for (std::uint32_t i = 0; i < texts && !in.is_short(); ++i) {
    BookText text;
    text.bytes = in.Next<std::uint64_t>();
    text.hash = in.Next<std::uint64_t>();
    text.name = in.NextText(kMostTextName);
    file.texts.push_back(std::move(text));
  }
  return in.is_short() ? "the file ends in the middle" : "";
}

void TakeSide(const Book& book, const BookSide& from, const std::byte* mean,
              const std::byte* rotation, BookFile::Side& side) {
  const std::size_t dim = book.head_dim;
  side.mean.resize(dim);
  std::memcpy(side.mean.data(), mean, dim * sizeof(std::uint16_t));
  side.eigenvalues = from.eigenvalues;
  // Rounding may leave a direction without energy just below 0.
  for (float& value : side.eigenvalues) value = std::max(value, 0.0f);
  BookFile::Side::Rotated& rotated = side.by_planes[from.planes - 1];
  rotated.errors = from.errors;
  rotated.rotation.resize(dim * dim);
  std::memcpy(rotated.rotation.data(), rotation, dim * dim * sizeof(std::uint16_t));
}

BookSide SideOf(const BookFile::Side& from, std::uint32_t planes, std::byte* mean,
                std::byte* rotation) {
  const BookFile::Side::Rotated& rotated = from.by_planes[planes - 1];
  std::memcpy(mean, from.mean.data(), from.mean.size() * sizeof(std::uint16_t));
  std::memcpy(rotation, rotated.rotation.data(), rotated.rotation.size() * sizeof(std::uint16_t));
  return {.planes = planes, .eigenvalues = from.eigenvalues, .errors = rotated.errors};
}

}  // namespace

std::uint64_t FingerprintOf(const BookedModel& model) {
  Hash hash;
  hash.Add(model.layers.size());
  for (const BookedModel::Layer& layer : model.layers) {
    hash.Add(layer.query_heads);
    hash.Add(layer.kv_heads);
    hash.Add(layer.head_dim);
  }
  hash.Add(model.rope_theta);
  hash.Add(model.rope_interleaved);
  hash.Add(model.rope_scaling.size());
  hash.Add(model.rope_scaling.data(), model.rope_scaling.size());
  hash.Add(model.rope_scaling_factor);
  for (const double frequency : model.rope_frequencies) hash.Add(frequency);
  return hash.value();
}

std::string FingerprintText(std::uint64_t fingerprint) {
  std::string digits;
  for (int shift = 60; shift >= 0; shift -= 4) {
    digits += "0123456789abcdef"[fingerprint >> shift & 15];
  }
  return digits;
}

BookText BookTextOf(std::string_view path, std::string_view content) {
  Hash hash;
  hash.Add(content.data(), content.size());
  path.remove_prefix(path.rfind('/') + 1);  // npos + 1 is 0
  return {.name = std::string(path.substr(0, kMostTextName)),
          .bytes = content.size(),
          .hash = hash.value()};
}

bool IsBookName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxBookName && std::ranges::all_of(name, [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
}

BookFile::Lane MakeFileLane(const LaneRows& rows, const Operations& operations) {
  BookFile::Lane lane = {.head_dim = rows.keys.head_dim};
  for (std::uint32_t planes = 1; planes <= kMaxPlanes; ++planes) {
    const Book book = MakeBook(rows, {.key = planes, .value = planes}, operations);
    const RotationView view = book.view();
    TakeSide(book, book.key, view.key_mean, view.key, lane.key);
    TakeSide(book, book.value, view.value_mean, view.value, lane.value);
  }
  return lane;
}

Book BookFile::BookOf(std::uint32_t lane, const BookPlanes& planes) const {
  const Lane& from = lanes[lane];
  const BookLayout layout = BookLayoutOf(from.head_dim);
  Book book;
  book.head_dim = from.head_dim;
  book.bytes.resize(layout.bytes);
  std::byte* const base = book.bytes.data();
  book.key = SideOf(from.key, planes.key, base + layout.key_mean, base + layout.key_rotation);
  book.value =
      SideOf(from.value, planes.value, base + layout.value_mean, base + layout.value_rotation);
  return book;
}

std::vector<std::byte> BytesOf(const BookFile& file) {
  Writer out;
  out.Add(kMagic.data(), kMagic.size());
  out.Add(kVersion);
  out.Add(static_cast<std::uint32_t>(file.lanes.size()));
  out.Add(file.fingerprint);
  out.Add(file.rows);
  out.Add(static_cast<std::uint32_t>(file.texts.size()));
  out.AddText(file.name);
  for (const BookText& text : file.texts) {
    out.Add(text.bytes);
    out.Add(text.hash);
    out.AddText(text.name);
  }
  for (const BookFile::Lane& lane : file.lanes) {
    out.Add(lane.head_dim);
    AddSide(lane.key, out);
    AddSide(lane.value, out);
  }
  return std::move(out).Sealed();
}

void SealBookFile(std::span<std::byte> bytes) {
  const std::size_t body = bytes.size() - sizeof(std::uint32_t);
  const std::uint32_t crc = Crc32C(bytes.first(body));
  std::memcpy(bytes.data() + body, &crc, sizeof crc);
}

std::string ReadBookFile(std::span<const std::byte> bytes, BookFile& file) {
  file = {};
  std::uint32_t lanes = 0;
  std::uint32_t crc = 0;
  if (bytes.size() < kMagic.size() + sizeof crc) return "it is no book file";
  const std::span<const std::byte> body = bytes.first(bytes.size() - sizeof crc);
  Reader in(body);
  std::string problem = ReadHeader(in, lanes, file);
  if (!problem.empty()) return problem;
  std::memcpy(&crc, bytes.data() + body.size(), sizeof crc);
  if (Crc32C(body) != crc) return "its checksum is wrong: it is damaged or cut off";
  for (std::uint32_t i = 0; i < lanes; ++i) {
    BookFile::Lane lane;
    lane.head_dim = in.Next<std::uint32_t>();
    if (!IsHeadDim(lane.head_dim)) {
      return "lane " + Text(i) + " has rows of " + Text(lane.head_dim) +
             " channels; allowed are 64, 128 and 256";
    }
    for (BookFile::Side* const side : {&lane.key, &lane.value}) {
      problem = ReadSide(in, lane.head_dim, *side);
      if (!problem.empty()) return "lane " + Text(i) + ": " + problem;
    }
    file.lanes.push_back(std::move(lane));
  }
  if (in.left() != 0) return "it has " + Text(in.left()) + " bytes after its last lane";
  return {};
}

}  // namespace tessera::kernels
