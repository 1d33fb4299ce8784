#include "daemon/base/published.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

namespace tessera {
namespace {

TEST(Published, AReaderKeepsWhatItGot) {
  Published<std::string> text("old");
  const std::shared_ptr<const std::string> before = text.Get();
  text.Set("new");
  EXPECT_EQ(*before, "old");
  EXPECT_EQ(*text.Get(), "new");
}

// For ThreadSanitizer.
TEST(Published, ReadersRaceWithTheWriter) {
  Published<std::string> text("0");
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done.load()) EXPECT_FALSE(text.Get()->empty());
  });
  for (int i = 0; i < 1000; ++i) text.Set(std::string(100, static_cast<char>('0' + i % 10)));
  done.store(true);
  reader.join();
  EXPECT_EQ(*text.Get(), std::string(100, '9'));
}

}  // namespace
}  // namespace tessera
