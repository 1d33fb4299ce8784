// Converts public types to the kernels' types and back. The numbers agree, so each conversion is a
// cast.
#pragma once

#include "kernels/dispatch/attend.h"
#include "kernels/format/element.h"
#include "kernels/format/tile_shape.h"
#include "tessera/compression.h"
#include "tessera/model.h"

namespace tessera::client {

static_assert(static_cast<int>(ElementType::kFp32) ==
              static_cast<int>(kernels::ElementType::kFp32));
static_assert(static_cast<int>(ValueType::kFp8) == static_cast<int>(kernels::ValueType::kFp8));
static_assert(static_cast<int>(Summary::kSigns) == static_cast<int>(kernels::Summary::kSigns));
static_assert(static_cast<int>(SelectionRule::Judge::kLogit) ==
              static_cast<int>(kernels::SelectionRule::Judge::kLogit));

constexpr kernels::ElementType ToKernels(ElementType type) {
  return static_cast<kernels::ElementType>(type);
}
constexpr kernels::Summary ToKernels(Summary summary) {
  return static_cast<kernels::Summary>(summary);
}
constexpr kernels::ValueType ToKernels(ValueType type) {
  return static_cast<kernels::ValueType>(type);
}
constexpr ElementType FromKernels(kernels::ElementType type) {
  return static_cast<ElementType>(type);
}
constexpr Summary FromKernels(kernels::Summary summary) { return static_cast<Summary>(summary); }
constexpr ValueType FromKernels(kernels::ValueType type) { return static_cast<ValueType>(type); }

constexpr kernels::SelectionRule ToKernels(const SelectionRule& rule) {
  return {.rate = rule.rate,
          .entries = rule.entries,
          .floor = rule.floor,
          .judge = static_cast<kernels::SelectionRule::Judge>(rule.judge),
          .first_block = rule.first_block,
          .counts_tail = rule.counts_tail,
          .each_head = rule.each_head,
          .each_query = rule.each_query};
}
constexpr SelectionRule FromKernels(const kernels::SelectionRule& rule) {
  return {.rate = rule.rate,
          .entries = rule.entries,
          .floor = rule.floor,
          .judge = static_cast<SelectionRule::Judge>(rule.judge),
          .first_block = rule.first_block,
          .counts_tail = rule.counts_tail,
          .each_head = rule.each_head,
          .each_query = rule.each_query};
}

}  // namespace tessera::client
