// Book files: the books of all lanes of a model, made beforehand from texts. `tessera calibrate`
// writes them, the daemon reads them. Little-endian, without padding:
//
//   char magic[8] "TESSBOOK"; u32 version 1; u32 lanes
//   u64 fingerprint of the model; u64 rows of each lane
//   u32 texts; u32 n; char name[n]                               of the book, as policies say it
//   per text:  u64 bytes; u64 hash; u32 n; char name[n]
//   per lane:  u32 head_dim; the side of keys, the side of values
//     a side:  u16 mu[D]; f32 eigenvalues[D]
//              for 1 plane, then for 2: f32 errors[2][4]; u16 R[D][D]
//   u32 CRC-32C of all of the above
//
// Numbers of 16 bits are bf16. A policy has one or two planes on each side, and R depends on that.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/format/operations.h"
#include "kernels/strategy/book.h"

namespace tessera::kernels {

// What the rows of a model depend on, as far as its worker tells the daemon. Weights are not among
// it: two models of one architecture have the same fingerprint.
struct BookedModel {
  struct Layer {
    std::uint32_t query_heads = 0, kv_heads = 0, head_dim = 0;
  };
  std::vector<Layer> layers;
  double rope_theta = 0;
  bool rope_interleaved = false;
  std::string rope_scaling;
  double rope_scaling_factor = 0;
  std::vector<double> rope_frequencies;
};
std::uint64_t FingerprintOf(const BookedModel& model);
std::string FingerprintText(std::uint64_t fingerprint);  // 16 hexadecimal digits

// A text that a book was made from.
struct BookText {
  std::string name;  // of the file, without folders
  std::uint64_t bytes = 0;
  std::uint64_t hash = 0;

  // Whether one is a copy of the other, or, as versions of a document do, has its name.
  bool IsLike(const BookText& other) const {
    return name == other.name || (bytes == other.bytes && hash == other.hash);
  }
  friend bool operator==(const BookText&, const BookText&) = default;
};
BookText BookTextOf(std::string_view path, std::string_view content);

inline constexpr std::size_t kMaxBookName = 64;
// 1 to 64 letters, digits, '.', '_' and '-'.
bool IsBookName(std::string_view name);

struct BookFile {
  // One side of a lane.
  struct Side {
    struct Rotated {
      std::array<std::array<float, 4>, kMaxPlanes> errors = {};  // BookSide::errors
      std::vector<std::uint16_t> rotation;                       // R, bf16 [D][D]
      bool operator==(const Rotated&) const = default;
    };
    std::vector<std::uint16_t> mean;  // mu, bf16
    std::vector<float> eigenvalues;   // BookSide::eigenvalues
    std::array<Rotated, kMaxPlanes> by_planes;
    bool operator==(const Side&) const = default;
  };
  struct Lane {
    std::uint32_t head_dim = 0;
    Side key, value;
    bool operator==(const Lane&) const = default;
  };

  std::string name;
  std::uint64_t fingerprint = 0;
  std::uint64_t rows = 0;
  std::vector<BookText> texts;
  std::vector<Lane> lanes;  // layer by layer, kv head by kv head

  // The book of a lane for codes of so many planes.
  Book BookOf(std::uint32_t lane, const BookPlanes& planes) const;
  bool operator==(const BookFile&) const = default;
};

// Makes the books of a lane from its rows, which must have no BookProblem.
BookFile::Lane MakeFileLane(const LaneRows& rows, const Operations& operations);

std::vector<std::byte> BytesOf(const BookFile& file);

// Reads a file's bytes, which may be anything, and must not change meanwhile. Returns why they are
// no book file; empty: `file` holds it. Checked are lengths, names, that numbers are finite, that
// the rows of every R have length 1, and the checksum.
std::string ReadBookFile(std::span<const std::byte> bytes, BookFile& file);

// Overwrites the last four bytes with the checksum of those before.
void SealBookFile(std::span<std::byte> bytes);

}  // namespace tessera::kernels
