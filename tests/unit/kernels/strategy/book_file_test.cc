// Book files: what is written is read again, and anything else is refused with the reason.

#include "kernels/strategy/files/book_file.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels {
namespace {

using testing::HasSubstr;

class BookFiles : public testing::Test {
 protected:
  BookFile Make(std::uint32_t lanes, std::uint32_t dim = 64) {
    BookFile file = {.name = "papers-1",
                     .fingerprint = random_.Bits(),
                     .rows = 300,
                     .texts = {BookTextOf("/a/b/one.txt", "some text"), BookTextOf("two", "")},
                     .lanes = {}};
    for (std::uint32_t i = 0; i < lanes; ++i) {
      const TestLane lane(PowerLaw(random_, 300, dim, 0.7), PowerLaw(random_, 300, dim, 0.3),
                          ElementType::kBf16);
      sources_.push_back(lane);
      file.lanes.push_back(MakeFileLane(lane.rows(), BestOperations()));
    }
    return file;
  }
  // The reason why these bytes, with a checksum that fits, are refused.
  static std::string ProblemOf(std::vector<std::byte> bytes) {
    SealBookFile(bytes);
    BookFile file;
    return ReadBookFile(bytes, file);
  }
  template <typename Number>
  static std::vector<std::byte> With(std::vector<std::byte> bytes, std::size_t at, Number number) {
    std::memcpy(bytes.data() + at, &number, sizeof number);
    return bytes;
  }

  TestRandom random_;
  std::vector<TestLane> sources_;
};

TEST_F(BookFiles, AreReadAsTheyWereWritten) {
  const BookFile file = Make(2);
  BookFile read;
  ASSERT_EQ(ReadBookFile(BytesOf(file), read), "");
  EXPECT_TRUE(read == file);
}

TEST_F(BookFiles, HoldTheBookThatWouldBeMade) {
  const BookFile file = Make(1, 128);
  for (const BookPlanes planes : {BookPlanes{2, 1}, BookPlanes{2, 2}, BookPlanes{1, 2}}) {
    const Book made = MakeBook(sources_[0].rows(), planes, BestOperations());
    const Book read = file.BookOf(0, planes);
    EXPECT_TRUE(std::ranges::equal(made.bytes, read.bytes));
    EXPECT_EQ(made.key.planes, read.key.planes);
    EXPECT_EQ(made.key.errors, read.key.errors);
    EXPECT_EQ(made.value.errors, read.value.errors);
  }
}

// Any change of one byte is noticed, and any cut.
TEST_F(BookFiles, DamageIsNoticed) {
  const std::vector<std::byte> bytes = BytesOf(Make(1));
  BookFile file;
  for (int i = 0; i < 300; ++i) {
    std::vector<std::byte> damaged = bytes;
    damaged[random_.Below(damaged.size())] ^= std::byte{1} << random_.Below(8);
    EXPECT_NE(ReadBookFile(damaged, file), "");
    EXPECT_NE(ReadBookFile(std::span(bytes).first(random_.Below(bytes.size())), file), "");
  }
  EXPECT_THAT(ReadBookFile(With(bytes, bytes.size() - 9, 'x'), file), HasSubstr("checksum"));
}

TEST_F(BookFiles, WhatIsWrongIsSaid) {
  const BookFile good = Make(1);
  const std::vector<std::byte> bytes = BytesOf(good);
  EXPECT_EQ(ProblemOf(With(bytes, 0, 'X')), "it is no book file");
  EXPECT_THAT(ProblemOf(With(bytes, 8, 2u)), HasSubstr("it has version 2"));
  EXPECT_THAT(ProblemOf(With(bytes, 12, 0u)), HasSubstr("it has 0 lanes"));
  EXPECT_THAT(ProblemOf(With(bytes, 12, 2u)), HasSubstr("lane 1 has rows of 0 channels"));
  EXPECT_THAT(ProblemOf(With(bytes, 32, 5000u)), HasSubstr("it names 5000 texts"));
  EXPECT_THAT(ProblemOf(With(bytes, 36, 99u)), HasSubstr("ends in the middle"));
  EXPECT_THAT(ProblemOf(With(bytes, 40, '/')), HasSubstr("the book's name must have"));
  std::vector<std::byte> longer = bytes;
  longer.insert(longer.end() - 4, std::byte{0});
  EXPECT_THAT(ProblemOf(longer), HasSubstr("1 bytes after its last lane"));

  const float nan = std::numeric_limits<float>::quiet_NaN();
  BookFile bad = good;
  bad.lanes[0].key.mean[3] = FloatToBf16(nan);
  EXPECT_EQ(ProblemOf(BytesOf(bad)), "lane 0: mu is not finite");
  bad = good;
  bad.lanes[0].value.eigenvalues[63] = -1;
  EXPECT_EQ(ProblemOf(BytesOf(bad)), "lane 0: an eigenvalue is not finite");
  bad = good;
  bad.lanes[0].key.by_planes[1].errors[1][3] = nan;
  EXPECT_EQ(ProblemOf(BytesOf(bad)), "lane 0: an error is not finite");
  for (const float element : {2.0f, nan}) {
    bad = good;
    bad.lanes[0].value.by_planes[0].rotation[64 * 5] = FloatToBf16(element);
    EXPECT_THAT(ProblemOf(BytesOf(bad)), HasSubstr("lane 0: row 5 of R has a squared length of"));
  }
}

TEST_F(BookFiles, TextsAreKnownByNameAndByContent) {
  const BookText text = BookTextOf("/usr/share/doc/a.txt", "words");
  EXPECT_EQ(text.name, "a.txt");
  EXPECT_TRUE(text.IsLike(BookTextOf("b", "words")));
  EXPECT_TRUE(text.IsLike(BookTextOf("/elsewhere/a.txt", "other words")));
  EXPECT_FALSE(text.IsLike(BookTextOf("b", "other words")));
}

TEST_F(BookFiles, FingerprintsTellModelsApart) {
  const BookedModel model = {.layers = {{4, 2, 64}, {4, 2, 64}}, .rope_theta = 10000};
  std::vector<BookedModel> others(6, model);
  others[0].layers.pop_back();
  others[1].layers[1].kv_heads = 4;
  others[2].rope_theta = 100000;
  others[3].rope_interleaved = true;
  others[4].rope_scaling = "linear";
  others[5].rope_frequencies = {1};
  for (const BookedModel& other : others) EXPECT_NE(FingerprintOf(other), FingerprintOf(model));
  EXPECT_EQ(FingerprintOf(model), FingerprintOf(BookedModel(model)));
  EXPECT_EQ(FingerprintText(0x0123456789abcdef), "0123456789abcdef");
}

}  // namespace
}  // namespace tessera::kernels
