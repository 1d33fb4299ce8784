#include "kernels/dispatch/implementation.h"

#include <cstdio>
#include <cstdlib>

#include "kernels/cpu/features.h"
#include "kernels/cpu/operations.h"
#include "kernels/dispatch/implementation_table.h"
#include "kernels/reference/attend_part.h"

namespace tessera::kernels {
namespace {

struct Table {
  explicit Table(const CpuFeatures& features)
      : reference("reference", ReferenceOperations(), {.supported = true}),
        avx2("avx2", Avx2(), Avx2Support(features), BestLookahead(features)),
        avx512("avx512", Avx512(), Avx512Support(features), BestLookahead(features)),
        avx512vbmi2("avx512vbmi2", Avx512Vbmi2(), Avx512Vbmi2Support(features),
                    BestLookahead(features)),
        avx512bf16("avx512bf16", Avx512Bf16(), Avx512Bf16Support(features),
                   BestLookahead(features)),
        list{&reference, &avx2, &avx512, &avx512vbmi2, &avx512bf16},
        best(&reference) {
    for (const Implementation* each : list) {
      if (each->supported()) best = each;
    }
  }

  Implementation reference;
  Implementation avx2;
  Implementation avx512;
  Implementation avx512vbmi2;
  Implementation avx512bf16;
  const Implementation* list[5];
  const Implementation* best;
};

const Table& TheTable() {
  static const Table table(DetectCpuFeatures());
  return table;
}

}  // namespace

const Operations& Implementation::operations() const {
  if (!support_.supported) [[unlikely]] {
    std::fprintf(stderr, "kernels: implementation %.*s cannot run here: %.*s\n",
                 static_cast<int>(name_.size()), name_.data(),
                 static_cast<int>(support_.reason.size()), support_.reason.data());
    std::abort();
  }
  return operations_;
}

std::span<const Implementation* const> Implementations() { return TheTable().list; }

const Implementation* FindImplementation(std::string_view name) {
  for (const Implementation* implementation : Implementations()) {
    if (implementation->name() == name) return implementation;
  }
  return nullptr;
}

const Implementation& BestImplementation() { return *TheTable().best; }

const Operations& OperationsOf(const Implementation& implementation) {
  return implementation.operations();
}

std::string_view ImplementationName(const Implementation& implementation) {
  return implementation.name();
}

bool ImplementationSupported(const Implementation& implementation) {
  return implementation.supported();
}

std::string_view ImplementationReason(const Implementation& implementation) {
  return implementation.reason();
}

std::int64_t FirstUnusable(const Implementation& implementation, const void* elements,
                           std::size_t count, ElementType type) {
  return implementation.operations().first_unusable(elements, count, type);
}

}  // namespace tessera::kernels
