// Book files as the daemon loads them: which are refused, and which models may use which.

#include "daemon/cache/segment/book_library.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"
#include "tests/fakes/seed.h"

namespace tessera::cache {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

class BookLibraryTest : public testing::Test {
 protected:
  BookLibraryTest() { fs::create_directory(folder_); }
  ~BookLibraryTest() override { fs::remove_all(folder_); }

  static Model ModelWith(std::uint32_t layers, double theta = 10000) {
    ModelSpec spec = {.name = "any", .rope_theta = theta};
    spec.layers.assign(layers, {.query_heads = 2, .kv_heads = 1, .head_dim = 64});
    auto model = Model::Create(ModelId(1), spec, 4);
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  }
  // A file with so many lanes of random rows.
  std::string Write(const std::string& name, const Model& model, std::uint32_t lanes) {
    kernels::BookFile file = {.name = name, .fingerprint = model.book_fingerprint(), .rows = 64};
    std::vector<float> rows(64 * 64);
    for (float& element : rows) element = static_cast<float>(random_.Below(2001)) / 1000 - 1;
    const kernels::RowSpan span = {reinterpret_cast<const std::byte*>(rows.data()), 64, 64,
                                   kernels::ElementType::kFp32};
    const auto& operations = kernels::OperationsOf(kernels::BestImplementation());
    file.lanes.assign(lanes, kernels::MakeFileLane({span, span}, operations));
    const std::vector<std::byte> bytes = kernels::BytesOf(file);
    const fs::path path = folder_ / Concat(name, random_.Bits(), ".book");
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return path.string();
  }
  static std::string Refusal(const std::vector<std::string>& paths) {
    const auto library = BookLibrary::Load(paths);
    EXPECT_TRUE(absl::IsInvalidArgument(library.status())) << library.status();
    return std::string(library.status().message());
  }

  TestRandom random_;
  const fs::path folder_ = fs::path(testing::TempDir()) / Concat("books-", random_.Bits());
};

TEST_F(BookLibraryTest, ABookIsFoundByNameAndModel) {
  const Model small = ModelWith(2), large = ModelWith(3), other_rope = ModelWith(2, 500000);
  const auto library = BookLibrary::Load(
      {Write("papers", small, 2), Write("papers", large, 3), Write("code", large, 3)});
  ASSERT_TRUE(library.ok()) << library.status();
  for (const Model* const model : {&small, &large}) {
    EXPECT_TRUE(library->Check("papers", *model).ok());
    ASSERT_NE(library->Find("papers", *model), nullptr);
    EXPECT_EQ(library->Find("papers", *model)->lanes.size(), model->layers());
  }
  const absl::Status unknown = library->Check("poems", small);
  EXPECT_THAT(std::string(unknown.message()),
              HasSubstr("this daemon has no book poems; it has papers, papers, code"));
  const absl::Status other = library->Check("code", small);
  EXPECT_TRUE(absl::IsInvalidArgument(other));
  EXPECT_THAT(
      std::string(other.message()),
      HasSubstr(Concat("the book code is of a model with fingerprint ",
                       kernels::FingerprintText(large.book_fingerprint()), ", but this model has ",
                       kernels::FingerprintText(small.book_fingerprint()))));
  EXPECT_FALSE(library->Check("papers", other_rope).ok());
}

// The name of a model, and what its rows do not depend on, may differ.
TEST_F(BookLibraryTest, NamesOfModelsDoNotMatter) {
  const Model one = ModelWith(2);
  ModelSpec spec = one.spec();
  spec.name = "another";
  spec.delimiter_token_ids = {1, 2};
  const auto model = Model::Create(ModelId(2), spec, 4);
  ASSERT_TRUE(model.ok()) << model.status();
  const auto library = BookLibrary::Load({Write("papers", one, 2)});
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_TRUE(library->Check("papers", *model).ok());
}

TEST_F(BookLibraryTest, LanesThatAreNotTheModelsAreRefused) {
  const Model model = ModelWith(2);
  const auto library = BookLibrary::Load({Write("papers", model, 1)});
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_EQ(library->Find("papers", model), nullptr);
  EXPECT_THAT(std::string(library->Check("papers", model).message()),
              HasSubstr("1 lanes that are not those of this model, which has 2"));
}

TEST_F(BookLibraryTest, FilesAreRefusedWithTheReason) {
  const Model model = ModelWith(1);
  EXPECT_THAT(Refusal({"/nowhere/a.book"}), HasSubstr("/nowhere/a.book"));
  const std::string damaged = Write("papers", model, 1);
  fs::resize_file(damaged, fs::file_size(damaged) - 1);
  EXPECT_THAT(Refusal({damaged}), HasSubstr("its checksum is wrong"));
  EXPECT_THAT(Refusal({damaged}), HasSubstr(damaged));
  EXPECT_THAT(Refusal({Write("papers", model, 1), Write("papers", model, 1)}),
              HasSubstr("have the same name, papers, and are of the same model"));
}

}  // namespace
}  // namespace tessera::cache
