#include "daemon/platform/device_uuid.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "daemon/base/strings.h"

namespace tessera {
namespace {

using Kind = DeviceUuid::Kind;
using testing::HasSubstr;

DeviceUuid Uuid(Kind kind, std::initializer_list<int> bytes) {
  DeviceUuid uuid = {.kind = kind};
  std::transform(bytes.begin(), bytes.end(), uuid.bytes.begin(),
                 [](int byte) { return static_cast<std::byte>(byte); });
  return uuid;
}

TEST(DeviceUuid, IsPrintedAsNvidiaSmiDoes) {
  // Every byte differs, so a swapped group or nibble shows.
  const auto bytes = {0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef,
                      0xf0, 0xe1, 0xd2, 0xc3, 0xb4, 0xa5, 0x96, 0x87};
  EXPECT_EQ(Uuid(Kind::kGpu, bytes).ToString(), "GPU-01234567-89ab-cdef-f0e1-d2c3b4a59687");
  EXPECT_EQ(Uuid(Kind::kMig, bytes).ToString(), "MIG-01234567-89ab-cdef-f0e1-d2c3b4a59687");
  EXPECT_EQ(Uuid(Kind::kCpu, bytes).ToString(), "CPU-01234567-89ab-cdef-f0e1-d2c3b4a59687");
  EXPECT_EQ(DeviceUuid().ToString(), "GPU-00000000-0000-0000-0000-000000000000");
}

TEST(DeviceUuid, EveryTextParsesToWhatPrintedIt) {
  for (int first = 0; first < 256; ++first) {
    for (const Kind kind : {Kind::kGpu, Kind::kMig, Kind::kCpu}) {
      DeviceUuid uuid = {.kind = kind};
      for (std::size_t i = 0; i < uuid.bytes.size(); ++i) {
        uuid.bytes[i] = static_cast<std::byte>(first + 37 * i);
      }
      const std::string text = uuid.ToString();
      EXPECT_EQ(text.size(), kDeviceUuidLength);
      const auto parsed = ParseDeviceUuid(text);
      ASSERT_TRUE(parsed.ok()) << parsed.status();
      EXPECT_EQ(*parsed, uuid);
    }
  }
  EXPECT_EQ(*ParseDeviceUuid("GPU-0123ABCD-89AB-CDEF-F0E1-D2C3B4A59687"),
            *ParseDeviceUuid("GPU-0123abcd-89ab-cdef-f0e1-d2c3b4a59687"));
}

TEST(DeviceUuid, OtherTextsAreRefusedByName) {
  for (const std::string text :
       {"", "GPU-", "cuda:0", "gpu-01234567-89ab-cdef-f0e1-d2c3b4a59687",
        "01234567-89ab-cdef-f0e1-d2c3b4a59687", "GPU-01234567-89ab-cdef-f0e1-d2c3b4a5968",
        "GPU-01234567-89ab-cdef-f0e1-d2c3b4a596870", "GPU-0123456-789ab-cdef-f0e1-d2c3b4a59687",
        "GPU-01234567-89ab-cdef-f0e1-d2c3b4a5968g", "GPU-01234567089ab-cdef-f0e1-d2c3b4a59687",
        "TPU-01234567-89ab-cdef-f0e1-d2c3b4a59687", " GPU-01234567-89ab-cdef-f0e1-d2c3b4a59687"}) {
    const auto parsed = ParseDeviceUuid(text);
    ASSERT_TRUE(absl::IsInvalidArgument(parsed.status())) << text;
    EXPECT_THAT(parsed.status().ToString(), HasSubstr(Concat("\"", text, "\" is not a device")));
  }
  EXPECT_THAT(
      ParseDeviceUuid("MIG-GPU-01234567-89ab-cdef-f0e1-d2c3b4a59687/1/0").status().ToString(),
      HasSubstr("drivers older than 470"));
}

TEST(DeviceUuid, IsFoundInAFileName) {
  const std::string text = "GPU-01234567-89ab-cdef-f0e1-d2c3b4a59687";
  for (const std::string& name :
       {text, text + ".sock", "tessera-" + text + "-a.sock", "GPU-MIG-x-" + text + text}) {
    const auto found = FindDeviceUuid(name);
    ASSERT_TRUE(found.has_value()) << name;
    EXPECT_EQ(found->ToString(), text);
  }
  for (const std::string name :
       {"", "tesserad.sock", "GPU-0123.sock", "GPU-01234567-89ab-cdef-f0e1-d2c3b4a5968.sock"}) {
    EXPECT_FALSE(FindDeviceUuid(name).has_value()) << name;
  }
}

}  // namespace
}  // namespace tessera
