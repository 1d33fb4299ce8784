// The terms bf16, fp16, int8 and fp8: the type of packed values.
#include "daemon/base/check.h"
#include "daemon/policies/registry_rows.h"

namespace tessera::policies {
namespace {

using kernels::ValueType;

constexpr ValueType kStandard = ValueType::kInt8;  // of mosaickv

template <ValueType type>
constexpr TermKind Row(std::string_view is) {
  return {.name = kernels::ValueTypeName(type),
          .is = is,
          .sets = "the value type of packed rows",
          .decides = Decides::kValues,
          .apply =
              [](const Values&, Policy& policy) {
                if (policy.key_channels.has_value()) {
                  policy.key_channels->values = type;
                  return;
                }
                TESSERA_CHECK(policy.mosaic.has_value(), "a value type needs packed rows");
                policy.mosaic->strategy.values = type;
              },
          .read = [](const Policy& policy) -> std::optional<Values> {
            const bool packed = policy.mosaic.has_value() && type != kStandard &&
                                policy.mosaic->strategy.values == type;
            const bool cut = policy.key_channels.has_value() && policy.key_channels->values == type;
            if (!packed && !cut) return std::nullopt;
            return Values(std::span<const Option>());
          }};
}

}  // namespace

constexpr TermKind kBf16 = Row<ValueType::kBf16>(
    "Stores packed values as bf16, as in the paper of mosaickv; without a type think uses the "
    "layer's own");
constexpr TermKind kFp16 = Row<ValueType::kFp16>(
    "Stores packed values as fp16: finer than bf16; rows with values beyond 65504 are left dense");
constexpr TermKind kInt8 = Row<ValueType::kInt8>(
    "Stores packed values as int8, with a bf16 scale per row; the default of mosaickv");
constexpr TermKind kFp8 =
    Row<ValueType::kFp8>("Stores packed values as fp8 (e4m3), with a bf16 scale per row");

}  // namespace tessera::policies
