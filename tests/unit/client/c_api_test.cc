#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <fstream>
#include <sstream>
#include <string>

#include "tessera/tessera.h"

extern "C" {
tessera_code AttachFromC(const char* address, tessera_error* error);
int InitializersAreRight(void);
int VersionsAgree(void);
}

namespace {

TEST(CApi, CompilesAsCAndFillsItsStructs) {
  EXPECT_TRUE(InitializersAreRight());
  EXPECT_TRUE(VersionsAgree());
  // Programs that know only `code` and `message` have an error of this size.
  EXPECT_EQ(sizeof(tessera_error), 1024u);
  EXPECT_EQ(offsetof(tessera_error, message), 4u);
  EXPECT_EQ(offsetof(tessera_error, cause), 1016u);
  EXPECT_EQ(offsetof(tessera_error, retry_after_ms), 1020u);
  EXPECT_EQ(alignof(tessera_error), 4u) << "as in ABI 1";
}

TEST(CApi, TellsDelimitersByTheirTexts) {
  const char* const texts[] = {"", "the", ".", nullptr, " and", ".\n", ";", ", and", " "};
  std::uint32_t ids[std::size(texts)] = {};
  ASSERT_EQ(tessera_delimiters(texts, std::size(texts), ids), 4u);
  EXPECT_EQ(std::vector<std::uint32_t>(ids, ids + 4), (std::vector<std::uint32_t>{2, 5, 6, 8}));
  EXPECT_EQ(tessera_delimiters(texts, 3, nullptr), 1u);
}

TEST(CApi, NamesWhatIsWrong) {
  tessera_error error;
  EXPECT_EQ(AttachFromC("nowhere", &error), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(error.code, TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("\"nowhere\""), std::string::npos) << error.message;
  // Longer than the error buffer: truncated and terminated.
  const std::string endless(4000, 'x');
  EXPECT_EQ(AttachFromC(endless.c_str(), &error), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(error.message).size(), sizeof error.message - 1);
  EXPECT_EQ(AttachFromC(endless.c_str(), nullptr), TESSERA_INVALID_ARGUMENT);
}

TEST(CApi, ADeviceIsTakenAndChecked) {
  tessera_attach_options options = TESSERA_ATTACH_OPTIONS_INIT;
  EXPECT_EQ(options.device, nullptr);
  options.address = "unix:/nonexistent/tessera/";
  tessera_worker* worker = nullptr;
  tessera_error error;
  EXPECT_EQ(tessera_attach(&options, &worker, &error), TESSERA_NOT_FOUND) << error.message;
  EXPECT_NE(std::string(error.message).find("/nonexistent/tessera/"), std::string::npos)
      << error.message;
  options.device = "gpu-7";
  EXPECT_EQ(tessera_attach(&options, &worker, &error), TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("device \"gpu-7\""), std::string::npos)
      << error.message;
  // A program that was built before the field existed.
  options.struct_size = offsetof(tessera_attach_options, device);
  EXPECT_EQ(tessera_attach(&options, &worker, &error), TESSERA_NOT_FOUND) << error.message;
  EXPECT_EQ(worker, nullptr);
}

TEST(Readme, ShowsTheExampleThatIsCompiled) {
  const auto read = [](const char* path) {
    std::ifstream file(path);
    EXPECT_TRUE(file.good()) << path;
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  };
  const std::string example = read(TESSERA_CLIENT_FOLDER "/examples/cpp_minimal.cc");
  const auto lines = std::count(example.begin(), example.end(), '\n');
  EXPECT_TRUE(lines >= 60 && lines <= 80) << lines;
  EXPECT_NE(read(TESSERA_CLIENT_FOLDER "/README.md").find("```cpp\n" + example + "```\n"),
            std::string::npos);
}

}  // namespace
