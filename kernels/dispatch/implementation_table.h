// The definition of Implementation, private to this folder.
#pragma once

#include <string_view>

#include "kernels/dispatch/implementation.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

class Implementation {
 public:
  Implementation(std::string_view name, const Operations& operations, Support support,
                 Lookahead lookahead = {})
      : name_(name), operations_(operations), support_(support), lookahead_(lookahead) {}

  std::string_view name() const { return name_; }
  bool supported() const { return support_.supported; }
  std::string_view reason() const { return support_.reason; }
  Lookahead lookahead() const { return lookahead_; }

  // Aborts with the reason if this machine cannot run it, before an illegal instruction can.
  const Operations& operations() const;

 private:
  std::string_view name_;
  const Operations& operations_;
  Support support_;
  Lookahead lookahead_;
};

}  // namespace tessera::kernels
